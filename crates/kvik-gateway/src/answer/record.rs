//! The record of one request: what it holds and what is reported of it when it ends.
//!
//! A record is a guard. It begins with the request's head, moves into the answer's body, and ends
//! with it, in whatever way: load and permit go back, the breaker counts it, the metrics count it
//! one line goes to the access log (target `access`) and the request's span ends. A record that is
//! dropped before its end belongs to a client that has left.

use std::sync::Arc;

use http::{HeaderMap, HeaderValue};
use kvik_runtime::telemetry::Span;
use tokio::time::Instant;
use tokio_util::sync::DropGuard;

use crate::management::ModelUse;
use crate::placement::admission::Permit;
use crate::placement::lookup::Lookup;
use crate::placement::prediction::Prediction;
use crate::placement::under_way::UnderWayGuard;
use crate::route::Route;
use crate::state::Shared;
use crate::upstream::backend::LoadGuard;
use crate::upstream::breaker::Outcome;
use crate::upstream::exchange::Exchanged;
use crate::upstream::fleet::ModelGroup;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The answer is complete.
    Complete,
    /// The gateway refused it.
    Refused,
    /// The client went away.
    ClientLeft,
    /// The worker's answer broke off.
    UpstreamBroke,
    /// The worker's answer fell silent.
    UpstreamSilent,
    /// Its time was over.
    DeadlinePassed,
}

/// Everything about one request.
#[derive(Debug)]
pub(crate) struct Record {
    shared: Arc<Shared>,
    route: Route,
    pub(crate) request_id: HeaderValue,
    started: Instant,
    pub(crate) group: Option<Arc<ModelGroup>>,
    /// Of a model whose engine is managed; held until the answer has ended.
    pub(crate) model_use: Option<Box<dyn ModelUse>>,
    pub(crate) permit: Option<Permit>,
    pub(crate) load: Option<LoadGuard>,
    /// On the worker that will go on with the answer.
    next_load: Option<LoadGuard>,
    /// What the index said of the worker.
    pub(crate) prediction: Option<Prediction>,
    /// Held until the answer has ended.
    pub(crate) under_way: Option<UnderWayGuard>,
    /// Another leg of the request that is under way; it ends with the request, unless that is complete.
    other_leg: Option<DropGuard>,
    /// In the answer's head; 0 before there is one.
    pub(crate) status: u16,
    /// What the answer's head says about the worker.
    pub(crate) head_outcome: Outcome,
    pub(crate) is_stream: bool,
    pub(crate) n_retries: u32,
    n_bytes: u64,
    first_byte: Option<Instant>,
    span: Span,
    is_ended: bool,
}

