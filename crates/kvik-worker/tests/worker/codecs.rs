//! KV that is coded below memory, and what comes back of it.

use kvik_worker::{StoreConfig, WorkerConfig};
use serde_json::{Value, json};

use crate::support::{TestWorker, config, start_with};

/// Blocks for the prompt and its output.
const KV_BLOCKS: usize = 39;

fn prompt() -> Vec<u32> {
    (0..600).map(|place| 10 + (place * 41 + place * place % 83) % 2000).collect()
}

async fn start(store: Value) -> TestWorker {
    let store: StoreConfig = serde_json::from_value(store).unwrap();
    // How many chunks the planner would compute instead depends on the machine's load.
    let store = StoreConfig { planner: "load_all".to_owned(), ..store };
    start_with(WorkerConfig { kv_blocks: KV_BLOCKS, store, ..config() }).await
}

/// The log probabilities of the output's tokens, and where the prompt's KV came from.
async fn complete(worker: &TestWorker) -> (Vec<f64>, Value) {
    let body = json!({"prompt": prompt(), "max_tokens": 12, "temperature": 0, "logprobs": 5});
    let answer = worker.client.ask("/v1/completions", &body).await;
    worker.client.wait_for_copies().await;
    let logprobs = answer["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
    let tiers = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"].clone();
    (logprobs.iter().map(|value| value.as_f64().unwrap()).collect(), tiers)
}

/// Completes the prompt on a worker of its own.
async fn complete_once(store: Value) -> (Vec<f64>, Value) {
    let worker = start(store).await;
    let completed = complete(&worker).await;
    worker.end().await;
    completed
}

#[tokio::test]
async fn a_restarted_worker_reads_its_coded_disk_to_the_same_logits() {
    let folder = tempfile::tempdir().unwrap();
    let (expected, _) = complete_once(json!({})).await;
    let store = |codec: &str, layerwise: bool| {
        let nvme = format!("{}:256MiB", folder.path().display());
        json!({"ram": "64MiB", "nvme": nvme, "nvme_codec": codec, "layerwise": layerwise})
    };
    complete_once(store("lossless", false)).await;
    for layerwise in [false, true] {
        let (logprobs, tiers) = complete_once(store("lossless", layerwise)).await;
        assert_eq!((logprobs, tiers), (expected.clone(), json!({"nvme": 512})), "layerwise: {layerwise}");
    }
    // Without the codec what is there is not found, and it stays.
    assert_eq!(complete_once(store("none", false)).await, (expected.clone(), Value::Null));
    assert_eq!(complete_once(store("lossless", false)).await, (expected.clone(), json!({"nvme": 512})));
    assert_eq!(complete_once(store("none", true)).await, (expected, json!({"nvme": 512})));
}

#[tokio::test]
async fn tiers_of_a_list_have_codecs_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| format!("{}:256MiB", folder.path().join(name).display());
    let store = json!({
        "ram": "64MiB",
        "tiers": [{"name": "fast", "nvme": place("a")}, {"name": "slow", "nvme": place("b"), "codec": "lossless"}],
    });
    complete_once(store.clone()).await;
    let worker = start(store).await;
    let stats = worker.client.get("/cache/stats").await.json();
    let used = |name: &str| {
        let tier = stats["tiers"].as_array().unwrap().iter().find(|tier| tier["tier"] == name);
        tier.and_then(|tier| tier["used_bytes"].as_u64()).unwrap_or_else(|| panic!("no {name} in {stats}"))
    };
    let (fast, slow) = (used("fast"), used("slow"));
    assert!(0 < slow && slow < fast, "{slow} bytes coded of {fast}");
    worker.end().await;
}

#[tokio::test]
async fn an_approximate_store_answers_nearly_and_shares_nothing_with_an_exact_one() {
    let folder = tempfile::tempdir().unwrap();
    let (expected, _) = complete_once(json!({})).await;
    let nvme = format!("{}:256MiB", folder.path().display());
    let approximate = json!({"ram": "64MiB", "nvme": nvme, "nvme_codec": "int8", "allow_lossy": ["int8"]});
    let exact = json!({"ram": "64MiB", "nvme": nvme, "nvme_codec": "lossless"});
    assert_eq!(complete_once(approximate.clone()).await, (expected.clone(), Value::Null));
    let (near, tiers) = complete_once(approximate).await;
    assert_eq!(tiers, json!({"nvme": 512}));
    assert_ne!(near, expected);
    let difference = (near[0] - expected[0]).abs();
    assert!(difference < 0.2, "the first token's log probability differs by {difference}");
    assert_eq!(complete_once(exact).await, (expected, Value::Null));
}
