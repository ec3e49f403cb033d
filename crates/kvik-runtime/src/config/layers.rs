//! The merging of layers.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Effective, FieldChange, Origin, Sources};
use crate::error::{Result, RuntimeError};
use crate::secret::{self, HIDDEN, redacted_url};

/// Largest configuration file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Fields that a variable with a meaning beyond one role sets too, in every section that has them.
pub(super) const STANDARD_VARIABLES: &[(&str, &str)] = &[
    ("admin_token", "KVIK_ADMIN_TOKEN"),
    ("admin_token_file", "KVIK_ADMIN_TOKEN_FILE"),
    ("cluster_token", "KVIK_CLUSTER_TOKEN"),
    ("cluster_token_file", "KVIK_CLUSTER_TOKEN_FILE"),
    ("hub.cache", "HF_HUB_CACHE"),
    ("hub.home", "HF_HOME"),
    ("hub.offline", "HF_HUB_OFFLINE"),
    ("hub.token", "HF_TOKEN"),
    ("hub.token_file", "HF_TOKEN_PATH"),
    ("hub.url", "HF_ENDPOINT"),
    ("memory.enabled", "ENABLE_KVCACHED"),
    ("memory.ipc_name", "KVCACHED_IPC_NAME"),
    ("memory.log_level", "KVCACHED_LOG_LEVEL"),
    ("memory.page_size_mb", "KVCACHED_PAGE_SIZE_MB"),
    ("memory.preallocates", "KVCACHED_PAGE_PREALLOC_ENABLED"),
    ("memory.utilization", "KVCACHED_GPU_UTILIZATION"),
    ("tracing.otlp_endpoint", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    ("tracing.otlp_headers", "OTEL_EXPORTER_OTLP_HEADERS"),
    ("tracing.otlp_protocol", "OTEL_EXPORTER_OTLP_PROTOCOL"),
    ("tracing.tls.authorities", "OTEL_EXPORTER_OTLP_CERTIFICATE"),
    ("tracing.tls.certificate", "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"),
    ("tracing.tls.key", "OTEL_EXPORTER_OTLP_CLIENT_KEY"),
];

/// Reads a YAML file.
pub(super) fn read_yaml(path: &Path) -> Result<Value> {
    let io = |source| RuntimeError::Io { path: path.to_owned(), source };
    let invalid = |reason: String| RuntimeError::InvalidFile { path: path.to_owned(), reason };
    let n_bytes = std::fs::metadata(path).map_err(io)?.len();
    if MAX_FILE_BYTES < n_bytes {
        return Err(invalid(format!("{n_bytes} bytes; allowed: at most {MAX_FILE_BYTES}")));
    }
    let text = std::fs::read_to_string(path).map_err(io)?;
    if text.trim().is_empty() {
        return Ok(Value::Null);
    }
    // Without the lines around the place: they may have a secret.
    serde_saphyr::from_str(&text)
        .map_err(|error: serde_saphyr::Error| invalid(error.without_snippet().to_string()))
}

/// As [`Sources::check_sections`].
pub(super) fn check_sections(sections: &[&str], sources: &Sources) -> Result<()> {
    let Some((path, document)) = &sources.file else { return Ok(()) };
    let (field, value) = match document {
        Value::Null => return Ok(()),
        Value::Object(found) => match found.keys().find(|name| !sections.contains(&name.as_str())) {
            None => return Ok(()),
            Some(name) => (name.clone(), "unknown".to_owned()),
        },
        other => ("the file".to_owned(), masked(other).to_string()),
    };
    Err(RuntimeError::InvalidField {
        origin: format!("file {path}"),
        field,
        value,
        allowed: format!("the sections {}", sections.join(", ")),
    })
}

/// Merges all layers of one section.
pub(super) fn load<C: Serialize + DeserializeOwned + Default>(
    section: &str,
    sources: &Sources,
) -> Result<Effective<C>> {
    let default =
        serde_json::to_value(C::default()).map_err(|error| invalid("default", section, &error, "JSON"))?;
    let mut fields = BTreeMap::new();
    collect_leaves("", &default, &mut fields);

    if let Some((path, document)) = &sources.file {
        let origin = Origin::File(path.clone());
        match document.get(section) {
            None | Some(Value::Null) => {}
            Some(values) => overlay("", values, &default, &origin, &mut fields)?,
        }
    }
    for (field, (value, origin)) in &mut fields {
        let standard = STANDARD_VARIABLES.iter().find(|(known, _)| known == field);
        let names = [Some(variable_name(section, field)), standard.map(|(_, name)| (*name).to_owned())];
        let set = names.into_iter().flatten().find_map(|name| {
            let text = sources.environment.get(&name)?;
            Some((name, text))
        });
        if let Some((name, text)) = set {
            *value = read_variable::<C>(&default, field, text);
            *origin = Origin::Environment(name);
        }
    }
    if !sources.flags.is_null() {
        overlay("", &sources.flags, &default, &Origin::Flag, &mut fields)?;
    }
    let mut merged = Value::Object(serde_json::Map::new());
    for (field, (value, _)) in &fields {
        set_path(&mut merged, field, value.clone());
    }
    let value: C = serde_json::from_value(merged).map_err(|error| blame::<C>(&default, &fields, &error))?;
    // As the configuration shows them: it knows which are secret.
    let shown =
        serde_json::to_value(&value).map_err(|error| invalid("configuration", section, &error, "JSON"))?;
    for (field, (value, _)) in &mut fields {
        *value = get_path(&shown, field).map_or(Value::Null, |value| redacted(value.clone()));
    }
    Ok(Effective { value, fields })
}

/// As [`super::changes`].
pub(super) fn changes<C: Serialize + Default>(before: &C, after: &C) -> Result<Vec<FieldChange>> {
    let failed = |error| invalid("configuration", "the whole", &error, "JSON");
    let shown = |config: &C| serde_json::to_value(config).map_err(failed);
    let marked = |config: &C| secret::comparing(|| serde_json::to_value(config)).map_err(failed);
    let mut fields = BTreeMap::new();
    collect_leaves("", &shown(&C::default())?, &mut fields);
    let (shown_before, shown_after) = (shown(before)?, shown(after)?);
    let (marked_before, marked_after) = (marked(before)?, marked(after)?);
    let mut changes = Vec::new();
    for field in fields.into_keys() {
        if get_path(&marked_before, &field) != get_path(&marked_after, &field) {
            let value = |shown| get_path(shown, &field).cloned().map_or(Value::Null, redacted);
            let (before, after) = (value(&shown_before), value(&shown_after));
            changes.push(FieldChange { field, before, after });
        }
    }
    Ok(changes)
}

/// The value of a variable: it reads as in the file where that fits the field, and as plain text otherwise. A secret is
/// always plain text.
fn read_variable<C: Serialize + DeserializeOwned>(default: &Value, field: &str, text: &str) -> Value {
    let plain = Value::String(text.to_owned());
    if is_secret::<C>(default, field) {
        return plain;
    }
    let Ok(parsed) = serde_saphyr::from_str::<Value>(text) else { return plain };
    let fits = |value: &Value| try_alone::<C>(default, field, value).is_ok();
    if !fits(&parsed) && fits(&plain) { plain } else { parsed }
}

/// Whether `field` hides what it is given.
fn is_secret<C: Serialize + DeserializeOwned>(default: &Value, field: &str) -> bool {
    let probe = Value::String("probe://user:password@host".to_owned());
    let Ok(config) = try_alone::<C>(default, field, &probe) else { return false };
    let shown = serde_json::to_value(config).unwrap_or_default();
    get_path(&shown, field).and_then(Value::as_str).is_some_and(|shown| shown.contains(HIDDEN))
}

/// The defaults with one other value.
fn try_alone<C: DeserializeOwned>(default: &Value, field: &str, value: &Value) -> serde_json::Result<C> {
    let mut alone = default.clone();
    set_path(&mut alone, field, value.clone());
    serde_json::from_value(alone)
}

/// The variable that sets `field` of `section`.
fn variable_name(section: &str, field: &str) -> String {
    format!("KVIK_{section}_{field}").to_uppercase().replace(['.', '-'], "_")
}

fn collect_leaves(path: &str, value: &Value, fields: &mut BTreeMap<String, (Value, Origin)>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (name, inner) in map {
                collect_leaves(&join(path, name), inner, fields);
            }
        }
        leaf => {
            fields.insert(path.to_owned(), (leaf.clone(), Origin::Default));
        }
    }
}

