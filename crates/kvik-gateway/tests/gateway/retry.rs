//! Another worker, but only before the first byte.

use crate::mock::{Behavior, MockWorker};
use crate::support::{TestGateway, until};

const BODY: &str = r#"{"model":"m","prompt":"hi","prompt_cache_key":"s"}"#;

/// Two workers, the first of which owns the key of [`BODY`].
async fn owner_and_other(behavior: Behavior) -> (TestGateway, MockWorker, MockWorker) {
    let (left, right) = (MockWorker::start("m").await, MockWorker::start("m").await);
    let gateway =
        TestGateway::before(&[&left, &right], |config| config.breaker.consecutive_failures = 100).await;
    let owner = gateway.complete(BODY).await.worker();
    let (owner, other) = if owner == left.url() { (left, right) } else { (right, left) };
    owner.state.seen.lock().clear();
    owner.behave(behavior);
    (gateway, owner, other)
}

#[tokio::test]
async fn a_worker_that_breaks_off_before_the_answer_is_replaced() {
    let (gateway, owner, other) = owner_and_other(Behavior::Die).await;
    let answer = gateway.complete(BODY).await;
    assert_eq!((answer.status.as_u16(), answer.worker()), (200, other.url()));
    assert_eq!((owner.n_seen(), other.n_seen()), (1, 1));
}

#[tokio::test]
async fn a_worker_that_is_gone_is_replaced() {
    let (gateway, owner, other) = owner_and_other(Behavior::Die).await;
    drop(owner);
    let answer = gateway.complete(BODY).await;
    assert_eq!((answer.status.as_u16(), answer.worker()), (200, other.url()));
}

#[tokio::test]
async fn an_unavailable_worker_is_replaced() {
    for status in [502, 503] {
        let (gateway, owner, other) = owner_and_other(Behavior::answer(status, "no")).await;
        assert_eq!(gateway.complete(BODY).await.worker(), other.url());
        assert_eq!((owner.n_seen(), other.n_seen()), (1, 1));
    }
}

#[tokio::test]
async fn other_errors_are_answers_and_are_not_tried_again() {
    for status in [400, 404, 429, 500, 501] {
        let (gateway, owner, other) = owner_and_other(Behavior::answer(status, "no")).await;
        let answer = gateway.complete(BODY).await;
        assert_eq!((answer.status.as_u16(), &answer.body[..]), (status, &b"no"[..]));
        assert_eq!((owner.n_seen(), other.n_seen()), (1, 0));
    }
}

#[tokio::test]
async fn a_named_sequence_moves_when_its_owner_has_no_place_left() {
    let body = r#"{"model":"m","prompt":"hi","seq_id":"s"}"#;
    let workers = [MockWorker::start("m").await, MockWorker::start("m").await];
    let gateway = TestGateway::before(&[&workers[0], &workers[1]], |_| {}).await;
    let owner = gateway.complete(body).await.worker();
    let (owner, other) = if workers[0].url() == owner { (0, 1) } else { (1, 0) };
    workers[owner].behave(Behavior::answer(429, "full"));
    assert_eq!(gateway.complete(body).await.worker(), workers[other].url());
    workers[other].behave(Behavior::answer(429, "full too"));
    let answer = gateway.complete(body).await;
    assert_eq!((answer.status.as_u16(), &answer.body[..]), (429, &b"full too"[..]));
}

#[tokio::test]
async fn nothing_is_tried_again_once_a_stream_has_begun() {
    let frames = Behavior::stream(&["data: 1\n\n"]);
    let (gateway, owner, other) = owner_and_other(Behavior::StreamAndDie(frames)).await;
    let answer = gateway.complete(BODY).await;
    assert!(answer.body.starts_with(b"data: 1\n\ndata: {\"error\""));
    assert_eq!((owner.n_seen(), other.n_seen()), (1, 0));
}

#[tokio::test]
async fn the_last_answer_is_passed_on_when_all_are_unavailable() {
    let (gateway, owner, other) = owner_and_other(Behavior::answer(503, "busy one")).await;
    other.behave(Behavior::answer(503, "busy two"));
    let answer = gateway.complete(BODY).await;
    assert_eq!((answer.status.as_u16(), &answer.body[..]), (503, &b"busy two"[..]));
    assert_eq!((owner.n_seen(), other.n_seen()), (1, 1), "each worker once, attempts bounded");
}

#[tokio::test]
async fn a_failure_without_another_worker_is_a_bad_gateway() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    worker.behave(Behavior::Die);
    gateway.complete(BODY).await.assert_error(502, None);
    assert_eq!(worker.n_seen(), 1);
    until("the load is back", async || gateway.outstanding_tokens() == 0).await;
}

#[tokio::test]
async fn retries_end_with_their_budget() {
    let (left, right) = (MockWorker::start("m").await, MockWorker::start("m").await);
    let gateway = TestGateway::before(&[&left, &right], |config| {
        config.breaker.consecutive_failures = 1000;
        config.breaker.min_requests = 1000;
        config.retry.budget_burst = 3;
        config.retry.budget_ratio = 0.0;
    })
    .await;
    left.behave(Behavior::answer(503, "no"));
    right.behave(Behavior::answer(503, "no"));
    for _ in 0..10 {
        assert_eq!(gateway.complete(BODY).await.status, 503);
    }
    assert_eq!(left.n_seen() + right.n_seen(), 13);
}
