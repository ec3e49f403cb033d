//! The daemon and its clients as processes that are killed, or taken over.
//!
//! It starts itself: as the daemon and as clients.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]
#![expect(clippy::print_stdout, reason = "it is its own test harness")]

#[path = "node_processes/kept_pins.rs"]
mod kept_pins;
#[path = "node_processes/kills.rs"]
mod kills;
#[path = "node_processes/processes.rs"]
mod processes;
#[path = "node_processes/take_overs.rs"]
mod take_overs;

use std::path::Path;

const N_KILLS: u64 = 40;
const N_TAKE_OVERS: u64 = 10;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [kills::DAEMON, socket] => return kills::serve(Path::new(socket)),
        [kills::CLIENT, socket, seed] => return kills::use_store(Path::new(socket), seed.parse().unwrap()),
        [take_overs::DAEMON, folder, how] => return take_overs::serve(Path::new(folder), how),
        [take_overs::CLIENT, folder, number] => {
            return take_overs::use_store(Path::new(folder), number.parse().unwrap());
        }
        _ => {}
    }
    // As in the usual harness, what is not an option selects tests by name.
    let filters: Vec<&str> = arguments.into_iter().filter(|argument| !argument.starts_with('-')).collect();
    let run = |name: &str, test: &dyn Fn()| {
        if filters.is_empty() || filters.iter().any(|filter| name.contains(filter)) {
            test();
            println!("test {name} ... ok");
        }
    };
    run("killed_clients_and_daemons_leave_no_wrong_byte_and_no_lease", &|| kills::kill_processes(N_KILLS));
    run("take_overs_under_load_fail_no_call_and_lose_no_chunk", &|| take_overs::take_over(N_TAKE_OVERS));
    run("pins_are_kept_by_daemons_that_take_over", &kept_pins::keep_pins);
}
