//! Answers that are streams, and those that wait for the end.

use std::convert::Infallible;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use http::header::CACHE_CONTROL;
use http::{HeaderValue, StatusCode};
use kvik_model::TokenLogprobs;
use kvik_proto::openai;
use kvik_proto::sse;
use serde::Serialize;

use super::typed;
use crate::error::Refusal;
use crate::events::{Event, Usage};
use crate::generation::Generation;

/// Size from which a frame is sent although more events wait.
const FRAME_BYTES: usize = 16 << 10;

/// Turns events into the events of a stream.
pub(super) trait Renderer: Send + 'static {
    /// Appends what `event` of the prompt `part_idx` means.
    fn render(&mut self, part_idx: usize, event: Event, out: &mut Vec<u8>);

    /// Appends what follows the last output.
    fn end(&mut self, out: &mut Vec<u8>);
}

/// An output that has ended.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
    pub(super) logprobs: Vec<TokenLogprobs>,
    pub(super) finish_reason: &'static str,
    pub(super) usage: Usage,
}

struct Stream<R> {
    generation: Generation,
    renderer: R,
    is_ended: bool,
}

/// Answers with server-sent events. The client's end, of the answer or of the connection, ends the
/// request in the engine.
pub(super) fn respond<R: Renderer>(generation: Generation, renderer: R) -> Response {
    let stream = Stream { generation, renderer, is_ended: false };
    let frames = stream::unfold(stream, |mut stream| async move {
        let frame = stream.next_frame().await?;
        Some((Ok::<Bytes, Infallible>(frame), stream))
    });
    let mut response = typed(StatusCode::OK, "text/event-stream", Body::from_stream(frames));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// Waits for all outputs: for each prompt, its choices.
pub(super) async fn collect(
    mut generation: Generation,
    n_prompts: usize,
    n_choices: usize,
) -> Result<Vec<Vec<Outcome>>, Refusal> {
    let mut outcomes: Vec<Vec<Outcome>> =
        (0..n_prompts).map(|_| (0..n_choices).map(|_| Outcome::default()).collect()).collect();
    while let Some((part_idx, event)) = generation.next().await {
        let Some(part) = outcomes.get_mut(part_idx) else { continue };
        match event {
            Event::Token(token) => {
                let Some(outcome) = part.get_mut(token.choice as usize) else { continue };
                outcome.text.push_str(&token.text);
                outcome.tokens.push(token.id);
                outcome.logprobs.extend(token.logprobs);
            }
            Event::Finished { choice, text, reason, usage } => {
                let Some(outcome) = part.get_mut(choice as usize) else { continue };
                outcome.text.push_str(&text);
                outcome.finish_reason = reason.as_str();
                outcome.usage = usage;
            }
            Event::Rejected(error) => return Err(error.into()),
            Event::Failed(message) => return Err(Refusal::failed(message)),
            Event::Accepted | Event::Admitted { .. } => {}
        }
    }
    Ok(outcomes)
}

/// Appends a value as an event.
pub(super) fn push_json(value: &impl Serialize, out: &mut Vec<u8>) {
    // Written by this crate; if it could not be, leaving it out is all that is left to do.
    if let Ok(text) = serde_json::to_string(value) {
        sse::encode(&text, out);
    }
}

/// The tokens used by all outputs; a prompt counts once.
pub(super) fn total_usage(outcomes: &[Vec<Outcome>]) -> openai::Usage {
    let mut total = openai::Usage::default();
    for outcome in outcomes {
        for (choice, outcome) in outcome.iter().enumerate() {
            add_usage(&mut total, choice as u32, outcome.usage);
        }
    }
    total
}

pub(super) fn add_usage(total: &mut openai::Usage, choice: u32, usage: Usage) {
    if choice == 0 {
        total.add(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens);
        total.prompt_tokens_details.cached_tokens_by_tier.add(usage.tiers);
    } else {
        total.add(0, 0, usage.completion_tokens);
    }
}

impl<R: Renderer> Stream<R> {
    /// The next bytes: all events that are there, at least one.
    async fn next_frame(&mut self) -> Option<Bytes> {
        let mut out = Vec::new();
        while out.is_empty() && !self.is_ended {
            let event = self.generation.next().await;
            self.take(event, &mut out);
            while out.len() < FRAME_BYTES
                && !self.is_ended
                && let Some(event) = self.generation.try_next()
            {
                self.take(Some(event), &mut out);
            }
        }
        (!out.is_empty()).then(|| Bytes::from(out))
    }

    fn take(&mut self, event: Option<(usize, Event)>, out: &mut Vec<u8>) {
        if let Some((part_idx, event)) = event {
            self.is_ended = matches!(event, Event::Failed(_) | Event::Rejected(_));
            self.renderer.render(part_idx, event, out);
        } else {
            self.is_ended = true;
            self.renderer.end(out);
        }
    }
}

/// The last event of a stream of the OpenAI API that cannot go on.
pub(super) fn push_error(message: &str, out: &mut Vec<u8>) {
    push_json(&openai::ErrorBody::server(message), out);
}
