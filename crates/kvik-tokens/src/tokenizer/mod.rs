//! Text to tokens and back, as Hugging Face does it for the same files.
//!
//! [`Tokenizer`] encodes, decodes and renders conversations; [`TextStream`] turns tokens into
//! text as they come and cuts the text at stop strings.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

use kvik_types::TokenId;
use tokenizers::{Encoding, Model, Token};
use xxhash_rust::xxh3::xxh3_64;

use crate::cut::CutRule;
use crate::error::{Result, TokensError};

mod chat;
mod date;
mod detokenize;
mod json;
mod settings;
mod stop;
mod stream;
#[cfg(test)]
mod tests;

pub use chat::{ChatMessage, ChatOptions};
pub use date::CalendarDate;
pub use json::Json;
pub use stop::StopMatch;
pub use stream::{StreamDelta, TextStream, TextStreamOptions};

use chat::ChatTemplate;
use detokenize::Joining;
use settings::Settings;

/// Whether encoding adds the special tokens that a text of the model starts or ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddSpecial {
    /// For a text that is a prompt as a whole.
    Yes,
    /// For a rendered conversation, which has them already, and for parts of a prompt.
    No,
}

/// The tokenizer of a model, with its chat template and its end tokens.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    joining: Joining,
    /// A template that does not compile is kept as its error: the model can still complete text.
    chat_template: Option<std::result::Result<ChatTemplate, String>>,
    eos_token_ids: Vec<u32>,
    bos_token_id: Option<u32>,
    /// The token to put before a text because the post-processor does not.
    leading_token: Option<u32>,
    key: TokenizerKey,
    /// Found when it is asked for: an engine that owns its tokenizer has no use for it.
    incremental: OnceLock<Option<Incremental>>,
}

/// What the tokens of a text depend on; two tokenizers with the same key give the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenizerKey(pub u64);

/// How the tokens of a text are put together from those of its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Incremental {
    /// Where texts can be cut.
    pub cut_rule: CutRule,
    /// Special tokens before the tokens of a whole text.
    pub leading: Vec<TokenId>,
    /// Special tokens after them.
    pub trailing: Vec<TokenId>,
}

impl Tokenizer {
    /// Opens the tokenizer of a model folder.
    ///
    /// `tokenizer.json` must be there; `tokenizer_config.json`, `chat_template.jinja` and
    /// `generation_config.json` may be missing.
    pub fn open(folder: &Path) -> Result<Self> {
        let tokenizer_json = read_optional(folder, "tokenizer.json")?.ok_or_else(|| {
            TokensError::MissingFile { folder: folder.to_owned(), what: "tokenizer.json".to_owned() }
        })?;
        let tokenizer_config = read_optional(folder, "tokenizer_config.json")?;
        let generation_config = read_optional(folder, "generation_config.json")?;
        let chat_template =
            match read_optional(folder, "chat_template.jinja")? {
                None => None,
                Some(bytes) => Some(String::from_utf8(bytes).map_err(|_| {
                    TokensError::InvalidTokenizer("chat_template.jinja is not UTF-8".to_owned())
                })?),
            };
        Self::from_parts(
            &tokenizer_json,
            tokenizer_config.as_deref(),
            chat_template.as_deref(),
            generation_config.as_deref(),
        )
    }

    /// Builds the tokenizer from the contents of its files.
    ///
    /// `chat_template_jinja` wins over the template inside `tokenizer_config_json`.
    pub fn from_parts(
        tokenizer_json: &[u8],
        tokenizer_config_json: Option<&[u8]>,
        chat_template_jinja: Option<&str>,
        generation_config_json: Option<&[u8]>,
    ) -> Result<Self> {
        let mut inner = tokenizers::Tokenizer::from_bytes(tokenizer_json)
            .map_err(|error| TokensError::InvalidTokenizer(format!("tokenizer.json: {error}")))?;
        // Both are left over from training; a prompt is neither cut nor filled up.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| TokensError::InvalidTokenizer(error.to_string()))?;

        let settings = Settings::read(tokenizer_config_json, generation_config_json)?;
        let special_id = |field: &str| {
            let text = settings.special_tokens.get(field)?;
            inner.token_to_id(text)
        };
        let bos_token_id = special_id("bos_token").or(settings.bos_token_id);
        let mut eos_token_ids: Vec<u32> = special_id("eos_token").into_iter().collect();
        for id in &settings.eos_token_ids {
            if !eos_token_ids.contains(id) {
                eos_token_ids.push(*id);
            }
        }
        let chat_template =
            chat_template_jinja.map(ToOwned::to_owned).or(settings.chat_template).map(|source| {
                ChatTemplate::compile(source, &settings.special_tokens).map_err(|error| error.to_string())
            });
        let mut tokenizer = Self {
            joining: Joining::of(inner.get_decoder()),
            inner,
            chat_template,
            eos_token_ids,
            bos_token_id,
            leading_token: None,
            key: TokenizerKey(xxh3_64(tokenizer_json)),
            incremental: OnceLock::new(),
        };
        if settings.adds_bos_token {
            // What the post-processor adds shows in the encoding of nothing.
            let is_added = tokenizer.encode("", AddSpecial::Yes)?.first().copied() == bos_token_id;
            tokenizer.leading_token = bos_token_id.filter(|_| !is_added);
        }
        Ok(tokenizer)
    }

