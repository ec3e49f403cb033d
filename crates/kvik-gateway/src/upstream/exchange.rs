//! One request to one backend, until the head of its answer.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::uri::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Uri, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt as _, Either, Full, Limited};
use hyper::body::Incoming;
use kvik_proto::journal::JOURNAL;
use kvik_proto::moves::{DECODE_AT, MOVED, MovedAnswer};
use tokio::time::Instant;
use tokio_util::sync::DropGuard;

use crate::error::Refusal;
use crate::route::Route;
use crate::state::Shared;
use crate::upstream::backend::{Backend, BackendKind, LoadGuard};
use crate::upstream::breaker::Outcome;
use crate::upstream::links::LinkedBody;

/// Longest answer of a request that moves, in bytes: the tokens and log probabilities of a long answer.
const MAX_MOVED_BYTES: usize = 256 << 20;

/// What is sent to a backend.
#[derive(Debug, Clone)]
pub(crate) struct Call<'a> {
    pub(crate) route: Route,
    /// Another path than that of the route.
    pub(crate) path: Option<&'static str>,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) query: Option<&'a str>,
    pub(crate) body: Bytes,
    /// The address of the worker that goes on with the request after its first token.
    pub(crate) decode_at: Option<&'a str>,
    /// When the head of the answer must be there.
    pub(crate) until: Instant,
    /// When the request's time is over.
    pub(crate) deadline: Instant,
}

/// The body of a worker's answer: of its own connection or of the client that all share.
#[derive(Debug)]
pub(crate) struct WorkerBody {
    /// What was looked at already.
    first: Option<Bytes>,
    inner: Either<LinkedBody, Incoming>,
}

/// What came of a request that may have had several legs.
#[derive(Debug)]
pub(crate) struct Exchanged {
    pub(crate) response: Response<WorkerBody>,
    /// The load of the backend that answered, if it was not the one that was asked for the answer.
    pub(crate) answered_by: Option<LoadGuard>,
    /// Whether the backend that was asked for the answer will go on with it: its load stays.
    pub(crate) is_on_its_way: bool,
    /// Ends another leg of the request that goes on.
    pub(crate) other_leg: Option<DropGuard>,
    /// Whether KV of the prompt came from elsewhere: then neither the time to the first token nor the tokens that are reported as
    /// cached say anything about what the backend itself had.
    pub(crate) has_foreign_kv: bool,
}

/// Why there is no answer that could be passed on.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The worker asks to be left alone, or a proxy before it failed.
    Unavailable(Box<Response<WorkerBody>>),
    /// No connection: the worker has not seen the request.
    Unreachable,
    /// The connection broke.
    Broke,
    /// No answer in time, though there is time left for another worker.
    Silent,
    /// The request's time is over.
    DeadlinePassed,
    /// The engine that computes the prompt for the worker failed, or there is none.
    NoPartner,
    /// It goes on elsewhere; only of a request without a stream.
    Moved(Box<MovedAnswer>),
    /// The request is wrong, for this kind of worker.
    Refused(Refusal),
}