/// Puts the values of a layer over `fields`; `default` says which fields exist.
fn overlay(
    path: &str,
    values: &Value,
    default: &Value,
    origin: &Origin,
    fields: &mut BTreeMap<String, (Value, Origin)>,
) -> Result<()> {
    match (values, default) {
        (Value::Object(map), Value::Object(known)) if !known.is_empty() => {
            for (name, value) in map {
                let field = join(path, name);
                let Some(inner) = known.get(name) else {
                    let allowed = known.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                    return Err(RuntimeError::InvalidField {
                        origin: origin.to_string(),
                        field,
                        value: "unknown".to_owned(),
                        allowed,
                    });
                };
                overlay(&field, value, inner, origin, fields)?;
            }
            Ok(())
        }
        (value, Value::Object(known)) if !known.is_empty() => {
            let allowed = known.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            Err(RuntimeError::InvalidField {
                origin: origin.to_string(),
                field: path.to_owned(),
                value: redacted(value.clone()).to_string(),
                allowed: format!("a map of {allowed}"),
            })
        }
        (value, _) => {
            fields.insert(path.to_owned(), (value.clone(), origin.clone()));
            Ok(())
        }
    }
}

/// Finds the field whose value the configuration does not take: the first one that, put alone over
/// the defaults, is refused.
fn blame<C: Serialize + DeserializeOwned>(
    default: &Value,
    fields: &BTreeMap<String, (Value, Origin)>,
    error: &serde_json::Error,
) -> RuntimeError {
    for (field, (value, origin)) in fields {
        if let Err(reason) = try_alone::<C>(default, field, value) {
            let is_list = get_path(default, field).is_some_and(|value| value.is_array() || value.is_object());
            // A list may hold secrets, at any place.
            let shown = match value {
                _ if is_secret::<C>(default, field) => Value::String(HIDDEN.to_owned()),
                value if is_list => masked(value),
                value => redacted(value.clone()),
            };
            let reason =
                if is_list { without_scalars(value, reason.to_string()) } else { reason.to_string() };
            return RuntimeError::InvalidField {
                origin: origin.to_string(),
                field: field.clone(),
                value: shown.to_string(),
                allowed: reason,
            };
        }
    }
    invalid("configuration", "the whole", error, "values that fit together")
}