    /// Returns the tokens of a text; special tokens written in the text count as such.
    pub fn encode(&self, text: &str, add_special: AddSpecial) -> Result<Vec<u32>> {
        let adds_special = add_special == AddSpecial::Yes;
        let encoding = self
            .inner
            .encode_fast(text, adds_special)
            .map_err(|error| TokensError::InvalidTokenizer(format!("encode: {error}")))?;
        let leading_token = self.leading_token.filter(|_| adds_special);
        Ok(leading_token.into_iter().chain(encoding.get_ids().iter().copied()).collect())
    }

    /// Returns what the tokens of a text depend on, special ones around it aside.
    pub fn key(&self) -> TokenizerKey {
        self.key
    }

    /// Returns how texts can be tokenized part by part, or `None` if that is not known to give the same
    /// tokens.
    pub fn incremental(&self) -> Option<&Incremental> {
        self.incremental.get_or_init(|| self.find_incremental()).as_ref()
    }

    fn find_incremental(&self) -> Option<Incremental> {
        // Post-processors put fixed tokens around a text, whatever it is; these show around any token.
        let probe = || Encoding::from_tokens(vec![Token::new(u32::MAX, String::new(), (0, 0))], 0);
        let plain = self.inner.post_process(probe(), None, false).ok()?;
        if plain.get_ids() != [u32::MAX] {
            return None;
        }
        let framed = self.inner.post_process(probe(), None, true).ok()?;
        let mut around = framed.get_ids().split(|id| *id == u32::MAX);
        let (before, after) = (around.next()?, around.next()?);
        if around.next().is_some() {
            return None;
        }
        Some(Incremental {
            cut_rule: CutRule::of(&self.inner)?,
            leading: self.leading_token.into_iter().chain(before.iter().copied()).collect(),
            trailing: after.to_vec(),
        })
    }

    /// Returns the text of tokens; ids outside of the vocabulary give none.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner
            .decode(ids, skip_special)
            .map_err(|error| TokensError::InvalidTokenizer(format!("decode: {error}")))
    }

    /// Returns a token as the vocabulary writes it, or `None` for an id that it does not have.
    pub fn token_text(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns the number of tokens, added ones included.
    ///
    /// The model's embedding may have more rows than this.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Returns the tokens that end a sequence, from `tokenizer_config.json` and `generation_config.json`.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    /// Returns the token that starts a sequence, if the model has one.
    pub fn bos_token_id(&self) -> Option<u32> {
        self.bos_token_id
    }

    /// Whether the model came with a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.chat_template.is_some()
    }

    /// Returns the text of a conversation, to be encoded with [`AddSpecial::No`].
    pub fn render_chat(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<String> {
        match &self.chat_template {
            Some(Ok(template)) => template.render(messages, options),
            Some(Err(reason)) => {
                Err(TokensError::InvalidTokenizer(format!("the chat template does not compile: {reason}")))
            }
            None => {
                let allowed = "a plain prompt, because the model has no chat template";
                Err(TokensError::request("messages", "a conversation", allowed))
            }
        }
    }

    /// How the decoder joins tokens.
    fn joining(&self) -> Joining {
        self.joining
    }

    /// A token as the decoder receives it, or `None` where decoding leaves it out.
    fn piece(&self, id: u32, skip_special: bool) -> Option<String> {
        let added_vocabulary = self.inner.get_added_vocabulary();
        added_vocabulary
            .simple_id_to_token(id)
            .or_else(|| self.inner.get_model().id_to_token(id))
            .filter(|piece| !skip_special || !added_vocabulary.is_special_token(piece))
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("joining", &self.joining)
            .field("has_chat_template", &self.has_chat_template())
            .field("eos_token_ids", &self.eos_token_ids)
            .field("bos_token_id", &self.bos_token_id)
            .finish_non_exhaustive()
    }
}

fn read_optional(folder: &Path, file_name: &str) -> Result<Option<Vec<u8>>> {
    let path = folder.join(file_name);
    match fs::read(&path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TokensError::Io { path, source }),
    }
}
