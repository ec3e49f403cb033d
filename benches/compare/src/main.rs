//! The built-in engine beside candle-transformers' Llama: same weights, same machine, same run.
//!
//! `cargo run --release --manifest-path benches/compare/Cargo.toml [-- --json]`
//!
//! Both sides get the bundled model and the same prompts and choose the most likely token at each
//! step. candle runs in f32 and in bf16; the faster of the two is the baseline. Rounds alternate
//! between the two projects, so that a busy machine slows both; each figure is the median.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::{D, DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama, LlamaConfig};
use kvik_model::{CpuBackendOptions, Engine, EngineEvent, EngineOptions, GenerateRequest, Model, SamplingParams};
use serde_json::json;

const N_ROUNDS: usize = 9;
const CONTEXT_TOKENS: usize = 64;
const DECODE_TOKENS: usize = 64;
const PREFILL_TOKENS: usize = 512;
const BATCHES: [usize; 3] = [1, 4, 16];

/// One thing that both projects are asked to do.
#[derive(Clone, Copy)]
enum Task {
    /// Prompts of `CONTEXT_TOKENS`, then `DECODE_TOKENS` steps of which the first is not counted.
    Decode { batch: usize },
    /// One prompt of `PREFILL_TOKENS` up to its first token.
    Prefill,
}

impl Task {
    fn name(self) -> String {
        match self {
            Self::Decode { batch } => format!("decode, batch {batch}"),
            Self::Prefill => format!("prefill, {PREFILL_TOKENS} tokens"),
        }
    }
}

/// The prompt of one sequence: fixed, different for each, within the vocabulary.
fn prompt(sequence_idx: usize, n_tokens: usize) -> Vec<u32> {
    (0..n_tokens).map(|idx| ((sequence_idx * 7919 + idx * 104_729) % 4000 + 6) as u32).collect()
}

struct Kvik {
    engine: Engine,
}

impl Kvik {
    fn new() -> Result<Self> {
        let mut options = EngineOptions::default();
        // Every round computes its prompts.
        options.reuses_prefixes = false;
        let engine = Model::bundled()?.cpu_engine(&CpuBackendOptions::default(), options)?;
        Ok(Self { engine })
    }

