//! Log lines on standard error.

use std::io::IsTerminal;

use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

use crate::error::{Result, RuntimeError};

/// How logs are written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TelemetryConfig {
    /// Which logs: a level, or directives such as `info,kvik_gateway=debug`. Default: `info`.
    pub log: String,
    /// `text` for people or `json` for machines. Default: `text`.
    pub log_format: LogFormat,
}

/// The form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self { log: "info".to_owned(), log_format: LogFormat::Text }
    }
}

/// Starts logging to standard error; once a process.
///
/// # Errors
/// If the directives cannot be read or logging has been started.
pub fn start_logging(config: &TelemetryConfig) -> Result<()> {
    let filter = EnvFilter::try_new(&config.log)
        .map_err(|error| RuntimeError::Telemetry(format!("`log` is {}: {error}", config.log)))?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // A line that cannot be written is lost. Reporting that on standard error too panics where its reader is gone,
        // and ends the task that logged.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(true);
    let outcome = match config.log_format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    outcome.map_err(|error| RuntimeError::Telemetry(error.to_string()))
}
