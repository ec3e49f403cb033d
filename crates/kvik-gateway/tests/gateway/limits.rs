//! Refusals: keys, sizes, queues, deadlines, nonsense.

use http::Request;
use http_body_util::Full;
use kvik_gateway::{ApiKeyConfig, GatewayConfig};
use kvik_proto::client::{TlsClientConfig, http_client};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::mock::{Behavior, MockWorker};
use crate::support::{TestGateway, until, whole};

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;
const STREAM: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;
/// `printf %s secret | sha256sum`
const SECRET: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

#[tokio::test]
async fn a_refusal_before_the_body_was_read_says_that_the_connection_closes() {
    let worker = MockWorker::start("m").await;
    let key = ApiKeyConfig { name: "me".to_owned(), sha256: SECRET.to_owned() };
    let gateway = TestGateway::before(&[&worker], |config| config.api_keys.push(key)).await;
    let address = gateway.url("").trim_start_matches("http://").to_owned();
    let mut connection = tokio::net::TcpStream::connect(&address).await.unwrap();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-length: 2\r\n\r\n");
    connection.write_all(head.as_bytes()).await.unwrap();
    // The body never comes: the answer must not wait for it, and the connection must end.
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");
    assert!(answer.to_lowercase().contains("\r\nconnection: close\r\n"), "{answer}");
}

#[tokio::test]
async fn only_known_keys_may_ask() {
    let worker = MockWorker::start("m").await;
    let key = ApiKeyConfig { name: "me".to_owned(), sha256: SECRET.to_owned() };
    let gateway = TestGateway::before(&[&worker], |config| config.api_keys.push(key)).await;
    for headers in [&[][..], &[("authorization", "Bearer wrong")]] {
        gateway.post("/v1/completions", headers, BODY).await.assert_error(401, Some("invalid_api_key"));
    }
    gateway.get("/v1/models").await.assert_error(401, Some("invalid_api_key"));
    let answer = gateway.post("/v1/completions", &[("authorization", "Bearer secret")], BODY).await;
    assert_eq!(answer.status, 200);
    assert_eq!(worker.n_seen(), 1);
    assert!(!worker.state.seen.lock()[0].headers.contains_key("authorization"));
    for open in ["/health", "/ready", "/metrics", "/openapi.json"] {
        assert_eq!(gateway.get(open).await.status, 200, "{open}");
    }
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |config| config.max_body_bytes = 1000).await;
    let body = format!(r#"{{"model":"m","prompt":"{}"}}"#, "x".repeat(1000));
    gateway.complete(&body).await.assert_error(413, None);
    assert_eq!(worker.n_seen(), 0);
    assert_eq!(gateway.complete(BODY).await.status, 200);
}

#[tokio::test]
async fn nonsense_is_refused_and_the_field_is_named() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    for (body, param) in [
        ("{", None),
        ("", None),
        ("[1]", None),
        (r#"{"model":"m","stream":"yes"}"#, Some("stream")),
        (r#"{"model":"m","max_tokens":-1}"#, Some("max_tokens")),
        (r#"{"model":7}"#, Some("model")),
    ] {
        let error = gateway.complete(body).await.assert_error(400, None);
        assert_eq!(error["param"].as_str(), param, "{error}");
    }
    let headers = [("x-request-timeout-ms", "soon")];
    gateway.post("/v1/completions", &headers, BODY).await.assert_error(400, None);
    gateway.get("/nothing").await.assert_error(404, None);
    gateway.get("/v1/completions").await.assert_error(405, None);
    assert_eq!(worker.n_seen(), 0);
}

#[tokio::test]
async fn a_full_queue_refuses_with_the_time_to_come_back() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |config| {
        config.admission.max_running = 1;
        config.admission.max_waiting = 1;
    })
    .await;
    worker.behave(Behavior::StreamAndHang(Behavior::stream(&["data: 1\n\n"])));
    let running = gateway.open("/v1/completions", &[], STREAM).await;
    let waiting = gateway.open("/v1/completions", &[], BODY);
    let refused = async {
        until("one waits", async || gateway.gateway().n_waiting() == 1).await;
        let refused = gateway.complete(BODY).await;
        refused.assert_error(429, Some("rate_limit_exceeded"));
        let retry_after: u64 = refused.headers["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((1..=60).contains(&retry_after));
        worker.behave(Behavior::answer(200, "{}"));
        drop(running);
    };
    let (waited, ()) = tokio::join!(waiting, refused);
    assert_eq!(whole(waited).await.status, 200);
}

#[tokio::test]
async fn a_request_that_waits_too_long_is_told_to_come_back() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |config| {
        config.admission.max_running = 1;
        config.admission.max_wait_ms = 50;
    })
    .await;
    worker.behave(Behavior::StreamAndHang(Behavior::stream(&["data: 1\n\n"])));
    let _running = gateway.open("/v1/completions", &[], STREAM).await;
    let refused = gateway.complete(BODY).await;
    refused.assert_error(503, None);
    assert!(refused.headers.contains_key("retry-after"));
}

