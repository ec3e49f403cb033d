//! Clients that are slow, silent, greedy or many.

use std::convert::Infallible;

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use bytes::Bytes;
use http_body::Frame;
use http_body_util::BodyExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::*;
use crate::http::connections::Connections;
use crate::http::monitor::Phase;

/// A limit that is reached within a test.
const SHORT_MS: u64 = 100;
/// A limit that is not.
const LONG_MS: u64 = 3_600_000;

/// Limits of which none is reached within a test.
fn long() -> ListenLimits {
    ListenLimits {
        handshake_ms: LONG_MS,
        header_ms: LONG_MS,
        body_ms: LONG_MS,
        idle_ms: LONG_MS,
        write_stall_ms: LONG_MS,
        ..ListenLimits::default()
    }
}

/// A body without end.
struct Endless {
    _ended: DropGuard,
}

impl http_body::Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[b'x'; 16 << 10])))))
    }
}

/// Asks for an endless answer, reads nothing, and waits until the server has dropped it.
async fn stall(limits: ListenLimits, answer_limits: fn() -> Option<AnswerLimits>) {
    let ended = CancellationToken::new();
    let token = ended.clone();
    let handler = async move || {
        let mut response = Response::new(Body::new(Endless { _ended: token.drop_guard() }));
        if let Some(limits) = answer_limits() {
            response.extensions_mut().insert(limits);
        }
        response
    };
    let shutdown = Shutdown::new();
    let (address, _) = start_with(&shutdown, Router::new().route("/", get(handler)), None, limits).await;
    let client = TcpStream::connect(address).await.unwrap();
    send(&client).await;
    tokio::time::timeout(PATIENCE, ended.cancelled()).await.expect("the body is dropped");
    shutdown.stop();
}

#[tokio::test]
async fn a_client_that_stops_reading_loses_its_connection() {
    stall(ListenLimits { write_stall_ms: SHORT_MS, ..long() }, || None).await;
}

#[tokio::test]
async fn the_limits_of_an_answer_hold_though_its_body_is_not_polled() {
    const SHORT: Duration = Duration::from_millis(SHORT_MS);
    const LONG: Duration = Duration::from_millis(LONG_MS);
    stall(long(), || Some(AnswerLimits { deadline: Instant::now() + SHORT, max_stall: LONG })).await;
    stall(long(), || Some(AnswerLimits { deadline: Instant::now() + LONG, max_stall: SHORT })).await;
}

#[tokio::test]
async fn a_client_that_sends_no_head_or_half_of_one_is_closed() {
    let shutdown = Shutdown::new();
    let limits = ListenLimits { header_ms: SHORT_MS, ..long() };
    let (address, _) = start_with(&shutdown, Router::new(), None, limits).await;
    let silent = TcpStream::connect(address).await.unwrap();
    let mut slow = TcpStream::connect(address).await.unwrap();
    slow.write_all(b"GET / HT").await.unwrap();
    assert_eq!(read(&silent, usize::MAX).await, "");
    assert_eq!(read(&slow, usize::MAX).await, "");
    shutdown.stop();
}

#[tokio::test]
async fn a_connection_without_requests_is_closed_and_a_running_one_is_not() {
    let (gate, arrived) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (opened, told) = (Arc::clone(&gate), Arc::clone(&arrived));
    let slow = async move || {
        told.notify_one();
        opened.notified().await;
    };
    let router = Router::new().route("/", get(async || "quick")).route("/slow", get(slow));
    let shutdown = Shutdown::new();
    let limits = ListenLimits { idle_ms: SHORT_MS, ..long() };
    let (address, _) = start_with(&shutdown, router, None, limits).await;
    let mut running = TcpStream::connect(address).await.unwrap();
    running.write_all(b"GET /slow HTTP/1.1\r\nhost: test\r\n\r\n").await.unwrap();
    arrived.notified().await;
    let idle = TcpStream::connect(address).await.unwrap();
    send(&idle).await;
    // Until the server closes it; the running one is older.
    assert!(read(&idle, usize::MAX).await.ends_with("quick"));
    gate.notify_one();
    assert!(read(&running, 12).await.starts_with("HTTP/1.1 200"));
    shutdown.stop();
}

