//! Whether KV is loaded or computed: the time to the first token by the planner, beside loading everything and computing
//! everything, over speeds of a tier and lengths of a prompt.
//!
//! Four workers with the bundled model have the same chunks on a disk each, whose reads wait as on a link of a certain speed.
//! One loads all chunks, one computes all, one plans, and one loads all layer by layer. They are asked in turns, one request at a
//! time.

mod plot;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use kvik_node::TierConfig;
use kvik_worker::{StoreConfig, WorkerConfig};
use serde_json::{Value, json};

use crate::local_worker::LocalWorker;
use crate::report::{Baseline, Goal, Measurement};

/// Room for the longest prompt, so that it displaces all before it.
const KV_BLOCKS: usize = 256;

const CHUNK_TOKENS: usize = 256;

const MODES: [&str; N_MODES] = ["load_all", "compute_all", "auto", LAYERWISE];
const N_MODES: usize = 4;

/// All chunks are loaded, layer by layer.
const LAYERWISE: &str = "layerwise";

/// A wait for copies or for the disk that is longer is a failure.
const LONGEST_WAIT: Duration = Duration::from_secs(20);

/// How much is measured.
#[derive(Debug, Clone)]
pub struct PlannerBenchOptions {
    /// A folder for the disks, which is removed by its owner.
    pub dir: PathBuf,
    /// Takes less time for less precise values.
    pub is_quick: bool,
}

/// Speeds that the tier is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speed {
    /// Megabytes (10^6) a second.
    Megabytes(u32),
    /// As fast as the disk is.
    Unbound,
    /// The chunks are in memory.
    Memory,
}

/// What was measured at one speed and length: the times to the first token in milliseconds, by mode.
#[derive(Debug, Clone)]
pub struct Cell {
    speed: Speed,
    n_tokens: usize,
    times_ms: [Vec<f64>; N_MODES],
}

/// Runs the measurements.
#[derive(Debug)]
pub struct PlannerBench {
    options: PlannerBenchOptions,
    runtime: tokio::runtime::Runtime,
}

impl Speed {
    /// How it is called in names of measurements.
    pub fn name(self) -> String {
        match self {
            Self::Megabytes(speed) => format!("{speed}mb_s"),
            Self::Unbound => "disk".to_owned(),
            Self::Memory => "memory".to_owned(),
        }
    }
}