    /// Tokens per second, and the tokens of the first sequence.
    fn run(&mut self, task: Task) -> Result<(f64, Vec<u32>)> {
        let (batch, n_prompt, n_generated) = match task {
            Task::Decode { batch } => (batch, CONTEXT_TOKENS, DECODE_TOKENS),
            Task::Prefill => (1, PREFILL_TOKENS, 1),
        };
        let mut first = None;
        for idx in 0..batch {
            let mut sampling = SamplingParams::greedy(n_generated as u32);
            sampling.ignore_eos = true;
            let id = self.engine.submit(GenerateRequest { prompt: prompt(idx, n_prompt), sampling })?;
            first.get_or_insert(id);
        }
        let (mut events, mut tokens) = (Vec::new(), Vec::new());
        let mut start = Instant::now();
        let mut n_timed = 0;
        let mut has_begun = matches!(task, Task::Prefill);
        while !self.engine.is_idle() {
            self.engine.step(&mut events)?;
            let mut n_tokens = 0;
            for event in events.drain(..) {
                if let EngineEvent::Token(event) = event {
                    n_tokens += 1;
                    if Some(event.request) == first {
                        tokens.push(event.token);
                    }
                }
            }
            if has_begun {
                n_timed += n_tokens;
            } else if n_tokens == batch {
                // All prompts are computed; from here on every step decodes all sequences.
                has_begun = true;
                start = Instant::now();
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        let n_timed = if matches!(task, Task::Prefill) { PREFILL_TOKENS } else { n_timed };
        Ok((n_timed as f64 / seconds, tokens))
    }
}

struct Candle {
    model: Llama,
    config: Config,
    dtype: DType,
}

impl Candle {
    fn new(folder: &Path, dtype: DType) -> Result<Self> {
        let text = std::fs::read_to_string(folder.join("config.json")).context("read config.json")?;
        let config: LlamaConfig = serde_json::from_str(&text).context("parse config.json")?;
        let config = config.into_config(false);
        let weights = std::fs::read(folder.join("model.safetensors")).context("read weights")?;
        let variables = VarBuilder::from_buffered_safetensors(weights, dtype, &Device::Cpu)?;
        Ok(Self { model: Llama::load(variables, &config)?, config, dtype })
    }

    fn run(&mut self, task: Task) -> Result<(f64, Vec<u32>)> {
        let (batch, n_prompt, n_generated) = match task {
            Task::Decode { batch } => (batch, CONTEXT_TOKENS, DECODE_TOKENS),
            Task::Prefill => (1, PREFILL_TOKENS, 1),
        };
        let mut cache = Cache::new(true, self.dtype, &self.config, &Device::Cpu)?;
        let prompts: Vec<u32> = (0..batch).flat_map(|idx| prompt(idx, n_prompt)).collect();
        let input = Tensor::from_vec(prompts, (batch, n_prompt), &Device::Cpu)?;
        let mut start = Instant::now();
        let mut next = self.most_likely(&input, 0, &mut cache)?;
        let mut tokens = vec![next[0]];
        if let Task::Prefill = task {
            return Ok((PREFILL_TOKENS as f64 / start.elapsed().as_secs_f64(), tokens));
        }
        start = Instant::now();
        for step in 0..n_generated - 1 {
            let input = Tensor::from_vec(next, (batch, 1), &Device::Cpu)?;
            next = self.most_likely(&input, n_prompt + step, &mut cache)?;
            tokens.push(next[0]);
        }
        let n_timed = batch * (n_generated - 1);
        Ok((n_timed as f64 / start.elapsed().as_secs_f64(), tokens))
    }

    fn most_likely(&self, input: &Tensor, position: usize, cache: &mut Cache) -> Result<Vec<u32>> {
        let logits = self.model.forward(input, position, cache)?;
        Ok(logits.argmax(D::Minus1)?.to_vec1()?)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn model_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/kvik-tiny")
}

fn main() -> Result<()> {
    let wants_json = std::env::args().any(|argument| argument == "--json");
    let folder = model_folder();
    let mut kvik = Kvik::new()?;
    let mut candle_f32 = Candle::new(&folder, DType::F32)?;
    let mut candle_bf16 = Candle::new(&folder, DType::BF16)?;
    let tasks: Vec<Task> =
        BATCHES.iter().map(|&batch| Task::Decode { batch }).chain([Task::Prefill]).collect();
    let mut results = Vec::new();
    if !wants_json {
        println!("{:<22} {:>12} {:>12} {:>12} {:>8}", "tokens/s", "kvik", "candle f32", "candle bf16", "ratio");
    }
    for task in tasks {
        let (mut ours, mut theirs_f32, mut theirs_bf16) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=N_ROUNDS {
            let (our_rate, our_tokens) = kvik.run(task)?;
            let (f32_rate, f32_tokens) = candle_f32.run(task)?;
            let (bf16_rate, _) = candle_bf16.run(task)?;
            // A figure for different work would be no comparison. Random prompts have near ties,
            // so the outputs may part later on.
            ensure!(our_tokens[0] == f32_tokens[0], "the first tokens differ: {}", task.name());
            // The first round warms up.
            if 0 < round {
                ours.push(our_rate);
                theirs_f32.push(f32_rate);
                theirs_bf16.push(bf16_rate);
            }
        }
        let (ours, f32_rate, bf16_rate) = (median(ours), median(theirs_f32), median(theirs_bf16));
        let (baseline, value) = if f32_rate < bf16_rate { ("bf16", bf16_rate) } else { ("f32", f32_rate) };
        let ratio = ours / value;
        if !wants_json {
            println!("{:<22} {ours:>12.0} {f32_rate:>12.0} {bf16_rate:>12.0} {ratio:>8.2}", task.name());
        }
        results.push(json!({
            "name": task.name(), "value": ours, "unit": "tokens/s",
            "baseline": {"name": format!("candle-transformers {baseline}"), "value": value}, "ratio": ratio,
        }));
    }
    if wants_json {
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown");
        let machine = json!({
            "cpu": cpu.trim_matches([' ', '\t', ':']),
            "cores": std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        });
        println!("{}", json!({"bench": "engine-compare", "machine": machine, "results": results}));
    }
    Ok(())
}
