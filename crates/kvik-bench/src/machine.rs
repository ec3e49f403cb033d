//! What a measurement ran on.

use std::fs;

use kvik_model::Isa;
use kvik_runtime::machine::{cpu_name, n_cores};
use serde::Serialize;

/// The machine of a measurement.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// The CPU's name, or `unknown`.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// The instruction set that the kernels take.
    pub isa: String,
    /// The operating system and its kernel's release.
    pub os: String,
    /// The version of this program.
    pub kvik: &'static str,
}

impl Machine {
    /// Reads what the operating system reports.
    pub fn detect() -> Self {
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let os = format!("{} {} {}", std::env::consts::OS, kernel.trim(), std::env::consts::ARCH);
        Self {
            cpu: cpu_name().unwrap_or_else(|| "unknown".to_owned()),
            cores: n_cores(),
            isa: Isa::detect().to_string(),
            os: os.split_whitespace().collect::<Vec<_>>().join(" "),
            kvik: env!("CARGO_PKG_VERSION"),
        }
    }
}
