//! JSON for chat templates, with the keys of objects in the order in which they came.
//!
//! Templates write tools and their calls into the prompt, so a sorted object is another prompt.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::Arc;

use minijinja::value::{Enumerator, Object, Value};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// A JSON value.
#[derive(Debug, Clone, PartialEq)]
pub enum Json {
    /// Nothing.
    Null,
    /// True or false.
    Bool(bool),
    /// A whole number.
    Integer(i64),
    /// A whole number that is too large for the other kind.
    Unsigned(u64),
    /// A number with a fraction.
    Float(f64),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Json>),
    /// Names with values, in their order.
    Object(Vec<(String, Json)>),
}

/// An object as templates see it.
#[derive(Debug)]
struct JsonObject {
    names: Vec<Value>,
    values: HashMap<String, Value>,
}

struct JsonVisitor;

impl Json {
    /// Returns a field of an object.
    pub fn get(&self, name: &str) -> Option<&Json> {
        match self {
            Self::Object(entries) => entries.iter().find(|(key, _)| key == name).map(|(_, value)| value),
            _ => None,
        }
    }

    pub(super) fn to_template(&self) -> Value {
        match self {
            Self::Null => Value::from(()),
            Self::Bool(value) => Value::from(*value),
            Self::Integer(value) => Value::from(*value),
            Self::Unsigned(value) => Value::from(*value),
            Self::Float(value) => Value::from(*value),
            Self::Text(text) => Value::from(text.as_str()),
            Self::List(values) => values.iter().map(Self::to_template).collect(),
            Self::Object(entries) => {
                let names = entries.iter().map(|(name, _)| Value::from(name.as_str())).collect();
                let values =
                    entries.iter().map(|(name, value)| (name.clone(), value.to_template())).collect();
                Value::from_object(JsonObject { names, values })
            }
        }
    }
}

impl From<serde_json::Value> for Json {
    fn from(value: serde_json::Value) -> Self {
        match value {
            serde_json::Value::Null => Self::Null,
            serde_json::Value::Bool(value) => Self::Bool(value),
            serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(value), _) => Self::Integer(value),
                (None, Some(value)) => Self::Unsigned(value),
                (None, None) => number.as_f64().map_or(Self::Null, Self::Float),
            },
            serde_json::Value::String(text) => Self::Text(text),
            serde_json::Value::Array(values) => Self::List(values.into_iter().map(Self::from).collect()),
            serde_json::Value::Object(entries) => {
                Self::Object(entries.into_iter().map(|(name, value)| (name, Self::from(value))).collect())
            }
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Integer(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(i64::try_from(value).map_or(Json::Unsigned(value), Json::Integer))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Json::Float(value))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> Result<Json, E> {
        Ok(Json::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Json, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = elements.next_element()? {
            values.push(value);
        }
        Ok(Json::List(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut entries: Vec<(String, Json)> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        while let Some((name, value)) = map.next_entry::<String, Json>()? {
            match places.entry(name) {
                // Of a name that comes twice the last value counts, at the place of the first, as in Python.
                Entry::Occupied(place) => entries[*place.get()].1 = value,
                Entry::Vacant(place) => {
                    entries.push((place.key().clone(), value));
                    place.insert(entries.len() - 1);
                }
            }
        }
        Ok(Json::Object(entries))
    }
}

impl Object for JsonObject {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.values.get(key.as_str()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.names.clone())
    }
}
