//! Typed reading of JSON fields, so that every wrong value is reported the same way.

use serde_json::{Map, Value};

use crate::error::{ModelError, Result};

/// Longest part of a wrong value that an error message repeats, in characters.
const MAX_SHOWN_CHARACTERS: usize = 80;

/// An object of `config.json` and the path that leads to it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Put before the field's name in messages: empty, or a parent field and a dot.
    path: &'static str,
}

impl<'a> Fields<'a> {
    pub(super) fn new(map: &'a Map<String, Value>, path: &'static str) -> Self {
        Self { map, path }
    }

    /// Returns the field, with `null` read as missing, as Hugging Face does for optional fields.
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// Whether the field is written, `null` included.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// Returns the fields and their values in no particular order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.map.iter()
    }

    /// Returns a count in `1..=max`, or `None` where it is missing.
    pub(super) fn optional_count(&self, name: &str, max: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_u64()
            .and_then(|count| usize::try_from(count).ok())
            .filter(|count| (1..=max).contains(count))
            .map(Some)
            .ok_or_else(|| self.invalid(name, value, format!("an integer from 1 to {max}")))
    }

    /// Returns a count in `1..=max` that has no default.
    pub(super) fn count(&self, name: &str, max: usize) -> Result<usize> {
        self.optional_count(name, max)?
            .ok_or_else(|| self.missing(name, format!("an integer from 1 to {max}")))
    }

    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool> {
        let Some(value) = self.get(name) else {
            return Ok(default);
        };
        value.as_bool().ok_or_else(|| self.invalid(name, value, "true or false"))
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value.as_str().map(Some).ok_or_else(|| self.invalid(name, value, "a string"))
    }

    /// Returns a number that is at least `min`, finite also as an `f32`, or `None` where it is missing.
    pub(super) fn optional_number(&self, name: &str, min: f64) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_f64()
            .filter(|number| *number >= min && (*number as f32).is_finite())
            .map(Some)
            .ok_or_else(|| self.invalid(name, value, format!("a number of at least {min}")))
    }

    /// Returns a token id, or `None` where it is missing.
    pub(super) fn token_id(&self, name: &str) -> Result<Option<u32>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        as_token_id(value).map(Some).ok_or_else(|| self.invalid(name, value, "a token id or null"))
    }

    /// Returns the token ids of a field that holds one, a list of them, or nothing.
    pub(super) fn token_ids(&self, name: &str) -> Result<Vec<u32>> {
        let Some(value) = self.get(name) else {
            return Ok(Vec::new());
        };
        let ids = match value {
            Value::Array(items) => items.iter().map(as_token_id).collect(),
            single => as_token_id(single).map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.invalid(name, value, "a token id, a list of token ids, or null"))
    }

    /// The error for `value` of the field `name`.
    pub(super) fn invalid(&self, name: &str, value: &Value, allowed: impl Into<String>) -> ModelError {
        ModelError::config(format!("{}{name}", self.path), shown(value), allowed)
    }

    /// The error for a field that has no default and is not there.
    pub(super) fn missing(&self, name: &str, allowed: impl Into<String>) -> ModelError {
        ModelError::config(format!("{}{name}", self.path), "missing", allowed)
    }
}

fn as_token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// The value as JSON, cut so that a damaged file cannot fill the log.
fn shown(value: &Value) -> String {
    let json = value.to_string();
    if json.chars().count() <= MAX_SHOWN_CHARACTERS {
        return json;
    }
    json.chars().take(MAX_SHOWN_CHARACTERS).chain("...".chars()).collect()
}
