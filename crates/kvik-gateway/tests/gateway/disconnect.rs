//! Clients that go away, and clients that do not read.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use kvik_gateway::GatewayConfig;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

use crate::mock::{Behavior, MockWorker};
use crate::support::{TestGateway, until};

const BODY: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;

#[tokio::test]
async fn a_thousand_disconnects_leave_no_load_and_no_request_behind() {
    let workers = [MockWorker::start("m").await, MockWorker::start("m").await];
    for worker in &workers {
        worker.behave(Behavior::StreamAndHang(Behavior::stream(&["data: 1\n\n"])));
    }
    let gateway = Arc::new(TestGateway::before(&[&workers[0], &workers[1]], |_| {}).await);
    let mut clients = JoinSet::new();
    for number in 0..20_u32 {
        let gateway = Arc::clone(&gateway);
        clients.spawn(async move {
            for round in 0..50_u32 {
                let mut response = gateway.open("/v1/completions", &[], BODY).await;
                // Some leave before the first frame and some after it.
                if (number + round).is_multiple_of(2) {
                    response.body_mut().frame().await.unwrap().unwrap();
                }
            }
        });
    }
    clients.join_all().await;
    until("all load is back", async || gateway.outstanding_tokens() == 0).await;
    // Health questions come and go; only streams stay open.
    let n_streams = || workers.iter().map(MockWorker::n_cancelled).sum::<usize>();
    until("all streams are cancelled", async || n_streams() == 1000).await;
    assert!(workers.iter().all(|worker| gateway.breaker(worker) == "closed"));
}

#[tokio::test]
async fn a_client_that_leaves_before_the_answer_cancels_the_request() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    worker.behave(Behavior::Hang);
    let request = gateway.open("/v1/completions", &[], r#"{"model":"m","prompt":"hi"}"#);
    tokio::select! {
        _ = request => unreachable!("the worker does not answer"),
        () = until("the worker has the request", async || worker.n_seen() == 1) => {}
    }
    until("the worker is let go", async || worker.n_cancelled() == 1).await;
    until("the load is back", async || gateway.outstanding_tokens() == 0).await;
}

#[tokio::test]
async fn a_client_that_leaves_the_queue_leaves_no_place_taken() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |config| config.admission.max_running = 1).await;
    worker.behave(Behavior::StreamAndHang(Behavior::stream(&["data: 1\n\n"])));
    let running = gateway.open("/v1/completions", &[], BODY).await;
    tokio::select! {
        _ = gateway.open("/v1/completions", &[], BODY) => unreachable!("there is no room"),
        () = until("it waits", async || gateway.gateway().n_waiting() == 1) => {}
    }
    until("the place is free", async || gateway.gateway().n_waiting() == 0).await;
    drop(running);
    worker.behave(Behavior::answer(200, "{}"));
    assert_eq!(gateway.complete(BODY).await.status, 200);
}

/// Streams without an end.
fn endless() -> Behavior {
    Behavior::Endless(Bytes::from([&b"data: "[..], &[b'x'; 10_000], b"\n\n"].concat()))
}

/// Sends a request over a connection of its own and never reads.
async fn ask_and_never_read(gateway: &TestGateway) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    // Little that the kernel would take in the client's place.
    socket.set_recv_buffer_size(4096).unwrap();
    let address = gateway.running.address();
    let mut stream = socket.connect(address).await.unwrap();
    let n_bytes = BODY.len();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-length: {n_bytes}\r\n\r\n{BODY}"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn a_client_that_does_not_read_stops_its_worker_and_fills_no_memory() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |config| config.timeouts.stream_idle_ms = 500).await;
    worker.behave(endless());
    let response = gateway.open("/v1/completions", &[], BODY).await;
    until("the worker is let go", async || worker.n_cancelled() == 1).await;
    // What the sockets' buffers of two connections hold, not what the worker could send.
    let n_sent_bytes = worker.state.n_sent_bytes.load(Ordering::SeqCst);
    assert!(n_sent_bytes < 64 << 20, "{n_sent_bytes} bytes");
    until("the load is back", async || gateway.outstanding_tokens() == 0).await;
    assert_eq!(gateway.breaker(&worker), "closed");
    drop(response);
}

/// With as many stalled clients as may run, another one is served once a limit has passed.
async fn assert_stalled_readers_make_room(change: impl FnOnce(&mut GatewayConfig)) {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |config| {
        config.admission.max_running = 4;
        change(config);
    })
    .await;
    worker.behave(endless());
    let mut stalled = Vec::new();
    for _ in 0..4 {
        stalled.push(ask_and_never_read(&gateway).await);
    }
    until("the worker has the requests", async || worker.n_seen() == 4).await;
    worker.behave(Behavior::answer(200, "{}"));
    // The limit may be one on its own time too, and it waits for those before it.
    until("another one is served", async || gateway.complete(BODY).await.status == 200).await;
    until("all are let go", async || worker.n_cancelled() == 4).await;
    until("the load is back", async || gateway.outstanding_tokens() == 0).await;
    assert_eq!(gateway.breaker(&worker), "closed");
}

#[tokio::test]
async fn stalled_readers_give_their_permits_back_at_the_request_deadline() {
    assert_stalled_readers_make_room(|config| config.timeouts.request_ms = 500).await;
}

#[tokio::test]
async fn stalled_readers_give_their_permits_back_when_they_have_been_silent() {
    assert_stalled_readers_make_room(|config| config.timeouts.stream_idle_ms = 500).await;
}

#[tokio::test]
async fn stalled_readers_give_their_permits_back_at_the_listeners_limit() {
    assert_stalled_readers_make_room(|config| config.limits.write_stall_ms = 500).await;
}

#[tokio::test]
async fn a_thousand_stalled_readers_leave_the_gateway_serving_others() {
    const N_STALLED: usize = 1000;
    kvik_runtime::http::raise_file_limit();
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |config| {
        assert_eq!(config.admission.max_running, 1024);
        config.timeouts.request_ms = 3000;
    })
    .await;
    worker.behave(endless());
    let mut stalled = Vec::new();
    for _ in 0..N_STALLED {
        stalled.push(ask_and_never_read(&gateway).await);
    }
    until("the worker has the requests", async || worker.n_seen() == N_STALLED).await;
    worker.behave(Behavior::answer(200, "{}"));
    for _ in 0..20 {
        assert_eq!(gateway.complete(BODY).await.status, 200);
    }
    until("all are let go", async || worker.n_cancelled() == N_STALLED).await;
    until("the load is back", async || gateway.outstanding_tokens() == 0).await;
}
