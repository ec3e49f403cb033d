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
use std::sync::atomic::{AtomicBool, Ordering};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Value};
use minijinja::{Environment, Error, ErrorKind};
use minijinja_contrib::pycompat;

use super::date::CalendarDate;
use super::json::Json;
use crate::error::{Result, TokensError};

/// Instructions one rendering may take; a message takes some hundred.
const FUEL: u64 = 10_000_000;

/// Nesting of blocks and macros in one rendering.
const RECURSION_LIMIT: usize = 200;

/// Longest rendered conversation, in bytes.
const MAX_RENDERED_BYTES: usize = 64 << 20;

const TEMPLATE_NAME: &str = "chat_template";

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatMessage {
    /// The role of its author: `system`, `user` or `assistant`, and what else the template knows.
    pub role: String,
    /// What is said; none in a message that only calls tools. Of several parts all of them, in lines.
    pub content: Option<String>,
    /// The parts of the content, for templates that go through them; empty if it is one text.
    pub parts: Vec<String>,
    /// What else the message has, such as `tool_calls`, for templates that look at it.
    pub fields: Vec<(String, Json)>,
}

/// How a conversation is rendered.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatOptions {
    /// Whether the text ends with the start of the assistant's answer. Default: true.
    pub add_generation_prompt: bool,
    /// Whether the text ends with the content of the last message, for the model to go on with it; not
    /// together with `add_generation_prompt`. Default: false.
    pub continue_final_message: bool,
    /// Descriptions of the tools that the model may call. Default: none.
    pub tools: Option<Json>,
    /// Variables for the template beside those it always has, which win. Default: none.
    pub template_variables: Vec<(String, Json)>,
    /// What `strftime_now` gives; without it that function is not defined, and templates that
    /// look for it take a date of their own. Default: none.
    pub today: Option<CalendarDate>,
}

/// A compiled chat template.
#[derive(Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    /// Whether it goes through the parts of a content.
    takes_parts: bool,
}

/// Marks an error as the template's own refusal of a conversation.
#[derive(Debug)]
struct RaisedByTemplate;

/// A message as templates see it, with its keys in the order of the original.
#[derive(Debug)]
struct MessageObject {
    message: ChatMessage,
    takes_parts: bool,
}

/// Parts of a content that record whether a template went through them.
#[derive(Debug)]
struct ObservedParts {
    parts: Value,
    was_visited: Arc<AtomicBool>,
}

/// Collects the output up to a limit.
struct BoundedOutput<'a> {
    bytes: &'a mut Vec<u8>,
}

// === impl ChatMessage ===

impl ChatMessage {
    /// A message of `role` that says `content`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(content.into()), parts: Vec::new(), fields: Vec::new() }
    }

    /// A message of `role` that says `parts`, one after the other.
    ///
    /// A template that goes through the parts of a content gets them as they are; any other gets one text with a line
    /// for each, as in vLLM.
    pub fn from_parts(role: impl Into<String>, parts: Vec<String>) -> Self {
        Self { role: role.into(), content: Some(parts.join("\n")), parts, fields: Vec::new() }
    }

    /// A message as an API has it: an object with a `role` and a `content` of text or of parts with text; see
    /// [`Self::from_parts`].
    ///
    /// # Errors
    /// [`TokensError::InvalidRequest`] for anything else, also for parts that are not text.
    pub fn from_json(message: Json) -> Result<Self> {
        let refuse = |value: String, allowed: &str| Err(TokensError::request("messages", value, allowed));
        let Json::Object(entries) = message else {
            return refuse("a list with something that is not an object".to_owned(), "objects");
        };
        let (mut role, mut content, mut parts, mut fields) = (None, None, Vec::new(), Vec::new());
        for (name, value) in entries {
            match (name.as_str(), value) {
                ("role", Json::Text(text)) => role = Some(text),
                ("content", Json::Text(text)) => content = Some(text),
                ("content", Json::Null) => {}
                ("content", Json::List(list)) => {
                    parts = texts_of(&list)?;
                    content = Some(parts.join("\n"));
                }
                ("role" | "content", _) => {
                    return refuse(
                        format!("a message with an unusable `{name}`"),
                        "text, or parts with text",
                    );
                }
                (_, value) => fields.push((name, value)),
            }
        }
        match role {
            Some(role) => Ok(Self { role, content, parts, fields }),
            None => refuse("a message without a role".to_owned(), "messages with `role` and `content`"),
        }
    }
}

fn texts_of(parts: &[Json]) -> Result<Vec<String>> {
    let mut texts = Vec::with_capacity(parts.len());
    for part in parts {
        match (part.get("type"), part.get("text")) {
            (Some(Json::Text(kind)), Some(Json::Text(text))) if kind == "text" => texts.push(text.clone()),
            (Some(Json::Text(kind)), _) => {
                let value = format!("a message with a part of type `{kind}`");
                return Err(TokensError::request("messages", value, "parts of type `text`"));
            }
            _ => {
                let value = "a message with a part without a type";
                return Err(TokensError::request("messages", value, "parts of type `text`"));
            }
        }
    }
    Ok(texts)
}

