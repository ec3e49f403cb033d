//! What the process itself takes, under the names that Prometheus' own clients use.
//!
//! | name | kind | meaning |
//! |---|---|---|
//! | `process_cpu_seconds_total` | counter | time of all its threads on processors |
//! | `process_resident_memory_bytes` | gauge | memory that it has in use |

use std::fmt::Write as _;
use std::fs;

/// Parts of a second that the kernel counts time in for programs, on all processors that kvik runs on.
const TICKS_PER_SECOND: f64 = 100.0;

/// Appends what the process takes in Prometheus' text format; nothing where the operating system does not tell.
pub(super) fn render(text: &mut String) {
    let read = |path: &str| fs::read_to_string(path).ok();
    if let Some(seconds) = read("/proc/self/stat").as_deref().and_then(cpu_seconds) {
        // Writing to a string cannot fail.
        let _ =
            writeln!(text, "# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total {seconds}\n");
    }
    if let Some(n_bytes) = read("/proc/self/status").as_deref().and_then(resident_bytes) {
        let name = "process_resident_memory_bytes";
        let _ = writeln!(text, "# TYPE {name} gauge\n{name} {n_bytes}\n");
    }
}

/// User and system time; the fields are counted behind the program's name, which may have spaces and brackets.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some((ticks()? + ticks()?) as f64 / TICKS_PER_SECOND)
}

fn resident_bytes(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_memory_are_read_behind_a_name_with_brackets() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 90 0 0 0 250 150 0 0 20 0 1 0 100 1000 50";
        assert_eq!(cpu_seconds(stat), Some(4.0));
        assert_eq!(cpu_seconds("7 (a) S 1"), None);
        assert_eq!(resident_bytes("VmHWM:\t  9 kB\nVmRSS:\t  12 kB\n"), Some(12 << 10));
        assert_eq!(resident_bytes("VmRSS:\t many"), None);
    }

    #[test]
    fn this_process_tells_what_it_takes() {
        let mut text = String::new();
        render(&mut text);
        assert!(
            text.contains("# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total "),
            "{text}"
        );
        assert!(text.contains("\nprocess_resident_memory_bytes "), "{text}");
    }
}
