//! Values of fields: read, compared with their names in LMCache, and refused with the field and what is allowed.

use std::fmt::Display;

use kvik_types::ByteSize;
use serde::{Deserialize, Deserializer};

use crate::error::{NodeError, Result};

pub(super) const TIMEOUTS: &str = "1 to 600000 (ten minutes)";

const SIZES: &str = "a size such as 2GiB, 512MiB or 1073741824";

/// The value of a field that has an alias: whichever is given.
pub(super) fn either<T: PartialEq>(
    alias_field: &'static str,
    value: Option<T>,
    alias: Option<T>,
) -> Result<Option<T>> {
    match (&value, &alias) {
        (Some(one), Some(other)) if one != other => contradiction(alias_field),
        _ => Ok(value.or(alias)),
    }
}

/// The same for a field that always has a value: one that is not the default was given.
pub(super) fn over<T: PartialEq>(
    alias_field: &'static str,
    value: T,
    default: &T,
    alias: Option<T>,
) -> Result<T> {
    match alias {
        None => Ok(value),
        Some(alias) if value == *default || value == alias => Ok(alias),
        Some(_) => contradiction(alias_field),
    }
}

fn contradiction<T>(alias_field: &'static str) -> Result<T> {
    refuse(alias_field, "set beside kvik's own name with another value", "one of the two names")
}

pub(super) fn refuse<T>(field: &'static str, value: &str, allowed: &'static str) -> Result<T> {
    Err(NodeError::invalid(field, &value, allowed))
}

pub(super) fn check(
    fits: bool,
    field: &'static str,
    value: &(impl Display + ?Sized),
    allowed: &'static str,
) -> Result<()> {
    if fits { Ok(()) } else { refuse(field, &value.to_string(), allowed) }
}

pub(super) fn parse_size(field: &'static str, text: &str) -> Result<u64> {
    match text.parse::<ByteSize>() {
        Ok(size) => Ok(size.bytes()),
        Err(_) => refuse(field, text, SIZES),
    }
}

pub(super) fn gigabytes(field: &'static str, size: f64) -> Result<u64> {
    check((0.0..=1e9).contains(&size), field, &size, "GB from 0 to 1000000000")?;
    Ok((size * 1e9) as u64)
}

/// Reads a switch given as a word; in YAML `on` and `off` are other words for true and false.
pub(super) fn switch_text<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Given {
        Switch(bool),
        Text(String),
    }
    Ok(match Given::deserialize(deserializer)? {
        Given::Switch(is_on) => (if is_on { "on" } else { "off" }).to_owned(),
        Given::Text(text) => text,
    })
}

/// Reads a size given as a number of bytes or as text.
pub(super) fn size_text<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Given {
        Bytes(u64),
        Text(String),
    }
    Ok(match Given::deserialize(deserializer)? {
        Given::Bytes(n_bytes) => n_bytes.to_string(),
        Given::Text(text) => text,
    })
}
