//! Cold chunks that are coded again while the worker serves.

use http::{Method, StatusCode};
use kvik_worker::{StoreConfig, WorkerConfig};
use serde_json::{Value, json};

use crate::support::{TestWorker, config, start_with};

/// Two chunks and some.
fn prompt() -> Vec<u32> {
    (0..600).map(|place| 10 + (place * 41 + place * place % 83) % 2000).collect()
}

async fn start(store: &Value) -> TestWorker {
    let store: StoreConfig = serde_json::from_value(store.clone()).unwrap();
    // How many chunks the planner would compute instead depends on the machine's load.
    let store = StoreConfig { planner: "load_all".to_owned(), ..store };
    start_with(WorkerConfig { kv_blocks: 39, store, ..config() }).await
}

/// The tokens of the answer, and where the prompt's KV came from.
async fn complete(worker: &TestWorker) -> (Value, Value) {
    let body = json!({"prompt": prompt(), "max_tokens": 8, "temperature": 0, "return_token_ids": true});
    let answer = worker.client.ask("/v1/completions", &body).await;
    worker.client.wait_for_copies().await;
    let tiers = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"].clone();
    (answer["choices"][0]["token_ids"].clone(), tiers)
}

/// Waits until the chunks are on the disk.
async fn write_down(worker: &TestWorker) {
    let request = json!({"token_ids": prompt(), "from": "ram", "to": "nvme", "copy": true});
    while worker.client.ask("/cache/move", &request).await["chunks"] != 2 {}
}

/// Begins a run and waits for its end.
async fn compress(worker: &TestWorker, request: &Value) -> Value {
    let mut status = worker.client.ask("/cache/compress", request).await;
    while status["state"] == "running" {
        status = worker.client.get("/cache/compress").await.json();
    }
    status
}

#[tokio::test]
async fn cold_chunks_become_smaller_and_answer_as_before() {
    let folder = tempfile::tempdir().unwrap();
    let store = json!({
        "ram": "64MiB", "nvme": format!("{}:256MiB", folder.path().display()),
        "nvme_codec": "lossless", "allow_lossy": ["int8"],
    });
    let worker = start(&store).await;
    let (expected, _) = complete(&worker).await;
    write_down(&worker).await;
    assert_eq!(worker.client.get("/cache/compress").await.json()["state"], "idle");
    let hot = compress(&worker, &json!({"codec": "int8", "idle_s": 3600})).await;
    assert_eq!((&hot["state"], &hot["cold_chunks"]), (&json!("done"), &json!(0)), "it was just used");
    let lossless = compress(&worker, &json!({"idle_s": 0})).await;
    assert_eq!((&lossless["codec"], &lossless["recoded_chunks"]), (&json!("lossless"), &json!(0)));
    let status = compress(&worker, &json!({"tier": "nvme", "codec": "int8", "idle_s": 0})).await;
    assert_eq!((&status["state"], &status["recoded_chunks"]), (&json!("done"), &json!(2)), "{status}");
    assert!(
        2 * status["bytes_after"].as_u64().unwrap() < status["bytes_before"].as_u64().unwrap(),
        "{status}"
    );
    worker.end().await;

    let worker = start(&store).await;
    let (tokens, tiers) = complete(&worker).await;
    assert_eq!((tokens, tiers), (expected, json!({"nvme": 512})));
    worker.end().await;
}

#[tokio::test]
async fn what_cannot_be_compressed_is_refused_and_a_run_can_be_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| format!("{}:256MiB", folder.path().join(name).display());
    let worker = start(&json!({
        "ram": "64MiB",
        "tiers": [{"name": "nvme", "nvme": place("a"), "codec": "lossless"}, {"name": "plain", "nvme": place("b")}],
    }))
    .await;
    complete(&worker).await;
    write_down(&worker).await;
    for (request, field) in [
        (json!({"codec": "int8"}), "codec"),
        (json!({"codec": "zip"}), "codec"),
        (json!({"tier": "plain"}), "tier"),
        (json!({"tier": "ram"}), "tier"),
        (json!({"tier": "tape"}), "tier"),
        (json!({"bytes_per_s": 0}), "bytes_per_s"),
    ] {
        let answer = worker.client.post("/cache/compress", &request).await;
        assert_eq!((answer.status, answer.error().1), (StatusCode::BAD_REQUEST, json!(field)), "{request}");
    }
    // From lossless to none nothing becomes smaller, so the run ends by itself or is cancelled.
    worker.client.ask("/cache/compress", &json!({"codec": "none", "idle_s": 0})).await;
    let cancelled = worker.client.send(Method::DELETE, "/cache/compress", Vec::new()).await;
    assert_eq!(cancelled.status, StatusCode::OK);
    let status = loop {
        let status = worker.client.get("/cache/compress").await.json();
        if status["state"] != "running" {
            break status;
        }
    };
    assert_eq!(status["recoded_chunks"], 0);
    worker.end().await;
}
