//! A look at a request's body without taking it apart.
//!
//! The body goes to the worker as it came, unknown fields included; only what routing needs is
//! read, and borrowed from the bytes. A key that occurs twice counts with its last value, as most
//! parsers do. Fields are checked for their type only: what a value means is the worker's affair,
//! and so is the inside of values that are passed over (see [`scan`]).

pub(crate) mod scan;

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, Visitor};
use serde::{Deserialize, de};

use self::scan::scan_object;

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
    /// Keeps the KV of its requests apart from all other KV.
    pub(crate) cache_salt: Option<Cow<'a, str>>,
    /// Whether something besides prompt and salt decides which KV the worker uses, so that what it has of the prompt
    /// cannot be predicted and its report says nothing about the prompt's blocks.
    pub(crate) is_unpredictable: bool,
    /// The prompt as JSON text, as it was written.
    pub(crate) prompt: Option<&'a str>,
    /// The messages as JSON text, as they were written.
    pub(crate) messages: Option<&'a str>,
    /// The sampling parameters of `/generate` as JSON text.
    pub(crate) sampling: Option<&'a str>,
    /// How messages are rendered, each as JSON text.
    pub(crate) tools: Option<&'a str>,
    pub(crate) add_generation_prompt: Option<&'a str>,
    pub(crate) continue_final_message: Option<&'a str>,
    pub(crate) chat_template_kwargs: Option<&'a str>,
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
    CacheSalt,
    Prompt,
    TokenIds,
    Messages,
    Sampling,
    Tools,
    AddGenerationPrompt,
    ContinueFinalMessage,
    ChatTemplateKwargs,
}

/// A string that is borrowed where it has no escapes.
struct Text<'a>(Cow<'a, str>);

// === impl Peek ===

impl<'a> Peek<'a> {
    /// Reads the fields of `body`.
    pub(crate) fn read(body: &'a [u8]) -> Result<Self, PeekError> {
        let invalid = |message: String| PeekError { message, param: None };
        let text = simdutf8::basic::from_utf8(body)
            .map_err(|error| invalid(format!("the body is not UTF-8: {error}")))?;
        let mut fields = RawFields::default();
        let mut is_unpredictable = false;
        scan_object(text, |name, value| {
            if let Some(field) = Field::from_name(name) {
                fields.values[field as usize] = Some(value);
            } else {
                is_unpredictable |= changes_kv(name, value);
            }
        })
        .map_err(|error| {
            let (expected, place) = (error.expected, error.place);
            invalid(format!("the body is not a JSON object: expected {expected} at byte {place}"))
        })?;
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
            cache_salt: fields.text(Field::CacheSalt)?,
            is_unpredictable,
            prompt: fields.get(Field::Prompt).or(fields.get(Field::TokenIds)),
            messages: fields.get(Field::Messages),
            sampling: fields.get(Field::Sampling),
            tools: fields.get(Field::Tools),
            add_generation_prompt: fields.get(Field::AddGenerationPrompt),
            continue_final_message: fields.get(Field::ContinueFinalMessage),
            chat_template_kwargs: fields.get(Field::ChatTemplateKwargs),
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

// === impl Field ===

impl Field {
    const ALL: [Self; 16] = [
        Self::Model,
        Self::Stream,
        Self::MaxTokens,
        Self::MaxCompletionTokens,
        Self::SeqId,
        Self::PromptCacheKey,
        Self::User,
        Self::CacheSalt,
        Self::Prompt,
        Self::TokenIds,
        Self::Messages,
        Self::Sampling,
        Self::Tools,
        Self::AddGenerationPrompt,
        Self::ContinueFinalMessage,
        Self::ChatTemplateKwargs,
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
            Self::CacheSalt => "cache_salt",
            Self::Prompt => "prompt",
            Self::TokenIds => "token_ids",
            Self::Messages => "messages",
            Self::Sampling => "sampling",
            Self::Tools => "tools",
            Self::AddGenerationPrompt => "add_generation_prompt",
            Self::ContinueFinalMessage => "continue_final_message",
            Self::ChatTemplateKwargs => "chat_template_kwargs",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|field| field.name() == name)
    }
}

/// Whether a field with this value makes an engine use other KV than that of the prompt as it is written, or none: the
/// names are those of vLLM, `SGLang` and kvik.
pub(crate) fn changes_kv(name: &str, value: &str) -> bool {
    let is_set = || !matches!(value, "null" | "false" | "[]" | "{}" | "\"\"");
    match name {
        // Whatever the value: what is left out by default depends on the route.
        "add_special_tokens" => value != "null",
        // The prompt is cut or another one.
        "truncate_prompt_tokens" | "truncation" | "chat_template" | "documents" | "prompt_embeds" | "input_embeds"
        // All of the prompt is computed for its log probabilities, or because the request says so.
        | "prompt_logprobs" | "echo" | "logprob_start_len" | "skip_reading_prefix_cache"
        // An adapter.
        | "lora" | "lora_name" | "lora_path" | "lora_request" | "adapter" | "adapter_id"
        // Images, audio, video.
        | "multi_modal_data" | "mm_processor_kwargs" | "image_data" | "audio_data" | "video_data"
        // KV from elsewhere, or under a name that events do not have.
        | "kv_transfer_params" | "extra_key"
        // A prompt that is put together from parts.
        | "kvik" => is_set(),
        _ => false,
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
mod tests;
