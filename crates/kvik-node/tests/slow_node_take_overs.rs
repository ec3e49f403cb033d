//! Many take-overs of a daemon by another one.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]
#![expect(clippy::print_stdout, reason = "it is its own test harness")]

#[path = "node_processes/processes.rs"]
mod processes;
#[path = "node_processes/take_overs.rs"]
mod take_overs;

use std::path::Path;

const N_TAKE_OVERS: u64 = 50;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, take_overs::DAEMON, folder, how] => take_overs::serve(Path::new(folder), how),
        [_, take_overs::CLIENT, folder, number] => {
            take_overs::use_store(Path::new(folder), number.parse().unwrap());
        }
        _ => take_overs::take_over(N_TAKE_OVERS),
    }
}
