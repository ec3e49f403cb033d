//! `/inference/init`, `/inference/step` and `/inference/finish`: sequences that clients step, wherever they are.
//!
//! A sequence begins on the worker that owns its name, and its steps go there. A worker that drains gives it to another one; then
//! the workers are asked which has it. If none does, because its worker died, a worker goes on from the tokens that this
//! gateway has passed on. A sequence that another gateway has begun is looked for on all workers; if its worker dies, its steps end
//! with one error, for this gateway knows none of its tokens.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use kvik_proto::moves::{HELD, SEED};
use kvik_proto::worker::{FinishRequest, FinishResponse, InitResponse, StepRequest, StepResponse};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::answer::forward::{Received, find_group, receive, wait_for_turn};
use crate::answer::record::{Ending, Record};
use crate::config::millis;
use crate::error::Refusal;
use crate::held_book::{HeldProgress, HeldSequence};
use crate::metrics::Metrics;
use crate::placement::{Placed, Wanted, place_worker};
use crate::request::headers::{REQUEST_ID, WORKER, clean_request_headers, new_request_id, request_id};
use crate::request::peek::Peek;
use crate::request::routing_key::estimated_prompt_tokens;
use crate::route::Route;
use crate::state::{Shared, View};
use crate::upstream::backend::{Backend, BackendKind};
use crate::upstream::breaker::Outcome;
use crate::upstream::exchange::{Call, Failure, exchange, outcome_of};
use crate::upstream::fleet::ModelGroup;

/// Longest answer of a worker, in bytes: the tokens and text of the longest step are far less.
const MAX_ANSWER_BYTES: usize = 16 << 20;
/// Attempts to begin a sequence, each on another worker, before the request fails.
const MAX_TRIES: usize = 3;
/// Workers that are asked for a sequence, in the order of the ring from its name on.
const MAX_ASKED: usize = 64;
/// Interval at which the fleet is polled while no worker is usable.
const WAIT_INTERVAL: Duration = Duration::from_millis(100);
const RESUME_PATH: &str = "/sequences/resume";

/// What a client gets.
struct Reply {
    status: StatusCode,
    body: Bytes,
    /// The worker that gave it.
    worker: Option<Arc<Backend>>,
}

/// A call on its way.
struct Caller<'a> {
    shared: &'a Arc<Shared>,
    view: &'a View,
    route: Route,
    headers: HeaderMap,
    deadline: Instant,
}

