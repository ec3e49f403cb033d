//! `/generate` on engines that only have the `OpenAI` API.
//!
//! kvik's own workers take the request as it is. For another engine it becomes a streamed
//! completion, or a chat completion if it has messages, and the chunks become events: `token` for
//! each piece of text, with the token's number where the engine tells it and `null` where it does
//! not, one `finished` for each output, and `[DONE]`.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame};
use kvik_proto::sse::{SseDecoder, encode};
use kvik_proto::worker::GenerateRequest;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::events::{Dialect, failure_event};
use crate::error::Refusal;
use crate::route::Route;

/// A stream of chunks, translated into events.
#[derive(Debug)]
pub(crate) struct TranslatedBody<B> {
    inner: B,
    decoder: SseDecoder,
    translator: Translator,
    is_ended: bool,
}

/// Turns chunks into events.
#[derive(Debug, Default)]
struct Translator {
    /// By choice: why it finished, and its tokens. Sent at the end, when the usage is known.
    finished: BTreeMap<u32, (Option<String>, u64)>,
    prompt_tokens: u64,
    cached_tokens: u64,
    has_failed: bool,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<ChunkChoice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct ChunkChoice {
    #[serde(default)]
    index: u32,
    text: Option<String>,
    delta: Option<Delta>,
    finish_reason: Option<String>,
    token_ids: Option<Vec<u32>>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: u64,
    prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Deserialize)]
struct PromptTokensDetails {
    cached_tokens: Option<u64>,
}

/// Reads `max_tokens` out of the sampling parameters.
pub(crate) fn max_tokens(sampling: Option<&str>) -> Option<u64> {
    #[derive(Deserialize)]
    struct Limit {
        max_tokens: Option<u64>,
    }
    sampling.and_then(|text| serde_json::from_str::<Limit>(text).ok()).and_then(|limit| limit.max_tokens)
}

/// Turns a request of `/generate` into one of the `OpenAI` API.
pub(crate) fn translate_request(body: &[u8], model: &str) -> Result<(Route, Bytes), Refusal> {
    let request: GenerateRequest = serde_json::from_slice(body)
        .map_err(|error| Refusal::invalid(format!("the request cannot be read: {error}"), None))?;
    let sampling = request
        .sampling
        .merge()
        .map_err(|conflict| Refusal::invalid(conflict.to_string(), Some(conflict.field)))?;
    let mut fields = match serde_json::to_value(&sampling) {
        Ok(Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    };
    fields.retain(|_, value| !is_default(value));
    let input = request.input;
    if let Some(salt) = input.cache_salt {
        fields.insert("cache_salt".to_owned(), salt.into());
    }
    let route = match (input.prompt, input.token_ids, input.messages) {
        (Some(prompt), None, None) => {
            fields.insert("prompt".to_owned(), prompt.into());
            Route::Completions
        }
        (None, Some(token_ids), None) => {
            fields.insert("prompt".to_owned(), token_ids.into());
            Route::Completions
        }
        (None, None, Some(messages)) => {
            let messages =
                messages.into_iter().map(|message| json!({"role": message.role, "content": message.content}));
            fields.insert("messages".to_owned(), messages.collect());
            Route::Chat
        }
        _ => {
            let message = "exactly one of `prompt`, `token_ids` and `messages` must be given";
            return Err(Refusal::invalid(message, Some("prompt")));
        }
    };
    if route == Route::Chat
        && let Some(n_top) = fields.remove("logprobs")
    {
        fields.insert("logprobs".to_owned(), true.into());
        fields.insert("top_logprobs".to_owned(), n_top);
    }
    fields.insert("model".to_owned(), model.into());
    fields.insert("stream".to_owned(), true.into());
    fields.insert("stream_options".to_owned(), json!({"include_usage": true}));
    Ok((route, Bytes::from(Value::Object(fields).to_string())))
}

fn is_default(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        _ => false,
    }
}

// === impl TranslatedBody ===

impl<B> TranslatedBody<B> {
    pub(crate) fn new(inner: B) -> Self {
        Self { inner, decoder: SseDecoder::default(), translator: Translator::default(), is_ended: false }
    }
}

impl<B: Body<Data = Bytes, Error = io::Error> + Unpin> Body for TranslatedBody<B> {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = self.get_mut();
        if this.is_ended {
            return Poll::Ready(None);
        }
        loop {
            let mut out = Vec::new();
            match Pin::new(&mut this.inner).poll_frame(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error))),
                Poll::Ready(None) => {
                    this.is_ended = true;
                    this.translator.finish(&mut out);
                }
                Poll::Ready(Some(Ok(frame))) => {
                    let Ok(data) = frame.into_data() else { continue };
                    let translator = &mut this.translator;
                    let outcome = this.decoder.push(&data, |event| translator.translate(event, &mut out));
                    if outcome.is_err() {
                        this.is_ended = true;
                        let failure = failure_event(Dialect::Generate, "the engine's stream cannot be read");
                        out.extend_from_slice(&failure);
                    }
                }
            }
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(Bytes::from(out)))));
            }
            if this.is_ended {
                return Poll::Ready(None);
            }
        }
    }
}

