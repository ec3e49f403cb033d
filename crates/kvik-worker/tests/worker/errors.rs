//! What is refused, with which status, naming which field.

use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::{TestWorker, config, start, start_with};

#[tokio::test]
async fn bad_parameters_are_refused_with_400_and_their_name() {
    let worker = start().await;
    let completion = |field: &str, value: Value| {
        let mut body = json!({"prompt": "a", "max_tokens": 2});
        body[field] = value;
        ("/v1/completions", body, field.to_owned())
    };
    let chat = |field: &str, value: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2});
        body[field] = value;
        ("/v1/chat/completions", body, field.to_owned())
    };
    let cases = [
        completion("temperature", json!(-1)),
        completion("temperature", json!("hot")),
        chat("temperature", json!("hot")),
        ("/v1/chat/completions", chat("stop_token_ids", json!([1, -1])).1, "stop_token_ids[1]".to_owned()),
        chat("stream", json!("yes")),
        chat("stream_options", json!({})),
        completion("top_p", json!(0)),
        completion("top_p", json!(1.5)),
        completion("n", json!(0)),
        completion("n", json!(129)),
        completion("max_tokens", json!(0)),
        completion("max_tokens", json!(-3)),
        completion("logprobs", json!(21)),
        completion("presence_penalty", json!(3)),
        completion("frequency_penalty", json!(-2.1)),
        completion("repetition_penalty", json!(0)),
        completion("stop", json!([""])),
        completion("stop", json!(7)),
        completion("suffix", json!("x")),
        completion("best_of", json!(2)),
        completion("logit_bias", json!({"1": 5})),
        completion("prompt", json!([])),
        completion("prompt", json!([[]])),
        completion("prompt", json!([4096])),
        completion("prompt", json!({"text": "a"})),
        completion("stream_options", json!({"include_usage": true})),
        completion("seq_id", json!("")),
        chat("tools", json!([{"type": "function"}])),
        chat("tool_choice", json!("required")),
        chat("functions", json!([{}])),
        chat("response_format", json!({"type": "json_object"})),
        chat("audio", json!({"voice": "a"})),
        chat("modalities", json!(["text", "audio"])),
        chat("modalities", json!("audio")),
        chat("logit_bias", json!({"1": 5})),
        chat("top_logprobs", json!(2)),
        chat("messages", json!([])),
        chat("max_tokens", json!(0)),
        chat("max_completion_tokens", json!(0)),
        chat("messages", json!("hi")),
    ];
    for (path, body, field) in cases {
        let answer = worker.client.post(path, &body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}: {}", answer.text());
        let (message, param, _) = answer.error();
        assert_eq!(param, field.as_str(), "{body}: {message}");
        assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
    }
    let message = worker.client.post("/v1/completions", &json!({"prompt": "a", "top_p": 2})).await.error().0;
    assert_eq!(message, "`top_p` is 2; allowed: above 0 to 1");
    worker.end().await;
}

#[tokio::test]
async fn parts_of_messages_that_are_not_text_are_refused_with_their_place() {
    let worker = start().await;
    let image = json!({"type": "image_url", "image_url": {"url": "x"}});
    for (content, shown) in [(json!([image]), "image_url"), (Value::Null, "missing")] {
        let body = json!({"messages": [{"role": "user", "content": content}]});
        let answer = worker.client.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        let (message, param, _) = answer.error();
        assert_eq!(param, "messages[0].content");
        assert!(message.contains(shown), "{message}");
    }
    worker.end().await;
}