/// What a worker said.
struct Said {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

/// Serves one of the three calls.
pub(crate) async fn serve(shared: Arc<Shared>, route: Route, mut request: Request) -> Response {
    let request_id = request_id(request.headers());
    let mut record = Record::new(shared, route, request_id);
    record.trace(request.headers_mut());
    let mut response = match ask(&mut record, route, request).await {
        Ok(Reply { status, body, worker }) => {
            record.status = status.as_u16();
            record.end(Ending::Complete);
            let mut response = (status, [(CONTENT_TYPE, "application/json")], body).into_response();
            let is_exposed = record.shared().view().config.expose_worker;
            if let Some(name) =
                worker.as_ref().filter(|_| is_exposed).and_then(|worker| worker.header.clone())
            {
                response.headers_mut().insert(WORKER, name);
            }
            response
        }
        Err(refusal) => {
            record.status = refusal.status.as_u16();
            record.end(Ending::Refused);
            Metrics::rejected(refusal.reason);
            refusal.into_response()
        }
    };
    response.headers_mut().insert(REQUEST_ID, record.request_id.clone());
    response.map(Body::new)
}

async fn ask(record: &mut Record, route: Route, request: Request) -> Result<Reply, Refusal> {
    let view = record.shared().view();
    let config = &*view.config;
    let Received { mut parts, body, deadline } = receive(record, &view, request).await?;
    record.permit = Some(wait_for_turn(record, body.len(), config, deadline).await?);
    clean_request_headers(&mut parts.headers, config.forward_authorization);
    parts.headers.insert(REQUEST_ID, record.request_id.clone());
    // Only this gateway names lives.
    parts.headers.remove(HELD);
    let shared = Arc::clone(record.shared());
    let caller = Caller { shared: &shared, view: &view, route, headers: parts.headers, deadline };
    match route {
        Route::Step => caller.step(&body).await,
        Route::Finish => caller.finish(&body).await,
        _ => caller.init(record, body).await,
    }
}

impl Caller<'_> {
    async fn init(&self, record: &mut Record, body: Bytes) -> Result<Reply, Refusal> {
        let peek = Peek::read(&body).map_err(|error| Refusal::invalid(error.message, error.param))?;
        let group = Arc::clone(find_group(&self.view.fleet, &peek)?);
        record.group = Some(Arc::clone(&group));
        let Some(seq_id) = peek.seq_id.as_deref() else {
            return Err(Refusal::invalid("`seq_id` is missing; it names the sequence", Some("seq_id")));
        };
        let n_tokens = estimated_prompt_tokens(peek.n_prompt_bytes());
        let identity = new_request_id().to_str().unwrap_or_default().to_owned();
        let mut tried = Vec::new();
        while tried.len() < MAX_TRIES {
            let Some(Placed { load, .. }) = self.place(&group, seq_id, n_tokens, &tried) else { break };
            let worker = Arc::clone(&load.backend);
            let said = match self.call(&worker, None, Some(&identity), body.clone()).await {
                Ok(said) => said,
                Err(Failure::DeadlinePassed) => return Err(Refusal::deadline()),
                Err(_) => {
                    tried.push(worker);
                    continue;
                }
            };
            let seed = said.headers.get(SEED).and_then(|seed| seed.to_str().ok()?.parse::<u64>().ok());
            if let (StatusCode::OK, Some(seed)) = (said.status, seed)
                && let Ok(response) = serde_json::from_slice::<InitResponse>(&said.body)
            {
                let about = (identity, group.model.clone(), body.clone());
                self.shared.held.insert(HeldSequence::new(about, seed, &response, Arc::clone(&worker)));
            }
            return Ok(said.reply(worker));
        }
        Err(Refusal::no_backend(group.time_to_probe().as_secs() + 1))
    }

    async fn step(&self, body: &Bytes) -> Result<Reply, Refusal> {
        let StepRequest { seq_id, n, step_index } = parse(body)?;
        let Some(held) = self.shared.held.get(&seq_id) else { return self.ask_all(&seq_id, body).await };
        let locking = tokio::time::timeout_at(self.deadline, held.progress.lock());
        let mut progress = locking.await.map_err(|_| Refusal::deadline())?;
        let first = step_index.unwrap_or(progress.n_answered());
        let wanted = first.saturating_add(n.into());
        let n_known = progress.n_tokens();
        // A worker refuses what no sequence can be asked for.
        if n == 0 || n_known < first || (n_known < wanted && !progress.is_ended()) {
            let n_missing = if n == 0 { 0 } else { wanted - n_known.min(wanted) };
            let step_index = Some(if n_known < first { first } else { n_known });
            let missing =
                StepRequest { seq_id: seq_id.clone(), n: u32::try_from(n_missing).unwrap_or(n), step_index };
            if let Some(refused) = self.advance(&held, &mut progress, &missing).await? {
                return Ok(refused);
            }
        }
        let response = progress.answer(&seq_id, first, wanted);
        Ok(json_reply(&response, Some(Arc::clone(&progress.owner))))
    }

    /// Has a sequence make the step `missing`, on its worker or elsewhere; what the worker said if it refuses.
    async fn advance(
        &self,
        held: &HeldSequence,
        progress: &mut HeldProgress,
        missing: &StepRequest,
    ) -> Result<Option<Reply>, Refusal> {
        let body = Bytes::from(serde_json::to_vec(missing).unwrap_or_default());
        let owner = Arc::clone(&progress.owner);
        if let Some(outcome) = self.step_at(&owner, held, progress, &body).await? {
            return Ok(outcome.err());
        }
        let until = self.deadline.min(Instant::now() + millis(self.view.config.retry.continuation_wait_ms));
        loop {
            let view = self.shared.view();
            let group = view.fleet.group(&held.model).map(Arc::clone);
            for worker in group.iter().flat_map(|group| self.asked(group, &held.seq_id)) {
                if let Some(outcome) = self.step_at(&worker, held, progress, &body).await? {
                    Metrics::continued("moved");
                    return Ok(outcome.err());
                }
            }
            if let Some(group) = &group
                && let Some(worker) = self.resume(group, held, progress).await?
                && let Some(outcome) = self.step_at(&worker, held, progress, &body).await?
            {
                Metrics::continued("replayed");
                return Ok(outcome.err());
            }
            if until <= Instant::now() {
                Metrics::continued("failed");
                return Err(Refusal::no_backend(1));
            }
            tokio::time::sleep(WAIT_INTERVAL).await;
        }
    }

