//! Clients that go away, and clients that do not read.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http_body_util::BodyExt as _;
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

#[tokio::test]
async fn a_client_that_does_not_read_stops_its_worker_and_fills_no_memory() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    let frame = [&b"data: "[..], &[b'x'; 10_000], b"\n\n"].concat();
    worker.behave(Behavior::Endless(Bytes::from(frame)));
    let response = gateway.open("/v1/completions", &[], BODY).await;
    let sent = || worker.state.n_sent_bytes.load(Ordering::SeqCst);
    // The last count, and how many looks in a row have found it.
    let looks = std::cell::Cell::new((u64::MAX, 0));
    until("the worker waits for the client", async || {
        let (last, n_same) = looks.get();
        looks.set((sent(), if last == sent() { n_same + 1 } else { 0 }));
        n_same >= 40
    })
    .await;
    // What the sockets' buffers of two connections hold, not what the worker could send.
    assert!(sent() < 64 << 20, "{} bytes", sent());
    drop(response);
    until("the load is back", async || gateway.outstanding_tokens() == 0).await;
}
