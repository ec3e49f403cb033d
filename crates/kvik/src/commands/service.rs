//! What the commands that run a service share: configuration, logs, the runtime, the end.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use kvik_runtime::RuntimeError;
use kvik_runtime::config::{Effective, Sources};
use kvik_runtime::http::raise_file_limit;
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::telemetry::{LogFormat, TelemetryConfig, maintain_metrics, start_logging, start_metrics};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::cli::services::{LogForm, ServiceArguments, StoreArguments};

/// Marks an error as the fault of what was given.
#[derive(Debug)]
pub(crate) struct InvalidInput(String);

impl InvalidInput {
    pub(crate) fn new(message: String) -> Self {
        Self(message)
    }
}

impl std::fmt::Display for InvalidInput {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for InvalidInput {}

/// Flags of a role in the shape of its configuration.
#[derive(Debug, Default)]
pub(crate) struct Flags(Map<String, Value>);

impl Flags {
    /// Sets a field if its flag was given.
    pub(crate) fn with(mut self, field: &str, value: Option<impl Into<Value>>) -> Self {
        if let Some(value) = value {
            self.0.insert(field.to_owned(), value.into());
        }
        self
    }

    /// Sets a list if its flag was given.
    pub(crate) fn with_list(self, field: &str, values: &[String]) -> Self {
        self.with(field, (!values.is_empty()).then(|| values.to_vec()))
    }

    /// All of them as a value; `None` without any.
    pub(crate) fn into_value(self) -> Option<Value> {
        (!self.0.is_empty()).then_some(Value::Object(self.0))
    }

    /// Adds the fields of `--set`, whose values read as in the file.
    fn with_settings(mut self, settings: &[String]) -> Result<Self, InvalidInput> {
        for setting in settings {
            let Some((field, text)) = setting.split_once('=') else {
                return Err(InvalidInput(format!("read --set: `{setting}`; allowed: FIELD=VALUE")));
            };
            let value = serde_saphyr::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()));
            insert_path(&mut self.0, field, value);
        }
        Ok(self)
    }
}

/// The flags of a store in the shape of its configuration; `None` if none was given.
pub(crate) fn store_flags(arguments: &StoreArguments) -> Option<Value> {
    let flags = Flags::default()
        .with("ram", arguments.ram.clone())
        .with("nvme", arguments.nvme.clone())
        .with("remote", arguments.remote.clone());
    flags.into_value()
}

/// Puts `value` under the dotted `path`, making maps where there are none.
fn insert_path(map: &mut Map<String, Value>, path: &str, value: Value) {
    let Some((name, rest)) = path.split_once('.') else {
        map.insert(path.to_owned(), value);
        return;
    };
    let inner = map.entry(name).or_insert(Value::Null);
    if !inner.is_object() {
        *inner = Value::Object(Map::new());
    }
    if let Value::Object(inner) = inner {
        insert_path(inner, rest, value);
    }
}

/// The sections of a configuration file: one for each role.
const SECTIONS: [&str; 5] = ["coordinator", "epp", "gateway", "store", "worker"];

/// The configuration of `role` from file, environment and flags.
pub(crate) fn load<C: Serialize + DeserializeOwned + Default>(
    role: &str,
    file: Option<&Path>,
    flags: Flags,
    settings: &[String],
) -> anyhow::Result<Effective<C>> {
    let flags = flags.with_settings(settings)?;
    let flags = if flags.0.is_empty() { Value::Null } else { Value::Object(flags.0) };
    let effective = Sources::read(file).and_then(|sources| {
        sources.check_sections(&SECTIONS)?;
        sources.with_flags(flags).load(role)
    });
    effective.map_err(|error| match error {
        RuntimeError::Io { .. } => anyhow::Error::new(error).context("read the configuration"),
        invalid => InvalidInput(format!("read the configuration: {invalid}")).into(),
    })
}

/// Starts logs and metrics and runs `service` to its end; the first signal drains, the second or
/// `grace` after the first stops.
pub(crate) fn run<F>(
    arguments: &ServiceArguments,
    default_log: &str,
    service: impl FnOnce(Shutdown) -> F,
) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    let log_format = match arguments.log_format {
        LogForm::Text => LogFormat::Text,
        LogForm::Json => LogFormat::Json,
    };
    let telemetry =
        TelemetryConfig { log: arguments.log.clone().unwrap_or_else(|| default_log.to_owned()), log_format };
    start_logging(&telemetry).map_err(|error| InvalidInput(format!("start logging: {error}")))?;
    start_metrics().context("start metrics")?;
    // Each connection is a file, and the usual limit is far below `limits.max_connections`.
    raise_file_limit();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("start the runtime")?;
    let shutdown = Shutdown::new();
    let outcome = runtime.block_on(async {
        maintain_metrics(&shutdown);
        let outcome = service(shutdown.clone()).await;
        shutdown.finish().await;
        outcome
    });
    // Nothing of value is left: every task has been waited for.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}
