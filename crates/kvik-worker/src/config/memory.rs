//! Memory that workers share.

use std::path::PathBuf;
use std::time::Duration;

use kvik_model::MemoryGroup;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::check;
use crate::error::Result;

/// Smallest part of memory that is counted.
const UNIT_BYTES: u64 = 2 << 20;

/// Memory that the workers of one host share by what they need now.
///
/// The variables of kvcached that have a meaning for a worker set the fields that name them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SharedMemoryConfig {
    /// Whether memory is shared; `ENABLE_KVCACHED` in the environment sets it too. Default: none, it is where
    /// `ipc_name` is given.
    #[serde(deserialize_with = "optional_switch")]
    pub enabled: Option<bool>,
    /// Name of the group: workers that say the same are under one limit. `KVCACHED_IPC_NAME` in the
    /// environment sets it too. Default: none, a group of the worker's own where `enabled` is true.
    pub ipc_name: Option<String>,
    /// The most that the group may hold, if it does not exist yet; `kvctl limit` changes it. Default: none,
    /// all that the host's ledger has.
    pub limit_bytes: Option<u64>,
    /// What the host has for all groups together, if there is no ledger yet. Default: 4 294 967 296 bytes
    /// (4 GiB).
    pub device_bytes: u64,
    /// The part of `device_bytes` that groups may hold, above 0 and up to 1; `KVCACHED_GPU_UTILIZATION` in the
    /// environment sets it too. Default: 1.
    #[serde(deserialize_with = "utilization")]
    pub utilization: f64,
    /// Size of a page in one layer, a multiple of 2 MiB; `KVCACHED_PAGE_SIZE_MB` in the environment sets it
    /// too. Default: none, the smallest that holds sixteen blocks well.
    #[serde(deserialize_with = "page_size_mb")]
    pub page_size_mb: Option<u64>,
    /// Whether pages are kept ready beyond those in use; `KVCACHED_PAGE_PREALLOC_ENABLED` in the environment
    /// sets it too. Default: false, an idle worker holds nothing.
    #[serde(deserialize_with = "switch")]
    pub preallocates: bool,
    /// Which logs the process writes where `--log` says nothing: `trace`, `debug`, `info`, `warning`, `error` or
    /// `critical`; `KVCACHED_LOG_LEVEL` in the environment sets it too. Default: none, `info`.
    #[serde(deserialize_with = "log_level")]
    pub log_level: Option<String>,
    /// Folder of the ledger. Default: `/dev/shm`.
    pub dir: PathBuf,
    /// Time that a request waits for memory of other workers before it fails. Default: 30 s.
    pub wait_timeout_s: u64,
}

impl Default for SharedMemoryConfig {
    fn default() -> Self {
        Self {
            enabled: None,
            ipc_name: None,
            limit_bytes: None,
            device_bytes: 4 << 30,
            utilization: 1.0,
            page_size_mb: None,
            preallocates: false,
            log_level: None,
            dir: PathBuf::from("/dev/shm"),
            wait_timeout_s: 30,
        }
    }
}

impl SharedMemoryConfig {
    pub(super) fn validate(&self) -> Result<()> {
        let device = self.device_bytes;
        check(UNIT_BYTES <= device, "memory.device_bytes", &device, "2097152 (2 MiB) or more")?;
        if let Some(limit) = self.limit_bytes {
            check(UNIT_BYTES <= limit, "memory.limit_bytes", &limit, "2097152 (2 MiB) or more")?;
        }
        check(is_share(self.utilization), "memory.utilization", &self.utilization, "above 0, up to 1")?;
        if let Some(size) = self.page_size_mb {
            check(is_page_size(size), "memory.page_size_mb", &size, "a multiple of 2, from 2 to 1048576")?;
        }
        if let Some(level) = &self.log_level {
            check(directive(level).is_some(), "memory.log_level", level, LOG_LEVELS)?;
        }
        let wait = self.wait_timeout_s;
        check((1..=3600).contains(&wait), "memory.wait_timeout_s", &wait, "1 to 3600 (an hour)")
    }

    /// What is logged by default, as the log's filter names it.
    pub fn log_directive(&self) -> Option<&'static str> {
        self.log_level.as_deref().and_then(directive)
    }

    /// The group, for an engine that calls itself `label`; `None` where memory is not shared.
    pub(crate) fn group(&self, label: String) -> Option<MemoryGroup> {
        let is_enabled = self.enabled.unwrap_or(self.ipc_name.is_some());
        is_enabled.then(|| MemoryGroup {
            ipc_name: self
                .ipc_name
                .clone()
                .unwrap_or_else(|| format!("kvcached_kvik_{}", std::process::id())),
            label,
            limit_bytes: self.limit_bytes,
            device_bytes: ((self.device_bytes as f64 * self.utilization) as u64).max(UNIT_BYTES),
            page_bytes: self.page_size_mb.map(|size| size << 20),
            is_preallocating: self.preallocates,
            dir: self.dir.clone(),
        })
    }

    pub(crate) fn wait_timeout(&self) -> Duration {
        Duration::from_secs(self.wait_timeout_s)
    }
}

