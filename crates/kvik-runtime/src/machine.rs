//! What the program runs on.

use std::fs;

/// Cores that this process may use; at least 1.
pub fn n_cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Name of the CPU; `None` where the operating system does not report it.
pub fn cpu_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    field(&text, "model name").map(str::to_owned)
}

/// The value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let text = "model\t\t: 143\nmodel name\t: A CPU: 2 GHz\n";
        assert_eq!(field(text, "model name"), Some("A CPU: 2 GHz"));
        assert_eq!(field(text, "name"), None);
    }
}