    /// Makes a step on `worker`; `None` if it does not have the sequence or does not answer.
    async fn step_at(
        &self,
        worker: &Arc<Backend>,
        held: &HeldSequence,
        progress: &mut HeldProgress,
        body: &Bytes,
    ) -> Result<Option<Result<(), Reply>>, Refusal> {
        let said = match self.call(worker, None, Some(&held.identity), body.clone()).await {
            Ok(said) if said.status != StatusCode::NOT_FOUND => said,
            Err(Failure::DeadlinePassed) => return Err(Refusal::deadline()),
            Ok(_) | Err(_) => return Ok(None),
        };
        if said.status != StatusCode::OK {
            return Ok(Some(Err(said.reply(Arc::clone(worker)))));
        }
        let response = serde_json::from_slice::<StepResponse>(&said.body).ok();
        if !response.is_some_and(|response| progress.take(&response)) {
            tracing::warn!(worker = %worker.id, "a worker answered a step with another one");
            return Err(Refusal::upstream());
        }
        progress.owner = Arc::clone(worker);
        Ok(Some(Ok(())))
    }

    /// Has a worker go on with a sequence from its tokens; `None` if none does now.
    async fn resume(
        &self,
        group: &ModelGroup,
        held: &HeldSequence,
        progress: &HeldProgress,
    ) -> Result<Option<Arc<Backend>>, Refusal> {
        let left = std::slice::from_ref(&progress.owner);
        let Some(Placed { load, .. }) = self.place(group, &held.seq_id, progress.n_tokens(), left) else {
            return Ok(None);
        };
        let mut body = serde_json::to_vec(&held.resumed(progress)).unwrap_or_default();
        body.push(b'\n');
        body.extend_from_slice(&held.body);
        let worker = Arc::clone(&load.backend);
        match self.call(&worker, Some(RESUME_PATH), None, body.into()).await {
            Ok(said) if said.status == StatusCode::OK => Ok(Some(worker)),
            Ok(said) => {
                let status = said.status.as_u16();
                tracing::debug!(worker = %worker.id, status, "the worker does not go on with a sequence");
                Ok(None)
            }
            Err(Failure::DeadlinePassed) => Err(Refusal::deadline()),
            Err(_) => Ok(None),
        }
    }

    async fn finish(&self, body: &Bytes) -> Result<Reply, Refusal> {
        let FinishRequest { seq_id, .. } = parse(body)?;
        let Some(held) = self.shared.held.get(&seq_id) else { return self.ask_all(&seq_id, body).await };
        let locking = tokio::time::timeout_at(self.deadline, held.progress.lock());
        let progress = locking.await.map_err(|_| Refusal::deadline())?;
        self.shared.held.remove(&held);
        let others = self.view.fleet.group(&held.model);
        let others = others.into_iter().flat_map(|group| self.asked(group, &seq_id));
        for worker in std::iter::once(Arc::clone(&progress.owner)).chain(others) {
            match self.call(&worker, None, Some(&held.identity), body.clone()).await {
                Ok(said) if said.status != StatusCode::NOT_FOUND => return Ok(said.reply(worker)),
                Err(Failure::DeadlinePassed) => return Err(Refusal::deadline()),
                Ok(_) | Err(_) => {}
            }
        }
        // No worker has it any more: it has ended, and nothing of it is resident.
        Ok(json_reply(&FinishResponse { seq_id, resident_tokens: 0 }, None))
    }

