//! KV that is loaded, computed, or both until they meet: the answers are the same.

use std::path::Path;

use kvik_worker::{StoreConfig, WorkerConfig};
use serde_json::{Value, json};

use crate::support::{TestWorker, config, start_with};

/// Six chunks and some.
const PROMPT_TOKENS: u32 = 1600;

/// Blocks for one prompt of that length and its output, but not for two.
const KV_BLOCKS: usize = 101;

fn prompt(seed: u32) -> Vec<u32> {
    (0..PROMPT_TOKENS).map(|place| 10 + (place * 31 + seed * 977 + place * place % 97) % 2000).collect()
}

async fn start(store: Value) -> TestWorker {
    let store: StoreConfig = serde_json::from_value(store).unwrap();
    start_with(WorkerConfig { kv_blocks: KV_BLOCKS, store, ..config() }).await
}

/// A store with the chunks of `folder`, read at so many bytes a second.
fn slow_disk(folder: &Path, bytes_per_s: u64, planner: &str) -> Value {
    let nvme = format!("{}:512MiB", folder.display());
    json!({
        "ram": "128MiB", "planner": planner, "load_timeout_ms": 60_000,
        "tiers": [{"nvme": nvme, "bytes_per_s": bytes_per_s, "waits": 0 < bytes_per_s}],
    })
}

/// The output with the log probabilities of every token, and where the prompt's KV came from.
async fn complete(worker: &TestWorker, prompt: &[u32]) -> (Value, Value) {
    let body = json!({
        "prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 5, "return_token_ids": true,
    });
    let mut answer = worker.client.ask("/v1/completions", &body).await;
    let details = &mut answer["usage"]["prompt_tokens_details"];
    let (cached, tiers) = (details["cached_tokens"].take(), details["cached_tokens_by_tier"].take());
    let n_by_tier: u64 = tiers.as_object().into_iter().flatten().filter_map(|(_, n)| n.as_u64()).sum();
    assert_eq!(cached.as_u64().unwrap_or(0), n_by_tier, "every cached token has a tier: {tiers}");
    (answer["choices"].take(), tiers)
}

/// A prompt that takes the place of others.
const OTHER: u32 = 99;

/// Leaves the KV of prompts on a disk, and gives what was answered to them.
async fn fill(folder: &Path, prompts: &[Vec<u32>]) -> Vec<Value> {
    let worker = start(slow_disk(folder, 0, "auto")).await;
    let mut outputs = Vec::new();
    // The other one too: it is not written to a slow disk then.
    for prompt in prompts.iter().chain([&prompt(OTHER)]) {
        outputs.push(complete(&worker, prompt).await.0);
        worker.client.wait_for_copies().await;
    }
    worker.end().await;
    outputs
}

/// Leaves nothing of a prompt in the engine's blocks and in memory.
async fn forget(worker: &TestWorker) {
    complete(worker, &prompt(OTHER)).await;
    worker.client.wait_for_copies().await;
    worker.client.ask("/cache/clear", &json!({"tiers": ["ram"]})).await;
}

#[tokio::test]
async fn answers_are_the_same_to_the_bit_at_every_speed_of_a_tier() {
    let folder = tempfile::tempdir().unwrap();
    let expected = fill(folder.path(), &[prompt(1)]).await.remove(0);
    for (bytes_per_s, planner) in
        [(0, "auto"), (0, "load_all"), (0, "compute_all"), (20_000_000, "auto"), (4_000_000, "auto")]
    {
        let worker = start(slow_disk(folder.path(), bytes_per_s, planner)).await;
        // Three times: nothing was measured before the first.
        for round in 0..3 {
            let (output, tiers) = complete(&worker, &prompt(1)).await;
            assert_eq!(output, expected, "{planner} at {bytes_per_s}, round {round}");
            match planner {
                "load_all" => assert_eq!(tiers, json!({"nvme": 1536})),
                "compute_all" => assert_eq!(tiers, Value::Null),
                _ => {}
            }
            forget(&worker).await;
        }
        let counts = worker.client.get("/cache/stats").await.json()["counts"].clone();
        let n_planned: u64 = ["load", "layers", "meet", "compute"]
            .map(|decision| counts[format!("planned_{decision}_requests")].as_u64().unwrap())
            .iter()
            .sum();
        assert_eq!(n_planned > 0, planner == "auto", "{counts}");
        worker.end().await;
    }
}