const LOG_LEVELS: &str = "trace, debug, info, warning, error or critical";

fn is_share(value: f64) -> bool {
    0.0 < value && value <= 1.0
}

fn is_page_size(size_mb: u64) -> bool {
    size_mb.is_multiple_of(2) && (2..=1 << 20).contains(&size_mb)
}

fn directive(level: &str) -> Option<&'static str> {
    match level.to_ascii_lowercase().as_str() {
        "trace" => Some("trace"),
        "debug" => Some("debug"),
        "info" => Some("info"),
        "warn" | "warning" => Some("warn"),
        "error" | "critical" => Some("error"),
        _ => None,
    }
}

// Checked while they are read: an error names the variable that a value comes from.

fn switch<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    let given = Value::deserialize(deserializer)?;
    read_switch(&given).ok_or_else(|| D::Error::custom(SWITCHES))
}

fn optional_switch<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<bool>, D::Error> {
    let given = Value::deserialize(deserializer)?;
    if is_unset(&given) {
        return Ok(None);
    }
    read_switch(&given).map(Some).ok_or_else(|| D::Error::custom(SWITCHES))
}

const SWITCHES: &str = "true, false, 1, 0, yes, no, on or off";

fn read_switch(given: &Value) -> Option<bool> {
    let text = match given {
        Value::Bool(is_on) => return Some(*is_on),
        Value::String(text) => text.to_ascii_lowercase(),
        other => other.to_string(),
    };
    match text.as_str() {
        "true" | "1" | "yes" | "on" => Some(true),
        "false" | "0" | "no" | "off" => Some(false),
        _ => None,
    }
}

/// Variables that are set to nothing count as not set.
fn is_unset(given: &Value) -> bool {
    given.is_null() || given.as_str().is_some_and(str::is_empty)
}

fn utilization<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let given = Value::deserialize(deserializer)?;
    if is_unset(&given) {
        return Ok(SharedMemoryConfig::default().utilization);
    }
    given.as_f64().filter(|share| is_share(*share)).ok_or_else(|| D::Error::custom("above 0, up to 1"))
}

fn page_size_mb<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let given = Value::deserialize(deserializer)?;
    if is_unset(&given) {
        return Ok(None);
    }
    let size = given.as_u64().filter(|size| is_page_size(*size));
    size.map(Some).ok_or_else(|| D::Error::custom("a multiple of 2, from 2 to 1048576"))
}

fn log_level<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let given = Value::deserialize(deserializer)?;
    if is_unset(&given) {
        return Ok(None);
    }
    let level = given.as_str().filter(|level| directive(level).is_some());
    level.map(|level| Some(level.to_owned())).ok_or_else(|| D::Error::custom(LOG_LEVELS))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<SharedMemoryConfig, String> {
        serde_json::from_value(value).map_err(|error| error.to_string())
    }

    #[test]
    fn values_of_kvcached_are_read_as_it_reads_them() {
        let config = read(json!({
            "enabled": "yes", "utilization": 0.5, "page_size_mb": 4, "preallocates": 1, "log_level": "WARNING",
        }))
        .unwrap();
        assert_eq!(config.log_directive(), Some("warn"));
        let group = config.group("w".to_owned()).unwrap();
        assert_eq!(
            (group.device_bytes, group.page_bytes, group.is_preallocating),
            (2 << 30, Some(4 << 20), true)
        );
        assert!(group.ipc_name.starts_with("kvcached_kvik_"));
        let off = read(json!({"enabled": "off", "ipc_name": "group"})).unwrap();
        assert_eq!(off.group("w".to_owned()), None);
        assert_eq!(SharedMemoryConfig::default().group("w".to_owned()), None);
    }

    #[test]
    fn bad_values_are_refused_with_what_is_allowed() {
        for (field, value, allowed) in [
            ("enabled", json!("banana"), SWITCHES),
            ("preallocates", json!(2), SWITCHES),
            ("utilization", json!("banana"), "above 0, up to 1"),
            ("utilization", json!(1.5), "above 0, up to 1"),
            ("page_size_mb", json!(3), "a multiple of 2, from 2 to 1048576"),
            ("log_level", json!("loud"), LOG_LEVELS),
        ] {
            let error = read(json!({ field: value })).unwrap_err();
            assert!(error.contains(allowed), "{field}: {error}");
        }
    }
}
