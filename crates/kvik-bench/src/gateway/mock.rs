//! Workers that cost as little as a worker can: they read a request whole, parse it as JSON and
//! answer without computing anything.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Either, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::time::{Interval, MissedTickBehavior};

/// The model that the mock workers serve.
pub(crate) const MODEL: &str = "bench";

/// Time between two chunks of a paced stream, as between two steps of an engine: each chunk travels
/// alone and costs system calls of its own.
const STEP: Duration = Duration::from_millis(2);

const CHUNK: &[u8] = b"data: {\"id\":\"cmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":0,\
\"model\":\"bench\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"finish_reason\":null}]}\n\n";
const DONE: &[u8] = b"data: [DONE]\n\n";

/// How fast the chunks of a stream come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// As fast as they are taken.
    Saturated,
    /// One every two milliseconds.
    Steps,
}

/// Bytes of a stream of `n_chunks` chunks.
pub(crate) const fn stream_bytes(n_chunks: usize) -> usize {
    (n_chunks - 1) * CHUNK.len() + DONE.len()
}

/// Starts a mock worker on `runtime` and returns where it listens; it ends with the runtime.
pub(crate) fn start(runtime: &Runtime) -> anyhow::Result<SocketAddr> {
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).context("listen as a mock worker")?;
    let address = listener.local_addr().context("listen as a mock worker")?;
    runtime.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream));
        }
    });
    Ok(address)
}

async fn serve(stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    // A connection that breaks shows itself as a failed request of the load.
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(answer)).await;
}

async fn answer(request: Request<Incoming>) -> Result<Response<Either<Full<Bytes>, Chunks>>, Infallible> {
    if request.method() == Method::GET {
        return Ok(Response::new(Either::Left(Full::from("{}"))));
    }
    let body = request.into_body().collect().await.map(http_body_util::Collected::to_bytes);
    let body = body.ok().and_then(|body| serde_json::from_slice::<Value>(&body).ok());
    let Some(body) = body else {
        let mut refused = Response::new(Either::Left(Full::default()));
        *refused.status_mut() = StatusCode::BAD_REQUEST;
        return Ok(refused);
    };
    let (kind, body) = match body["n_chunks"].as_u64() {
        Some(n_chunks) => {
            let pace = if body["is_paced"] == true { Pace::Steps } else { Pace::Saturated };
            ("text/event-stream", Either::Right(Chunks::new(n_chunks as usize, pace)))
        }
        None => ("application/json", Either::Left(Full::from(completion(&body)))),
    };
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static(kind));
    Ok(response)
}

fn completion(request: &Value) -> String {
    let n_messages = request["messages"].as_array().map_or(0, Vec::len);
    json!({
        "id": "cmpl-bench",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": "One word."},
            "finish_reason": "stop"
        }],
        "usage": {"prompt_tokens": n_messages, "completion_tokens": 3, "total_tokens": n_messages + 3}
    })
    .to_string()
}

/// The body of a stream: chunks, the last of them `[DONE]`.
#[derive(Debug)]
struct Chunks {
    /// `None` where they come as fast as they are taken.
    interval: Option<Interval>,
    n_left: usize,
}

impl Chunks {
    fn new(n_chunks: usize, pace: Pace) -> Self {
        let interval = (pace == Pace::Steps).then(|| {
            let mut interval = tokio::time::interval(STEP);
            // A late step does not make the next ones come together.
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            interval
        });
        Self { interval, n_left: n_chunks }
    }
}

impl Body for Chunks {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        if this.n_left == 0 {
            return Poll::Ready(None);
        }
        if let Some(interval) = &mut this.interval {
            std::task::ready!(interval.poll_tick(context));
        }
        this.n_left -= 1;
        let chunk = if this.n_left == 0 { DONE } else { CHUNK };
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(chunk)))))
    }
}
