//! What the legs of all protocols have in common: whom they ask, and what an answer means.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::{Response, StatusCode, header};
use http_body_util::BodyExt as _;
use kvik_index::placement::Request;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::config::{GatewayConfig, PdProtocol, Role, millis};
use crate::metrics::Metrics;
use crate::placement::input::Prompt;
use crate::placement::lookup::Lookup;
use crate::placement::under_way::UnderWayGuard;
use crate::placement::{Placed, Wanted, place_among};
use crate::state::Shared;
use crate::upstream::backend::{Backend, LoadGuard};
use crate::upstream::exchange::{Call, Exchanged, Failure, WorkerBody, exchange, outcome_of};
use crate::upstream::fleet::{ModelGroup, Seat};

/// Longest answer of an engine that computes a prompt, in bytes: the numbers of a million blocks.
const MAX_PREFILL_ANSWER_BYTES: usize = 8 << 20;
/// Engines that are asked to compute one prompt, one after the other.
pub(super) const MAX_PREFILLS: usize = 2;

/// A request that is about to be done in parts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scene<'a> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) config: &'a GatewayConfig,
    pub(super) group: &'a ModelGroup,
    pub(super) prompt: Prompt<'a>,
}

/// A backend that computes a prompt, with the request's load on it.
#[derive(Debug)]
pub(crate) struct Prefill {
    pub(crate) load: LoadGuard,
    /// Held while the prompt is computed.
    _under_way: Option<UnderWayGuard>,
}

/// What came of asking an engine to compute a prompt.
pub(super) enum Prefilled {
    /// It did, and answered this.
    Done(Bytes),
    /// The request is wrong, and this says so to the client.
    Refused(Box<Exchanged>),
    /// It did not, for this reason.
    Failed(&'static str),
}

// === impl Scene ===

impl<'a> Scene<'a> {
    /// How a prompt is placed that another backend will go on with.
    pub(super) fn wanted(&self) -> Wanted<'a> {
        let Prompt { key, n_tokens, saved_tokens, .. } = self.prompt;
        let request = Request { key, tokens: n_tokens.max(1), matched_tokens: saved_tokens };
        Wanted { request, output_tokens: 1, is_named: false }
    }

    /// Which backends may compute a prompt for `decode`: only those that do nothing else, if there is one.
    pub(super) fn prefilling(
        &self,
        decode: &'a Arc<Backend>,
        protocol: PdProtocol,
        tried: &'a [Arc<Backend>],
    ) -> impl Fn(&Seat) -> bool + 'a {
        let is_free = move |seat: &Seat| {
            seat.is_usable()
                && seat.part.prefills_by(protocol)
                && !Arc::ptr_eq(&seat.backend, decode)
                && !tried.iter().any(|other| Arc::ptr_eq(other, &seat.backend))
        };
        let has_pure = self.group.seats.iter().any(|seat| is_free(seat) && seat.part.role == Role::Prefill);
        move |seat| is_free(seat) && (!has_pure || seat.part.role == Role::Prefill)
    }

    /// Places the prompt on a backend that computes it for `decode`.
    pub(super) fn place_prefill(
        &self,
        decode: &Arc<Backend>,
        protocol: PdProtocol,
        tried: &[Arc<Backend>],
    ) -> Option<Prefill> {
        let allowed = self.prefilling(decode, protocol, tried);
        let Placed { load, .. } = place_among(self.group, self.wanted(), &self.config.routing, allowed)?;
        let blocks = self.prompt.lookup.map(Lookup::blocks);
        let under_way = blocks.and_then(|blocks| self.shared.under_way.send(&load.backend, blocks));
        Some(Prefill { load, _under_way: under_way })
    }

    /// Tokens of the prompt that a member does not have.
    pub(super) fn uncached_tokens(&self, member: usize) -> u64 {
        // What is negative or no number becomes 0.
        let cached = self.prompt.saved_tokens.get(member).map_or(0, |n_tokens| *n_tokens as u64);
        self.prompt.n_tokens.saturating_sub(cached)
    }

    /// When an engine must have computed a prompt.
    pub(super) fn prefill_until(&self, call: &Call<'_>) -> Instant {
        call.deadline.min(Instant::now() + millis(self.config.disaggregation.prefill_timeout_ms))
    }

    /// When the head of the decoding engine's answer must be there.
    pub(super) fn decode_until(&self, call: &Call<'_>, is_stream: bool) -> Instant {
        // An answer that is no stream has no head before it is complete.
        if is_stream {
            call.deadline.min(Instant::now() + millis(self.config.timeouts.response_header_ms))
        } else {
            call.deadline
        }
    }

    /// Has `prefill` compute the prompt of `call`, whose body asks for nothing else, and waits for its whole answer.
    ///
    /// # Errors
    /// Only if the request's time is over.
    pub(super) async fn compute(
        &self,
        protocol: PdProtocol,
        prefill: Prefill,
        call: &Call<'_>,
    ) -> Result<Prefilled, Failure> {
        let backend = Arc::clone(&prefill.load.backend);
        let (started, n_tokens) = (Instant::now(), backend.outstanding_tokens());
        let breaker = &self.config.breaker;
        let failed = |failure: &Failure| {
            backend.record(failure.outcome(), breaker);
            Ok(Prefilled::Failed(reason_of(failure)))
        };
        let response = match exchange(self.shared, &backend, call).await {
            Ok(response) => response,
            Err(Failure::DeadlinePassed) => return Err(Failure::DeadlinePassed),
            Err(failure) => return failed(&failure),
        };
        if is_wrong_request(response.status()) {
            return Ok(Prefilled::Refused(Box::new(refused(prefill, response))));
        }
        if !response.status().is_success() {
            backend.record(outcome_of(response.status(), response.headers()), breaker);
            return Ok(Prefilled::Failed("prefill_failed"));
        }
        let reading = read(response.into_body());
        let answer = tokio::select! {
            biased;
            answer = reading => answer,
            () = backend.unresponsive.notified() => return failed(&Failure::Silent),
            () = tokio::time::sleep_until(call.until) => {
                if call.deadline <= Instant::now() {
                    return Err(Failure::DeadlinePassed);
                }
                return failed(&Failure::Silent);
            }
        };
        let Some(answer) = answer else { return failed(&Failure::Broke) };
        backend.record(outcome_of(StatusCode::OK, &http::HeaderMap::new()), breaker);
        let time = started.elapsed();
        // What was there before was done before: all of it together shows the speed.
        backend.prefill_speed.measure(n_tokens, time);
        Metrics::prefill_ended(protocol.as_str(), time);
        Ok(Prefilled::Done(answer))
    }

    /// Reads an answer that nothing is needed of to its end, in a task that goes on when the other leg has ended, and that
    /// ends when the guard is dropped. The load is given back at the end.
    pub(super) fn drain(
        &self,
        prefill: Prefill,
        response: Response<WorkerBody>,
        until: Instant,
    ) -> DropGuard {
        let token = CancellationToken::new();
        let cancelled = token.clone();
        self.shared.shutdown.spawn(async move {
            let mut body = response.into_body();
            let draining = async { while let Some(Ok(_)) = body.frame().await {} };
            tokio::select! {
                () = cancelled.cancelled() => {}
                () = draining => {}
                () = tokio::time::sleep_until(until) => {}
            }
            drop(prefill);
        });
        token.drop_guard()
    }

    /// Waits for the first bytes of a stream of events and returns whether they are no error. An answer of another kind is fine
    /// as it is, and one that takes its time is passed on.
    ///
    /// # Errors
    /// If the stream breaks before its first byte.
    pub(super) async fn begins_well(
        &self,
        decode: &Backend,
        response: &mut Response<WorkerBody>,
        call: &Call<'_>,
    ) -> Result<bool, Failure> {
        if !is_event_stream(response) {
            return Ok(true);
        }
        let until = call.deadline.min(Instant::now() + millis(self.config.timeouts.stream_idle_ms));
        tokio::select! {
            biased;
            first = response.body_mut().peek() => match first {
                Ok(first) => Ok(!first.is_some_and(|first| is_error_event(first))),
                Err(_) => Err(Failure::Broke),
            },
            () = decode.unresponsive.notified() => Err(Failure::Silent),
            () = tokio::time::sleep_until(until) => Ok(true),
        }
    }
}

