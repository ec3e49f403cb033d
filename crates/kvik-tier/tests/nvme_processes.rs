//! The tier when its process is killed, its device is full and its directory is read-only.
//!
//! It starts itself: as the process that is killed, and inside of mount namespaces of its own.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]
#![expect(clippy::print_stdout, reason = "it is its own test harness")]

#[path = "nvme_processes/devices.rs"]
mod devices;
#[path = "nvme_processes/kills.rs"]
mod kills;

use std::path::Path;

const N_KILLS: u64 = 20;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [kills::WRITER, dir, first] => {
            return kills::write_until_killed(Path::new(dir), first.parse().unwrap());
        }
        [devices::SMALL_DEVICE, dir] => return devices::fill_a_small_device(Path::new(dir)),
        [devices::SMALL_FILES, dir] => return devices::use_a_device_without_room(Path::new(dir)),
        [devices::READ_ONLY, dir] => return devices::use_a_read_only_directory(Path::new(dir)),
        _ => {}
    }
    let tests: [(&str, fn()); 4] = [
        ("a_killed_process_loses_nothing_it_was_told_is_stored", || kills::kill_writers(N_KILLS)),
        ("a_full_device_is_no_room", devices::fill_in_a_namespace),
        ("a_device_without_room_for_a_segment_is_no_room", devices::forbid_long_files),
        ("a_read_only_directory_is_read", devices::read_what_is_read_only),
    ];
    // As in the usual harness, what is not an option selects tests by name.
    let filters: Vec<&str> = arguments.into_iter().filter(|argument| !argument.starts_with('-')).collect();
    for (name, test) in tests {
        if filters.is_empty() || filters.iter().any(|filter| name.contains(filter)) {
            test();
            println!("test {name} ... ok");
        }
    }
}
