//! Which worker gets a request.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http_body_util::BodyExt as _;

use crate::mock::{Behavior, MockWorker};
use crate::support::{TestGateway, until};

async fn workers(n_workers: usize) -> Vec<MockWorker> {
    let mut workers = Vec::new();
    for _ in 0..n_workers {
        workers.push(MockWorker::start("m").await);
    }
    workers
}

#[tokio::test]
async fn one_seq_id_stays_on_one_worker_and_many_use_all() {
    let workers = workers(4).await;
    let gateway = TestGateway::before(&workers.iter().collect::<Vec<_>>(), |_| {}).await;
    let mut used = HashSet::new();
    for number in 0..60 {
        let body = format!(r#"{{"model":"m","prompt":"x","seq_id":"s{number}"}}"#);
        let first = gateway.complete(&body).await.worker();
        let second = gateway.post("/v1/chat/completions", &[], &body).await.worker();
        assert_eq!(first, second);
        used.insert(first);
    }
    assert_eq!(used.len(), 4);
}

#[tokio::test]
async fn a_session_header_counts_where_there_is_no_seq_id() {
    let workers = workers(4).await;
    let gateway = TestGateway::before(&workers.iter().collect::<Vec<_>>(), |_| {}).await;
    let mut used = HashSet::new();
    for number in 0..40 {
        let session = format!("session-{number}");
        let headers = [("x-session-id", session.as_str())];
        let first = gateway.post("/v1/completions", &headers, r#"{"model":"m","prompt":"a"}"#).await.worker();
        let second =
            gateway.post("/v1/completions", &headers, r#"{"model":"m","prompt":"b"}"#).await.worker();
        assert_eq!(first, second);
        used.insert(first);
    }
    assert_eq!(used.len(), 4);
}

#[tokio::test]
async fn a_hot_key_spills_over_to_the_next_worker_and_no_bound_is_passed() {
    let workers = workers(4).await;
    let gateway = TestGateway::before(&workers.iter().collect::<Vec<_>>(), |_| {}).await;
    for worker in &workers {
        worker.behave(Behavior::StreamAndHang(Behavior::stream(&["data: 1\n\n"])));
    }
    let body = r#"{"model":"m","prompt":"x","prompt_cache_key":"hot","max_tokens":100,"stream":true}"#;
    let mut open = Vec::new();
    for _ in 0..40 {
        open.push(gateway.open("/v1/completions", &[], body).await);
        let loads: Vec<u64> =
            gateway.gateway().workers().iter().map(|worker| worker.outstanding_tokens).collect();
        // A request does not split: where none has room the least loaded one takes it.
        let bound = (1.25 * loads.iter().sum::<u64>() as f64 / 4.0).ceil() + 101.0;
        assert!(loads.iter().all(|&load| load as f64 <= bound), "{loads:?}");
    }
    assert!(workers.iter().all(|worker| 0 < worker.state.n_open.load(Ordering::SeqCst)));
}

#[tokio::test]
async fn a_named_sequence_keeps_its_worker_beside_a_few_other_streams_of_it() {
    let workers = workers(4).await;
    let gateway = TestGateway::before(&workers.iter().collect::<Vec<_>>(), |_| {}).await;
    let body = r#"{"model":"m","prompt":"x","seq_id":"conversation","max_tokens":100,"stream":true}"#;
    let owner = gateway.complete(body).await.worker();
    for worker in &workers {
        worker.behave(Behavior::StreamAndHang(Behavior::stream(&["data: 1\n\n"])));
    }
    // Streams of other sequences with the same owner, and of none other: the mean load says nothing of the owner's.
    let mut open = Vec::new();
    for number in 0.. {
        let other =
            format!(r#"{{"model":"m","prompt":"x","seq_id":"s{number}","max_tokens":100,"stream":true}}"#);
        let stream = gateway.open("/v1/completions", &[], &other).await;
        if stream.headers()["x-kvik-worker"] == owner.as_str() {
            open.push(stream);
        }
        if open.len() == 5 {
            break;
        }
    }
    let next = gateway.open("/v1/completions", &[], body).await;
    assert_eq!(next.headers()["x-kvik-worker"], owner.as_str());
}

#[tokio::test]
async fn a_prompt_is_load_until_the_first_token_and_the_answer_until_its_end() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    // About a thousand tokens.
    let prompt = "x".repeat(4000);
    let body = format!(r#"{{"model":"m","prompt":"{prompt}","max_tokens":100,"stream":true}}"#);

    worker.behave(Behavior::StreamAndHang(Vec::new()));
    let waiting = gateway.open("/v1/completions", &[], &body).await;
    assert_eq!(gateway.outstanding_tokens(), 1100, "nothing of the answer has come");
    worker.behave(Behavior::StreamAndHang(Behavior::stream(&["data: 1\n\n", "data: 2\n\n"])));
    let mut begun = gateway.open("/v1/completions", &[], &body).await;
    begun.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(gateway.outstanding_tokens(), 1200, "a prompt is computed");
    worker.behave(Behavior::AnswerAndHang(Bytes::from_static(b"{")));
    let mut whole = gateway.open("/v1/completions", &[], &body).await;
    whole.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(gateway.outstanding_tokens(), 2300, "an answer in one piece is computed when it has ended");

    drop(begun);
    until("the answer's part is back", async || gateway.outstanding_tokens() == 2200).await;
    drop((waiting, whole));
    until("all load is back", async || gateway.outstanding_tokens() == 0).await;
}

#[tokio::test]
async fn models_of_all_backends_are_listed_and_requests_go_by_model() {
    let (first, second) = (MockWorker::start("org/one").await, MockWorker::start("two").await);
    let gateway = TestGateway::before(&[&first, &second], |_| {}).await;
    let models = gateway.get("/v1/models").await.json();
    let ids: Vec<&str> =
        models["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["org/one", "two"]);
    assert_eq!(gateway.get("/v1/models/org/one").await.json()["id"], "org/one");
    gateway.get("/v1/models/three").await.assert_error(404, Some("model_not_found"));
    for (model, worker) in [("org/one", &first), ("two", &second)] {
        for path in ["/v1/completions", "/tokenize", "/detokenize"] {
            let answer = gateway.post(path, &[], &format!(r#"{{"model":"{model}","prompt":"x"}}"#)).await;
            assert_eq!(answer.worker(), worker.url());
        }
    }
    let error = gateway
        .complete(r#"{"model":"three","prompt":"x"}"#)
        .await
        .assert_error(404, Some("model_not_found"));
    assert_eq!(error["param"], "model");
    let error = gateway.complete(r#"{"prompt":"x"}"#).await.assert_error(400, None);
    assert_eq!(error["param"], "model");
}
