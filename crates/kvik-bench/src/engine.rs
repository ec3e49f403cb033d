//! How fast the engine computes prompts and tokens.
//!
//! Prefill: all prompts of a batch are submitted together; the time ends when the last of them has
//! its first token. Decode: the time of steps in which every sequence of the batch gets one token;
//! the steps that compute the prompts are not in it. Prefixes are never reused. Each measurement
//! is run once to warm up, then repeated at least `MIN_REPEATS` times and for at least the time
//! asked for. Prompts are random tokens, the same in every run: the speed does not depend on them.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::ensure;
use kvik_model::{
    BLOCK_TOKENS, BackendOptions, CpuBackendOptions, CudaBackendOptions, DeviceName, Engine, EngineEvent,
    EngineOptions, GenerateRequest, KvSize, Model, ModelConfig, ModelError, RequestId, SamplingParams,
};
use kvik_types::{Dtype, TokenId};

use crate::report::Measurement;

/// The smallest number of repeats whose median ignores one outlier.
const MIN_REPEATS: usize = 3;

/// Rows of a pass on a GPU: prompts come in few pieces.
const GPU_BATCHED_TOKENS: usize = 8192;

const UNIT: &str = "tokens/s";

/// What is measured.
#[derive(Debug, Clone)]
pub struct EngineBenchOptions {
    /// Sequences in a batch; one measurement of each kind for each size.
    pub batch_sizes: Vec<usize>,
    /// Length of the prompts whose prefill is measured.
    pub prefill_tokens: usize,
    /// Steps of one repeat of a decode measurement.
    pub decode_tokens: usize,
    /// Length of the prompts before the decode steps.
    pub context_tokens: usize,
    /// How long each measurement is repeated at least.
    pub at_least: Duration,
    /// Device that the model runs on.
    pub device: DeviceName,
    /// Type in which keys and values are kept.
    pub kv_dtype: Dtype,
    /// Threads that compute on the CPU.
    pub n_threads: usize,
}

/// The measurements, done one by one.
#[derive(Debug)]
pub struct EngineBench {
    engine: Engine,
    options: EngineBenchOptions,
    model_name: String,
    vocab_size: usize,
    n_done: usize,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Prefill,
    Decode,
}

// === impl EngineBenchOptions ===

impl EngineBenchOptions {
    /// Checks that the sequences fit into the model's context.
    ///
    /// # Errors
    /// [`ModelError::InvalidRequest`] for the first option that does not fit.
    pub fn validate(&self, config: &ModelConfig) -> kvik_model::Result<()> {
        let longest = config.max_positions;
        if longest <= self.prefill_tokens {
            let allowed = format!("1 to {}, less than the model's context", longest - 1);
            return Err(ModelError::request("prefill_tokens", self.prefill_tokens, allowed));
        }
        let n_free = longest.saturating_sub(self.decode_tokens + self.n_early_tokens());
        if n_free <= self.context_tokens {
            let allowed = format!(
                "less than {n_free}, so that it fits into the model's context of {longest} with all decoded tokens"
            );
            return Err(ModelError::request("context", self.context_tokens, allowed));
        }
        Ok(())
    }

    /// Blocks with which no sequence ever waits for another.
    pub fn n_blocks(&self) -> usize {
        let longest =
            (self.prefill_tokens + 1).max(self.context_tokens + self.decode_tokens + self.n_early_tokens());
        self.largest_batch() * longest.div_ceil(BLOCK_TOKENS)
    }

    fn largest_batch(&self) -> usize {
        self.batch_sizes.iter().copied().max().unwrap_or(1)
    }

    /// Bound on the tokens that the first sequence has before the last one of its batch has started:
    /// one for each step, and a step computes at least one whole budget of prompt tokens.
    fn n_early_tokens(&self) -> usize {
        let n_prompt_tokens = self.largest_batch() * self.context_tokens;
        let n_left_by_decoding = self.max_batched_tokens() - self.largest_batch();
        n_prompt_tokens.div_ceil(n_left_by_decoding) + 1
    }

    /// The engine's own budget, but always room for prompts beside a batch that decodes.
    fn max_batched_tokens(&self) -> usize {
        let own = match self.device {
            DeviceName::Cpu => EngineOptions::default().max_batched_tokens,
            DeviceName::Cuda(_) => GPU_BATCHED_TOKENS,
        };
        own.max(2 * self.largest_batch())
    }
}

// === impl EngineBench ===

impl EngineBench {
    /// Loads the model.
    pub fn try_new(model: &Model, options: EngineBenchOptions) -> kvik_model::Result<Self> {
        let backend = match options.device {
            DeviceName::Cpu => {
                let mut backend = CpuBackendOptions::default();
                backend.kv_dtype = options.kv_dtype;
                backend.n_threads = options.n_threads;
                backend.n_blocks = options.n_blocks();
                BackendOptions::Cpu(backend)
            }
            DeviceName::Cuda(ordinal) => {
                let mut backend = CudaBackendOptions::default();
                backend.ordinal = ordinal;
                backend.kv_dtype = options.kv_dtype;
                backend.kv_size = KvSize::Blocks(options.n_blocks());
                BackendOptions::Cuda(backend)
            }
        };
        let mut engine = EngineOptions::default();
        engine.reuses_prefixes = false;
        engine.max_sequences = options.largest_batch();
        engine.max_batched_tokens = options.max_batched_tokens();
        Ok(Self {
            engine: model.engine(&backend, engine)?,
            options,
            model_name: model.name().to_owned(),
            vocab_size: model.config().vocab_size,
            n_done: 0,
        })
    }

    /// Number of measurements in all.
    pub fn n_measurements(&self) -> usize {
        2 * self.options.batch_sizes.len()
    }

