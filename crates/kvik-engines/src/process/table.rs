//! What the kernel says of processes.

use std::fs;

/// What counts of a line of `/proc/PID/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) is_zombie: bool,
    pub(super) group: i32,
    pub(super) start_ticks: u64,
}

/// What the kernel says of a process; `None` if there is none.
pub(super) fn stat(pid: i32) -> Option<Stat> {
    parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse(line: &str) -> Option<Stat> {
    // The name in parentheses may have spaces and parentheses of its own.
    let (_, fields) = line.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
    Some(Stat {
        is_zombie: matches!(*fields.first()?, "Z" | "X"),
        group: fields.get(2)?.parse().ok()?,
        start_ticks: fields.get(19)?.parse().ok()?,
    })
}

/// The name of this life of the machine.
pub(super) fn boot_id() -> Option<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned())
}

/// The leaders of groups whose mark begins with `prefix`, with the rest of the mark.
pub(crate) fn find_marked(prefix: &str) -> Vec<(i32, String)> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let variable = format!("{}={prefix}", super::MARK);
    pids.filter_map(|pid| {
        let is_leader = stat(pid).is_some_and(|stat| stat.group == pid && !stat.is_zombie);
        if !is_leader {
            return None;
        }
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let mark =
            environment.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(variable.as_bytes()))?;
        Some((pid, String::from_utf8(mark.to_vec()).ok()?))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let line = "7 (a) b) S 1 7 7 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 4242 100 200";
        assert_eq!(parse(line), Some(Stat { is_zombie: false, group: 7, start_ticks: 4242 }));
        assert_eq!(parse("7 (a"), None);
        assert_eq!(parse("7 (a) S 1"), None);
    }
}
