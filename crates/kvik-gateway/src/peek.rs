//! A look at a request's body without taking it apart.
//!
//! The body goes to the worker as it came, unknown fields included; only what routing needs is
//! read, and borrowed from the bytes. A key that occurs twice counts with its last value, as most
//! parsers do. Fields are checked for their type only: what a value means is the worker's affair.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::value::RawValue;

/// What routing needs of a body.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Peek<'a> {
    /// The model that is asked for.
    pub(crate) model: Option<Cow<'a, str>>,
    /// Whether the answer is to be a stream.
    pub(crate) is_stream: bool,
    /// The most tokens to generate.
    pub(crate) max_tokens: Option<u64>,
    /// Names the sequence.
    pub(crate) seq_id: Option<Cow<'a, str>>,
    /// Names the prefix that is expected in a cache.
    pub(crate) prompt_cache_key: Option<Cow<'a, str>>,
    /// Names the user.
    pub(crate) user: Option<Cow<'a, str>>,
    /// The prompt as JSON text, as it was written.
    pub(crate) prompt: Option<&'a str>,
    /// The messages as JSON text, as they were written.
    pub(crate) messages: Option<&'a str>,
    /// The sampling parameters of `/generate` as JSON text.
    pub(crate) sampling: Option<&'a str>,
}

/// Why a body cannot be forwarded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeekError {
    /// For people.
    pub(crate) message: String,
    /// The field, if one is at fault.
    pub(crate) param: Option<&'static str>,
}

/// The fields that are read, each as its JSON text.
#[derive(Default)]
struct RawFields<'a> {
    values: [Option<&'a str>; Field::ALL.len()],
}

#[derive(Clone, Copy)]
enum Field {
    Model,
    Stream,
    MaxTokens,
    MaxCompletionTokens,
    SeqId,
    PromptCacheKey,
    User,
    Prompt,
    TokenIds,
    Messages,
    Sampling,
}

struct FieldName(Option<Field>);

/// A string that is borrowed where it has no escapes.
struct Text<'a>(Cow<'a, str>);

// === impl Peek ===

impl<'a> Peek<'a> {
    /// Reads the fields of `body`.
    pub(crate) fn read(body: &'a [u8]) -> Result<Self, PeekError> {
        let invalid = |message: String| PeekError { message, param: None };
        // Before the parser, which does not look into strings that it passes over.
        let text =
            std::str::from_utf8(body).map_err(|error| invalid(format!("the body is not UTF-8: {error}")))?;
        let fields: RawFields<'a> = serde_json::from_str(text)
            .map_err(|error| invalid(format!("the body is not a JSON object: {error}")))?;
        let max_tokens: Option<u64> = fields.parse(Field::MaxTokens, "a whole number, 0 or more")?;
        let max_completion_tokens = fields.parse(Field::MaxCompletionTokens, "a whole number, 0 or more")?;
        Ok(Self {
            model: fields.text(Field::Model)?,
            is_stream: fields.parse(Field::Stream, "true or false")?.unwrap_or(false),
            // The newer name wins, as in the API that has both.
            max_tokens: max_completion_tokens.or(max_tokens),
            seq_id: fields.text(Field::SeqId)?,
            prompt_cache_key: fields.text(Field::PromptCacheKey)?,
            user: fields.text(Field::User)?,
            prompt: fields.get(Field::Prompt).or(fields.get(Field::TokenIds)),
            messages: fields.get(Field::Messages),
            sampling: fields.get(Field::Sampling),
        })
    }

    /// Bytes of the prompt, whichever form it has.
    pub(crate) fn n_prompt_bytes(&self) -> usize {
        self.prompt.map_or(0, str::len) + self.messages.map_or(0, str::len)
    }
}

// === impl RawFields ===

impl<'a> RawFields<'a> {
    /// The value of a field; one that is `null` is not there.
    fn get(&self, field: Field) -> Option<&'a str> {
        self.values[field as usize].filter(|&text| text != "null")
    }

    fn parse<T: Deserialize<'a>>(&self, field: Field, allowed: &str) -> Result<Option<T>, PeekError> {
        let Some(text) = self.get(field) else { return Ok(None) };
        serde_json::from_str(text).map(Some).map_err(|_| {
            let name = field.name();
            let shown: String = text.chars().take(40).collect();
            PeekError { message: format!("`{name}` is {shown}; allowed: {allowed}"), param: Some(name) }
        })
    }

    fn text(&self, field: Field) -> Result<Option<Cow<'a, str>>, PeekError> {
        Ok(self.parse::<Text<'a>>(field, "a string")?.map(|text| text.0))
    }
}

impl<'de> Deserialize<'de> for RawFields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;

        impl<'de> Visitor<'de> for Fields {
            type Value = RawFields<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = RawFields::default();
                while let Some(FieldName(field)) = map.next_key()? {
                    match field {
                        Some(field) => {
                            fields.values[field as usize] = Some(map.next_value::<&RawValue>()?.get());
                        }
                        None => {
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                Ok(fields)
            }
        }

        deserializer.deserialize_map(Fields)
    }
}

// === impl Field ===

