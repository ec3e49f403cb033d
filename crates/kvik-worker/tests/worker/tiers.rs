//! Several disks under names of their own, over the admin API.

use http::{Method, StatusCode};
use kvik_worker::{StoreConfig, WorkerConfig};
use serde_json::{Value, json};

use crate::support::{TestWorker, config, start_with};

fn prompt() -> Vec<u32> {
    (0..600).map(|place| 10 + (place * 37 + place * place % 89) % 2000).collect()
}

async fn start(store: Value) -> TestWorker {
    let store: StoreConfig = serde_json::from_value(store).unwrap();
    start_with(WorkerConfig { kv_blocks: 39, store, ..config() }).await
}

/// The bytes behind the header, whose metadata have no order.
fn tensors_of(exported: &[u8]) -> &[u8] {
    let (header_bytes, rest) = exported.split_first_chunk().unwrap();
    &rest[u64::from_le_bytes(*header_bytes) as usize..]
}

#[tokio::test]
async fn prompts_are_moved_written_and_read_by_the_names_of_disks() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| format!("{}:256MiB", folder.path().join(name).display());
    let worker = start(json!({
        "ram": "64MiB", "write_back": "reuse",
        "tiers": [{"name": "fast-1", "nvme": place("a")}, {"name": "slow", "nvme": place("b")}],
    }))
    .await;
    let client = &worker.client;
    let tokens = json!({"token_ids": prompt()});
    client.ask("/v1/completions", &json!({"prompt": prompt(), "max_tokens": 1})).await;
    client.wait_for_copies().await;

    let relocation = json!({"token_ids": prompt(), "from": "ram", "to": "slow"});
    assert_eq!(client.ask("/cache/move", &relocation).await["chunks"], 2);
    assert_eq!(client.ask("/cache/lookup", &tokens).await["tiers"], json!({"slow": 512}));

    let exported = client.post("/cache/retrieve?tier=slow", &tokens).await.body.to_vec();
    let n_bytes_of = |body: &[u8]| body.len();
    let nothing = client.post("/cache/retrieve?tier=fast-1", &tokens).await.body.to_vec();
    assert!(n_bytes_of(&nothing) < n_bytes_of(&exported) / 100, "the other disk has no chunk");
    let (message, field, _) = client.post("/cache/retrieve?tier=tape", &tokens).await.error();
    assert_eq!((message.as_str(), field), ("`tier` is tape; allowed: ram, fast-1, slow", json!("tier")));

    client.ask("/cache/clear", &tokens).await;
    let stored = client.send(Method::POST, "/cache/store?tier=fast-1", exported.clone()).await;
    assert_eq!(stored.json(), json!({"stored_chunks": 2, "present_chunks": 0}));
    assert_eq!(client.ask("/cache/lookup", &tokens).await["tiers"], json!({"fast-1": 512}));
    let read_back = client.post("/cache/retrieve?tier=fast-1", &tokens).await.body.to_vec();
    assert!(tensors_of(&read_back) == tensors_of(&exported), "other bytes came back");
    let begun = client.post("/cache/prefetch?tier=slow", &tokens).await;
    assert_eq!(begun.status, StatusCode::OK, "a tier that has nothing loads nothing");

    let stats = client.get("/cache/stats").await.json();
    let labels: Vec<(&Value, &Value)> =
        stats["tiers"].as_array().unwrap().iter().map(|tier| (&tier["tier"], &tier["kind"])).collect();
    let label = |name: &str, kind: &str| (json!(name), json!(kind));
    let expected = [label("ram", "ram"), label("fast-1", "nvme"), label("slow", "nvme")];
    assert_eq!(labels, expected.iter().map(|(name, kind)| (name, kind)).collect::<Vec<_>>());
    assert_eq!(stats["counts"]["written_chunks_fast_1"], 2, "{stats}");
    worker.end().await;
}

#[tokio::test]
async fn a_worker_starts_without_an_optional_disk_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "in the way").unwrap();
    let broken = format!("{}/file/below:256MiB", folder.path().display());
    let good = format!("{}:256MiB", folder.path().join("good").display());
    let worker = start(json!({
        "ram": "64MiB",
        "tiers": [{"name": "gone", "nvme": broken, "optional": true}, {"name": "good", "nvme": good}],
    }))
    .await;
    let health = worker.client.get("/cache/health").await.json();
    let states: Vec<&Value> = health["tiers"].as_array().unwrap().iter().map(|tier| &tier["state"]).collect();
    assert_eq!(
        (&health["status"], states),
        (&json!("degraded"), vec![&json!("up"), &json!("down"), &json!("up")])
    );
    worker.client.ask("/v1/completions", &json!({"prompt": prompt(), "max_tokens": 1})).await;
    worker.client.wait_for_copies().await;
    let copy = json!({"token_ids": prompt(), "from": "ram", "to": "good"});
    assert_eq!(worker.client.ask("/cache/move", &copy).await["chunks"], 2);
    worker.end().await;
}
