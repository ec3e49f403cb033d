//! From the command line or standard input to the tokens of the prompt.

use std::io::{self, Read};

use anyhow::Context;
use kvik_model::{Model, ModelError};
use kvik_tokens::{AddSpecial, ChatMessage, ChatOptions, Tokenizer};
use kvik_types::TokenId;

use crate::cli::generate::GenerateArguments;

/// Longest text that is read from standard input, in bytes: ten million tokens would fit, and a
/// pipe that never ends does not fill the memory.
const MAX_STDIN_BYTES: u64 = 64 << 20;

/// What the model is asked to continue.
#[derive(Debug)]
pub(super) struct Prompt {
    text: String,
    /// Whether `text` is a user's message and not a text to continue.
    is_chat: bool,
    system: Option<String>,
}

impl Prompt {
    /// Takes the prompt from the arguments, or from standard input if they say so.
    pub(super) fn read(arguments: &GenerateArguments) -> anyhow::Result<Self> {
        let text = if arguments.prompt == "-" {
            read_stdin().context("read the prompt from standard input")?
        } else {
            utf8("prompt", arguments.prompt.as_encoded_bytes()).context("read the prompt")?
        };
        if text.is_empty() {
            let error = ModelError::request("prompt", "empty", "at least one character");
            return Err(error).context("read the prompt");
        }
        let system = arguments.system.as_ref();
        let system = system.map(|text| utf8("system", text.as_encoded_bytes()));
        Ok(Self { text, is_chat: arguments.chat, system: system.transpose().context("read the options")? })
    }

    /// The tokens that the engine gets.
    pub(super) fn encode(&self, model: &Model) -> anyhow::Result<Vec<TokenId>> {
        let tokenizer = model.tokenizer();
        if !self.is_chat {
            return encode(tokenizer, &self.text, AddSpecial::Yes);
        }
        if !tokenizer.has_chat_template() {
            let allowed = "a plain prompt, because the model has no chat template";
            return Err(ModelError::request("chat", "asked for", allowed)).context("render the conversation");
        }
        let system = self.system.as_ref();
        let messages: Vec<ChatMessage> = system
            .map(|text| ChatMessage::new("system", text))
            .into_iter()
            .chain([ChatMessage::new("user", &self.text)])
            .collect();
        let rendered = tokenizer
            .render_chat(&messages, &ChatOptions::default())
            .map_err(ModelError::from)
            .context("render the conversation")?;
        encode(tokenizer, &rendered, AddSpecial::No)
    }
}

fn encode(tokenizer: &Tokenizer, text: &str, add_special: AddSpecial) -> anyhow::Result<Vec<TokenId>> {
    tokenizer.encode(text, add_special).map_err(ModelError::from).context("encode the prompt")
}

/// Takes an option's bytes as text.
///
/// Done here and not by the argument parser, whose message does not name the option.
pub(super) fn utf8(option: &'static str, bytes: &[u8]) -> kvik_model::Result<String> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(error) => {
            let value = format!("not UTF-8 at byte {}", error.valid_up_to());
            Err(ModelError::request(option, value, "UTF-8 text"))
        }
    }
}

fn read_stdin() -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    io::stdin().lock().take(MAX_STDIN_BYTES + 1).read_to_end(&mut bytes)?;
    if MAX_STDIN_BYTES < bytes.len() as u64 {
        let allowed = format!("at most {MAX_STDIN_BYTES} bytes");
        return Err(ModelError::request("prompt", "longer", allowed).into());
    }
    let mut text = utf8("prompt", &bytes)?;
    // The line break that `echo` and editors append is not meant to be continued.
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}