impl PlannerBench {
    /// # Errors
    /// If the operating system gives no threads, or the disks cannot be filled.
    pub fn try_new(options: PlannerBenchOptions) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let bench = Self { options, runtime };
        bench.runtime.block_on(bench.fill()).context("fill the disks")?;
        Ok(bench)
    }

    /// The speeds that are measured, in their order.
    pub fn speeds(&self) -> Vec<Speed> {
        if self.options.is_quick {
            return vec![Speed::Megabytes(30), Speed::Memory];
        }
        let bound = [10, 30, 100, 300, 1000].map(Speed::Megabytes);
        bound.into_iter().chain([Speed::Unbound, Speed::Memory]).collect()
    }

    fn lengths(&self) -> &'static [usize] {
        if self.options.is_quick { &[1000] } else { &[1000, 4000] }
    }

    /// A multiple of the number of modes, so that each is at every place of a round equally often.
    fn n_repeats(&self) -> usize {
        if self.options.is_quick { 1 } else { 2 * N_MODES }
    }

    /// What was measured, for a reader of the results.
    pub fn description(&self) -> String {
        format!(
            "kvik-tiny, 8 KiB of KV a token, prompts of {} tokens, one request at a time, {} repeats",
            self.lengths().iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            self.n_repeats()
        )
    }

    /// The same for programs.
    pub fn settings(&self) -> Value {
        json!({
            "lengths": self.lengths(),
            "repeats": self.n_repeats(),
            "speeds": self.speeds().into_iter().map(Speed::name).collect::<Vec<_>>(),
        })
    }

    /// Measures all lengths at one speed.
    ///
    /// # Errors
    /// If a worker cannot be started or asked.
    pub fn measure(&self, speed: Speed) -> anyhow::Result<Vec<Cell>> {
        self.runtime.block_on(self.run(speed))
    }

    fn folder(&self, mode: &str) -> PathBuf {
        self.options.dir.join(mode)
    }

    /// Computes the prompts once, and gives each worker its copy of them.
    async fn fill(&self) -> anyhow::Result<()> {
        let first = self.folder(MODES[0]);
        let worker = LocalWorker::start(config(&first, Speed::Unbound, "compute_all")).await?;
        for seed in 0..2 {
            for &n_tokens in self.lengths() {
                let prompt = prompt(n_tokens, seed);
                complete(&worker, &prompt).await?;
                wait_until_on_disk(&worker, &prompt).await?;
            }
        }
        worker.end().await;
        for mode in &MODES[1..] {
            copy_files(&first, &self.folder(mode)).with_context(|| format!("copy {}", first.display()))?;
        }
        Ok(())
    }

    async fn run(&self, speed: Speed) -> anyhow::Result<Vec<Cell>> {
        let mut workers = Vec::new();
        for mode in MODES {
            workers.push(LocalWorker::start(config(&self.folder(mode), speed, mode)).await?);
        }
        let cell = |&n_tokens| Cell { speed, n_tokens, times_ms: Default::default() };
        let mut cells: Vec<Cell> = self.lengths().iter().map(cell).collect();
        // The first round is not counted: engine and tiers are measured in it.
        for round in 0..=self.n_repeats() {
            for cell in &mut cells {
                for turn in 0..MODES.len() {
                    // Each is at every place equally often, and none runs beside what another still copies.
                    let mode = (round + turn) % MODES.len();
                    let worker = &workers[mode];
                    for other in &workers {
                        wait_for_copies(other).await?;
                    }
                    let prompt = prompt(cell.n_tokens, round % 2);
                    let time_ms = measure_one(worker, &prompt, speed, MODES[mode]).await?;
                    if 0 < round {
                        cell.times_ms[mode].push(time_ms);
                    }
                }
            }
        }
        for worker in workers {
            worker.end().await;
        }
        Ok(cells)
    }
}

/// The values of cells, for a report. The planner's are beside the better of the two others.
pub fn measurements(cells: &[Cell]) -> Vec<Measurement> {
    let mut results = Vec::new();
    for Cell { speed, n_tokens, times_ms } in cells {
        let [load_all, compute_all, planned, layerwise] = times_ms;
        let of = |mode: &str, times: &[f64]| {
            let name = format!("first_token_{n_tokens}_{}_{mode}", speed.name());
            Measurement::from_repeats(name, "ms", times.to_vec())
        };
        let (load_all, compute_all) = (of("load_all", load_all), of("compute_all", compute_all));
        let better = match (&load_all, &compute_all) {
            (Some(load), Some(compute)) if load.value <= compute.value => Some(("load all", load.value)),
            (_, Some(compute)) => Some(("compute all", compute.value)),
            _ => None,
        };
        let planned = of("planner", planned);
        // The engine takes chunks whole: what it costs to read them otherwise, and no goal.
        let whole = load_all.as_ref().map(|load| Baseline { name: "load all", value: load.value });
        let layerwise = of(LAYERWISE, layerwise).zip(whole);
        let layerwise = layerwise.map(|(layerwise, whole)| layerwise.compared_with(whole, None));
        results.extend(load_all);
        results.extend(compute_all);
        results.extend(planned.map(|planned| match better {
            Some((name, value)) => {
                planned.compared_with(Baseline { name, value }, Some(Goal::RatioAtMost(1.05)))
            }
            None => planned,
        }));
        results.extend(layerwise);
    }
    results
}

/// Draws the times over the speed, a panel for each length of prompts.
pub fn svg(cells: &[Cell]) -> String {
    plot::svg(cells)
}

