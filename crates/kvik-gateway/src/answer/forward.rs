//! The way of a request to a worker and of the answer back.
//!
//! Key, body, peek, turn, worker: each step can refuse, and what was taken by then goes back with
//! the [`Record`]. A request is tried on another worker only while no byte of an answer has been
//! seen: after a connection error, a missing head, or a 502 or 503, of a named sequence also a 429, each
//! worker at most once, and only as the retry budget allows. The worker's answer is then the client's, whatever it says.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use http::StatusCode;
use http::header;
use http::request::Parts;
use kvik_proto::journal::JOURNAL;
use kvik_proto::moves::ResumeHead;
use kvik_runtime::http::AnswerLimits;
use tokio::time::Instant;

use crate::answer;
use crate::answer::body::{Clock, GuardedBody};
use crate::answer::continuation::{Continuation, Continuer};
use crate::answer::events::{Dialect, Events};
use crate::answer::generate::{self, TranslatedBody};
use crate::answer::record::{Ending, Record};
use crate::answer::send::{Outgoing, worker_path};
use crate::config::{GatewayConfig, millis};
use crate::disaggregation::Disaggregation;
use crate::error::Refusal;
use crate::metrics::Metrics;
use crate::placement::admission::{NotAdmitted, Permit};
use crate::placement::input::RouteInput;
use crate::placement::{self, Placed, Wanted, place_at, place_worker};
use crate::request::body::{keep_memory, read_body};
use crate::request::headers::{
    REQUEST_ID, WORKER, clean_connection_headers, clean_request_headers, request_id, request_timeout,
};
use crate::request::peek::Peek;
use crate::request::routing_key::estimated_output_tokens;
use crate::route::Route;
use crate::state::{Shared, View};
use crate::upstream::backend::{Backend, BackendKind};
use crate::upstream::breaker::Outcome;
use crate::upstream::exchange::{Exchanged, Failure, WorkerBody, outcome_of};
use crate::upstream::fleet::{Fleet, ModelGroup};

/// Most times that a request without a stream moves: a drained fleet moves it once a worker.
const MAX_MOVES: usize = 8;
/// Interval at which the fleet is polled while no worker is usable.
const WAIT_INTERVAL: Duration = Duration::from_millis(100);

/// What a worker answered.
struct Answer {
    response: http::Response<WorkerBody>,
    deadline: Instant,
    max_silence: Duration,
    expose_worker: bool,
    /// Whether the chunks become events of `/generate`.
    is_translated: bool,
    /// Continues the answer on another worker.
    continuer: Option<Continuer>,
}

/// Forwards a request.
pub(crate) async fn forward(shared: Arc<Shared>, route: Route, mut request: Request) -> Response {
    let request_id = request_id(request.headers());
    let mut record = Record::new(shared, route, request_id);
    record.trace(request.headers_mut());
    match ask(&mut record, route, request).await {
        Ok(answer) => deliver(record, route, answer),
        Err(refusal) => {
            record.status = refusal.status.as_u16();
            record.end(Ending::Refused);
            Metrics::rejected(refusal.reason);
            let mut response = refusal.into_response();
            response.headers_mut().insert(REQUEST_ID, record.request_id.clone());
            response
        }
    }
}

/// A request of a client with a valid key, its body read.
pub(crate) struct Received {
    pub(crate) parts: Parts,
    pub(crate) body: Bytes,
    pub(crate) deadline: Instant,
}

/// Checks the key of a request and reads its body.
///
/// # Errors
/// If the key is wrong, or the body is too large or too slow.
pub(crate) async fn receive(record: &Record, view: &View, request: Request) -> Result<Received, Refusal> {
    let config = &*view.config;
    let (parts, body) = request.into_parts();
    if !view.keys.accepts(&parts.headers) {
        return Err(Refusal::unauthorized(answer::WRONG_KEY).before_body());
    }
    let timeout = request_timeout(&parts.headers, config).map_err(Refusal::before_body)?;
    let deadline = record.started() + timeout;
    let reading = read_body(body, &parts.headers, config.max_body_bytes, deadline);
    let body = reading.await.map_err(Refusal::before_body)?;
    Ok(Received { parts, body, deadline })
}

