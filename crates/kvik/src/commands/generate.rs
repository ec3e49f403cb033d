//! `kvik generate`: one prompt in, text out.

mod outcome;
mod prompt;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::time::Instant;

use anyhow::Context;
use kvik_model::{
    BLOCK_TOKENS, BackendOptions, CpuBackendOptions, CudaBackendOptions, DeviceName, Engine, EngineEvent,
    EngineOptions, GenerateRequest, KvSize, Model, ModelConfig, ModelError, SamplingParams,
};
use kvik_types::{Dtype, TokenId};

use super::{check_kv_blocks, default_kv_dtype, n_blocks_in_memory, open_model, print_json};
use crate::cli::generate::{EngineArguments, GenerateArguments};
use kvik_runtime::terminal::{self, TextOutput};
use outcome::{Outcome, Report};

/// Share of the machine's memory, as a divisor, that keys and values take unless asked for more.
/// A half leaves room for the weights; outputs that do not fit are computed one after another.
const MEMORY_DIVISOR: u64 = 2;

/// Runs the command.
pub(crate) fn run(arguments: &GenerateArguments) -> anyhow::Result<()> {
    let sampling = sampling_params(arguments)?;
    let prompt = prompt::Prompt::read(arguments)?;
    let model = open_model(arguments.model.as_deref())?;
    let prompt_ids = prompt.encode(&model)?;
    let mut engine = load(&model, &arguments.engine, &prompt_ids, &sampling)?;

    // Choices are printed one after another, so only the first can be seen while it is made.
    let mut live = (!arguments.json).then(TextOutput::new);
    let n_choices = sampling.n;
    if let Some(output) = &mut live {
        write_title(output, 0, n_choices)?;
    }
    let request = GenerateRequest { prompt: prompt_ids.clone(), sampling: sampling.clone() };
    let outcome = complete(&mut engine, request, live.as_mut())?;

    let Some(mut output) = live else {
        return print_json(&Report::new(&model, &prompt_ids, &sampling, &outcome));
    };
    for (idx, choice) in outcome.choices().iter().enumerate().skip(1) {
        write(&mut output, "\n")?;
        write_title(&mut output, idx, n_choices)?;
        write(&mut output, &choice.text)?;
    }
    write(&mut output, "\n")?;
    if terminal::stderr_is_terminal() {
        let style = terminal::DIMMED;
        // Statistics that cannot be written are no reason to fail: the text is out.
        let _ = writeln!(anstream::stderr(), "{style}{}{style:#}", outcome.summary(sampling.seed));
    }
    Ok(())
}

fn sampling_params(arguments: &GenerateArguments) -> anyhow::Result<SamplingParams> {
    let given = &arguments.sampling;
    let stop = given
        .stop
        .iter()
        .map(|text| prompt::utf8("stop", text.as_encoded_bytes()))
        .collect::<kvik_model::Result<Vec<String>>>()
        .context("read the options")?;
    let is_random = given.temperature != 0.0;
    let sampling = SamplingParams {
        temperature: given.temperature,
        top_k: given.top_k,
        top_p: given.top_p,
        min_p: given.min_p,
        repetition_penalty: given.repetition_penalty,
        presence_penalty: given.presence_penalty,
        frequency_penalty: given.frequency_penalty,
        seed: given.seed.or_else(|| is_random.then(random_seed)),
        stop,
        ignore_eos: given.ignore_eos,
        logprobs: given.logprobs,
        n: given.n,
        max_tokens: given.max_tokens,
        ..SamplingParams::default()
    };
    // The engine checks this too, but only after the weights were read.
    sampling.validate().context("read the options")?;
    Ok(sampling)
}

/// A seed from the system's randomness, of 32 bits: short enough to be typed again, and exact in
/// JSON readers that keep numbers as f64.
fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 32
}

fn load(
    model: &Model,
    arguments: &EngineArguments,
    prompt_ids: &[TokenId],
    sampling: &SamplingParams,
) -> anyhow::Result<Engine> {
    let config = model.config();
    // The engine checks this too, but only after the weights were read.
    if config.max_positions <= prompt_ids.len() {
        let value = format!("{} tokens long", prompt_ids.len());
        let allowed = format!("1 to {} tokens, less than the model's context", config.max_positions - 1);
        return Err(ModelError::request("prompt", value, allowed)).context("read the prompt");
    }
    let kv_dtype = arguments.kv_dtype.map_or_else(|| default_kv_dtype(arguments.device), Dtype::from);
    let n_blocks = match arguments.kv_blocks {
        Some(n_blocks) => n_blocks as usize,
        None => default_kv_blocks(config, kv_dtype, prompt_ids.len(), sampling),
    };
    let backend = match arguments.device {
        DeviceName::Cpu => {
            let mut backend = CpuBackendOptions::default();
            backend.kv_dtype = kv_dtype;
            backend.n_blocks = n_blocks;
            if let Some(n_threads) = arguments.threads {
                backend.n_threads = n_threads as usize;
            }
            check_kv_blocks(config, kv_dtype, n_blocks).context("read the options")?;
            BackendOptions::Cpu(backend)
        }
        DeviceName::Cuda(ordinal) => {
            let mut backend = CudaBackendOptions::default();
            backend.ordinal = ordinal;
            backend.kv_dtype = kv_dtype;
            backend.kv_size = KvSize::Blocks(n_blocks);
            BackendOptions::Cuda(backend)
        }
    };
    model.engine(&backend, EngineOptions::default()).context("load the model")
}

/// Blocks for all choices at their longest, but no more than a share of the memory; at least
/// enough for one choice, because less would cut it.
fn default_kv_blocks(
    config: &ModelConfig,
    kv_dtype: Dtype,
    n_prompt: usize,
    sampling: &SamplingParams,
) -> usize {
    let longest = n_prompt.saturating_add(sampling.max_tokens as usize).min(config.max_positions);
    let n_one = longest.div_ceil(BLOCK_TOKENS);
    // The choices share the full blocks of the prompt.
    let n_own = n_one - n_prompt / BLOCK_TOKENS;
    let n_all = n_one + n_own * (sampling.n as usize - 1);
    let n_affordable = n_blocks_in_memory(config, kv_dtype)
        .map_or(usize::MAX, |n_possible| (n_possible / MEMORY_DIVISOR) as usize);
    n_all.min(n_affordable).max(n_one)
}

/// Runs the request to its end; the first choice's text goes to `live` as it is made.
fn complete(
    engine: &mut Engine,
    request: GenerateRequest,
    mut live: Option<&mut TextOutput>,
) -> anyhow::Result<Outcome> {
    let mut outcome = Outcome::new(request.sampling.n, Instant::now());
    engine.submit(request).context("run the request")?;
    let mut events: Vec<EngineEvent> = Vec::new();
    while !engine.is_idle() {
        engine.step(&mut events).context("run the request")?;
        let now = Instant::now();
        for event in events.drain(..) {
            let (choice, text) = outcome.take(event, now).context("run the request")?;
            if let (0, Some(output)) = (choice, live.as_deref_mut())
                && !text.is_empty()
            {
                write(output, &text)?;
            }
        }
    }
    Ok(outcome)
}

fn write_title(output: &mut TextOutput, choice_idx: usize, n_choices: u32) -> anyhow::Result<()> {
    if n_choices == 1 {
        return Ok(());
    }
    write(output, &format!("--- {} of {n_choices} ---\n", choice_idx + 1))
}

fn write(output: &mut TextOutput, text: &str) -> anyhow::Result<()> {
    let written: io::Result<()> = output.write_text(text);
    written.context("write to standard output")
}