    /// Passes a call on to the worker that has a sequence which this gateway does not know.
    async fn ask_all(&self, seq_id: &str, body: &Bytes) -> Result<Reply, Refusal> {
        let mut unknown = None;
        for worker in self.view.fleet.groups.iter().flat_map(|group| self.asked(group, seq_id)) {
            match self.call(&worker, None, None, body.clone()).await {
                Ok(said) if said.status != StatusCode::NOT_FOUND => return Ok(said.reply(worker)),
                Ok(said) => unknown = Some(said.reply(worker)),
                Err(Failure::DeadlinePassed) => return Err(Refusal::deadline()),
                Err(_) => {}
            }
        }
        unknown.ok_or_else(|| Refusal::no_backend(1))
    }

    /// The workers that may have a sequence, in the order of the ring.
    fn asked<'a>(
        &'a self,
        group: &'a ModelGroup,
        seq_id: &'a str,
    ) -> impl Iterator<Item = Arc<Backend>> + 'a {
        let mut asked = Vec::new();
        std::iter::from_fn(move || {
            if MAX_ASKED <= asked.len() {
                return None;
            }
            let Placed { load, .. } = self.place(group, seq_id, 1, &asked)?;
            asked.push(Arc::clone(&load.backend));
            Some(Arc::clone(&load.backend))
        })
    }

    fn place(
        &self,
        group: &ModelGroup,
        seq_id: &str,
        n_tokens: u64,
        left: &[Arc<Backend>],
    ) -> Option<Placed> {
        let key = seq_id.as_bytes();
        let request = kvik_index::placement::Request { key, tokens: n_tokens.max(1), matched_tokens: &[] };
        let wanted = Wanted { request, output_tokens: 1, is_named: true };
        place_worker(group, wanted, &self.view.config, left)
    }

    /// Calls a worker and reads its answer.
    async fn call(
        &self,
        worker: &Arc<Backend>,
        path: Option<&'static str>,
        identity: Option<&str>,
        body: Bytes,
    ) -> Result<Said, Failure> {
        debug_assert_eq!(worker.kind, BackendKind::Worker);
        let mut headers = self.headers.clone();
        if let Some(identity) = identity.and_then(|identity| HeaderValue::from_str(identity).ok()) {
            headers.insert(HELD, identity);
        }
        let (until, deadline) = (self.deadline, self.deadline);
        let call = Call {
            route: self.route,
            path,
            headers: &headers,
            query: None,
            body,
            decode_at: None,
            until,
            deadline,
        };
        let said = match exchange(self.shared, worker, &call).await {
            Ok(response) => read(response, deadline).await,
            Err(failure) => Err(failure),
        };
        let outcome = match &said {
            Ok(said) => outcome_of(said.status, &said.headers),
            Err(failure) => failure.outcome(),
        };
        if outcome != Outcome::Neutral {
            worker.record(outcome, &self.view.config.breaker);
        }
        said
    }
}

impl Said {
    fn reply(self, worker: Arc<Backend>) -> Reply {
        Reply { status: self.status, body: self.body, worker: Some(worker) }
    }
}

async fn read(
    response: http::Response<crate::upstream::exchange::WorkerBody>,
    deadline: Instant,
) -> Result<Said, Failure> {
    let (parts, body) = response.into_parts();
    match tokio::time::timeout_at(deadline, Limited::new(body, MAX_ANSWER_BYTES).collect()).await {
        Ok(Ok(body)) => Ok(Said { status: parts.status, headers: parts.headers, body: body.to_bytes() }),
        Ok(Err(_)) => Err(Failure::Broke),
        Err(_) => Err(Failure::DeadlinePassed),
    }
}

fn json_reply(value: &impl serde::Serialize, worker: Option<Arc<Backend>>) -> Reply {
    // Numbers, texts and lists: nothing that JSON cannot say.
    let body = serde_json::to_vec(value).unwrap_or_default();
    Reply { status: StatusCode::OK, body: body.into(), worker }
}

/// Reads a body.
fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body)
        .map_err(|error| Refusal::invalid(format!("the request cannot be read: {error}"), None))
}
