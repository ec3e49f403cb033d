//! Many deaths of a process that writes to the tier on local disks.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]
#![expect(clippy::print_stdout, reason = "it is its own test harness")]

#[path = "nvme_processes/kills.rs"]
mod kills;

use std::path::Path;

const N_KILLS: u64 = 200;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, kills::WRITER, dir, first] => kills::write_until_killed(Path::new(dir), first.parse().unwrap()),
        _ => kills::kill_writers(N_KILLS),
    }
}