fn invalid(origin: &str, field: &str, value: &serde_json::Error, allowed: &str) -> RuntimeError {
    RuntimeError::InvalidField {
        origin: origin.to_owned(),
        field: field.to_owned(),
        value: value.to_string(),
        allowed: allowed.to_owned(),
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

/// The value with every address as it may be printed.
fn redacted(value: Value) -> Value {
    match value {
        Value::String(text) if text.contains("://") => Value::String(redacted_url(&text)),
        Value::Array(values) => Value::Array(values.into_iter().map(redacted).collect()),
        Value::Object(map) => map.into_iter().map(|(name, value)| (name, redacted(value))).collect(),
        other => other,
    }
}

/// The shape of a value, without its texts and numbers.
fn masked(value: &Value) -> Value {
    match value {
        Value::Array(values) => Value::Array(values.iter().map(masked).collect()),
        Value::Object(map) => map.iter().map(|(name, value)| (name.clone(), masked(value))).collect(),
        Value::Null => Value::Null,
        _ => Value::String(HIDDEN.to_owned()),
    }
}

/// A message without the texts and numbers of `value`.
fn without_scalars(value: &Value, message: String) -> String {
    match value {
        Value::Array(values) => values.iter().fold(message, |message, value| without_scalars(value, message)),
        Value::Object(map) => map.values().fold(message, |message, value| without_scalars(value, message)),
        Value::String(text) if !text.is_empty() => {
            let escaped = format!("{text:?}");
            message.replace(escaped.trim_matches('"'), HIDDEN).replace(text.as_str(), HIDDEN)
        }
        Value::Number(number) => message.replace(&number.to_string(), HIDDEN),
        _ => message,
    }
}

fn get_path<'a>(root: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(root, |place, name| place.get(name))
}

fn set_path(root: &mut Value, path: &str, value: Value) {
    let mut place = root;
    for name in path.split('.') {
        if !place.is_object() {
            *place = Value::Object(serde_json::Map::new());
        }
        place = &mut place[name];
    }
    *place = value;
}
