//! Chat templates: Jinja as Hugging Face runs it, bounded.
//!
//! A template comes with the model and a conversation comes from anyone. Work is bounded by
//! fuel, depth by a recursion limit and the output by a size; a template reads no file, no
//! clock and no environment.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Enumerator, Kwargs, Object, Value};
use minijinja::{Environment, Error, ErrorKind};
use minijinja_contrib::pycompat;

use super::date::CalendarDate;
use crate::error::{ModelError, Result};

/// Instructions one rendering may take; a message takes some hundred.
const FUEL: u64 = 10_000_000;

/// Nesting of blocks and macros in one rendering.
const RECURSION_LIMIT: usize = 200;

/// Longest rendered conversation, in bytes.
const MAX_RENDERED_BYTES: usize = 64 << 20;

const TEMPLATE_NAME: &str = "chat_template";

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatMessage {
    /// Who speaks: `system`, `user` or `assistant`, and what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// How a conversation is rendered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatOptions {
    /// Whether the text ends with the start of the assistant's answer. Default: true.
    pub add_generation_prompt: bool,
    /// What `strftime_now` gives; without it that function is not defined, and templates that
    /// look for it take a date of their own. Default: none.
    pub today: Option<CalendarDate>,
}

/// A compiled chat template.
#[derive(Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
}

/// Marks an error as the template's own refusal of a conversation.
#[derive(Debug)]
struct RaisedByTemplate;

/// A message as templates see it, with its keys in the order of the original.
#[derive(Debug)]
struct MessageObject(ChatMessage);

/// Collects the output up to a limit.
struct BoundedOutput<'a> {
    bytes: &'a mut Vec<u8>,
}

// === impl ChatMessage ===

impl ChatMessage {
    /// A message of `role` that says `content`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

// === impl ChatOptions ===

impl Default for ChatOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, today: None }
    }
}

// === impl ChatTemplate ===

impl ChatTemplate {
    /// Compiles a template; `special_tokens` become its global variables.
    pub(super) fn compile(
        source: String,
        special_tokens: &BTreeMap<&'static str, String>,
    ) -> std::result::Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION_LIMIT);
        environment.set_unknown_method_callback(pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        for (name, text) in special_tokens {
            environment.add_global(*name, Value::from(text.as_str()));
        }
        environment.add_template_owned(TEMPLATE_NAME, source)?;
        Ok(Self { environment })
    }

    pub(super) fn render(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<String> {
        let messages: Value =
            messages.iter().map(|message| Value::from_object(MessageObject(message.clone()))).collect();
        let mut context = BTreeMap::from([
            ("messages", messages),
            ("add_generation_prompt", Value::from(options.add_generation_prompt)),
            // Templates test these against none, which an undefined variable is not.
            ("tools", Value::from(())),
            ("documents", Value::from(())),
        ]);
        if let Some(today) = options.today {
            let format_today = move |format: &str| {
                today.format(format).map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
            };
            context.insert("strftime_now", Value::from_function(format_today));
        }
        let mut bytes = Vec::new();
        self.environment
            .get_template(TEMPLATE_NAME)
            .and_then(|template| template.render_captured_to(context, BoundedOutput { bytes: &mut bytes }))
            .map_err(|error| render_error(&error))?;
        String::from_utf8(bytes).map_err(|_| {
            ModelError::InvalidTokenizer("the chat template gives text that is not UTF-8".to_owned())
        })
    }
}

// === impl RaisedByTemplate ===

impl fmt::Display for RaisedByTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("raised by the template")
    }
}

impl StdError for RaisedByTemplate {}

// === impl MessageObject ===

impl Object for MessageObject {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_str()? {
            "role" => Some(Value::from(self.0.role.as_str())),
            "content" => Some(Value::from(self.0.content.as_str())),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Str(&["role", "content"])
    }
}

// === impl BoundedOutput ===

impl io::Write for BoundedOutput<'_> {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + part.len() > MAX_RENDERED_BYTES {
            return Err(io::Error::other(format!("more than {MAX_RENDERED_BYTES} bytes of text")));
        }
        self.bytes.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn raise_exception(message: &str) -> std::result::Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()).with_source(RaisedByTemplate))
}

/// `tojson` without escapes for HTML: the text goes to a model, not to a browser.
fn to_json(value: &Value, indent: Option<Value>, arguments: Kwargs) -> std::result::Result<Value, Error> {
    // Taken so that they count as known. Output is never escaped to ASCII and separators are
    // those of Python; templates that pass these arguments ask for just that.
    for name in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = arguments.get(name)?;
    }
    let json = minijinja::filters::tojson(value, indent, arguments)?;
    Ok(Value::from(without_html_escapes(json.as_str().unwrap_or_default())))
}

fn without_html_escapes(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    let mut rest = json;
    while let Some(backslash) = rest.find('\\') {
        text.push_str(&rest[..backslash]);
        rest = &rest[backslash..];
        let character = match rest.get(..6) {
            Some("\\u003c") => Some('<'),
            Some("\\u003e") => Some('>'),
            Some("\\u0026") => Some('&'),
            Some("\\u0027") => Some('\''),
            _ => None,
        };
        // Another escape is copied with the character it escapes, which may be a backslash.
        let n_bytes = if let Some(character) = character {
            text.push(character);
            6
        } else {
            let n_bytes = rest.chars().take(2).map(char::len_utf8).sum();
            text.push_str(&rest[..n_bytes]);
            n_bytes
        };
        rest = &rest[n_bytes..];
    }
    text.push_str(rest);
    text
}

fn render_error(error: &Error) -> ModelError {
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(current) = cause {
        if current.is::<RaisedByTemplate>() {
            let refusal = format!("refused by the chat template: {}", error.detail().unwrap_or_default());
            return ModelError::request("messages", refusal, "a conversation that the chat template takes");
        }
        cause = current.source();
    }
    ModelError::InvalidTokenizer(format!("the chat template failed: {error}"))
}
