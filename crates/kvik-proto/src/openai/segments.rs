//! Prompts that name the parts whose KV may be used at any place.

use serde::{Deserialize, Serialize};

/// kvik's own fields of a request, under `kvik`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KvikFields {
    /// The parts of the prompt. Where the prompt itself is empty they are the prompt, one after the other; otherwise the
    /// reusable ones are looked for in it, in their order. Default: none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub segments: Vec<PromptPart>,
    /// Text that stands between the parts of the prompt: all but the last are reusable then. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub separator: Option<String>,
    /// Which tokens of reusable parts are computed again. Default: what the model's settings say; without one, the
    /// prompt is computed as any other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blend: Option<BlendField>,
}

/// A part of a prompt: either a text or tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PromptPart {
    /// Its text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Its tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// Whether its KV may come from another prompt. Default: false.
    pub reusable: bool,
}

/// A selector, alone or in an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a selector such as \"first:16\", or an object with one under `selector`")]
pub enum BlendField {
    /// The selector.
    Text(String),
    /// An object.
    Object {
        /// The selector.
        selector: String,
    },
}

impl BlendField {
    /// The selector as it is written.
    pub fn selector(&self) -> &str {
        match self {
            Self::Text(selector) | Self::Object { selector } => selector,
        }
    }
}