/// Reads a body, counts its bytes as they come, and answers with what was wrong.
async fn count_bytes(n_read: Arc<AtomicUsize>, request: Request) -> Response {
    let mut body = request.into_body();
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => {
                n_read.fetch_add(frame.data_ref().map_or(0, Bytes::len), Ordering::SeqCst);
            }
            Err(error) => return format!("{:?}", RequestBodyError::find(&error)).into_response(),
        }
    }
    "whole".into_response()
}

fn counting_router(n_read: &Arc<AtomicUsize>) -> Router {
    let n_read = Arc::clone(n_read);
    Router::new().route("/", post(move |request| count_bytes(n_read, request)))
}

/// A connection that has sent the first bytes of a body.
async fn post_part(address: SocketAddr, n_announced: usize, n_sent: usize) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST / HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: {n_announced}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&vec![b'x'; n_sent]).await.unwrap();
    stream
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("it never came that {what}"));
}

#[tokio::test]
async fn a_body_that_does_not_arrive_in_time_is_an_error() {
    let shutdown = Shutdown::new();
    let limits = ListenLimits { body_ms: SHORT_MS, ..long() };
    let (address, _) = start_with(&shutdown, counting_router(&Arc::default()), None, limits).await;
    let slow = post_part(address, 10, 5).await;
    assert!(read(&slow, usize::MAX).await.ends_with("Some(Slow)"));
    shutdown.stop();
}

#[tokio::test]
async fn bodies_beyond_the_budget_are_an_error_and_small_ones_are_still_read() {
    let shutdown = Shutdown::new();
    let limits = ListenLimits { max_body_bytes_in_flight: 1 << 20, ..long() };
    let n_read = Arc::new(AtomicUsize::new(0));
    let (address, _) = start_with(&shutdown, counting_router(&n_read), None, limits).await;
    let large = post_part(address, 10 << 20, 600 << 10).await;
    until("the large body is half there", || n_read.load(Ordering::SeqCst) == 600 << 10).await;
    let second = post_part(address, 10 << 20, 400 << 10).await;
    assert!(read(&second, usize::MAX).await.ends_with("Some(NoRoom)"));
    let n_before = n_read.load(Ordering::SeqCst);
    let mut small = post_part(address, 2000, 1000).await;
    until("the small body is half there", || n_read.load(Ordering::SeqCst) == n_before + 1000).await;
    small.write_all(&[b'x'; 1000]).await.unwrap();
    assert!(read(&small, usize::MAX).await.ends_with("whole"));
    // The bytes of a body go back with it.
    drop(large);
    let again = async {
        while !read(&post_part(address, 500 << 10, 500 << 10).await, usize::MAX).await.ends_with("whole") {}
    };
    tokio::time::timeout(PATIENCE, again).await.expect("there is room again");
    shutdown.stop();
}

fn tls() -> Option<TlsAcceptor> {
    let folder = tempfile::tempdir().unwrap();
    let signed = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let write = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        Some(path)
    };
    let config = TlsServerConfig {
        certificate: write("certificate.pem", signed.cert.pem()),
        key: write("key.pem", signed.signing_key.serialize_pem()),
        client_authorities: None,
    };
    tls_acceptor(&config).unwrap()
}

#[tokio::test]
async fn a_tls_client_that_says_nothing_is_closed() {
    let shutdown = Shutdown::new();
    let limits = ListenLimits { handshake_ms: SHORT_MS, ..long() };
    let (address, _) = start_with(&shutdown, Router::new(), tls(), limits).await;
    let silent = TcpStream::connect(address).await.unwrap();
    assert_eq!(read(&silent, usize::MAX).await, "");
    shutdown.stop();
}