#[tokio::test]
async fn an_unknown_model_is_404_and_a_long_prompt_400() {
    let worker = start().await;
    for (path, body) in [
        ("/v1/completions", json!({"model": "gpt-5", "prompt": "a"})),
        ("/v1/chat/completions", json!({"model": "gpt-5", "messages": [{"role": "user", "content": "a"}]})),
        ("/tokenize", json!({"model": "gpt-5", "prompt": "a"})),
    ] {
        let answer = worker.client.post(path, &body).await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND);
        assert_eq!(answer.error().2, "model_not_found");
    }
    assert_eq!(worker.client.get("/v1/models/gpt-5").await.status, StatusCode::NOT_FOUND);
    let long = vec![70; 4096];
    let answer = worker.client.post("/v1/completions", &json!({"prompt": long})).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    let (message, param, code) = answer.error();
    assert_eq!((param, code), (json!("prompt"), json!("context_length_exceeded")));
    assert!(message.contains("4096 tokens long; allowed: at most 4095"), "{message}");
    let answer = worker.client.post("/inference/generate", &json!({"token_ids": vec![70; 4096]})).await;
    let (_, param, code) = answer.error();
    assert_eq!((param, code), (json!("token_ids"), json!("context_length_exceeded")));
    let body = json!({"messages": [{"role": "user", "content": "long ".repeat(5000)}]});
    let answer = worker.client.post("/v1/chat/completions", &body).await;
    assert_eq!(answer.error().2, "context_length_exceeded");
    assert_eq!(answer.error().1, "messages");
    worker.end().await;
}

#[tokio::test]
async fn bodies_that_are_no_json_or_too_large_and_paths_that_do_not_exist_are_refused() {
    let mut config = config();
    config.body_limit_bytes = 2000;
    let worker = start_with(config).await;
    let client = &worker.client;
    for body in ["", "{", "[]", "{\"prompt\": \"a\"} trailing", "\u{0}"] {
        let answer = client.send(Method::POST, "/v1/completions", body.as_bytes().to_vec()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
        answer.error();
    }
    let answer = client.send(Method::POST, "/v1/completions", vec![b' '; 2001]).await;
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE);
    answer.error();
    let answer = client.get("/v2/none").await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    answer.error();
    let answer = client.get("/v1/completions").await;
    assert_eq!(answer.status, StatusCode::METHOD_NOT_ALLOWED);
    answer.error();
    worker.end().await;
}

#[tokio::test]
async fn more_than_may_wait_gets_429_and_a_time() {
    let mut config = config();
    config.max_sequences = 1;
    config.max_waiting = 1;
    let worker = start_with(config).await;
    let body = json!({"prompt": "a", "max_tokens": 3000, "ignore_eos": true, "stream": true});
    let mut running = worker.client.stream("/v1/completions", &body).await;
    running.next().await.unwrap();
    let waiting = worker.client.stream("/v1/completions", &body).await;
    let refused = worker.client.post("/v1/completions", &json!({"prompt": "a"})).await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.error().2, "rate_limit_exceeded");
    assert!(refused.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    // More outputs than there are places at all can never be served.
    let never = worker.client.post("/v1/completions", &json!({"prompt": "a", "n": 3})).await;
    assert_eq!(never.status, StatusCode::BAD_REQUEST);
    drop((running, waiting));
    worker.client.wait_for_stats(|stats| stats.running_sequences + stats.waiting_sequences == 0).await;
    assert_eq!(worker.client.post("/v1/completions", &json!({"prompt": "a"})).await.status, StatusCode::OK);
    worker.end().await;
}

/// Announces a body and sends a part of it.
async fn post_part(worker: &TestWorker, n_announced: usize, n_sent: usize) -> TcpStream {
    let mut connection = TcpStream::connect(worker.running.address()).await.unwrap();
    let head = format!("POST /tokenize HTTP/1.1\r\nhost: test\r\ncontent-length: {n_announced}\r\n\r\n");
    connection.write_all(head.as_bytes()).await.unwrap();
    connection.write_all(&vec![b' '; n_sent]).await.unwrap();
    connection
}

#[tokio::test]
async fn slow_bodies_get_408_and_too_many_bytes_of_bodies_503() {
    let mut config = config();
    config.limits.body_ms = 2000;
    config.limits.max_body_bytes_in_flight = 1 << 20;
    let worker = start_with(config).await;
    let mut parts = Vec::new();
    for _ in 0..4 {
        parts.push(post_part(&worker, 8 << 20, 300 << 10).await);
    }
    let (mut n_slow, mut n_refused) = (0, 0);
    for part in &mut parts {
        let mut answer = String::new();
        part.read_to_string(&mut answer).await.unwrap();
        if answer.starts_with("HTTP/1.1 408 ") {
            n_slow += 1;
        } else {
            assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("retry-after: 1"), "{answer}");
            n_refused += 1;
        }
    }
    assert!(0 < n_slow && 0 < n_refused, "{n_slow} slow, {n_refused} refused");
    worker.end().await;
}
