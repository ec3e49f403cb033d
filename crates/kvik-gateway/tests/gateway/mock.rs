//! A worker that does as it is told.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

/// What a worker does with a request that is not for its health or models.
#[derive(Debug, Clone)]
pub(crate) enum Behavior {
    /// Answers at once.
    Answer { status: u16, headers: Vec<(&'static str, &'static str)>, body: Bytes },
    /// Answers with this part of a body that is no stream and then neither ends nor goes on.
    AnswerAndHang(Bytes),
    /// Streams these frames and ends.
    Stream(Vec<Bytes>),
    /// Streams these frames and breaks the connection.
    StreamAndDie(Vec<Bytes>),
    /// Streams these frames and then neither ends nor goes on.
    StreamAndHang(Vec<Bytes>),
    /// Streams this frame again and again.
    Endless(Bytes),
    /// Does not answer.
    Hang,
    /// Breaks the connection before an answer.
    Die,
}

/// A request as the worker saw it.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

#[derive(Debug)]
pub(crate) struct MockState {
    pub(crate) behavior: Mutex<Behavior>,
    pub(crate) seen: Mutex<Vec<Seen>>,
    /// Requests for its health, models and events.
    pub(crate) questions: Mutex<Vec<Seen>>,
    pub(crate) model: Mutex<String>,
    /// What `/metrics` says.
    pub(crate) metrics: Mutex<String>,
    pub(crate) is_healthy: AtomicBool,
    pub(crate) is_ready: AtomicBool,
    /// Requests that have neither ended nor been dropped.
    pub(crate) n_open: AtomicUsize,
    /// Requests that the other side gave up.
    pub(crate) n_cancelled: AtomicUsize,
    /// Bytes of endless bodies that the connection took.
    pub(crate) n_sent_bytes: AtomicU64,
}

/// A running worker; gone when dropped.
#[derive(Debug)]
pub(crate) struct MockWorker {
    pub(crate) address: SocketAddr,
    pub(crate) state: Arc<MockState>,
    _stop: DropGuard,
}

/// Counts an open request.
struct Open {
    state: Arc<MockState>,
    is_complete: bool,
}

struct MockBody {
    frames: VecDeque<Bytes>,
    end: End,
    open: Open,
    has_paused: bool,
}

#[derive(Clone)]
enum End {
    Complete,
    Die,
    Hang,
    Repeat(Bytes),
}

impl MockWorker {
    pub(crate) async fn start(model: &str) -> Self {
        Self::start_at("127.0.0.1:0", model).await
    }

