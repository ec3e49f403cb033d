//! One request to one worker, up to the head of its answer.

use std::io;

use bytes::Bytes;
use http::header;
use http::uri::Parts;
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use http_body_util::{BodyExt as _, Either, Full, Limited};
use hyper::body::Incoming;
use kvik_proto::journal::JOURNAL;
use kvik_proto::moves::{MOVED, MovedAnswer, ResumeHead};
use tokio::time::Instant;

use crate::answer::generate;
use crate::config::{GatewayConfig, millis};
use crate::error::Refusal;
use crate::route::Route;
use crate::state::Shared;
use crate::upstream::backend::{Backend, BackendKind};
use crate::upstream::breaker::Outcome;
use crate::upstream::links::LinkedBody;

/// Where workers go on with requests that others have begun.
const RESUME_PATH: &str = "/sequences/resume";
/// Longest answer of a request that moves, in bytes: the tokens and log probabilities of a long answer.
const MAX_MOVED_BYTES: usize = 256 << 20;

/// The body of a worker's answer: of its own connection or of the client that all share.
pub(crate) type WorkerBody = Either<LinkedBody, Incoming>;

/// What a request sends, to whichever worker.
#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    pub(crate) route: Route,
    pub(crate) headers: HeaderMap,
    pub(crate) query: Option<String>,
    pub(crate) body: Bytes,
    pub(crate) is_stream: bool,
    pub(crate) deadline: Instant,
    /// How far another worker has come with it.
    pub(crate) resumed: Option<ResumeHead>,
}

/// Why there is no answer that could be passed on.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The worker asks to be left alone, or a proxy before it failed.
    Unavailable(http::Response<WorkerBody>),
    /// It goes on elsewhere; only of a request without a stream.
    Moved(Box<MovedAnswer>),
    /// No connection, or it broke.
    Broke,
    /// No answer in time, though there is time left for another worker.
    Silent,
    /// The request's time is over.
    DeadlinePassed,
    /// The request is wrong, for this kind of worker.
    Refused(Refusal),
}

/// Sends the request to `backend` and waits for the head of its answer.
pub(crate) async fn send(
    shared: &Shared,
    backend: &Backend,
    model: &str,
    outgoing: &Outgoing,
    config: &GatewayConfig,
) -> Result<(http::Response<WorkerBody>, bool), Failure> {
    let is_translated = outgoing.route == Route::Generate && backend.kind == BackendKind::OpenAi;
    let request = match &outgoing.resumed {
        Some(resumed) => resume_request(backend, outgoing, resumed),
        None if is_translated => {
            let translated = generate::translate_request(&outgoing.body, model);
            let (route, body) = translated.map_err(Failure::Refused)?;
            plain_request(backend, route, outgoing, body)
        }
        None => plain_request(backend, outgoing.route, outgoing, outgoing.body.clone()),
    };
    let mut request = request.ok_or(Failure::Broke)?;
    *request.method_mut() = Method::POST;
    *request.headers_mut() = outgoing.headers.clone();
    // Only this gateway asks for it: to a client its lines would be comments without end.
    request.headers_mut().remove(JOURNAL);
    if backend.kind == BackendKind::Worker {
        request.headers_mut().extend(shared.cluster_header.clone());
        if outgoing.route.is_generation() {
            request.headers_mut().insert(JOURNAL, HeaderValue::from_static("1"));
        }
    }
    let asking = async {
        match &backend.links {
            Some(links) => {
                request.headers_mut().insert(header::HOST, links.host_header.clone());
                Ok(links.request(request).await?.map(Either::Left))
            }
            None => kvik_proto::client::send(&shared.http, request)
                .await
                .map(|response| response.map(Either::Right))
                .map_err(io::Error::other),
        }
    };

    // An answer that is no stream has no head before it is complete.
    let until = if outgoing.is_stream {
        outgoing.deadline.min(Instant::now() + millis(config.timeouts.response_header_ms))
    } else {
        outgoing.deadline
    };
    let response = tokio::select! {
        biased;
        response = asking => response.map_err(|error: io::Error| {
            tracing::debug!(worker = %backend.id, %error, "the worker did not answer");
            Failure::Broke
        })?,
        () = backend.unresponsive.notified() => return Err(Failure::Silent),
        () = tokio::time::sleep_until(until) => {
            let is_over = outgoing.deadline <= Instant::now();
            return Err(if is_over { Failure::DeadlinePassed } else { Failure::Silent });
        }
    };
    match response.status() {
        StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE => Err(Failure::Unavailable(response)),
        _ if backend.kind == BackendKind::Worker && response.headers().contains_key(MOVED) => {
            Err(read_moved(response, outgoing.deadline).await)
        }
        _ => Ok((response, is_translated)),
    }
}