#[tokio::test]
async fn clients_that_say_nothing_or_half_a_head_do_not_hold_a_drain() {
    let shutdown = Shutdown::new();
    let router = Router::new().route("/", get(async || "here"));
    let (address, serving) = start_with(&shutdown, router, None, long()).await;
    let silent = TcpStream::connect(address).await.unwrap();
    let mut slow = TcpStream::connect(address).await.unwrap();
    slow.write_all(b"GET / HT").await.unwrap();
    // Accepted after the others.
    let honest = TcpStream::connect(address).await.unwrap();
    send(&honest).await;
    assert!(read(&honest, 12).await.starts_with("HTTP/1.1 200"));
    shutdown.drain();
    assert!(ends(serving).await);
    assert_eq!(read(&silent, usize::MAX).await, "");
}

#[tokio::test]
async fn a_new_client_is_served_in_place_of_an_idle_one() {
    let shutdown = Shutdown::new();
    let limits = ListenLimits { max_connections: 3, ..long() };
    let router = Router::new().route("/", get(async || "here"));
    let (address, _) = start_with(&shutdown, router, None, limits).await;
    let mut clients = Vec::new();
    for _ in 0..20 {
        let client = TcpStream::connect(address).await.unwrap();
        send(&client).await;
        assert!(read(&client, 12).await.ends_with("here"));
        clients.push(client);
    }
    for client in &clients[..17] {
        read(client, usize::MAX).await;
    }
    // Those that are left can be used.
    for client in &clients[17..] {
        send(client).await;
        assert!(read(client, 12).await.ends_with("here"));
    }
    shutdown.stop();
}

#[tokio::test]
async fn a_new_client_waits_while_every_connection_has_a_request() {
    let (shutdown, gate, arrived) = (Shutdown::new(), Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (opened, told) = (Arc::clone(&gate), Arc::clone(&arrived));
    let handler = async move || {
        told.notify_one();
        opened.notified().await;
    };
    let limits = ListenLimits { max_connections: 1, ..long() };
    let (address, _) = start_with(&shutdown, Router::new().route("/", get(handler)), None, limits).await;
    let first = TcpStream::connect(address).await.unwrap();
    send(&first).await;
    arrived.notified().await;
    let second = TcpStream::connect(address).await.unwrap();
    send(&second).await;
    gate.notify_one();
    assert!(read(&first, 12).await.starts_with("HTTP/1.1 200"));
    arrived.notified().await;
    gate.notify_one();
    assert!(read(&second, 12).await.starts_with("HTTP/1.1 200"));
    shutdown.stop();
}

#[tokio::test(start_paused = true)]
async fn the_longest_idle_are_closed_first_then_slow_bodies_and_never_running_requests() {
    let start = Instant::now();
    let mut connections = Connections::new(4);
    let mut monitors = Vec::new();
    let mut ended = Vec::new();
    let phases = [(Phase::Running, 0), (Phase::Body, 1), (Phase::Waiting, 3), (Phase::Head, 2)];
    for (phase, second) in phases {
        let monitor = Arc::new(Monitor::new(start));
        monitor.enter(phase, start + Duration::from_secs(second));
        let token = CancellationToken::new();
        let guard = token.clone().drop_guard();
        connections.spawn(Arc::clone(&monitor), async move {
            let _guard = guard;
            std::future::pending::<()>().await;
        });
        monitors.push(monitor);
        ended.push(token);
    }
    assert!(!connections.has_room());
    for expected in [3, 2, 1] {
        assert!(connections.evict());
        assert!(connections.join_next().await);
        assert!(ended[expected].is_cancelled(), "{expected}");
        assert!(connections.has_room());
    }
    assert!(!connections.evict());
    assert!(!ended[0].is_cancelled());
    monitors[0].enter(Phase::Waiting, start);
    monitors[0].set_stalled(true);
    assert!(!connections.evict(), "its answer is still on the way");
    connections.shutdown().await;
}

#[test]
fn the_files_limit_can_be_raised() {
    assert!(raise_file_limit().is_none_or(|limit| 0 < limit));
}