fn config(folder: &Path, speed: Speed, mode: &str) -> WorkerConfig {
    let bytes_per_s = match speed {
        Speed::Megabytes(speed) => u64::from(speed) * 1_000_000,
        Speed::Unbound | Speed::Memory => 0,
    };
    let tier = TierConfig {
        nvme: Some(format!("{}:1GiB", folder.display())),
        bytes_per_s: bytes_per_s.to_string(),
        waits: 0 < bytes_per_s,
        ..TierConfig::default()
    };
    WorkerConfig {
        kv_blocks: KV_BLOCKS,
        store: StoreConfig {
            ram: "512MiB".to_owned(),
            tiers: vec![tier],
            planner: if mode == LAYERWISE { "load_all" } else { mode }.to_owned(),
            layerwise: mode == LAYERWISE,
            load_timeout_ms: 60_000,
            ..StoreConfig::default()
        },
        ..WorkerConfig::default()
    }
}

/// Milliseconds until the first token of a prompt that the engine does not have.
async fn measure_one(worker: &LocalWorker, prompt: &[u32], speed: Speed, mode: &str) -> anyhow::Result<f64> {
    if speed == Speed::Memory {
        worker.post("/cache/prefetch", &json!({"token_ids": prompt})).await?;
        wait_until_in_memory(worker, prompt).await?;
    } else {
        worker.post("/cache/clear", &json!({"tiers": ["ram"]})).await?;
    }
    let begin = Instant::now();
    let found = complete(worker, prompt).await?;
    let time_ms = begin.elapsed().as_secs_f64() * 1e3;
    let n_stored = (prompt.len() - 1) / CHUNK_TOKENS * CHUNK_TOKENS;
    let tier = if speed == Speed::Memory { "ram" } else { "nvme" };
    let n_engine = found["engine"].as_u64().unwrap_or(0) as usize;
    ensure!(n_engine < CHUNK_TOKENS, "the engine had {n_engine} tokens of the prompt");
    let n_loaded = found[tier].as_u64().unwrap_or(0) as usize;
    let is_right = match mode {
        "load_all" | LAYERWISE => n_stored <= n_loaded + n_engine,
        "compute_all" => n_loaded == 0,
        _ => true,
    };
    ensure!(is_right, "{mode} had {found} of {} tokens", prompt.len());
    Ok(time_ms)
}

/// Computes one token of a prompt; where its cached tokens were.
async fn complete(worker: &LocalWorker, prompt: &[u32]) -> anyhow::Result<Value> {
    let body = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": true});
    let mut answer = worker.post("/v1/completions", &body).await?;
    Ok(answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"].take())
}

async fn wait_for_copies(worker: &LocalWorker) -> anyhow::Result<()> {
    wait(async || Ok(worker.get("/cache/stats").await?["counts"]["copy_queue_bytes"] == 0)).await
}

async fn wait_until_in_memory(worker: &LocalWorker, prompt: &[u32]) -> anyhow::Result<()> {
    let n_stored = prompt.len() / CHUNK_TOKENS * CHUNK_TOKENS;
    let request = json!({"token_ids": prompt});
    wait(async || Ok(worker.post("/cache/lookup", &request).await?["tiers"]["ram"] == n_stored)).await
}

async fn wait_until_on_disk(worker: &LocalWorker, prompt: &[u32]) -> anyhow::Result<()> {
    let request = json!({"token_ids": prompt, "from": "ram", "to": "nvme", "copy": true});
    let n_chunks = prompt.len() / CHUNK_TOKENS;
    wait(async || Ok(worker.post("/cache/move", &request).await?["chunks"] == n_chunks)).await
}

/// Asks until the answer is yes.
async fn wait(is_done: impl AsyncFn() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let begin = Instant::now();
    while !is_done().await? {
        ensure!(begin.elapsed() < LONGEST_WAIT, "the store does not get ready");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

fn copy_files(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// Tokens that no other prompt begins with.
fn prompt(n_tokens: usize, seed: usize) -> Vec<u32> {
    let seed = (n_tokens + seed) as u32;
    (0..n_tokens as u32)
        .map(|place| 10 + place.wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503)) % 2000)
        .collect()
}
