//! The merging of layers.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Effective, Origin, Sources};
use crate::error::{Result, RuntimeError};

/// Largest configuration file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Fields that a variable with a meaning beyond kvik sets too, in every section that has them.
pub(super) const STANDARD_VARIABLES: &[(&str, &str)] = &[
    ("memory.enabled", "ENABLE_KVCACHED"),
    ("memory.ipc_name", "KVCACHED_IPC_NAME"),
    ("memory.log_level", "KVCACHED_LOG_LEVEL"),
    ("memory.page_size_mb", "KVCACHED_PAGE_SIZE_MB"),
    ("memory.preallocates", "KVCACHED_PAGE_PREALLOC_ENABLED"),
    ("memory.utilization", "KVCACHED_GPU_UTILIZATION"),
    ("tracing.otlp_endpoint", "OTEL_EXPORTER_OTLP_ENDPOINT"),
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
    serde_saphyr::from_str(&text).map_err(|error| invalid(error.to_string()))
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
        other => ("the file".to_owned(), other.to_string()),
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
            // A scalar reads as in the file; what is no YAML is a plain string.
            *value = serde_saphyr::from_str(text).unwrap_or_else(|_| Value::String(text.clone()));
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
    let value = serde_json::from_value(merged).map_err(|error| blame::<C>(&default, &fields, &error))?;
    Ok(Effective { value, fields })
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
                value: value.to_string(),
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
fn blame<C: DeserializeOwned>(
    default: &Value,
    fields: &BTreeMap<String, (Value, Origin)>,
    error: &serde_json::Error,
) -> RuntimeError {
    for (field, (value, origin)) in fields {
        let mut alone = default.clone();
        set_path(&mut alone, field, value.clone());
        if let Err(reason) = serde_json::from_value::<C>(alone) {
            return RuntimeError::InvalidField {
                origin: origin.to_string(),
                field: field.clone(),
                value: value.to_string(),
                allowed: reason.to_string(),
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