    pub(crate) async fn start_at(address: &str, model: &str) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(MockState {
            behavior: Mutex::new(Behavior::answer(200, r#"{"ok":true}"#)),
            seen: Mutex::default(),
            questions: Mutex::default(),
            model: Mutex::new(model.to_owned()),
            metrics: Mutex::default(),
            is_healthy: AtomicBool::new(true),
            is_ready: AtomicBool::new(true),
            n_open: AtomicUsize::new(0),
            n_cancelled: AtomicUsize::new(0),
            n_sent_bytes: AtomicU64::new(0),
        });
        let stop = CancellationToken::new();
        tokio::spawn(serve(listener, Arc::clone(&state), stop.clone()));
        Self { address, state, _stop: stop.drop_guard() }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn behave(&self, behavior: Behavior) {
        *self.state.behavior.lock() = behavior;
    }

    pub(crate) fn n_seen(&self) -> usize {
        self.state.seen.lock().len()
    }

    pub(crate) fn n_cancelled(&self) -> usize {
        self.state.n_cancelled.load(Ordering::SeqCst)
    }
}

impl Behavior {
    pub(crate) fn answer(status: u16, body: &'static str) -> Self {
        Self::Answer { status, headers: Vec::new(), body: Bytes::from_static(body.as_bytes()) }
    }

    pub(crate) fn stream(frames: &[&'static str]) -> Vec<Bytes> {
        frames.iter().map(|frame| Bytes::from_static(frame.as_bytes())).collect()
    }
}

async fn serve(listener: TcpListener, state: Arc<MockState>, stop: CancellationToken) {
    // Dropped with this task: a worker that is gone has no connections.
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let Ok((stream, _)) = accepted else { continue };
        stream.set_nodelay(true).unwrap();
        let state = Arc::clone(&state);
        connections.spawn(async move {
            let service = service_fn(move |request| handle(Arc::clone(&state), request));
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn handle(
    state: Arc<MockState>,
    request: Request<Incoming>,
) -> Result<Response<MockBody>, std::io::Error> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let open = Open::new(&state);
    if parts.method == Method::GET {
        state.questions.lock().push(Seen { path: path.clone(), headers: parts.headers, body: Bytes::new() });
        let is_ok = match path.as_str() {
            "/health" => state.is_healthy.load(Ordering::SeqCst),
            "/ready" => state.is_ready.load(Ordering::SeqCst),
            _ => true,
        };
        if !is_ok {
            // A stopped process does not answer at all.
            std::future::pending::<Infallible>().await;
        }
        if path == "/metrics" {
            let metrics = state.metrics.lock().clone();
            return Ok(Response::new(MockBody::new(vec![Bytes::from(metrics)], End::Complete, open)));
        }
        let models = format!(r#"{{"object":"list","data":[{{"id":"{}"}}]}}"#, state.model.lock());
        return Ok(Response::new(MockBody::new(vec![Bytes::from(models)], End::Complete, open)));
    }
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    state.seen.lock().push(Seen { path, headers: parts.headers, body });
    let behavior = state.behavior.lock().clone();
    let stream = |frames: Vec<Bytes>, end: End| {
        Response::builder().header("content-type", "text/event-stream").body((frames, end)).unwrap()
    };
    let response = match behavior {
        Behavior::Answer { status, headers, body } => {
            let mut response = Response::new((vec![body], End::Complete));
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            for (name, value) in headers {
                response.headers_mut().insert(name, value.parse().unwrap());
            }
            response
        }
        Behavior::AnswerAndHang(part) => Response::new((vec![part], End::Hang)),
        Behavior::Stream(frames) => stream(frames, End::Complete),
        Behavior::StreamAndDie(frames) => stream(frames, End::Die),
        Behavior::StreamAndHang(frames) => stream(frames, End::Hang),
        Behavior::Endless(frame) => stream(Vec::new(), End::Repeat(frame)),
        Behavior::Hang => std::future::pending().await,
        Behavior::Die => return Err(std::io::Error::other("told to die")),
    };
    Ok(response.map(|(frames, end)| MockBody::new(frames, end, open)))
}

impl Open {
    fn new(state: &Arc<MockState>) -> Self {
        state.n_open.fetch_add(1, Ordering::SeqCst);
        Self { state: Arc::clone(state), is_complete: false }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.state.n_open.fetch_sub(1, Ordering::SeqCst);
        if !self.is_complete {
            self.state.n_cancelled.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl MockBody {
    fn new(frames: Vec<Bytes>, end: End, open: Open) -> Self {
        Self { frames: frames.into(), end, open, has_paused: true }
    }
}

impl Body for MockBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        let this = self.get_mut();
        // One frame at a time on the wire: the connection flushes while a body waits.
        this.has_paused = !this.has_paused;
        if this.has_paused {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if let Some(frame) = this.frames.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(frame))));
        }
        match this.end.clone() {
            End::Complete => {
                this.open.is_complete = true;
                Poll::Ready(None)
            }
            End::Die => {
                this.open.is_complete = true;
                Poll::Ready(Some(Err(std::io::Error::other("told to die"))))
            }
            End::Hang => Poll::Pending,
            End::Repeat(frame) => {
                this.open.state.n_sent_bytes.fetch_add(frame.len() as u64, Ordering::SeqCst);
                Poll::Ready(Some(Ok(Frame::data(frame))))
            }
        }
    }
}