async fn ask(record: &mut Record, route: Route, request: Request) -> Result<Answer, Refusal> {
    let mut view = record.shared().view();
    let Received { mut parts, body, deadline } = receive(record, &view, request).await?;
    let peek = Peek::read(&body).map_err(|error| Refusal::invalid(error.message, error.param))?;
    let mut group = Arc::clone(find_group(&view.fleet, &peek)?);
    record.group = Some(Arc::clone(&group));
    if group.is_managed {
        make_ready(record, &group, deadline).await?;
        // Its backend may have come meanwhile.
        view = record.shared().view();
        group = Arc::clone(find_group(&view.fleet, &peek)?);
    }
    let config = &*view.config;
    record.is_stream = peek.is_stream || route == Route::Generate;
    let output_tokens = expected_output_tokens(route, &peek, config);

    record.permit = Some(wait_for_turn(record, body.len(), config, deadline).await?);
    let asked = (route, &peek);
    let input =
        RouteInput::read(record.shared(), &group, asked, &parts.headers, &config.routing, output_tokens)
            .await;
    record.shared().retry_budget.deposit(&config.retry);
    clean_request_headers(&mut parts.headers, config.forward_authorization);
    parts.headers.insert(REQUEST_ID, record.request_id.clone());
    let mut outgoing = Outgoing {
        route,
        headers: parts.headers,
        query: parts.uri.query().map(str::to_owned),
        is_stream: record.is_stream,
        body: body.clone(),
        deadline,
        resumed: None,
    };
    let answer = try_workers(record, &view, &group, &input, &mut outgoing).await;
    drop(outgoing);
    keep_memory(body);
    answer
}

/// Sends the request to one worker after the other until one answers.
async fn try_workers(
    record: &mut Record,
    view: &View,
    group: &ModelGroup,
    input: &RouteInput,
    outgoing: &mut Outgoing,
) -> Result<Answer, Refusal> {
    let config = &*view.config;
    let shared = Arc::clone(record.shared());
    let mut tried: Vec<Arc<Backend>> = Vec::new();
    let wanted = input.wanted();
    let lookup = input.lookup.as_ref();
    let mut parts = Disaggregation::new(&shared, config, group, input.prompt());
    let place = |tried: &[Arc<Backend>]| placement::place(group, wanted, &config.routing, tried);
    let Some(mut placed) = place(&tried) else {
        return Err(Refusal::no_backend(group.time_to_probe().as_secs() + 1));
    };
    let mut n_moves = 0;
    loop {
        let Placed { load, reason } = placed;
        shared.metrics.decision(reason);
        let backend = Arc::clone(&load.backend);
        record.place(load, group, lookup);
        let failure = match send(&mut parts, &backend, group, outgoing, config).await {
            // The owner of a named sequence has no place left for it: others are asked before the client is.
            Ok((exchanged, _))
                if wanted.is_named && exchanged.response.status() == StatusCode::TOO_MANY_REQUESTS =>
            {
                Failure::Unavailable(Box::new(exchanged.response))
            }
            Ok((mut exchanged, is_translated)) => {
                record.take_legs(&mut exchanged);
                let response = exchanged.response;
                let can_continue =
                    backend.kind == BackendKind::Worker && response.headers().contains_key(JOURNAL);
                let continuer = can_continue.then(|| Continuer::new(&shared, group, wanted, outgoing));
                return Ok(Answer {
                    response,
                    deadline: outgoing.deadline,
                    max_silence: millis(config.timeouts.stream_idle_ms),
                    expose_worker: config.expose_worker,
                    is_translated,
                    continuer,
                });
            }
            Err(Failure::Moved(moved)) => {
                outgoing.resumed = Some(ResumeHead {
                    path: worker_path(outgoing.route).to_owned(),
                    head: moved.head,
                    progress: moved.progress,
                    ticket: Some(moved.ticket).filter(|ticket| !ticket.is_empty()),
                    partial: Some(moved.partial),
                });
                Metrics::continued("moved");
                placed = place_moved(&shared, group, wanted, &moved.to, &backend, outgoing.deadline)
                    .await
                    .ok_or_else(|| Refusal::no_backend(group.time_to_probe().as_secs() + 1))?;
                n_moves += 1;
                if MAX_MOVES < n_moves {
                    return Err(Refusal::upstream());
                }
                continue;
            }
            Err(failure) => failure,
        };
        if let Failure::Refused(refusal) = failure {
            return Err(refusal);
        }
        tried.push(Arc::clone(&backend));
        let may_retry =
            tried.len() < config.retry.max_attempts as usize && !matches!(failure, Failure::DeadlinePassed);
        // The worker that is tried next is found before an answer that could be passed on is lost.
        let next = if !may_retry {
            None
        } else if outgoing.resumed.is_some() {
            place_worker(group, wanted, config, &tried)
        } else {
            place(&tried)
        };
        let next = next.filter(|_| shared.retry_budget.withdraw());
        let Some(next) = next else {
            return give_up(record, &backend, failure, outgoing, config);
        };
        backend.record(failure.outcome(), &config.breaker);
        shared.metrics.retries.increment(1);
        record.n_retries += 1;
        tracing::debug!(worker = %backend.id, next = %next.load.backend.id, "trying another worker");
        placed = next;
    }
}