#[tokio::test]
async fn a_slow_tier_brings_the_back_of_a_prompt_while_its_front_is_computed() {
    let folder = tempfile::tempdir().unwrap();
    let expected = fill(folder.path(), &[prompt(1)]).await.remove(0);
    let worker = start(slow_disk(folder.path(), 0, "compute_all")).await;
    let begin = std::time::Instant::now();
    complete(&worker, &prompt(1)).await;
    let compute_s = begin.elapsed().as_secs_f64();
    worker.end().await;
    // All chunks take as long to load as to compute, so half of them come in time.
    let bytes_per_s = (6.0 * 256.0 * 8192.0 / compute_s) as u64;
    let worker = start(slow_disk(folder.path(), bytes_per_s, "auto")).await;
    let mut n_loaded = Vec::new();
    for _ in 0..4 {
        forget(&worker).await;
        let (output, tiers) = complete(&worker, &prompt(1)).await;
        assert_eq!(output, expected);
        n_loaded.push(tiers["nvme"].as_u64().unwrap_or(0));
    }
    assert!(n_loaded.iter().any(|n_loaded| (256..1536).contains(n_loaded)), "{n_loaded:?}");
    worker.end().await;
}

#[tokio::test]
async fn layers_come_while_what_lies_behind_them_is_computed() {
    let folder = tempfile::tempdir().unwrap();
    // Three chunks, and half a prompt behind them that is another one each time.
    let stored = prompt(1)[..800].to_vec();
    let prompts: Vec<Vec<u32>> = (2..6).map(|seed| [&stored[..], &prompt(seed)[800..]].concat()).collect();
    fill(folder.path(), &[stored]).await;
    // On another disk, so that what lies behind the chunks is not stored.
    let other_folder = tempfile::tempdir().unwrap();
    let worker = start(slow_disk(other_folder.path(), 0, "compute_all")).await;
    let begin = std::time::Instant::now();
    let (mut expected, mut compute_s) = (Vec::new(), 0.0);
    for prompt in &prompts {
        expected.push(complete(&worker, prompt).await.0);
        compute_s = begin.elapsed().as_secs_f64() / expected.len() as f64;
    }
    worker.end().await;
    // As long as the first pass behind the chunks takes.
    let bytes_per_s = (3.0 * 256.0 * 8192.0 / (0.3 * compute_s)) as u64;
    let worker = start(slow_disk(folder.path(), bytes_per_s, "auto")).await;
    let mut n_loaded = 0;
    for (prompt, expected) in prompts.iter().zip(&expected) {
        forget(&worker).await;
        let (output, tiers) = complete(&worker, prompt).await;
        assert_eq!(&output, expected);
        n_loaded = n_loaded.max(tiers["nvme"].as_u64().unwrap_or(0));
    }
    let counts = worker.client.get("/cache/stats").await.json()["counts"].clone();
    assert!(
        0 < counts["planned_layers_requests"].as_u64().unwrap() && n_loaded == 768,
        "{n_loaded}: {counts}"
    );
    worker.end().await;
}

#[tokio::test]
async fn chunks_that_are_lost_on_their_way_are_computed() {
    let folder = tempfile::tempdir().unwrap();
    let objects = folder.path().join("objects");
    std::fs::create_dir_all(&objects).unwrap();
    let store = |planner: &str| {
        json!({
            "ram": "128MiB", "planner": planner, "load_timeout_ms": 60_000,
            "remote": format!("file://{}", objects.display()),
        })
    };
    let worker = start(store("auto")).await;
    let (expected, _) = complete(&worker, &prompt(1)).await;
    worker.client.wait_for_copies().await;
    worker.end().await;
    let files = files_below(&objects);
    assert_eq!(files.len(), 6);
    for damaged in &files {
        // The middle of one chunk; the others prove themselves.
        let mut bytes = std::fs::read(damaged).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(damaged, &bytes).unwrap();
        let worker = start(store("auto")).await;
        let (output, tiers) = complete(&worker, &prompt(1)).await;
        assert_eq!(output, expected);
        // On a busy machine the engine may compute some of the others before they come.
        let n_loaded = tiers["object"].as_u64().unwrap_or(0);
        assert!(
            n_loaded <= 5 * 256 && n_loaded.is_multiple_of(16),
            "{n_loaded} tokens, of which 256 are lost"
        );
        worker.client.wait_for_copies().await;
        worker.end().await;
        bytes[middle] ^= 1;
        std::fs::write(damaged, &bytes).unwrap();
    }
}