impl Record {
    /// A request that has just arrived.
    pub(crate) fn new(shared: Arc<Shared>, route: Route, request_id: HeaderValue) -> Self {
        shared.metrics.outstanding_requests.increment(1.0);
        Self {
            shared,
            route,
            request_id,
            started: Instant::now(),
            group: None,
            model_use: None,
            permit: None,
            load: None,
            next_load: None,
            prediction: None,
            under_way: None,
            other_leg: None,
            status: 0,
            head_outcome: Outcome::Neutral,
            is_stream: false,
            n_retries: 0,
            n_bytes: 0,
            first_byte: None,
            span: Span::default(),
            is_ended: false,
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    /// Begins the request's span as a child of the one that `headers` name, and names it to the
    /// worker in its place. Without traces the headers pass as they are.
    pub(crate) fn trace(&mut self, headers: &mut HeaderMap) {
        let route = self.route.name();
        self.span = self.shared.tracer.request(headers, || format!("POST {route}"));
        self.span.propagate(headers);
    }

    /// Notes the worker that the request goes to, with its load there and what the index said of the worker.
    pub(crate) fn place(&mut self, load: LoadGuard, group: &ModelGroup, lookup: Option<&Lookup>) {
        let under_way = &self.shared.under_way;
        self.under_way = lookup.and_then(|lookup| under_way.send(&load.backend, lookup.blocks()));
        self.prediction = lookup.and_then(|lookup| lookup.prediction(&group.model, &load.backend));
        self.load = Some(load);
    }

    /// Takes what the legs of the request left behind; the rest is the answer.
    pub(crate) fn take_legs(&mut self, exchanged: &mut Exchanged) {
        self.other_leg = exchanged.other_leg.take();
        if let Some(load) = exchanged.answered_by.take() {
            let before = self.load.replace(load);
            self.next_load = before.filter(|_| exchanged.is_on_its_way);
            self.prediction = None;
            self.under_way = None;
        }
        if exchanged.has_foreign_kv {
            self.note_foreign_kv();
        }
    }

    /// Notes that KV of the prompt comes from elsewhere: the worker's speed and its report say nothing about what it had.
    pub(crate) fn note_foreign_kv(&mut self) {
        self.prediction = None;
        if let Some(load) = &mut self.load {
            load.forget_speed();
        }
    }

    /// Counts bytes of the answer's body, which are also a sign that the worker lives, and the first ones of a
    /// stream that it has computed the prompt.
    pub(crate) fn count(&mut self, data: &[u8]) {
        let n_bytes = data.len();
        self.n_bytes += n_bytes as u64;
        if let Some(prediction) = &mut self.prediction {
            prediction.look(data);
        }
        let is_first = self.first_byte.is_none() && 0 < n_bytes;
        if is_first {
            self.first_byte = Some(Instant::now());
        }
        if let Some(load) = &mut self.load {
            load.backend.hear();
            // An answer that is no stream begins when all of it is there.
            if is_first && self.is_stream {
                load.end_prompt();
            }
        }
    }

    /// Notes that its worker has failed, though the request goes on.
    pub(crate) fn note_failure(&mut self) {
        if let Some(load) = &self.load {
            load.backend.record(Outcome::Failure, &self.shared.view().config.breaker);
        }
        self.n_retries += 1;
    }

    /// Goes on at another worker.
    pub(crate) fn go_on(&mut self, load: LoadGuard) {
        self.load = Some(load);
        self.next_load = None;
        if let Some(load) = &mut self.load {
            // Another worker has computed the prompt, or a part of it.
            load.forget_speed();
            if self.first_byte.is_some() {
                load.end_prompt();
            }
        }
        // What the index said was of another worker.
        self.prediction = None;
        self.under_way = None;
    }

    /// Ends the request; only the first end counts.
    pub(crate) fn end(&mut self, ending: Ending) {
        if self.is_ended {
            return;
        }
        self.is_ended = true;
        let now = Instant::now();
        let duration = now - self.started;
        let ttft = self.first_byte.map(|first_byte| first_byte - self.started);

        let metrics = self.shared.metrics.route(self.route);
        metrics.ended(if ending == Ending::ClientLeft && self.status == 0 { 499 } else { self.status });
        metrics.seconds.record(duration.as_secs_f64());
        if let Some(ttft) = ttft
            && self.is_stream
        {
            metrics.ttft_seconds.record(ttft.as_secs_f64());
        }
        self.shared.metrics.outstanding_requests.decrement(1.0);

        if ending == Ending::Complete
            && let Some(settling) = self.prediction.take().and_then(Prediction::settle)
        {
            self.shared.shutdown.spawn(settling);
        }
        self.under_way = None;
        self.next_load = None;
        let other_leg = self.other_leg.take().filter(|_| ending == Ending::Complete);
        other_leg.map(DropGuard::disarm);
        let load = self.load.take();
        tracing::info!(
            target: "access",
            request_id = self.request_id.to_str().unwrap_or_default(),
            route = self.route.name(),
            model = self.group.as_ref().map_or("", |group| group.model.as_str()),
            worker = load.as_ref().map_or("", |load| load.backend.id.as_str()),
            status = self.status,
            bytes = self.n_bytes,
            ttft_ms = ttft.map(|ttft| ttft.as_secs_f64() * 1e3),
            duration_ms = duration.as_secs_f64() * 1e3,
            retries = self.n_retries,
            outcome = ending.as_str(),
            "request ended"
        );
        self.end_span(ending, load.as_ref());
        if let Some(load) = &load {
            let outcome = match ending {
                Ending::Complete => self.head_outcome,
                Ending::UpstreamBroke | Ending::UpstreamSilent => Outcome::Failure,
                Ending::Refused | Ending::ClientLeft | Ending::DeadlinePassed => Outcome::Neutral,
            };
            load.backend.record(outcome, &self.shared.view().config.breaker);
        }
        drop(load);
        self.permit = None;
        if let Some(mut model_use) = self.model_use.take() {
            model_use.end(ending == Ending::Complete && self.status < 400);
        }
    }

    fn end_span(&mut self, ending: Ending, load: Option<&LoadGuard>) {
        let mut span = std::mem::take(&mut self.span);
        if !span.is_recording() {
            return;
        }
        span.set("http.request.method", "POST");
        span.set("http.route", self.route.name());
        span.set("http.response.status_code", i64::from(self.status));
        span.set("kvik.request_id", self.request_id.to_str().unwrap_or_default().to_owned());
        if let Some(group) = &self.group {
            span.set("gen_ai.request.model", group.model.clone());
        }
        if let Some(load) = load {
            span.set("kvik.worker", load.backend.id.clone());
            span.set("kvik.estimated_tokens", load.n_tokens as i64);
        }
        if let Some(first_byte) = self.first_byte {
            span.set("kvik.ttft_ms", (first_byte - self.started).as_secs_f64() * 1e3);
        }
        span.set("kvik.retries", i64::from(self.n_retries));
        span.set("kvik.outcome", ending.as_str());
        match ending {
            Ending::UpstreamBroke | Ending::UpstreamSilent | Ending::DeadlinePassed => {
                span.fail(ending.as_str());
            }
            _ if 500 <= self.status => span.fail("the request failed"),
            _ => {}
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.end(Ending::ClientLeft);
    }
}

impl Ending {
    /// The word for it in logs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Refused => "refused",
            Self::ClientLeft => "client_left",
            Self::UpstreamBroke => "upstream_broke",
            Self::UpstreamSilent => "upstream_silent",
            Self::DeadlinePassed => "deadline_passed",
        }
    }
}