/// Places a request that its worker has given away: where its KV is, else on any worker, as soon as there is one.
async fn place_moved(
    shared: &Shared,
    group: &ModelGroup,
    wanted: Wanted<'_>,
    to: &str,
    left: &Arc<Backend>,
    deadline: Instant,
) -> Option<Placed> {
    if let Some(placed) = place_at(group, wanted, to) {
        return Some(placed);
    }
    let wait = millis(shared.view().config.retry.continuation_wait_ms);
    let until = deadline.min(Instant::now() + wait);
    // The fleet may change meanwhile, and what the index said is by its places.
    let request = kvik_index::placement::Request { matched_tokens: &[], ..wanted.request };
    let wanted = Wanted { request, ..wanted };
    loop {
        let view = shared.view();
        let group = view.fleet.group(&group.model);
        let placed =
            group.and_then(|group| place_worker(group, wanted, &view.config, std::slice::from_ref(left)));
        if placed.is_some() || until <= Instant::now() {
            return placed;
        }
        tokio::time::sleep(WAIT_INTERVAL).await;
    }
}

/// Passes on what there is after the last try.
fn give_up(
    record: &mut Record,
    backend: &Backend,
    failure: Failure,
    outgoing: &Outgoing,
    config: &GatewayConfig,
) -> Result<Answer, Refusal> {
    let outcome = failure.outcome();
    let refusal = match failure {
        Failure::Unavailable(response) => {
            return Ok(Answer {
                response: *response,
                deadline: outgoing.deadline,
                max_silence: millis(config.timeouts.stream_idle_ms),
                expose_worker: config.expose_worker,
                is_translated: false,
                continuer: None,
            });
        }
        Failure::Unreachable | Failure::Broke | Failure::Moved(_) => Refusal::upstream(),
        Failure::NoPartner => Refusal::no_backend(1),
        Failure::Silent | Failure::DeadlinePassed => Refusal::deadline(),
        Failure::Refused(refusal) => refusal,
    };
    backend.record(outcome, &config.breaker);
    // The log line names the worker; the breaker has counted it.
    record.head_outcome = Outcome::Neutral;
    Err(refusal)
}

/// Sends the request to `backend`, in parts if that pays, and waits for the head of its answer.
async fn send(
    parts: &mut Disaggregation<'_>,
    backend: &Arc<Backend>,
    group: &ModelGroup,
    outgoing: &Outgoing,
    config: &GatewayConfig,
) -> Result<(Exchanged, bool), Failure> {
    if outgoing.resumed.is_some() {
        let call = outgoing.resume_call(config).ok_or(Failure::Unreachable)?;
        return Ok((parts.exchange_plain(backend, &call).await?, false));
    }
    let is_translated = outgoing.route == Route::Generate && backend.kind == BackendKind::OpenAi;
    let (route, body) = if is_translated {
        generate::translate_request(&outgoing.body, &group.model).map_err(Failure::Refused)?
    } else {
        (outgoing.route, outgoing.body.clone())
    };
    let call = outgoing.call(config, route, body);
    Ok((parts.exchange(backend, &call).await?, is_translated))
}

