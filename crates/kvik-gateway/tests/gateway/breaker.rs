//! Workers that fail get no requests until they are well.

use std::sync::atomic::Ordering;

use bytes::Bytes;

use crate::mock::{Behavior, MockWorker};
use crate::support::TestGateway;

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;

#[tokio::test]
async fn refusals_and_back_pressure_do_not_open_it() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |config| config.breaker.min_requests = 1).await;
    let busy = Behavior::Answer { status: 503, headers: vec![("retry-after", "1")], body: Bytes::new() };
    for behavior in [Behavior::answer(400, "no"), Behavior::answer(429, "later"), busy] {
        worker.behave(behavior);
        for _ in 0..10 {
            gateway.complete(BODY).await;
        }
        assert_eq!(gateway.breaker(&worker), "closed");
    }
    assert_eq!(worker.n_seen(), 30);
}

#[tokio::test]
async fn failures_open_it_and_health_closes_it_again() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |config| config.breaker.open_ms = 200).await;
    worker.behave(Behavior::answer(500, "no"));
    for _ in 0..3 {
        assert_eq!(gateway.complete(BODY).await.status, 500);
    }
    gateway.wait_for_breaker(&worker, "open").await;
    let refused = gateway.complete(BODY).await;
    refused.assert_error(503, None);
    assert!(refused.headers.contains_key("retry-after"));
    assert_eq!(worker.n_seen(), 3, "an open breaker lets nothing through");
    assert_eq!(gateway.get("/ready").await.status, 503);
    worker.behave(Behavior::answer(200, "{}"));
    gateway.wait_for_breaker(&worker, "closed").await;
    assert_eq!(gateway.complete(BODY).await.status, 200);
}

#[tokio::test]
async fn a_worker_that_is_gone_opens_it_and_one_that_is_back_closes_it() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    let url = worker.url();
    let address = worker.address.to_string();
    drop(worker);
    let is_usable = || gateway.gateway().workers().iter().any(|status| status.id == url && status.is_usable);
    crate::support::until("the breaker opens", async || {
        let answer = gateway.complete(BODY).await;
        assert!(matches!(answer.status.as_u16(), 502 | 503));
        !is_usable()
    })
    .await;
    let _back = MockWorker::start_at(&address, "m").await;
    crate::support::until("the breaker closes", async || is_usable()).await;
    assert_eq!(gateway.complete(BODY).await.status, 200);
}

#[tokio::test]
async fn a_stopped_worker_opens_it_and_its_waiting_requests_go_elsewhere() {
    let (left, right) = (MockWorker::start("m").await, MockWorker::start("m").await);
    let gateway = TestGateway::before(&[&left, &right], |config| {
        config.health.timeout_ms = 1000;
        config.health.failures = 2;
    })
    .await;
    let owner = gateway.complete(BODY).await.worker();
    let (stopped, other) = if owner == left.url() { (&left, &right) } else { (&right, &left) };
    // As a stopped process does: it takes connections and answers nothing.
    stopped.behave(Behavior::Hang);
    stopped.state.is_healthy.store(false, Ordering::SeqCst);
    let answer = gateway.complete(BODY).await;
    assert_eq!((answer.status.as_u16(), answer.worker()), (200, other.url()));
    gateway.wait_for_breaker(stopped, "open").await;
    stopped.behave(Behavior::answer(200, "{}"));
    stopped.state.is_healthy.store(true, Ordering::SeqCst);
    gateway.wait_for_breaker(stopped, "closed").await;
    assert_eq!(gateway.complete(BODY).await.worker(), stopped.url());
}

#[tokio::test]
async fn a_missing_head_of_a_stream_is_a_failure() {
    let (left, right) = (MockWorker::start("m").await, MockWorker::start("m").await);
    let gateway = TestGateway::before(&[&left, &right], |config| {
        config.timeouts.response_header_ms = 100;
        config.breaker.consecutive_failures = 1;
        config.breaker.open_ms = 60_000;
        config.breaker.max_open_ms = 60_000;
    })
    .await;
    let body = r#"{"model":"m","prompt":"hi","stream":true}"#;
    let owner = gateway.complete(body).await.worker();
    let (silent, other) = if owner == left.url() { (&left, &right) } else { (&right, &left) };
    silent.behave(Behavior::Hang);
    assert_eq!(gateway.complete(body).await.worker(), other.url());
    assert_eq!(gateway.breaker(silent), "open");
}