/// The answer of an engine for prompts that becomes the client's.
pub(super) fn refused(prefill: Prefill, response: Response<WorkerBody>) -> Exchanged {
    let answered_by = Some(prefill.load);
    Exchanged { answered_by, ..Exchanged::plain(response) }
}

/// Whether a status says that the request is wrong, on whichever engine.
pub(super) fn is_wrong_request(status: StatusCode) -> bool {
    status.is_client_error()
        && !matches!(
            status,
            StatusCode::NOT_FOUND | StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS
        )
}

/// The word for a failure of an engine for prompts in metrics.
pub(super) fn reason_of(failure: &Failure) -> &'static str {
    match failure {
        Failure::Silent | Failure::DeadlinePassed => "prefill_slow",
        Failure::Unavailable(_) => "prefill_unavailable",
        _ => "prefill_failed",
    }
}

pub(super) fn is_event_stream(response: &Response<WorkerBody>) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

/// Whether the first event of a stream says that the request failed, as vLLM and `SGLang` write it.
fn is_error_event(first: &[u8]) -> bool {
    let Some(event) = first.trim_ascii_start().strip_prefix(b"data:") else { return false };
    let Some(inside) = event.trim_ascii_start().strip_prefix(b"{") else { return false };
    inside.trim_ascii_start().starts_with(b"\"error\"")
}

/// Reads a body of bounded length; `None` if it breaks off or is longer.
async fn read(mut body: WorkerBody) -> Option<Bytes> {
    let mut answer = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.ok()?.into_data() else { continue };
        if MAX_PREFILL_ANSWER_BYTES < answer.len() + data.len() {
            return None;
        }
        answer.extend_from_slice(&data);
    }
    Some(answer.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_says_that_the_request_is_wrong_becomes_the_clients_answer() {
        for (status, expected) in [
            (400, true),
            (401, true),
            (413, true),
            (422, true),
            (404, false),
            (408, false),
            (429, false),
            (500, false),
        ] {
            assert_eq!(is_wrong_request(StatusCode::from_u16(status).unwrap()), expected, "{status}");
        }
    }

    #[test]
    fn an_error_in_place_of_a_first_event_is_seen() {
        for event in [&b"data: {\"error\": {\"message\":\"x\"}}\n\n"[..], b"\ndata:{ \"error\":{}}\n\n"] {
            assert!(is_error_event(event));
        }
        for event in
            [&b"data: {\"id\":\"1\",\"error\":null}\n\n"[..], b"data: [DONE]\n\n", b": ping\n\n", b"data: {"]
        {
            assert!(!is_error_event(event));
        }
    }
}
