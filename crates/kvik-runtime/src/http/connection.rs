//! The life of one connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use http::Request;
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tower::Service as _;

use super::body::{AnswerBody, BodyBudget, RequestBody};
use super::limits::{AnswerLimits, ListenLimits};
use super::monitor::{Monitor, Phase, Verdict};
use super::stream::LimitedStream;

/// Unsent bytes that the kernel keeps for a client. Its default on a fast network is megabytes, all of which a client
/// that does not read would hold.
const MAX_UNSENT_BYTES: u32 = 256 << 10;

/// What the connections of one listener share.
pub(super) struct Listening {
    pub(super) router: Router,
    pub(super) tls: Option<TlsAcceptor>,
    pub(super) limits: ListenLimits,
    pub(super) budget: Arc<BodyBudget>,
    pub(super) end: End,
}

/// Tells connections that the request they have is their last.
#[derive(Debug, Default)]
pub(super) struct End {
    is_announced: AtomicBool,
    /// Cancelled after the flag is set.
    announced: CancellationToken,
}

impl End {
    pub(super) fn announce(&self) {
        // Release: a task that the token wakes sees the flag.
        self.is_announced.store(true, Ordering::Release);
        self.announced.cancel();
    }
}

/// Serves a connection until it ends or one of its limits is reached.
pub(super) async fn serve_connection(
    stream: TcpStream,
    peer: SocketAddr,
    listening: Arc<Listening>,
    monitor: Arc<Monitor>,
) {
    // Small frames of a stream must not wait for each other.
    let _ = stream.set_nodelay(true);
    let _ = socket2::SockRef::from(&stream).set_tcp_notsent_lowat(MAX_UNSENT_BYTES);
    let limits = &listening.limits;
    let stream = LimitedStream::new(stream, Arc::clone(&monitor), limits.write_stall());
    let Some(acceptor) = listening.tls.clone() else {
        return serve_requests(stream, peer, &listening, monitor).await;
    };
    let accepted = tokio::select! {
        accepted = tokio::time::timeout(limits.handshake(), acceptor.accept(stream)) => accepted,
        () = listening.end.announced.cancelled() => return,
    };
    match accepted {
        Ok(Ok(stream)) => {
            monitor.enter(Phase::New, Instant::now());
            serve_requests(stream, peer, &listening, monitor).await;
        }
        Ok(Err(error)) => tracing::debug!(%peer, %error, "TLS handshake failed"),
        Err(_) => super::count_closed("handshake"),
    }
}

/// Serves the requests of one connection; must be polled by one task only.
async fn serve_requests(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: SocketAddr,
    listening: &Arc<Listening>,
    monitor: Arc<Monitor>,
) {
    let service = {
        let (listening, monitor) = (Arc::clone(listening), Arc::clone(&monitor));
        service_fn(move |request| answer(request, peer, &listening, &monitor))
    };
    let mut builder = http1::Builder::new();
    // The monitor has the times of heads: here they would begin while a connection is idle.
    builder.timer(TokioTimer::new()).header_read_timeout(None);
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    let End { is_announced, announced } = &listening.end;
    let mut announcement = std::pin::pin!(announced.cancelled());
    let (mut is_awaited, mut is_ending) = (false, false);
    let first_look = Instant::now() + listening.limits.header().min(listening.limits.idle());
    let mut clock = std::pin::pin!(tokio::time::sleep_until(first_look));
    // A connection that breaks is the client's affair and is seen by the request's own guards.
    let _ = std::future::poll_fn(|context| {
        // This runs for every frame of every stream. The announcement and the clock wake this task once they have
        // been polled; after that a look at each takes no lock.
        if !is_awaited {
            is_awaited = true;
            let _ = announcement.as_mut().poll(context);
            let _ = clock.as_mut().poll(context);
        }
        while clock.is_elapsed() {
            match monitor.judge(&listening.limits, Instant::now()) {
                Verdict::Close(reason) => {
                    super::count_closed(reason);
                    return std::task::Poll::Ready(Ok(()));
                }
                Verdict::Until(then) => clock.as_mut().reset(then),
            }
            let _ = clock.as_mut().poll(context);
        }
        if !is_ending && is_announced.load(Ordering::Acquire) {
            is_ending = true;
            if monitor.is_idle() {
                return std::task::Poll::Ready(Ok(()));
            }
            connection.as_mut().graceful_shutdown();
        }
        connection.as_mut().poll(context)
    })
    .await;
}

/// Has one request answered, under the limits of the listener and of the answer.
fn answer(
    request: Request<Incoming>,
    peer: SocketAddr,
    listening: &Listening,
    monitor: &Arc<Monitor>,
) -> impl Future<Output = Result<http::Response<AnswerBody>, std::convert::Infallible>> + Send + use<> {
    let now = Instant::now();
    let is_complete = request.body().is_end_stream();
    monitor.enter(if is_complete { Phase::Running } else { Phase::Body }, now);
    let mut request = request.map(|body| {
        let (monitor, budget) = (Arc::clone(monitor), Arc::clone(&listening.budget));
        RequestBody::new(body, monitor, budget, now, listening.limits.body())
    });
    request.extensions_mut().insert(peer);
    let answering = listening.router.clone().call(request);
    let monitor = Arc::clone(monitor);
    async move {
        let mut response = answering.await?;
        if let Some(limits) = response.extensions_mut().remove::<AnswerLimits>() {
            monitor.begin_answer(limits);
        }
        Ok(response.map(|body| AnswerBody::new(body, monitor)))
    }
}
