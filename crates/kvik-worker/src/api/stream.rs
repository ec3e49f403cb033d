//! Answers that are streams, and those that wait for the end.

use std::convert::Infallible;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use http::header::CACHE_CONTROL;
use http::{HeaderValue, StatusCode};
use kvik_proto::journal::JOURNAL;
use kvik_proto::openai;
use kvik_proto::sse;
use serde::Serialize;

use super::journal::JournalWriter;
use super::outcome::Outcome;
use super::typed;
use crate::events::{Event, Usage};
use crate::generation::Generation;
use crate::plan::Plan;
use crate::running::{End, RunningGuard};

/// Size from which a frame is sent although more events wait.
const FRAME_BYTES: usize = 16 << 10;

/// Turns events into the events of a stream.
pub(super) trait Renderer: Send + 'static {
    /// Appends what `event` of the prompt `part_idx` means.
    fn render(&mut self, part_idx: usize, event: Event, out: &mut Vec<u8>);

    /// Passes over tokens that were sent from elsewhere.
    fn skip(&mut self, part_idx: usize, choice: u32, tokens: &[u32]);

    /// Passes over the end of an output that was sent from elsewhere.
    fn skip_end(&mut self, choice: u32, usage: Usage);

    /// Appends what follows the last output.
    fn end(&mut self, out: &mut Vec<u8>);
}

struct Stream<R> {
    generation: Generation,
    renderer: R,
    journal: Option<JournalWriter>,
    running: RunningGuard,
    is_ended: bool,
}

/// Answers with server-sent events. The client's end, of the answer or of the connection, ends the
/// request in the engine.
pub(super) fn respond<R: Renderer>(
    generation: Generation,
    renderer: R,
    journal: Option<JournalWriter>,
    running: RunningGuard,
) -> Response {
    let is_journaled = journal.is_some();
    let stream = Stream { generation, renderer, journal, running, is_ended: false };
    let frames = stream::unfold(stream, |mut stream| async move {
        let frame = stream.next_frame().await?;
        Some((Ok::<Bytes, Infallible>(frame), stream))
    });
    let mut response = typed(StatusCode::OK, "text/event-stream", Body::from_stream(frames));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if is_journaled {
        response.headers_mut().insert(JOURNAL, HeaderValue::from_static("1"));
    }
    response
}

/// Appends a value as an event.
pub(super) fn push_json(value: &impl Serialize, out: &mut Vec<u8>) {
    // Written by this crate; if it could not be, leaving it out is all that is left to do.
    if let Ok(text) = serde_json::to_string(value) {
        sse::encode(&text, out);
    }
}

/// The tokens used by all outputs; a prompt counts once.
pub(super) fn total_usage(plan: &Plan, outcomes: &[Vec<Outcome>]) -> openai::Usage {
    let mut total = no_usage(plan);
    for outcome in outcomes {
        for (choice, outcome) in outcome.iter().enumerate() {
            add_usage(&mut total, choice as u32, outcome.usage);
        }
    }
    total
}

/// The usage of an answer that has not begun.
pub(super) fn no_usage(plan: &Plan) -> openai::Usage {
    let mut usage = openai::Usage::default();
    usage.prompt_tokens_details.blend = plan.blend.as_ref().map(|blend| blend.selectors.to_string());
    usage
}

pub(super) fn add_usage(total: &mut openai::Usage, choice: u32, usage: Usage) {
    if choice == 0 {
        total.add(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens);
        let details = &mut total.prompt_tokens_details;
        details.cached_tokens_by_tier.add(usage.tiers);
        details.blended_tokens += usage.blend.blended_tokens;
        details.recomputed_tokens += usage.blend.recomputed_tokens;
    } else {
        total.add(0, 0, usage.completion_tokens);
    }
}

impl<R: Renderer> Stream<R> {
    /// The next bytes: all events that are there, at least one, and the line of the journal that covers them.
    async fn next_frame(&mut self) -> Option<Bytes> {
        let mut out = Vec::new();
        if let Some(journal) = &mut self.journal {
            journal.begin(&mut out);
        }
        while out.is_empty() && !self.is_ended {
            let tells_of_drain = self.journal.as_ref().is_some_and(|journal| !journal.has_told_of_drain());
            let event = tokio::select! {
                biased;
                event = self.generation.next() => event,
                () = self.running.should_leave(), if tells_of_drain => {
                    if let Some(journal) = &mut self.journal {
                        journal.drain(&mut out);
                    }
                    break;
                }
            };
            let mut is_last = self.take(event, &mut out);
            // No line ends between the last token of an output and its end: an answer that went on from there would have a
            // token too many.
            while !self.is_ended && (is_last || out.len() < FRAME_BYTES) {
                let event = match self.generation.try_next() {
                    None if is_last => self.generation.next().await,
                    None => break,
                    event => event,
                };
                is_last = self.take(event, &mut out);
            }
            if let Some(journal) = &mut self.journal {
                journal.cover(&mut out);
            }
        }
        (!out.is_empty()).then(|| Bytes::from(out))
    }

    /// Appends what an event means; whether it is a token that the end of its output follows.
    fn take(&mut self, event: Option<(usize, Event)>, out: &mut Vec<u8>) -> bool {
        let Some((part_idx, event)) = event else {
            self.is_ended = true;
            self.running.note_end(End::Finished);
            self.renderer.end(out);
            return false;
        };
        let is_last = matches!(&event, Event::Token(token) if token.is_last);
        match &event {
            Event::Token(_) => self.running.note_token(),
            Event::Failed(_) | Event::Rejected(_) => self.is_ended = true,
            Event::Frozen(_) => self.running.note_end(End::Migrated),
            Event::Stopped(cause) => {
                self.is_ended = true;
                self.running.note_end(End::Stopped);
                // A gateway with a journal goes on elsewhere: a stream that ends without a mark tells it to.
                if self.journal.is_none() {
                    self.renderer.render(part_idx, Event::Failed(cause.message().to_owned()), out);
                }
                return false;
            }
            _ => {}
        }
        if let Some(journal) = &mut self.journal {
            journal.note(part_idx, &event, out);
        }
        self.renderer.render(part_idx, event, out);
        is_last
    }
}

/// The last event of a stream of the OpenAI API that cannot go on.
pub(super) fn push_error(message: &str, out: &mut Vec<u8>) {
    push_json(&openai::ErrorBody::server(message), out);
}