// === impl Translator ===

impl Translator {
    fn translate(&mut self, event: &str, out: &mut Vec<u8>) {
        // What cannot be read is left out: engines add events of their own.
        let Ok(chunk) = serde_json::from_str::<Chunk>(event) else { return };
        if let Some(error) = chunk.error {
            self.has_failed = true;
            let message = error.get("message").and_then(Value::as_str).unwrap_or("the engine failed");
            out.extend_from_slice(&failure_event(Dialect::Generate, message));
            return;
        }
        for choice in chunk.choices {
            let text = choice.text.or(choice.delta.and_then(|delta| delta.content)).unwrap_or_default();
            let token_ids = choice.token_ids.unwrap_or_default();
            let finished = self.finished.entry(choice.index).or_default();
            // Several tokens can come at once; their text is that of the last one.
            let n_tokens = token_ids.len().max(usize::from(!text.is_empty()));
            for number in 0..n_tokens {
                let is_last = number + 1 == n_tokens;
                let event = json!({
                    "type": "token",
                    "choice": choice.index,
                    "token": token_ids.get(number),
                    "text": if is_last { text.as_str() } else { "" },
                });
                encode(&event.to_string(), out);
            }
            finished.1 += n_tokens as u64;
            if choice.finish_reason.is_some() {
                finished.0 = choice.finish_reason;
            }
        }
        if let Some(usage) = chunk.usage {
            self.prompt_tokens = usage.prompt_tokens;
            let details = usage.prompt_tokens_details;
            self.cached_tokens = details.and_then(|details| details.cached_tokens).unwrap_or(0);
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        if self.has_failed {
            return;
        }
        for (choice, (finish_reason, completion_tokens)) in std::mem::take(&mut self.finished) {
            let event = json!({
                "type": "finished",
                "choice": choice,
                "text": "",
                "finish_reason": finish_reason.unwrap_or_else(|| "stop".to_owned()),
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": completion_tokens,
            });
            encode(&event.to_string(), out);
        }
        encode("[DONE]", out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_becomes_a_completion_and_messages_a_chat() {
        let body = br#"{"prompt":"hi","sampling":{"max_tokens":3,"temperature":0.0}}"#;
        let (route, body) = translate_request(body, "m").unwrap();
        let value: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(route, Route::Completions);
        let expected = json!({
            "model": "m", "prompt": "hi", "max_tokens": 3, "temperature": 0.0,
            "stream": true, "stream_options": {"include_usage": true},
        });
        assert_eq!(value, expected);
        let beside = br#"{"prompt":"hi","max_tokens":3,"sampling":{"temperature":0.0}}"#;
        assert_eq!(translate_request(beside, "m").unwrap().1, body);
        let (route, _) = translate_request(br#"{"messages":[{"role":"user","content":"x"}]}"#, "m").unwrap();
        assert_eq!(route, Route::Chat);
        assert!(translate_request(br#"{"prompt":"a","token_ids":[1]}"#, "m").is_err());
        assert!(translate_request(b"{}", "m").is_err());
    }

    #[test]
    fn a_field_with_two_values_is_refused_with_its_name() {
        let body = br#"{"prompt":"hi","max_tokens":3,"sampling":{"max_tokens":4}}"#;
        let refusal = translate_request(body, "m").unwrap_err();
        assert_eq!(refusal.status, http::StatusCode::BAD_REQUEST);
        assert_eq!(refusal.body.error.param.as_deref(), Some("max_tokens"));
    }

    #[test]
    fn chunks_become_events() {
        let mut translator = Translator::default();
        let mut out = Vec::new();
        translator.translate(r#"{"choices":[{"index":0,"text":"a","token_ids":[7]}]}"#, &mut out);
        translator.translate(r#"{"choices":[{"index":0,"text":"b","finish_reason":"length"}]}"#, &mut out);
        translator.translate(r#"{"choices":[],"usage":{"prompt_tokens":5}}"#, &mut out);
        translator.translate("[DONE]", &mut out);
        translator.finish(&mut out);
        let mut events = Vec::new();
        SseDecoder::default().push(&out, |event| events.push(event.to_owned())).unwrap();
        assert_eq!(events.len(), 4);
        let token: Value = serde_json::from_str(&events[1]).unwrap();
        assert_eq!(token, json!({"type": "token", "choice": 0, "token": null, "text": "b"}));
        let finished: Value = serde_json::from_str(&events[2]).unwrap();
        assert_eq!(finished["finish_reason"], "length");
        assert_eq!((&finished["prompt_tokens"], &finished["completion_tokens"]), (&json!(5), &json!(2)));
        assert_eq!(events[3], "[DONE]");
    }

    #[test]
    fn an_error_ends_the_events() {
        let mut translator = Translator::default();
        let mut out = Vec::new();
        translator.translate(r#"{"error":{"message":"no"}}"#, &mut out);
        translator.finish(&mut out);
        assert_eq!(out, failure_event(Dialect::Generate, "no"));
    }
}