fn plain_request(
    backend: &Backend,
    route: Route,
    outgoing: &Outgoing,
    body: Bytes,
) -> Option<http::Request<Full<Bytes>>> {
    let uri = backend.uri(route)?;
    let mut request = http::Request::new(Full::new(body));
    let query = outgoing.query.as_deref();
    *request.uri_mut() = target(uri, query, backend.links.is_some())?;
    Some(request)
}

/// A request that goes on: how far it has come, and its own body.
fn resume_request(
    backend: &Backend,
    outgoing: &Outgoing,
    resumed: &ResumeHead,
) -> Option<http::Request<Full<Bytes>>> {
    let uri: Uri = format!("{}{RESUME_PATH}", backend.base).parse().ok()?;
    let mut body = serde_json::to_vec(resumed).ok()?;
    body.reserve_exact(outgoing.body.len() + 1);
    body.push(b'\n');
    body.extend_from_slice(&outgoing.body);
    let mut request = http::Request::new(Full::new(Bytes::from(body)));
    *request.uri_mut() = target(&uri, None, backend.links.is_some())?;
    Some(request)
}

/// The path at which a worker serves a route, as a request that goes on names it.
pub(crate) fn worker_path(route: Route) -> &'static str {
    BackendKind::Worker.path(route)
}

/// Reads where a request without a stream goes on.
async fn read_moved(response: http::Response<WorkerBody>, deadline: Instant) -> Failure {
    let reading = Limited::new(response.into_body(), MAX_MOVED_BYTES).collect();
    let Ok(Ok(body)) = tokio::time::timeout_at(deadline, reading).await else { return Failure::Broke };
    match serde_json::from_slice(&body.to_bytes()) {
        Ok(moved) => Failure::Moved(Box::new(moved)),
        Err(error) => {
            tracing::warn!(%error, "a worker moves a request in a way that cannot be read");
            Failure::Broke
        }
    }
}

/// Where a request goes: only the path where the connection says the rest.
fn target(uri: &Uri, query: Option<&str>, is_path_only: bool) -> Option<Uri> {
    let mut parts = if is_path_only { Parts::default() } else { uri.clone().into_parts() };
    parts.path_and_query = match query {
        None => uri.path_and_query().cloned(),
        Some(query) => Some(format!("{}?{query}", uri.path()).parse().ok()?),
    };
    Uri::from_parts(parts).ok()
}

/// What the head of an answer says about the worker.
pub(crate) fn outcome_of(status: StatusCode, headers: &HeaderMap) -> Outcome {
    match status {
        StatusCode::TOO_MANY_REQUESTS => Outcome::Neutral,
        StatusCode::SERVICE_UNAVAILABLE if headers.contains_key(header::RETRY_AFTER) => Outcome::Neutral,
        status if status.is_server_error() => Outcome::Failure,
        _ => Outcome::Success,
    }
}

impl Failure {
    pub(crate) fn outcome(&self) -> Outcome {
        match self {
            Self::Unavailable(response) => outcome_of(response.status(), response.headers()),
            Self::Broke | Self::Silent => Outcome::Failure,
            // A short deadline is the client's choice; the worker may be fine.
            Self::DeadlinePassed | Self::Refused(_) | Self::Moved(_) => Outcome::Neutral,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_pressure_and_refusals_are_no_failures() {
        let none = HeaderMap::new();
        let busy = HeaderMap::from_iter([(header::RETRY_AFTER, http::HeaderValue::from_static("1"))]);
        assert_eq!(outcome_of(StatusCode::BAD_REQUEST, &none), Outcome::Success);
        assert_eq!(outcome_of(StatusCode::TOO_MANY_REQUESTS, &none), Outcome::Neutral);
        assert_eq!(outcome_of(StatusCode::SERVICE_UNAVAILABLE, &busy), Outcome::Neutral);
        assert_eq!(outcome_of(StatusCode::SERVICE_UNAVAILABLE, &none), Outcome::Failure);
        assert_eq!(outcome_of(StatusCode::INTERNAL_SERVER_ERROR, &none), Outcome::Failure);
    }
}
