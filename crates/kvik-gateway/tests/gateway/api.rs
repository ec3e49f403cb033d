//! The published document, the metrics, the drain.

use kvik_gateway::ApiKeyConfig;
use serde_json::Value;

use crate::mock::{Behavior, MockWorker};
use crate::support::{TestGateway, until, whole};

const STREAM: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;

#[tokio::test]
async fn the_document_and_the_routes_are_the_same() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    let document = gateway.get("/openapi.json").await.json();
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1"));
    let mut operations = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys() {
            operations.push(format!("{method} {path}"));
        }
        let path = path.replace("{model}", "m");
        // What the document does not list, the gateway does not take.
        let answer = if item.get("get").is_some() {
            let answer = gateway.get(&path).await;
            // It asks which blocks.
            let expected = if path == "/index/blocks" { 400 } else { 200 };
            assert_eq!(answer.status, expected, "{path}");
            gateway.post(&path, &[], "{}").await
        } else {
            let body = match path.as_str() {
                "/v1/score" | "/index/prompt" => r#"{"model":"m","token_ids":[1]}"#,
                "/index/holders" => r#"{"keys":["0123456789abcdef"]}"#,
                path if path.starts_with("/inference/") => r#"{"model":"m","seq_id":"s","prompt":"x"}"#,
                _ => r#"{"model":"m","prompt":"x"}"#,
            };
            // Only workers of kvik have sequences that clients step.
            let expected = if path.starts_with("/inference/") { 503 } else { 200 };
            assert_eq!(gateway.post(&path, &[], body).await.status, expected, "{path}");
            gateway.get(&path).await
        };
        answer.assert_error(405, None);
    }
    let expected = [
        "get /health",
        "get /index/blocks",
        "get /index/stats",
        "get /metrics",
        "get /openapi.json",
        "get /ready",
        "get /v1/models",
        "get /v1/models/{model}",
        "post /detokenize",
        "post /generate",
        "post /index/holders",
        "post /index/prompt",
        "post /inference/finish",
        "post /inference/init",
        "post /inference/step",
        "post /route/explain",
        "post /tokenize",
        "post /v1/chat/completions",
        "post /v1/completions",
        "post /v1/score",
    ];
    operations.sort();
    assert_eq!(operations, expected);
}

#[tokio::test]
async fn every_reference_of_the_document_leads_somewhere() {
    let document: Value = serde_json::from_str(kvik_gateway::OPENAPI).unwrap();
    let mut n_references = 0;
    let mut values = vec![&document];
    while let Some(value) = values.pop() {
        match value {
            Value::Array(list) => values.extend(list),
            Value::Object(map) => {
                if let Some(reference) = map.get("$ref") {
                    let pointer = reference.as_str().unwrap().strip_prefix('#').unwrap();
                    assert!(document.pointer(pointer).is_some(), "{pointer}");
                    n_references += 1;
                }
                values.extend(map.values());
            }
            _ => {}
        }
    }
    assert!(0 < n_references);
}

#[tokio::test]
async fn metrics_are_counted_when_the_body_ends() {
    let worker = MockWorker::start("metrics-model").await;
    let gateway = TestGateway::before(&[&worker], |_| {}).await;
    let id = worker.url();
    let value = async |name: &str| {
        let text = String::from_utf8(gateway.get("/metrics").await.body.to_vec()).unwrap();
        let line = text.lines().find(|line| line.starts_with(name)).map(str::to_owned);
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
    };
    let tokens = format!("kvik_gateway_outstanding_tokens{{worker=\"{id}\"}}");
    worker.behave(Behavior::StreamAndHang(Behavior::stream(&["data: 1\n\n"])));
    let body = STREAM.replace("\"m\"", "\"metrics-model\"");
    let open = gateway.open("/v1/completions", &[], &body).await;
    until("the answer of an open stream counts", async || value(&tokens).await == Some(256.0)).await;
    drop(open);
    until("a closed stream does not", async || value(&tokens).await == Some(0.0)).await;
    for name in [
        "kvik_gateway_requests_total{",
        "kvik_gateway_request_seconds",
        "kvik_gateway_ttft_seconds",
        "kvik_gateway_outstanding_requests",
        "kvik_gateway_route_decisions_total{",
        "kvik_gateway_retries_total",
        "kvik_gateway_coordinator_connected",
    ] {
        assert!(value(name).await.is_some(), "{name}");
    }
}

#[tokio::test]
async fn draining_lets_open_streams_finish() {
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |config| config.timeouts.stream_idle_ms = 300).await;
    worker.behave(Behavior::StreamAndHang(Behavior::stream(&["data: 1\n\n"])));
    let open = gateway.open("/v1/completions", &[], STREAM).await;
    gateway.shutdown.drain();
    let answer = whole(open).await;
    assert!(answer.body.starts_with(b"data: 1\n\ndata: {\"error\""));
    gateway.running.finished().await;
    gateway.shutdown.finish().await;
}

#[tokio::test]
async fn holders_of_chunks_are_told_to_services_of_the_cluster() {
    const TOKEN: &str = "the-token-of-this-cluster";
    const QUESTION: &str = r#"{"keys":["0123456789abcdef","fedcba9876543210"]}"#;
    let worker = MockWorker::start("m").await;
    let gateway = TestGateway::before(&[&worker], |config| config.cluster_token = Some(TOKEN.into())).await;
    gateway.post("/index/holders", &[], QUESTION).await.assert_error(401, Some("invalid_token"));
    let shown = [("x-kvik-cluster-token", TOKEN)];
    let answer = gateway.post("/index/holders", &shown, QUESTION).await;
    assert_eq!((answer.status.as_u16(), answer.json()), (200, serde_json::json!({"holders": {}})));
    let too_many = format!(r#"{{"keys":[{}]}}"#, vec![r#""0123456789abcdef""#; 4097].join(","));
    for wrong in [r#"{"keys":["0123"]}"#, r#"{"keys":["+123456789abcdef"]}"#, &too_many] {
        let error = gateway.post("/index/holders", &shown, wrong).await.assert_error(400, None);
        assert_eq!(error["param"], "keys", "{error}");
    }

    let key = ApiKeyConfig { name: "me".to_owned(), sha256: "2b".repeat(32).into() };
    let gateway = TestGateway::before(&[&worker], |config| config.api_keys.push(key)).await;
    let answer = gateway.post("/index/holders", &[], QUESTION).await;
    assert_eq!(answer.status.as_u16(), 401, "without a token, a key is needed where there are keys");
}
