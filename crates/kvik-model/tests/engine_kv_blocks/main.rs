//! KV that leaves an engine by blocks and comes into another: the outputs do not change.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod arriving;
mod importing;
#[path = "../../../../tests/support/inner_backend.rs"]
mod inner_backend;
mod layers;
mod lent;
mod loaded;
mod names;
mod offered;
mod salts;
mod schedules;
mod shared_memory;
#[path = "../support/mod.rs"]
pub mod support;

use std::sync::Arc;

use kvik_model::{
    Engine, EngineEvent, EngineOptions, GenerateRequest, RequestId, SamplingParams, SubmitOptions,
};
use kvik_types::Dtype;

use support::requests::{Output, Outputs, alone, collect, engine, run};
use support::shelf::{Shelf, ShelfKv};
use support::{TestModel, backend_options, namespace};

const FIXTURES: [&str; 4] = ["mistral_sliding_window", "qwen3", "gpt2", "llama_tied_odd_sizes"];

/// Blocks of an engine in which nothing has to give way.
const N_BLOCKS: usize = 32;

/// Tokens that look random; different for each `salt`.
fn tokens(n_tokens: u32, salt: u32) -> Vec<u32> {
    (0..n_tokens).map(|position| (position * (2 * salt + 7) + position * position + salt) % 64).collect()
}

fn greedy(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    let mut sampling = SamplingParams::greedy(max_tokens);
    sampling.ignore_eos = true;
    sampling.logprobs = Some(3);
    GenerateRequest { prompt: prompt.to_vec(), sampling }
}

fn named(name: &str) -> SubmitOptions {
    SubmitOptions { name: Some(name.to_owned()), ..SubmitOptions::default() }
}

fn engine_of_dtype(model: &TestModel, kv_dtype: Dtype, max_batched_tokens: usize) -> Engine {
    let mut backend = backend_options(N_BLOCKS);
    backend.kv_dtype = kv_dtype;
    let mut options = EngineOptions::default();
    options.max_batched_tokens = max_batched_tokens;
    Engine::new(Box::new(model.backend(&backend)), None, &namespace(), options).unwrap()
}

fn submit_from(engine: &mut Engine, request: GenerateRequest, kv: ShelfKv) -> RequestId {
    submit_with_kv(engine, request, SubmitOptions::default(), kv)
}

fn submit_with_kv(
    engine: &mut Engine,
    request: GenerateRequest,
    options: SubmitOptions,
    kv: ShelfKv,
) -> RequestId {
    let prepared = engine.prepare(request, options);
    engine.submit_prepared(prepared, Some(Arc::new(kv))).unwrap()
}

/// How many tokens of a prompt without a salt the engine has.
fn matched_tokens(engine: &Engine, prompt: &[u32]) -> usize {
    engine.matched_tokens(&engine.prepare(greedy(prompt, 1), SubmitOptions::default()))
}

/// A shelf with the full blocks of `prompt`.
fn shelf_of(model: &TestModel, prompt: &[u32]) -> Shelf {
    let shelf = Shelf::default();
    let mut source = engine(model, N_BLOCKS, EngineOptions::default());
    source.set_kv_sink(shelf.sink());
    source.submit(greedy(prompt, 1)).unwrap();
    run(&mut source);
    shelf
}

fn only(outputs: Outputs) -> Output {
    let mut outputs = outputs.into_values();
    let output = outputs.next().unwrap();
    assert_eq!(outputs.next(), None);
    output
}

/// Asserts that an output is, to the bit, what comes of its request alone.
fn assert_as_alone(model: &TestModel, request: &GenerateRequest, output: &Output) {
    let expected = &alone(model, None, request)[0];
    assert_eq!(output.tokens, expected.tokens);
    assert_eq!(output.logprobs, expected.logprobs);
}

/// Steps until all requests have ended; returns what came of them.
fn run_all(engine: &mut Engine, mut events: Vec<EngineEvent>) -> Outputs {
    for _ in 0..100_000 {
        if engine.is_idle() {
            let mut outputs = Outputs::new();
            collect(events, &mut outputs);
            return outputs;
        }
        engine.step(&mut events).unwrap();
    }
    panic!("the engine does not end");
}

/// Submits one request after the other, with the steps between them that it names, and asserts that each output is what
/// comes of its request alone.
fn assert_all_as_alone<T>(
    model: &TestModel,
    engine: &mut Engine,
    requests: Vec<(GenerateRequest, T, usize)>,
    mut submit: impl FnMut(&mut Engine, &GenerateRequest, T) -> RequestId,
) {
    let (mut submitted, mut events) = (Vec::new(), Vec::new());
    for (request, kv, n_steps) in requests {
        submitted.push((submit(engine, &request, kv), request));
        for _ in 0..n_steps {
            engine.step(&mut events).unwrap();
        }
    }
    let mut outputs = run_all(engine, events);
    for (id, request) in submitted {
        assert_as_alone(model, &request, &outputs.remove(&(id, 0)).unwrap());
    }
}
