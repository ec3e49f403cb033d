//! What segments save: the time to the first token of a prompt of documents in changing order.

mod place;
mod random_model;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use kvik_worker::{StoreConfig, WorkerConfig};
use serde_json::{Value, json};

use crate::local_worker::LocalWorker;
use crate::report::{Baseline, Goal, Measurement};

const N_DOCUMENTS: usize = 24;
const DOCUMENT_TOKENS: usize = 100;
const QUESTION_TOKENS: usize = 20;

/// Enough for two prompts.
const KV_BLOCKS: usize = 400;

/// What a blended prompt may take of the time of a computed one.
const GOAL: f64 = 0.25;

/// Which model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The bundled one.
    Tiny,
    /// One of 80 million parameters with random weights.
    Random,
}

/// How much is measured.
#[derive(Debug, Clone)]
pub struct BlendBench {
    /// Folder for the disk tier and the random model.
    pub dir: PathBuf,
    /// Whether to measure less, less precisely.
    pub is_quick: bool,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Tiny, Self::Random];

    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Random => random_model::SIZE_NAME,
        }
    }
}

impl BlendBench {
    /// The settings for a report.
    pub fn settings(&self) -> Value {
        json!({
            "documents": N_DOCUMENTS, "document_tokens": DOCUMENT_TOKENS, "question_tokens": QUESTION_TOKENS,
            "selector": "none", "repeats": self.n_repeats(),
        })
    }

    /// The settings in words.
    pub fn description(&self) -> String {
        format!(
            "first token of {N_DOCUMENTS} documents of {DOCUMENT_TOKENS} tokens and a question, over loopback, \
             documents computed ahead and in another order each time"
        )
    }

    /// Measures one model.
    ///
    /// # Errors
    /// If a worker does not start or answers wrongly.
    pub fn measure(&self, kind: Kind) -> anyhow::Result<Vec<Measurement>> {
        let model = match kind {
            Kind::Tiny => None,
            Kind::Random => {
                let folder = self.dir.join("model");
                random_model::write(&folder)?;
                Some(folder)
            }
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let Times { full, ram, nvme } =
            runtime.block_on(self.run(model, &self.dir.join(kind.name()))).context("measure first tokens")?;
        let result = |source: &str, times: Vec<f64>| {
            let name = format!("first_token_blended_{}_{source}", kind.name());
            Measurement::from_repeats(name, "ms", times).map(|result| {
                result
                    .compared_with(Baseline::new("full prefill", full.clone()), Some(Goal::RatioAtMost(GOAL)))
            })
        };
        let mut measurements: Vec<Measurement> = [("ram", ram), ("nvme", nvme)]
            .into_iter()
            .filter_map(|(name, times)| result(name, times))
            .collect();
        if kind == Kind::Random {
            let placed = place::measure(&self.dir.join("model"), self.n_repeats());
            measurements.extend(placed.context("measure the placing of segments")?);
        }
        Ok(measurements)
    }

    async fn run(&self, model: Option<PathBuf>, folder: &Path) -> anyhow::Result<Times> {
        let config = WorkerConfig {
            kv_blocks: KV_BLOCKS,
            model,
            store: StoreConfig {
                ram: "1GiB".to_owned(),
                nvme: Some(format!("{}:4GiB", folder.display())),
                ..StoreConfig::default()
            },
            ..WorkerConfig::default()
        };
        let worker = LocalWorker::start(config.clone()).await?;
        for set in 0..self.n_repeats() {
            let segments: Vec<Value> =
                (0..N_DOCUMENTS).map(|idx| json!({"token_ids": document(set, idx)})).collect();
            worker.post("/cache/segments", &json!({"segments": segments})).await?;
        }
        // What was in its memory is on the disk alone then.
        worker.end().await;
        let worker = LocalWorker::start(config).await?;
        let mut times = Times::default();
        // The first request pays for what every process pays once.
        first_token(&worker, usize::MAX, 0, false).await?;
        for set in 0..self.n_repeats() {
            times.nvme.push(first_token(&worker, set, 1, true).await?);
            times.ram.push(first_token(&worker, set, 5, true).await?);
            times.full.push(first_token(&worker, set, 7, false).await?);
        }
        worker.end().await;
        Ok(times)
    }

    fn n_repeats(&self) -> usize {
        if self.is_quick { 2 } else { 8 }
    }
}

/// Milliseconds.
#[derive(Debug, Default)]
struct Times {
    full: Vec<f64>,
    ram: Vec<f64>,
    nvme: Vec<f64>,
}

/// Milliseconds until the first token of the documents of a set, in steps of `stride`: 1, 5 and 7 have no factor with their
/// number, so each gives another order.
async fn first_token(
    worker: &LocalWorker,
    set: usize,
    stride: usize,
    is_blended: bool,
) -> anyhow::Result<f64> {
    let order = (0..N_DOCUMENTS).map(|idx| (idx * stride + stride) % N_DOCUMENTS);
    let mut parts: Vec<Value> =
        order.map(|idx| json!({"token_ids": document(set, idx), "reusable": true})).collect();
    parts.push(json!({"token_ids": tokens(set, usize::MAX, QUESTION_TOKENS)}));
    let mut kvik = json!({"segments": parts});
    if is_blended {
        kvik["blend"] = json!("none");
    }
    let body = json!({"prompt": "", "max_tokens": 1, "temperature": 0, "ignore_eos": true, "kvik": kvik});
    let begin = Instant::now();
    let answer = worker.post("/v1/completions", &body).await?;
    let time_ms = begin.elapsed().as_secs_f64() * 1e3;
    let details = &answer["usage"]["prompt_tokens_details"];
    let n_blended = details["blended_tokens"].as_u64().unwrap_or(0);
    let n_expected = if is_blended { (N_DOCUMENTS * DOCUMENT_TOKENS) as u64 } else { 0 };
    ensure!(n_blended == n_expected && details["cached_tokens"] == 0, "unexpected use of KV: {details}");
    Ok(time_ms)
}

fn document(set: usize, idx: usize) -> Vec<u32> {
    tokens(set, idx, DOCUMENT_TOKENS)
}

fn tokens(set: usize, idx: usize, n_tokens: usize) -> Vec<u32> {
    let seed = (set as u32).wrapping_mul(40_503).wrapping_add((idx as u32).wrapping_mul(2_246_822_519));
    (0..n_tokens as u32)
        .map(|place| 10 + (place.wrapping_mul(2_654_435_761) ^ seed).wrapping_mul(3_266_489_917) % 2000)
        .collect()
}
