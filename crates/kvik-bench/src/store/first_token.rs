//! What a hit saves: the time to the first token of a long prompt, from each tier and computed.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;
use kvik_worker::{StoreConfig, WorkerConfig};
use serde_json::json;

use crate::local_worker::LocalWorker;
use crate::report::{Baseline, Measurement};

const PROMPT_TOKENS: u32 = 2000;

/// Room for one such prompt, so that the next one displaces it.
const KV_BLOCKS: usize = 130;

/// Where the KV of the prompt comes from.
const SOURCES: [&str; 2] = ["ram", "nvme"];

/// Measures a worker with the bundled model, over loopback, with one request at a time.
pub(super) fn measure(folder: &Path, is_quick: bool) -> anyhow::Result<Vec<Measurement>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let n_repeats = if is_quick { 2 } else { 10 };
    let times = runtime.block_on(run(&folder.join("first_token"), n_repeats))?;
    let [computed, ram, nvme] = times;
    let result = |name: &str, times: Vec<f64>| {
        Measurement::from_repeats(format!("first_token_2000_{name}"), "ms", times)
            .map(|result| result.compared_with(Baseline::new("computed", computed.clone()), None))
    };
    Ok(SOURCES.into_iter().zip([ram, nvme]).filter_map(|(name, times)| result(name, times)).collect())
}

/// The times of a computed prompt, of one from memory and of one from the disk, in milliseconds.
async fn run(folder: &Path, n_repeats: u32) -> anyhow::Result<[Vec<f64>; 3]> {
    let config = WorkerConfig {
        kv_blocks: KV_BLOCKS,
        store: StoreConfig {
            ram: "256MiB".to_owned(),
            nvme: Some(format!("{}:1GiB", folder.display())),
            ..StoreConfig::default()
        },
        ..WorkerConfig::default()
    };
    let client = Client { worker: LocalWorker::start(config).await? };
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    for repeat in 0..n_repeats {
        let prompt = prompt(2 * repeat);
        times[0].push(client.time(&prompt, None).await?);
        client.time(&self::prompt(2 * repeat + 1), None).await?;
        times[1].push(client.time(&prompt, Some("ram")).await?);
        client.wait_until_on_disk(&prompt).await?;
        client.worker.post("/cache/clear", &json!({"tiers": ["ram"]})).await?;
        client.time(&self::prompt(1_000_000 + repeat), None).await?;
        client.worker.post("/cache/clear", &json!({"tiers": ["ram"]})).await?;
        times[2].push(client.time(&prompt, Some("nvme")).await?);
    }
    client.worker.end().await;
    Ok(times)
}

fn prompt(seed: u32) -> Vec<u32> {
    (0..PROMPT_TOKENS)
        .map(|place| 10 + place.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503)) % 2000)
        .collect()
}

/// Asks the worker.
struct Client {
    worker: LocalWorker,
}

impl Client {
    /// Milliseconds until the first token of `prompt`, whose KV must come from `tier`.
    async fn time(&self, prompt: &[u32], tier: Option<&str>) -> anyhow::Result<f64> {
        let body = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": true});
        let begin = Instant::now();
        let answer = self.worker.post("/v1/completions", &body).await?;
        let time_ms = begin.elapsed().as_secs_f64() * 1e3;
        let found = &answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"];
        let is_right = match tier {
            None => found.is_null(),
            Some(tier) => found.get(tier).is_some(),
        };
        ensure!(is_right, "the KV came from {found}, not from {tier:?}");
        Ok(time_ms)
    }

    async fn wait_until_on_disk(&self, prompt: &[u32]) -> anyhow::Result<()> {
        let begin = Instant::now();
        loop {
            let request = json!({"token_ids": prompt, "from": "ram", "to": "nvme", "copy": true});
            let moved = self.worker.post("/cache/move", &request).await?;
            if moved["chunks"].as_u64() == Some(u64::from(PROMPT_TOKENS) / 256) {
                return Ok(());
            }
            ensure!(begin.elapsed() < Duration::from_secs(10), "the chunks do not get to the disk: {moved}");
        }
    }
}
