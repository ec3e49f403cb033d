//! What the files beside `tokenizer.json` say: special tokens, chat template, end tokens.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::error::{Result, TokensError};

/// Fields of `tokenizer_config.json` that name a special token and are handed to chat templates.
const SPECIAL_TOKEN_FIELDS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The part of `tokenizer_config.json` and `generation_config.json` that the engine uses.
#[derive(Debug, Default)]
pub(super) struct Settings {
    /// Text of the special tokens, by field name such as `bos_token`.
    pub(super) special_tokens: BTreeMap<&'static str, String>,
    /// Whether every text starts with the token `bos_token`.
    pub(super) adds_bos_token: bool,
    /// Source of the chat template.
    pub(super) chat_template: Option<String>,
    /// End tokens of `generation_config.json`.
    pub(super) eos_token_ids: Vec<u32>,
    /// Start token of `generation_config.json`.
    pub(super) bos_token_id: Option<u32>,
}

impl Settings {
    pub(super) fn read(tokenizer_config: Option<&[u8]>, generation_config: Option<&[u8]>) -> Result<Self> {
        let mut settings = Self::default();
        if let Some(bytes) = tokenizer_config {
            settings.read_tokenizer_config(&parse_object("tokenizer_config.json", bytes)?)?;
        }
        if let Some(bytes) = generation_config {
            settings.read_generation_config(&parse_object("generation_config.json", bytes)?)?;
        }
        Ok(settings)
    }

    fn read_tokenizer_config(&mut self, map: &Map<String, Value>) -> Result<()> {
        let file_name = "tokenizer_config.json";
        for field in SPECIAL_TOKEN_FIELDS {
            let text = match map.get(field) {
                None | Some(Value::Null) => continue,
                Some(Value::String(text)) => text,
                // An added token written with its options.
                Some(Value::Object(token)) => match token.get("content") {
                    Some(Value::String(text)) => text,
                    _ => {
                        return Err(invalid(
                            file_name,
                            field,
                            "an object",
                            "a string or an object with content",
                        ));
                    }
                },
                Some(_) => {
                    return Err(invalid(
                        file_name,
                        field,
                        "not a token",
                        "a string or an object with content",
                    ));
                }
            };
            self.special_tokens.insert(field, text.clone());
        }
        self.adds_bos_token = match map.get("add_bos_token") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(adds_bos_token)) => *adds_bos_token,
            Some(_) => return Err(invalid(file_name, "add_bos_token", "not a flag", "true or false")),
        };
        self.chat_template = match map.get("chat_template") {
            None | Some(Value::Null) => None,
            Some(Value::String(source)) => Some(source.clone()),
            Some(Value::Array(templates)) => templates
                .iter()
                .find(|template| template.get("name").and_then(Value::as_str) == Some("default"))
                .and_then(|template| template.get("template").and_then(Value::as_str))
                .map(ToOwned::to_owned),
            Some(_) => {
                let allowed = "a string or a list of named templates";
                return Err(invalid(file_name, "chat_template", "not a template", allowed));
            }
        };
        Ok(())
    }

    fn read_generation_config(&mut self, map: &Map<String, Value>) -> Result<()> {
        let file_name = "generation_config.json";
        let token_id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let eos_token_ids = match map.get("eos_token_id") {
            None | Some(Value::Null) => Some(Vec::new()),
            Some(Value::Array(ids)) => ids.iter().map(token_id).collect(),
            Some(id) => token_id(id).map(|id| vec![id]),
        };
        let allowed = "a token id, a list of token ids, or null";
        self.eos_token_ids =
            eos_token_ids.ok_or_else(|| invalid(file_name, "eos_token_id", "something else", allowed))?;
        self.bos_token_id = map.get("bos_token_id").and_then(token_id);
        Ok(())
    }
}

fn parse_object(file_name: &str, bytes: &[u8]) -> Result<Map<String, Value>> {
    serde_json::from_slice(bytes)
        .map_err(|error| TokensError::InvalidTokenizer(format!("{file_name} is not a JSON object: {error}")))
}

fn invalid(file_name: &str, field: &str, found: &str, allowed: &str) -> TokensError {
    TokensError::InvalidTokenizer(format!("{file_name}: `{field}` is {found}; allowed: {allowed}"))
}
