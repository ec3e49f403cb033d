//! `cache_salt`: tenants with the same prompt share KV only where they say so.

use http::StatusCode;
use kvik_worker::{StoreConfig, WorkerConfig};
use serde_json::{Value, json};

use crate::support::{TestWorker, config, start_with};

/// Blocks for one prompt of 600 tokens and its output, but not for two.
const KV_BLOCKS: usize = 39;

fn prompt(seed: u32) -> Vec<u32> {
    (0..600).map(|place| 10 + (place * 31 + seed * 977 + place * place % 97) % 2000).collect()
}

fn body(seed: u32, salt: Option<&str>) -> Value {
    let mut body = json!({"prompt": prompt(seed), "max_tokens": 4, "temperature": 0});
    if let Some(salt) = salt {
        body["cache_salt"] = salt.into();
    }
    body
}

/// Where the KV of a prompt came from.
async fn tiers(worker: &TestWorker, seed: u32, salt: Option<&str>) -> Value {
    let answer = worker.client.ask("/v1/completions", &body(seed, salt)).await;
    worker.client.wait_for_copies().await;
    answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"].clone()
}

#[tokio::test]
async fn the_engine_shares_blocks_between_requests_of_one_salt_alone() {
    let worker = start_with(config()).await;
    for salt in [Some("a"), Some("b"), None] {
        assert_eq!(tiers(&worker, 1, salt).await, Value::Null, "{salt:?}");
        assert_eq!(tiers(&worker, 1, salt).await, json!({"engine": 592}), "{salt:?}");
    }
    worker.end().await;
}

#[tokio::test]
async fn the_tiers_share_chunks_between_requests_of_one_salt_alone() {
    let folder = tempfile::tempdir().unwrap();
    let nvme = Some(format!("{}:256MiB", folder.path().display()));
    let planner = "load_all".to_owned();
    let store = StoreConfig { ram: "64MiB".to_owned(), nvme, planner, ..StoreConfig::default() };
    let start = || start_with(WorkerConfig { kv_blocks: KV_BLOCKS, store: store.clone(), ..config() });
    let worker = start().await;
    assert_eq!(tiers(&worker, 1, Some("a")).await, Value::Null);
    // Another prompt displaces what the engine has.
    tiers(&worker, 99, None).await;
    assert_eq!(tiers(&worker, 1, Some("b")).await, Value::Null);
    tiers(&worker, 99, None).await;
    assert_eq!(tiers(&worker, 1, None).await, Value::Null);
    tiers(&worker, 99, None).await;
    assert_eq!(tiers(&worker, 1, Some("a")).await, json!({"ram": 512}));
    worker.end().await;

    let worker = start().await;
    assert_eq!(tiers(&worker, 1, Some("c")).await, Value::Null);
    tiers(&worker, 99, None).await;
    assert_eq!(tiers(&worker, 1, Some("a")).await, json!({"nvme": 512}));
    worker.end().await;
}

#[tokio::test]
async fn the_admin_api_sees_what_was_stored_under_a_salt_with_that_salt_alone() {
    let store = StoreConfig { ram: "64MiB".to_owned(), ..StoreConfig::default() };
    let worker = start_with(WorkerConfig { store, ..config() }).await;
    let client = &worker.client;
    tiers(&worker, 1, Some("a")).await;
    let tokens = json!({"token_ids": prompt(1)});
    let salted = json!({"token_ids": prompt(1), "cache_salt": "a"});
    assert_eq!(client.ask("/cache/lookup", &tokens).await["cached_tokens"], 0);
    assert_eq!(client.ask("/cache/lookup", &salted).await["cached_tokens"], 512);
    let exported = client.post("/cache/retrieve", &salted).await.body.to_vec();
    client.ask("/cache/clear", &salted).await;
    client.send(http::Method::POST, "/cache/store", exported).await;
    assert_eq!(client.ask("/cache/lookup", &tokens).await["cached_tokens"], 0);
    assert_eq!(client.ask("/cache/lookup", &salted).await["cached_tokens"], 512);
    worker.end().await;
}

#[tokio::test]
async fn a_salt_of_another_type_or_length_is_refused_by_name() {
    let worker = start_with(config()).await;
    let long = "s".repeat(1025);
    for salt in [json!(""), json!(7), json!(["a"]), json!({"a": 1}), json!(long)] {
        for (path, mut request) in [
            ("/v1/completions", json!({"prompt": "a"})),
            ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a"}]})),
            ("/inference/init", json!({"seq_id": "s", "prompt": "a"})),
            ("/inference/generate", json!({"prompt": "a"})),
            ("/cache/lookup", json!({"prompt": "a"})),
        ] {
            request["cache_salt"] = salt.clone();
            let refused = worker.client.post(path, &request).await;
            assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{path} {salt}");
            let (message, field, _) = refused.error();
            assert_eq!(field, "cache_salt", "{path} {salt}: {message}");
            assert!(!message.contains(&long), "{message}");
        }
    }
    let unsalted = json!({"prompt": "a", "max_tokens": 1, "cache_salt": null});
    worker.client.ask("/v1/completions", &unsalted).await;
    worker.end().await;
}

#[tokio::test]
async fn a_stepped_sequence_is_continued_with_its_own_salt_alone() {
    let worker = start_with(config()).await;
    let mut request = json!({"seq_id": "talk", "token_ids": prompt(1), "cache_salt": "a"});
    for (salt, expected) in [("a", 0), ("a", 599), ("b", 0)] {
        request["cache_salt"] = salt.into();
        let answer = worker.client.ask("/inference/init", &request).await;
        assert_eq!(answer["cached_tokens"], expected, "{salt}");
        worker.client.ask("/inference/finish", &json!({"seq_id": "talk"})).await;
    }
    worker.end().await;
}
