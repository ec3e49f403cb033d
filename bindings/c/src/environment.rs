//! The environment of the engine that loaded the library, which is its configuration file.

use kvik_memory::config::MemoryConfig;

use crate::status::{Failure, kvik_status};

/// Reads the settings that a call does not give.
///
/// No other code can: an engine in C has no `kvik-runtime` that would read them for the library.
pub(crate) fn memory_config() -> Result<MemoryConfig, Failure> {
    let lookup = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    MemoryConfig::from_lookup(&lookup)
        .map_err(|errors| Failure::new(kvik_status::KVIK_ERROR_INVALID, errors.to_string()))
}