#[tokio::test]
async fn the_deadline_is_the_clients_up_to_the_configured_one() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |config| config.timeouts.request_ms = 300).await;
    worker.behave(Behavior::Hang);
    for timeout_ms in ["50", "999999"] {
        let headers = [("x-request-timeout-ms", timeout_ms)];
        gateway.post("/v1/completions", &headers, BODY).await.assert_error(504, None);
    }
    until("the worker is let go", async || worker.n_cancelled() == 2).await;
    assert_eq!(gateway.breaker(&worker), "closed");
}

#[tokio::test]
async fn without_a_backend_requests_are_unavailable_and_the_gateway_is_not_ready() {
    let gateway = TestGateway::start(GatewayConfig::default()).await;
    let refused = gateway.complete(BODY).await;
    refused.assert_error(503, None);
    assert!(refused.headers.contains_key("retry-after"));
    assert_eq!(gateway.get("/ready").await.status, 503);
    assert_eq!(gateway.get("/health").await.status, 200);
    assert_eq!(gateway.get("/v1/models").await.json()["data"], serde_json::json!([]));
}

/// Announces a body and sends a part of it.
async fn post_part(gateway: &TestGateway, n_announced: usize, n_sent: usize) -> TcpStream {
    let address = gateway.running.address();
    let mut connection = TcpStream::connect(address).await.unwrap();
    let head =
        format!("POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-length: {n_announced}\r\n\r\n");
    connection.write_all(head.as_bytes()).await.unwrap();
    connection.write_all(&vec![b' '; n_sent]).await.unwrap();
    connection
}

#[tokio::test]
async fn a_body_that_comes_too_slowly_is_refused_before_the_request_deadline() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |config| config.limits.body_ms = 100).await;
    let mut slow = post_part(&gateway, 10, 5).await;
    let mut answer = String::new();
    slow.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    assert_eq!(gateway.complete(BODY).await.status, 200);
}

#[tokio::test]
async fn bodies_that_arrive_are_bounded_together_and_small_ones_are_served() {
    let worker = MockWorker::start("m").await;
    let gateway =
        TestGateway::before(&[&worker], |config| config.limits.max_body_bytes_in_flight = 1 << 20).await;
    // More than all may have: one of them is refused, and the others go on to wait for their rest.
    let mut parts = Vec::new();
    for _ in 0..4 {
        parts.push(post_part(&gateway, 8 << 20, 300 << 10).await);
    }
    let refused = async |part: &mut TcpStream| {
        let mut answer = String::new();
        part.read_to_string(&mut answer).await.map(|_| answer).unwrap_or_default()
    };
    let answers = parts.iter_mut().map(|part| Box::pin(refused(part)));
    let (answer, ..) = futures_util::future::select_all(answers).await;
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("\r\nretry-after: 1\r\n"), "{answer}");
    assert_eq!(gateway.complete(BODY).await.status, 200);
}

#[tokio::test]
async fn a_tls_client_that_says_nothing_does_not_hold_a_drain() {
    let folder = tempfile::tempdir().unwrap();
    let files = crate::tls::make_files(folder.path());
    let mut config = GatewayConfig::default();
    config.tls.certificate = Some(files.certificate);
    config.tls.key = Some(files.key);
    let gateway = TestGateway::start(config).await;
    let address = gateway.running.address();
    let mut silent = TcpStream::connect(address).await.unwrap();
    // Accepted after the silent one.
    let authorities_pem = std::fs::read(&files.authority).unwrap();
    let http = http_client(&TlsClientConfig { authorities_pem, identity_pem: None }).unwrap();
    let health = Request::get(format!("https://{address}/health")).body(Full::default()).unwrap();
    assert_eq!(whole(http.request(health).await.unwrap()).await.status, 200);
    gateway.shutdown.drain();
    gateway.running.finished().await;
    assert_eq!(silent.read(&mut [0; 8]).await.unwrap_or(0), 0);
}
