//! The daemon and its clients as processes that are killed.
//!
//! It starts itself: as the daemon and as clients.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]
#![expect(clippy::print_stdout, reason = "it is its own test harness")]

#[path = "node_processes/kills.rs"]
mod kills;

use std::path::Path;

const N_KILLS: u64 = 40;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [kills::DAEMON, socket] => return kills::serve(Path::new(socket)),
        [kills::CLIENT, socket, seed] => return kills::use_store(Path::new(socket), seed.parse().unwrap()),
        _ => {}
    }
    // As in the usual harness, what is not an option selects tests by name.
    let name = "killed_clients_and_daemons_leave_no_wrong_byte_and_no_lease";
    let mut filters = arguments.into_iter().filter(|argument| !argument.starts_with('-')).peekable();
    if filters.peek().is_none() || filters.any(|filter| name.contains(filter)) {
        kills::kill_processes(N_KILLS);
        println!("test {name} ... ok");
    }
}
