//! `google.protobuf.Struct` and Envoy's metadata, which is made of it.

use std::collections::BTreeMap;

/// What filters have noted about a request, by their namespaces.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Metadata {
    /// By namespace.
    #[prost(btree_map = "string, message", tag = "1")]
    pub filter_metadata: BTreeMap<String, Struct>,
}

/// An object, as JSON has them.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Struct {
    /// By name.
    #[prost(btree_map = "string, message", tag = "1")]
    pub fields: BTreeMap<String, Value>,
}

/// A value, as JSON has them.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Value {
    /// The value.
    #[prost(oneof = "value::Kind", tags = "1, 2, 3, 4, 5, 6")]
    pub kind: Option<value::Kind>,
}

/// The kinds of [`Value`].
pub mod value {
    use super::{ListValue, Struct};

    /// A value, as JSON has them.
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Kind {
        /// Null.
        #[prost(int32, tag = "1")]
        Null(i32),
        /// A number.
        #[prost(double, tag = "2")]
        Number(f64),
        /// A text.
        #[prost(string, tag = "3")]
        Text(String),
        /// True or false.
        #[prost(bool, tag = "4")]
        Bool(bool),
        /// An object.
        #[prost(message, tag = "5")]
        Struct(Struct),
        /// A list.
        #[prost(message, tag = "6")]
        List(ListValue),
    }
}

/// A list of values.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListValue {
    /// The values.
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<Value>,
}

impl Value {
    /// The texts of a text or list, each cut at its commas; what is no text is passed over.
    pub fn texts(&self) -> Vec<String> {
        let mut texts = Vec::new();
        let cut = |text: &str, texts: &mut Vec<String>| {
            texts.extend(text.split(',').map(str::trim).filter(|text| !text.is_empty()).map(str::to_owned));
        };
        match &self.kind {
            Some(value::Kind::Text(text)) => cut(text, &mut texts),
            Some(value::Kind::List(list)) => {
                for value in &list.values {
                    if let Some(value::Kind::Text(text)) = &value.kind {
                        cut(text, &mut texts);
                    }
                }
            }
            _ => {}
        }
        texts
    }
}
