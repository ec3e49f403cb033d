//! Answers pass as they are.

use bytes::Bytes;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use crate::mock::{Behavior, MockWorker};
use crate::support::{TestGateway, until};

const BODY: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;

#[tokio::test]
async fn a_stream_passes_byte_for_byte_however_it_is_cut() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    let frames = [": comment\n\nda", "ta: {\"a\":1}\n", "\ndata: x\r\n\r", "\n", "data: [DONE]\n\n"];
    worker.behave(Behavior::Stream(Behavior::stream(&frames)));
    let answer = gateway.complete(BODY).await;
    assert_eq!(answer.body, frames.concat());
    assert_eq!(answer.headers["content-type"], "text/event-stream");
    until("the load is back", async || gateway.outstanding_tokens() == 0).await;
}

#[tokio::test]
async fn frames_arrive_when_they_are_sent_not_when_the_stream_ends() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    worker.behave(Behavior::StreamAndHang(Behavior::stream(&["data: first\n\n"])));
    let mut response = gateway.open("/v1/completions", &[], BODY).await;
    let frame = response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "data: first\n\n");
    assert!(0 < gateway.outstanding_tokens());
}

#[tokio::test]
async fn the_request_reaches_the_worker_untouched() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    let body = "{ \"model\" : \"m\", \"prompt\":\"h\\u00e9\", \"unknown\":{\"x\":[1e3, 1.50]},\n\"seed\":18446744073709551615}";
    let headers = [
        ("x-request-id", "my-id"),
        ("x-custom", "kept"),
        ("authorization", "Bearer secret"),
        ("connection", "x-hop"),
        ("x-hop", "1"),
    ];
    let answer = gateway.post("/v1/chat/completions", &headers, body).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.headers["x-request-id"], "my-id");
    let seen = worker.state.seen.lock()[0].clone();
    assert_eq!(seen.body, body);
    assert_eq!(seen.path, "/v1/chat/completions");
    assert_eq!(seen.headers["x-request-id"], "my-id");
    assert_eq!(seen.headers["x-custom"], "kept");
    assert_eq!(seen.headers["content-type"], "application/json");
    assert!(!seen.headers.contains_key("authorization") && !seen.headers.contains_key("x-hop"));
}

#[tokio::test]
async fn an_answer_keeps_its_status_headers_and_body() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    worker.behave(Behavior::Answer {
        status: 422,
        headers: vec![("x-worker", "yes"), ("content-type", "application/json")],
        body: Bytes::from_static(b"{\"error\":{}}"),
    });
    let answer = gateway.complete(r#"{"model":"m","prompt":"hi"}"#).await;
    assert_eq!((answer.status.as_u16(), &answer.body[..]), (422, &b"{\"error\":{}}"[..]));
    assert_eq!(answer.headers["x-worker"], "yes");
    assert_eq!(answer.headers["x-request-id"].len(), 32);
}

#[tokio::test]
async fn a_worker_that_dies_within_a_stream_leaves_a_clean_last_event() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    worker.behave(Behavior::StreamAndDie(Behavior::stream(&["data: {\"n\":1}\n\n", "data: {\"half"])));
    let answer = gateway.complete(BODY).await;
    let text = String::from_utf8(answer.body.to_vec()).unwrap();
    let events: Vec<Value> = text
        .split_terminator("\n\n")
        .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
        .collect();
    assert_eq!(events.len(), 2, "{text}");
    assert_eq!(events[0], json!({"n": 1}));
    assert_eq!(events[1]["error"]["type"], "server_error");
    assert_eq!(worker.n_seen(), 1, "a stream that began is not tried again");
    until("the load is back", async || gateway.outstanding_tokens() == 0).await;
}

#[tokio::test]
async fn a_stream_that_falls_silent_ends_with_an_event() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |config| config.timeouts.stream_idle_ms = 100).await;
    worker.behave(Behavior::StreamAndHang(Behavior::stream(&["data: 1\n\n"])));
    let answer = gateway.complete(BODY).await;
    let text = String::from_utf8(answer.body.to_vec()).unwrap();
    assert!(text.starts_with("data: 1\n\ndata: {\"error\"") && text.contains("silent"), "{text}");
    until("the worker is let go", async || worker.n_cancelled() == 1).await;
}

#[tokio::test]
async fn the_deadline_ends_a_stream_with_an_event() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    worker.behave(Behavior::StreamAndHang(Behavior::stream(&["data: 1\n\n"])));
    let answer = gateway.post("/v1/completions", &[("x-request-timeout-ms", "200")], BODY).await;
    let text = String::from_utf8(answer.body.to_vec()).unwrap();
    assert!(text.starts_with("data: 1\n\ndata: {\"error\"") && text.contains("time"), "{text}");
    assert_eq!(gateway.breaker(&worker), "closed", "a deadline is the client's choice");
}

#[tokio::test]
async fn generate_is_translated_for_engines_that_do_not_have_it() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    worker.behave(Behavior::Stream(Behavior::stream(&[
        "data: {\"choices\":[{\"index\":0,\"text\":\"Hel\"}]}\n\n",
        "data: {\"choices\":[{\"index\":0,\"text\":\"lo\",\"finish_reason\":\"stop\"}]}\n\ndata: [DO",
        "NE]\n\n",
    ])));
    let answer = gateway.post("/generate", &[], r#"{"prompt":"hi","seq_id":"s"}"#).await;
    let text = String::from_utf8(answer.body.to_vec()).unwrap();
    let events: Vec<&str> =
        text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap()).collect();
    assert_eq!(events.len(), 4, "{text}");
    let event = |number: usize| serde_json::from_str::<Value>(events[number]).unwrap();
    assert_eq!(event(0), json!({"type": "token", "choice": 0, "token": null, "text": "Hel"}));
    assert_eq!(event(2)["finish_reason"], "stop");
    assert_eq!(events[3], "[DONE]");
    assert_eq!(worker.state.seen.lock()[0].path, "/v1/completions");

    worker.behave(Behavior::StreamAndDie(Behavior::stream(&["data: {\"choices\":[{\"text\":\"a\"}]}\n\n"])));
    let answer = gateway.post("/generate", &[], r#"{"prompt":"hi"}"#).await;
    let text = String::from_utf8(answer.body.to_vec()).unwrap();
    assert!(text.contains(r#""type":"error""#) && !text.contains("[DONE]"), "{text}");
}
