//! What the kernel says of processes.

use std::fs;

/// What counts of a line of `/proc/PID/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) is_zombie: bool,
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
        start_ticks: fields.get(19)?.parse().ok()?,
    })
}

/// The name of this life of the machine.
pub(super) fn boot_id() -> Option<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned())
}

/// The processes whose mark begins with `prefix`, with the rest of the mark.
pub(crate) fn find_marked(prefix: &str) -> Vec<(i32, String)> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(|pid| find_mark(pid, prefix).map(|rest| (pid, rest))).collect()
}

/// The rest of the mark of a process, if it has one that begins with `prefix` and lives.
pub(super) fn find_mark(pid: i32, prefix: &str) -> Option<String> {
    let variable = format!("{}={prefix}", super::MARK);
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let mark =
        environment.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(variable.as_bytes()))?;
    let mark = String::from_utf8(mark.to_vec()).ok()?;
    stat(pid).is_some_and(|stat| !stat.is_zombie).then_some(mark)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let line = "7 (a) b) S 1 7 7 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 4242 100 200";
        assert_eq!(parse(line), Some(Stat { is_zombie: false, start_ticks: 4242 }));
        assert_eq!(parse("7 (a"), None);
        assert_eq!(parse("7 (a) S 1"), None);
    }
}