    /// What was measured, for programs.
    pub fn settings(&self) -> serde_json::Value {
        let options = &self.options;
        serde_json::json!({
            "model": self.model_name,
            "prefill_tokens": options.prefill_tokens,
            "decode_tokens": options.decode_tokens,
            "context_tokens": options.context_tokens,
            "device": options.device.to_string(),
            "kv_dtype": options.kv_dtype.name(),
            "threads": options.n_threads,
        })
    }

    /// What was measured, for people.
    pub fn description(&self) -> String {
        let options = &self.options;
        format!(
            "{} on {}, KV in {}; prefill of {} tokens, decode after {}",
            self.model_name,
            match options.device {
                DeviceName::Cpu => format!("{} threads", options.n_threads),
                DeviceName::Cuda(_) => options.device.to_string(),
            },
            options.kv_dtype,
            options.prefill_tokens,
            options.context_tokens
        )
    }

    /// The name of the next measurement; `None` after the last.
    pub fn next_name(&self) -> Option<String> {
        let (kind, batch_size) = self.next()?;
        Some(match kind {
            Kind::Prefill => format!("prefill_batch_{batch_size}"),
            Kind::Decode => format!("decode_batch_{batch_size}"),
        })
    }

    /// Does the next measurement; `None` after the last.
    pub fn measure_next(&mut self) -> anyhow::Result<Option<Measurement>> {
        let (Some(name), Some((kind, batch_size))) = (self.next_name(), self.next()) else {
            return Ok(None);
        };
        self.n_done += 1;
        self.repeat(kind, batch_size)?;
        let mut repeats = Vec::new();
        let started = Instant::now();
        while repeats.len() < MIN_REPEATS || started.elapsed() < self.options.at_least {
            repeats.push(self.repeat(kind, batch_size)?);
        }
        Ok(Measurement::from_repeats(name, UNIT, repeats))
    }

    fn next(&self) -> Option<(Kind, usize)> {
        let sizes = &self.options.batch_sizes;
        match sizes.get(self.n_done) {
            Some(&size) => Some((Kind::Prefill, size)),
            None => Some((Kind::Decode, *sizes.get(self.n_done - sizes.len())?)),
        }
    }

    /// One repeat; returns tokens per second.
    fn repeat(&mut self, kind: Kind, batch_size: usize) -> anyhow::Result<f64> {
        let (n_tokens, elapsed) = match kind {
            Kind::Prefill => (batch_size * self.options.prefill_tokens, self.prefill(batch_size)?),
            Kind::Decode => (batch_size * self.options.decode_tokens, self.decode(batch_size)?),
        };
        ensure!(
            self.engine.stats().n_preemptions == 0,
            "a sequence had to wait for memory, so the time means nothing"
        );
        Ok(n_tokens as f64 / elapsed.as_secs_f64())
    }

    /// Time from submission until every prompt of the batch has its first token.
    fn prefill(&mut self, batch_size: usize) -> anyhow::Result<Duration> {
        let prompts = self.prompts(batch_size, self.options.prefill_tokens);
        let started = Instant::now();
        // One token each, so that no decode step is in the time.
        self.submit(prompts, 1)?;
        let mut events = Vec::new();
        while !self.engine.is_idle() {
            self.engine.step(&mut events)?;
        }
        let elapsed = started.elapsed();
        count_tokens(events)?;
        Ok(elapsed)
    }

    /// Time of the steps in which every sequence of the batch gets one token.
    fn decode(&mut self, batch_size: usize) -> anyhow::Result<Duration> {
        let prompts = self.prompts(batch_size, self.options.context_tokens);
        let requests = self.submit(prompts, u32::MAX)?;
        let mut started = HashSet::new();
        let mut events = Vec::new();
        while started.len() < batch_size {
            self.engine.step(&mut events)?;
            for event in events.drain(..) {
                match event {
                    EngineEvent::Token(token) => _ = started.insert(token.request),
                    EngineEvent::Failed { error, .. } => return Err(error.into()),
                    _ => {}
                }
            }
        }
        let started = Instant::now();
        for _ in 0..self.options.decode_tokens {
            self.engine.step(&mut events)?;
        }
        let elapsed = started.elapsed();
        for request in requests {
            self.engine.cancel(request);
        }
        let n_tokens = count_tokens(events)?;
        ensure!(
            n_tokens == batch_size * self.options.decode_tokens,
            "an output ended early, so the time means nothing"
        );
        Ok(elapsed)
    }

    fn submit(&mut self, prompts: Vec<Vec<TokenId>>, max_tokens: u32) -> kvik_model::Result<Vec<RequestId>> {
        let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::greedy(max_tokens) };
        let submit = |prompt: Vec<TokenId>| {
            let sampling = sampling.clone();
            self.engine.submit(GenerateRequest { prompt, sampling })
        };
        prompts.into_iter().map(submit).collect()
    }

    fn prompts(&self, n_prompts: usize, n_tokens: usize) -> Vec<Vec<TokenId>> {
        // SplitMix64, so that the tokens are the same on every machine.
        let mut state = 0u64;
        let mut next_token = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = state;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((mixed ^ (mixed >> 31)) % self.vocab_size as u64) as TokenId
        };
        (0..n_prompts).map(|_| (0..n_tokens).map(|_| next_token()).collect()).collect()
    }
}

fn count_tokens(events: Vec<EngineEvent>) -> kvik_model::Result<usize> {
    let mut n_tokens = 0;
    for event in events {
        match event {
            EngineEvent::Token(_) => n_tokens += 1,
            EngineEvent::Failed { error, .. } => return Err(error),
            _ => {}
        }
    }
    Ok(n_tokens)
}
