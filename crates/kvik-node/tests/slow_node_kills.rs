//! Many deaths of a daemon and of its clients.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]
#![expect(clippy::print_stdout, reason = "it is its own test harness")]

#[path = "node_processes/kills.rs"]
mod kills;
#[path = "node_processes/processes.rs"]
mod processes;

use std::path::Path;

const N_KILLS: u64 = 500;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, kills::DAEMON, socket] => kills::serve(Path::new(socket)),
        [_, kills::CLIENT, socket, seed] => kills::use_store(Path::new(socket), seed.parse().unwrap()),
        _ => kills::kill_processes(N_KILLS),
    }
}
