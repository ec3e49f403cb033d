//! Configuration in layers.
//!
//! A service's configuration is one struct with `Serialize`, `Deserialize` and `Default`. Its
//! default is the list of all fields; a field that is not in it does not exist, in any layer.
//! Layers, later ones win: default, the service's section of the YAML file, the environment
//! (`KVIK_<SECTION>_<FIELD>`, dots and dashes as underscores; a few fields also by a variable that
//! other programs know), flags. Nothing is half applied: an error in any layer leaves no
//! configuration.

mod layers;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::Result;

/// What the clients of cloud stores are usually configured by.
const CLOUD_PREFIXES: &[&str] = &["AWS_", "AZURE_", "GOOGLE_"];

/// The variables of the environment that configure clients of cloud stores.
pub fn cloud_environment() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| CLOUD_PREFIXES.iter().any(|prefix| name.starts_with(prefix)))
        .collect()
}

/// The variables of the environment that start with `prefix` and set no field of any service, in order.
pub fn unused_variables(prefix: &str) -> Vec<String> {
    let is_unused = |name: &String| {
        name.starts_with(prefix) && !layers::STANDARD_VARIABLES.iter().any(|(_, standard)| standard == name)
    };
    let mut names: Vec<String> =
        std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).filter(is_unused).collect();
    names.sort_unstable();
    names
}

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The program.
    Default,
    /// The YAML file.
    File(String),
    /// A variable of the environment.
    Environment(String),
    /// The command line.
    Flag,
}

/// The sources besides the defaults.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// The YAML file's path and content, if there is one.
    pub file: Option<(String, Value)>,
    /// The environment.
    pub environment: BTreeMap<String, String>,
    /// Values of flags that were given, in the shape of the configuration.
    pub flags: Value,
}

/// A configuration and where its values come from.
#[derive(Debug, Clone)]
pub struct Effective<C> {
    /// The configuration.
    pub value: C,
    /// For each field, by its path: its value and origin.
    pub fields: BTreeMap<String, (Value, Origin)>,
}

/// A field whose value changed between two configurations.
#[derive(Debug, Clone, PartialEq)]
pub struct FieldChange {
    /// The field's path.
    pub field: String,
    /// The value before.
    pub before: Value,
    /// The value now.
    pub after: Value,
}

impl Sources {
    /// Reads the environment of the process and, if given, a YAML file.
    ///
    /// # Errors
    /// If the file cannot be read or is not YAML.
    pub fn read(file: Option<&Path>) -> Result<Self> {
        let file = match file {
            None => None,
            Some(path) => Some((path.display().to_string(), layers::read_yaml(path)?)),
        };
        let environment = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .filter(|(name, _)| {
                let is_standard = layers::STANDARD_VARIABLES.iter().any(|(_, standard)| standard == name);
                is_standard || name.starts_with("KVIK_")
            })
            .collect();
        Ok(Self { file, environment, flags: Value::Null })
    }

    /// The same sources with the values of flags.
    #[must_use]
    pub fn with_flags(mut self, flags: Value) -> Self {
        self.flags = flags;
        self
    }

    /// Refuses a file with anything but these sections: the fields of a section whose name is misspelled would
    /// be passed over without a word.
    ///
    /// # Errors
    /// [`RuntimeError::InvalidField`](crate::RuntimeError::InvalidField) with the first other section, or with the
    /// file as a whole if it has no sections.
    pub fn check_sections(&self, sections: &[&str]) -> Result<()> {
        layers::check_sections(sections, self)
    }

    /// Builds the configuration of `section`.
    ///
    /// # Errors
    /// [`RuntimeError::InvalidField`](crate::RuntimeError::InvalidField) for a field that does not
    /// exist or a value of the wrong type.
    pub fn load<C: Serialize + DeserializeOwned + Default>(&self, section: &str) -> Result<Effective<C>> {
        layers::load(section, self)
    }
}

impl<C> Effective<C> {
    /// The fields whose values differ from those of `before`.
    pub fn changes_since(&self, before: &Self) -> Vec<FieldChange> {
        let mut changes = Vec::new();
        for (field, (after, _)) in &self.fields {
            if let Some((value, _)) = before.fields.get(field)
                && value != after
            {
                changes.push(FieldChange {
                    field: field.clone(),
                    before: value.clone(),
                    after: after.clone(),
                });
            }
        }
        changes
    }
}

impl std::fmt::Display for Origin {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Default => formatter.write_str("default"),
            Self::File(path) => write!(formatter, "file {path}"),
            Self::Environment(name) => write!(formatter, "environment {name}"),
            Self::Flag => formatter.write_str("flag"),
        }
    }
}

#[cfg(test)]
mod tests;