/// Makes the worker's answer the client's.
fn deliver(mut record: Record, route: Route, answer: Answer) -> Response {
    let (mut parts, body) = answer.response.into_parts();
    record.status = parts.status.as_u16();
    record.head_outcome = outcome_of(parts.status, &parts.headers);
    let is_stream = parts
        .headers
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    record.is_stream = is_stream;
    let is_delimited = parts.headers.contains_key(header::CONTENT_LENGTH)
        || parts.headers.contains_key(header::TRANSFER_ENCODING);
    clean_connection_headers(&mut parts.headers);
    parts.headers.insert(REQUEST_ID, record.request_id.clone());
    if answer.expose_worker
        && let Some(load) = &record.load
        && let Some(name) = &load.backend.header
    {
        parts.headers.insert(WORKER, name.clone());
    }
    let events = is_stream.then(|| {
        // A last event may come on top.
        parts.headers.remove(header::CONTENT_LENGTH);
        let is_generate = route == Route::Generate && !answer.is_translated;
        Events::new(if is_generate { Dialect::Generate } else { Dialect::OpenAi }, !is_delimited)
    });
    let clock = Clock::new(answer.deadline, answer.max_silence);
    let is_journaled = parts.headers.remove(JOURNAL).is_some();
    let continuation = answer.continuer.filter(|_| is_journaled && is_stream).map(Continuation::new);
    let body = GuardedBody::new(body, record, events, clock, continuation);
    let body = if answer.is_translated && is_stream {
        axum::body::Body::new(TranslatedBody::new(body))
    } else {
        axum::body::Body::new(body)
    };
    // The body has the same times, but is not asked while the client reads nothing.
    parts.extensions.insert(AnswerLimits { deadline: answer.deadline, max_stall: answer.max_silence });
    Response::from_parts(parts, body)
}

/// Waits until the engine of a managed model can take the request, and keeps it there until the request has ended.
async fn make_ready(record: &mut Record, group: &ModelGroup, deadline: Instant) -> Result<(), Refusal> {
    let readiness = record.shared().readiness.as_ref();
    let Some(mut model_use) = readiness.and_then(|readiness| readiness.begin(&group.model)) else {
        return Ok(());
    };
    if !model_use.try_enter() {
        let entered = tokio::time::timeout_at(deadline, model_use.enter()).await;
        entered.map_err(|_| Refusal::deadline())?.map_err(Refusal::not_ready)?;
    }
    record.model_use = Some(model_use);
    Ok(())
}

/// Waits until a request of `n_bytes` may run.
pub(crate) async fn wait_for_turn(
    record: &Record,
    n_bytes: usize,
    config: &GatewayConfig,
    deadline: Instant,
) -> Result<Permit, Refusal> {
    let shared = record.shared();
    if let Some(permit) = shared.admission.try_admit() {
        return Ok(permit);
    }
    let start = Instant::now();
    let turn = shared.admission.admit(n_bytes, &config.admission);
    let permit = tokio::time::timeout_at(deadline, turn).await.map_err(|_| Refusal::deadline())?;
    shared.metrics.queue_wait_seconds.record(start.elapsed().as_secs_f64());
    permit.map_err(|error| match error {
        NotAdmitted::Full { retry_after } => Refusal::queue_full(retry_after),
        NotAdmitted::TooLate { retry_after } => Refusal::queue_timeout(retry_after),
    })
}

/// The backends of the model that a request asks for.
pub(crate) fn find_group<'a>(fleet: &'a Fleet, peek: &Peek<'_>) -> Result<&'a Arc<ModelGroup>, Refusal> {
    if fleet.groups.is_empty() {
        return Err(Refusal::no_backend(1));
    }
    match &peek.model {
        Some(model) => fleet.group(model).ok_or_else(|| Refusal::unknown_model(model)),
        None => fleet.only_group().ok_or_else(|| {
            Refusal::invalid(
                "`model` is missing; it must be given where several models are served",
                Some("model"),
            )
        }),
    }
}

/// Tokens that the answer to a request is expected to have.
pub(crate) fn expected_output_tokens(route: Route, peek: &Peek<'_>, config: &GatewayConfig) -> u64 {
    let default = if route.is_generation() { config.routing.default_max_tokens } else { 0 };
    let max_tokens = peek.max_tokens.or_else(|| generate::max_tokens(peek.sampling));
    estimated_output_tokens(max_tokens, default)
}
