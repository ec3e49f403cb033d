//! What the program runs on, for reports and for bounds on memory.

use std::fs;

use kvik_model::Isa;
use serde::Serialize;

/// The machine of a measurement.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Machine {
    /// The CPU's name, or `unknown`.
    pub(crate) cpu: String,
    /// Cores that this process may use.
    pub(crate) cores: usize,
    /// The instruction set that the kernels take.
    pub(crate) isa: String,
    /// The operating system and its kernel's release.
    pub(crate) os: String,
    /// The version of this program.
    pub(crate) kvik: &'static str,
}

impl Machine {
    /// Reads what the operating system tells.
    pub(crate) fn detect() -> Self {
        let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let os = format!("{} {} {}", std::env::consts::OS, kernel.trim(), std::env::consts::ARCH);
        Self {
            cpu: field(&cpu_info, "model name").unwrap_or("unknown").to_owned(),
            cores: n_cores(),
            isa: Isa::detect().to_string(),
            os: os.split_whitespace().collect::<Vec<_>>().join(" "),
            kvik: env!("CARGO_PKG_VERSION"),
        }
    }
}

/// Cores that this process may use; at least 1.
pub(crate) fn n_cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Bytes of memory that this process may use: the machine's, or the limit of its control group; `None` where the
/// operating system does not say.
pub(crate) fn memory_bytes() -> Option<u64> {
    Some(kvik_memory::machine::memory_bytes()).filter(|n_bytes| *n_bytes > 0)
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