/// Parts as templates see them.
fn parts_value(parts: &[String]) -> Value {
    let part = |text: &String| {
        let fields = [("type", "text"), ("text", text.as_str())];
        Json::Object(fields.map(|(name, text)| (name.to_owned(), Json::Text(text.to_owned()))).into())
            .to_template()
    };
    parts.iter().map(part).collect()
}

// === impl ChatOptions ===

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            continue_final_message: false,
            tools: None,
            template_variables: Vec::new(),
            today: None,
        }
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
        let mut template = Self { environment, takes_parts: false };
        template.takes_parts = template.visits_parts();
        Ok(template)
    }

    /// Whether a message's content is gone through where it is a list. A template that fails on one before does not.
    fn visits_parts(&self) -> bool {
        let was_visited = Arc::new(AtomicBool::new(false));
        let parts = parts_value(&["text".to_owned()]);
        let content = Value::from_object(ObservedParts { parts, was_visited: Arc::clone(&was_visited) });
        let message = Value::from(BTreeMap::from([("role", Value::from("user")), ("content", content)]));
        let mut bytes = Vec::new();
        // What it writes, and whether it can, does not matter here.
        let _ = self.write([message].into_iter().collect(), &ChatOptions::default(), &mut bytes);
        was_visited.load(Ordering::Relaxed)
    }

    pub(super) fn render(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<String> {
        let continued =
            if options.continue_final_message { Some(continued(messages, options)?) } else { None };
        let takes_parts = self.takes_parts;
        let messages = messages
            .iter()
            .map(|message| Value::from_object(MessageObject { message: message.clone(), takes_parts }))
            .collect();
        let mut bytes = Vec::new();
        self.write(messages, options, &mut bytes).map_err(|error| render_error(&error))?;
        let mut text = String::from_utf8(bytes).map_err(|_| {
            TokensError::InvalidTokenizer("the chat template gives text that is not UTF-8".to_owned())
        })?;
        if let Some(content) = continued {
            let n_bytes = end_of_content(&text, content).ok_or_else(|| {
                let value = "true, and the chat template does not write the last message as it is";
                TokensError::request("continue_final_message", value, "false")
            })?;
            text.truncate(n_bytes);
        }
        Ok(text)
    }

    fn write(
        &self,
        messages: Value,
        options: &ChatOptions,
        bytes: &mut Vec<u8>,
    ) -> std::result::Result<(), Error> {
        let mut context: BTreeMap<&str, Value> = options
            .template_variables
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_template()))
            .collect();
        context.extend([
            ("messages", messages),
            ("add_generation_prompt", Value::from(options.add_generation_prompt)),
            // Templates test these against none, which an undefined variable is not.
            ("tools", options.tools.as_ref().map_or(Value::from(()), Json::to_template)),
            ("documents", Value::from(())),
        ]);
        if let Some(today) = options.today {
            let format_today = move |format: &str| {
                today.format(format).map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
            };
            context.insert("strftime_now", Value::from_function(format_today));
        }
        let template = self.environment.get_template(TEMPLATE_NAME)?;
        template.render_captured_to(context, BoundedOutput { bytes }).map(|_| ())
    }
}

/// What the model is to go on with.
fn continued<'a>(messages: &'a [ChatMessage], options: &ChatOptions) -> Result<&'a str> {
    if options.add_generation_prompt {
        let value = "true together with `add_generation_prompt`";
        return Err(TokensError::request("continue_final_message", value, "one of the two"));
    }
    messages.last().and_then(|message| message.content.as_deref()).ok_or_else(|| {
        let value = "true without a last message that says something";
        TokensError::request("continue_final_message", value, "false")
    })
}

/// Where the last message ends in the text: after its content, with the white space behind it if the template
/// left that.
fn end_of_content(text: &str, content: &str) -> Option<usize> {
    let start = text.rfind(content.trim())?;
    let with_space = content.trim_start();
    let n_bytes = if text[start..].starts_with(with_space) { with_space.len() } else { content.trim().len() };
    Some(start + n_bytes)
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
        let message = &self.message;
        match key.as_str()? {
            "role" => Some(Value::from(message.role.as_str())),
            "content" if self.takes_parts && !message.parts.is_empty() => Some(parts_value(&message.parts)),
            "content" => Some(message.content.as_deref().map_or(Value::from(()), Value::from)),
            name => {
                message.fields.iter().find(|(field, _)| field == name).map(|(_, value)| value.to_template())
            }
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let others = self.message.fields.iter().map(|(name, _)| Value::from(name.as_str()));
        Enumerator::Values(["role", "content"].map(Value::from).into_iter().chain(others).collect())
    }
}

// === impl ObservedParts ===

impl Object for ObservedParts {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.parts.get_item(key).ok()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        // Relaxed: read by the thread that renders, when it has rendered.
        self.was_visited.store(true, Ordering::Relaxed);
        Enumerator::Seq(self.parts.len().unwrap_or(0))
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Writing them out is not going through them.
        f.write_str("text")
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

fn render_error(error: &Error) -> TokensError {
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(current) = cause {
        if current.is::<RaisedByTemplate>() {
            let refusal = format!("refused by the chat template: {}", error.detail().unwrap_or_default());
            return TokensError::request("messages", refusal, "a conversation that the chat template takes");
        }
        cause = current.source();
    }
    TokensError::InvalidTokenizer(format!("the chat template failed: {error}"))
}