impl Field {
    const ALL: [Self; 11] = [
        Self::Model,
        Self::Stream,
        Self::MaxTokens,
        Self::MaxCompletionTokens,
        Self::SeqId,
        Self::PromptCacheKey,
        Self::User,
        Self::Prompt,
        Self::TokenIds,
        Self::Messages,
        Self::Sampling,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Stream => "stream",
            Self::MaxTokens => "max_tokens",
            Self::MaxCompletionTokens => "max_completion_tokens",
            Self::SeqId => "seq_id",
            Self::PromptCacheKey => "prompt_cache_key",
            Self::User => "user",
            Self::Prompt => "prompt",
            Self::TokenIds => "token_ids",
            Self::Messages => "messages",
            Self::Sampling => "sampling",
        }
    }
}

impl<'de> Deserialize<'de> for FieldName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;

        impl Visitor<'_> for Name {
            type Value = FieldName;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a field's name")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Self::Value, E> {
                Ok(FieldName(Field::ALL.into_iter().find(|field| field.name() == name)))
            }
        }

        deserializer.deserialize_identifier(Name)
    }
}

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Borrowed;

        impl<'de> Visitor<'de> for Borrowed {
            type Value = Text<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string")
            }

            fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }

        deserializer.deserialize_str(Borrowed)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn an_error_names_the_field() {
        for (body, param) in [
            (r#"{"max_tokens": "ten"}"#, "max_tokens"),
            (r#"{"max_completion_tokens": -1}"#, "max_completion_tokens"),
            (r#"{"stream": 1}"#, "stream"),
            (r#"{"model": {}}"#, "model"),
            (r#"{"seq_id": 7}"#, "seq_id"),
        ] {
            let error = Peek::read(body.as_bytes()).unwrap_err();
            assert_eq!(error.param, Some(param));
            assert!(error.message.contains(param), "{}", error.message);
        }
    }

    #[test]
    fn bodies_that_are_no_objects_are_refused() {
        for body in ["", "[]", "{", "\"x\"", "{} {}", "{\"a\":}"] {
            assert_eq!(Peek::read(body.as_bytes()).unwrap_err().param, None, "{body}");
        }
        assert!(Peek::read(b"{\"other\": \"\xff\"}").is_err());
    }

    #[test]
    fn strings_are_borrowed_unless_they_have_escapes() {
        let peek = Peek::read(br#"{"model":"a/b","user":"\u00e9","prompt":"x \" y"}"#).unwrap();
        assert!(matches!(peek.model, Some(Cow::Borrowed("a/b"))));
        assert_eq!(peek.user.as_deref(), Some("\u{e9}"));
        assert_eq!(peek.prompt, Some(r#""x \" y""#));
    }

    fn field_value() -> impl Strategy<Value = Value> {
        prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            ".{0,12}".prop_map(Value::from),
            Just(json!([{"role": "user", "content": "a\"b\\"}])),
            Just(json!({"a": [1.5, {}]})),
        ]
    }

    fn field_name() -> impl Strategy<Value = String> {
        prop_oneof![prop::sample::select(Field::ALL.map(|field| field.name().to_owned()).to_vec()), ".{0,6}",]
    }

    proptest! {
        #[test]
        fn a_peek_sees_what_a_full_parse_sees(
            fields in prop::collection::vec((field_name(), field_value()), 0..12),
        ) {
            // Written by hand, so that a name can occur twice.
            let inside = fields.iter().map(|(name, value)| format!("{}: {value}", Value::from(name.as_str())));
            let body = format!("{{{}}}", inside.collect::<Vec<_>>().join(", "));
            let full: Value = serde_json::from_str(&body).unwrap();
            let get = |name: &str| full.get(name).filter(|value| !value.is_null());
            let is_valid = ["model", "seq_id", "prompt_cache_key", "user"]
                .iter().all(|name| get(name).is_none_or(Value::is_string))
                && ["max_tokens", "max_completion_tokens"].iter().all(|name| get(name).is_none_or(Value::is_u64))
                && get("stream").is_none_or(Value::is_boolean);
            match Peek::read(body.as_bytes()) {
                Err(error) => prop_assert!(!is_valid, "{}", error.message),
                Ok(peek) => {
                    prop_assert!(is_valid);
                    let text = |name: &str| get(name).and_then(Value::as_str).map(str::to_owned);
                    let parsed = |text: Option<&str>| text.map(|text| serde_json::from_str::<Value>(text).unwrap());
                    prop_assert_eq!(peek.model.as_deref().map(str::to_owned), text("model"));
                    prop_assert_eq!(peek.seq_id.as_deref().map(str::to_owned), text("seq_id"));
                    prop_assert_eq!(peek.user.as_deref().map(str::to_owned), text("user"));
                    prop_assert_eq!(peek.prompt_cache_key.as_deref().map(str::to_owned), text("prompt_cache_key"));
                    prop_assert_eq!(peek.is_stream, get("stream").and_then(Value::as_bool).unwrap_or(false));
                    let max_tokens = get("max_completion_tokens").or(get("max_tokens")).and_then(Value::as_u64);
                    prop_assert_eq!(peek.max_tokens, max_tokens);
                    prop_assert_eq!(parsed(peek.prompt), get("prompt").or(get("token_ids")).cloned());
                    prop_assert_eq!(parsed(peek.messages), get("messages").cloned());
                }
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(body in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Peek::read(&body);
        }

        #[test]
        fn any_text_like_json_is_read_or_refused(body in "[{}\\[\\]:,\"a-z0-9\\\\ .-]{0,80}") {
            let peek = Peek::read(body.as_bytes());
            let full = serde_json::from_str::<Value>(&body);
            prop_assert!(peek.is_err() || full.is_ok_and(|full| full.is_object()));
        }
    }
}