fn files_below(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_below(&path));
        } else {
            files.push(path);
        }
    }
    files.sort();
    files
}

#[tokio::test]
async fn a_request_that_is_given_up_while_its_kv_loads_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let expected = fill(folder.path(), &[prompt(1), prompt(2)]).await;
    let worker = start(slow_disk(folder.path(), 4_000_000, "auto")).await;
    let n_free = worker.client.kv_stats().await.free_blocks;
    for _ in 0..2 {
        let body = json!({"prompt": prompt(1), "max_tokens": 4, "stream": true});
        let client = worker.client.clone();
        let request = tokio::spawn(async move { client.stream("/v1/completions", &body).await });
        worker.client.wait_for_stats(|stats| 0 < stats.running_sequences).await;
        request.abort();
        let _ = request.await;
        worker
            .client
            .wait_for_stats(|stats| stats.running_sequences == 0 && stats.waiting_sequences == 0)
            .await;
    }
    let (one, two) = (prompt(1), prompt(2));
    let (first, second) = tokio::join!(complete(&worker, &one), complete(&worker, &two));
    assert_eq!((&first.0, &second.0), (&expected[0], &expected[1]));
    worker.client.wait_for_copies().await;
    worker.client.wait_for_stats(|stats| stats.free_blocks == n_free).await;
    worker.end().await;
}

#[tokio::test]
async fn the_decision_for_a_prompt_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    fill(folder.path(), &[prompt(1)]).await;
    let worker = start(slow_disk(folder.path(), 50_000_000, "auto")).await;
    let explain = async || worker.client.ask("/cache/explain", &json!({"token_ids": prompt(1)})).await;
    let unmeasured = explain().await;
    assert_eq!((&unmeasured["decision"], &unmeasured["predicted"]), (&json!("meet"), &Value::Null));
    assert_eq!(unmeasured["tiers"], json!([{"tier": "nvme", "queued_bytes": 0}]));
    for _ in 0..2 {
        complete(&worker, &prompt(1)).await;
        forget(&worker).await;
    }
    let measured = explain().await;
    assert_eq!((&measured["prompt_tokens"], &measured["planner"]), (&json!(1600), &json!("auto")));
    let speed = measured["tiers"][0]["bytes_per_s"].as_f64().unwrap();
    // 50 MB a second, less what a busy machine takes of it.
    assert!((2e6..6e7).contains(&speed), "{measured}");
    let chunks = measured["chunks"].as_array().unwrap();
    assert_eq!(chunks.len(), 6);
    assert!(chunks.iter().all(|chunk| chunk["tier"] == "nvme" && chunk["tokens"] == 256), "{measured}");
    let times = &measured["predicted"];
    let [plan, load_all, compute_all, load_layers] =
        ["plan_ms", "load_all_ms", "compute_all_ms", "load_layers_ms"]
            .map(|name| times[name].as_f64().unwrap());
    assert!(0.0 < load_layers && load_layers <= load_all + 0.001, "{measured}");
    assert_eq!(measured["reads"] == "layers", measured["decision"] == "layers", "{measured}");
    assert!(0.0 < plan && plan <= 1.05 * load_all.min(compute_all), "{measured}");
    worker.end().await;

    let mut layerwise = slow_disk(folder.path(), 0, "auto");
    layerwise["layerwise"] = json!(true);
    let worker = start(layerwise).await;
    let explained = worker.client.ask("/cache/explain", &json!({"token_ids": prompt(1)})).await;
    assert_eq!(explained["reads"], "layers");
    worker.end().await;

    let worker = start(slow_disk(folder.path(), 0, "compute_all")).await;
    assert_eq!(
        worker.client.ask("/cache/explain", &json!({"token_ids": prompt(1)})).await["planner"],
        "compute_all"
    );
    worker.end().await;
}