/// Sends a request to `backend` and waits for the head of its answer. Dropping the future cancels the request.
///
/// # Errors
/// As [`Failure`] says; 502 and 503 are failures, every other status is an answer.
pub(crate) async fn exchange(
    shared: &Shared,
    backend: &Backend,
    call: &Call<'_>,
) -> Result<Response<WorkerBody>, Failure> {
    let uri = match call.path {
        None => backend.uri(call.route).cloned(),
        Some(path) => format!("{}{path}", backend.base).parse().ok(),
    };
    let Some(uri) = uri else { return Err(Failure::Unreachable) };
    let mut request = http::Request::new(Full::new(call.body.clone()));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = target(&uri, call.query, backend.links.is_some()).ok_or(Failure::Unreachable)?;
    *request.headers_mut() = call.headers.clone();
    // Only this gateway asks for them: a journal's lines would be comments without end to a client, and where requests move is
    // none of its business.
    request.headers_mut().remove(JOURNAL);
    request.headers_mut().remove(DECODE_AT);
    if backend.kind == BackendKind::Worker {
        request.headers_mut().extend(shared.cluster_header.clone());
        if call.route.is_generation() {
            request.headers_mut().insert(JOURNAL, HeaderValue::from_static("1"));
            let decode_at = call.decode_at.and_then(|base| HeaderValue::from_str(base).ok());
            request.headers_mut().extend(decode_at.map(|base| (HeaderName::from_static(DECODE_AT), base)));
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
    let response = tokio::select! {
        biased;
        response = asking => response.map_err(|error: io::Error| {
            tracing::debug!(worker = %backend.id, %error, "the worker did not answer");
            if is_unconnected(&error) { Failure::Unreachable } else { Failure::Broke }
        })?,
        () = backend.unresponsive.notified() => return Err(Failure::Silent),
        () = tokio::time::sleep_until(call.until) => {
            let is_over = call.deadline <= Instant::now();
            return Err(if is_over { Failure::DeadlinePassed } else { Failure::Silent });
        }
    };
    let response = response.map(|inner| WorkerBody { first: None, inner });
    match response.status() {
        StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE => {
            Err(Failure::Unavailable(Box::new(response)))
        }
        _ if backend.kind == BackendKind::Worker && response.headers().contains_key(MOVED) => {
            Err(read_moved(response, call.deadline).await)
        }
        _ => Ok(response),
    }
}

/// Reads where a request without a stream goes on.
async fn read_moved(response: Response<WorkerBody>, deadline: Instant) -> Failure {
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

/// Whether an error is one of connecting, after which nothing was sent.
fn is_unconnected(error: &io::Error) -> bool {
    use io::ErrorKind::{AddrNotAvailable, ConnectionRefused, HostUnreachable, NetworkUnreachable, TimedOut};
    matches!(
        error.kind(),
        AddrNotAvailable | ConnectionRefused | HostUnreachable | NetworkUnreachable | TimedOut
    )
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

// === impl Exchanged ===

impl Exchanged {
    /// An answer of the backend that was asked, to a request of one leg.
    pub(crate) fn plain(response: Response<WorkerBody>) -> Self {
        let is_on_its_way = false;
        Self { response, answered_by: None, is_on_its_way, other_leg: None, has_foreign_kv: false }
    }
}

// === impl Failure ===

impl Failure {
    /// What it says about the worker.
    pub(crate) fn outcome(&self) -> Outcome {
        match self {
            Self::Unavailable(response) => outcome_of(response.status(), response.headers()),
            Self::Unreachable | Self::Broke | Self::Silent => Outcome::Failure,
            // A short deadline is the client's choice; the worker may be fine.
            Self::DeadlinePassed | Self::NoPartner | Self::Moved(_) | Self::Refused(_) => Outcome::Neutral,
        }
    }
}

// === impl WorkerBody ===

impl WorkerBody {
    /// Waits for the first bytes, which stay the first ones of the body, and returns them; `None` at the end of an empty body.
    /// Cancel safe.
    ///
    /// # Errors
    /// If the connection breaks before.
    pub(crate) async fn peek(&mut self) -> io::Result<Option<&Bytes>> {
        while self.first.is_none() {
            let Some(frame) = self.inner.frame().await else { return Ok(None) };
            let data = frame.map_err(io::Error::other)?.into_data().unwrap_or_default();
            self.first = Some(data).filter(|data| !data.is_empty());
        }
        Ok(self.first.as_ref())
    }
}

impl Body for WorkerBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = self.get_mut();
        if let Some(first) = this.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        let frame = Pin::new(&mut this.inner).poll_frame(context);
        frame.map(|frame| frame.map(|frame| frame.map_err(io::Error::other)))
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let n_first = self.first.as_ref().map_or(0, Bytes::len) as u64;
        let inner = self.inner.size_hint();
        let mut hint = SizeHint::default();
        hint.set_lower(inner.lower() + n_first);
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + n_first);
        }
        hint
    }
}
