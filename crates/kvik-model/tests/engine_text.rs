//! Text, stop strings and batches on the bundled model.

#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

pub mod support;

use std::sync::Arc;

use kvik_model::{EngineOptions, FinishReason, GenerateRequest, Model, SamplingParams};
use kvik_tokens::AddSpecial;

use support::TestModel;
use support::requests::{alone, engine_with, run};

const PROMPTS: [&str; 5] = [
    "Once upon a time",
    "Once upon a time there was a little girl",
    "The sun was warm",
    "Note 1: In Quarry there is a builder named Olga. Olga has a striped chair.\nQuestion: What is the job of Olga?\nAnswer:",
    "Note 1: In Quarry there is a builder named Olga. Olga has a striped chair.\nQuestion: Where does Olga live?\nAnswer:",
];

fn requests(model: &Model) -> Vec<GenerateRequest> {
    let mut requests = Vec::new();
    for (idx, prompt) in PROMPTS.iter().enumerate() {
        let greedy = SamplingParams { logprobs: Some(3), ..SamplingParams::greedy(16) };
        let sampled = SamplingParams {
            temperature: 1.0,
            top_p: 0.95,
            seed: Some(idx as u64),
            n: 2,
            repetition_penalty: 1.1,
            stop: vec![".".to_owned()],
            max_tokens: 20,
            ..SamplingParams::default()
        };
        for sampling in [greedy, sampled] {
            let prompt = model.tokenizer().encode(prompt, AddSpecial::Yes).unwrap();
            requests.push(GenerateRequest { prompt, sampling });
        }
    }
    requests
}

#[test]
fn a_crowded_engine_gives_every_request_the_text_it_gets_alone() {
    let model = Model::bundled().unwrap();
    let test_model = TestModel::bundled();
    let mut options = EngineOptions::default();
    options.max_batched_tokens = 24;
    options.max_sequences = 6;
    let tokenizer = Some(Arc::clone(model.tokenizer()));
    let mut engine = engine_with(&test_model, tokenizer, 10, options);
    let requests = requests(&model);
    for request in &requests {
        engine.submit(request.clone()).unwrap();
    }
    let mut outputs = run(&mut engine).into_values();
    let mut n_text_bytes = 0;
    for request in &requests {
        for mut expected in alone(&test_model, Some(model.tokenizer()), request) {
            let actual = outputs.next().unwrap();
            expected.usage.cached_tokens = actual.usage.cached_tokens;
            assert_eq!(actual, expected);
            n_text_bytes += actual.text.len();
        }
    }
    assert!(300 < n_text_bytes, "hardly any text was compared");
    assert!(outputs.next().is_none());
    assert!(0 < engine.stats().n_preemptions, "{:?}", engine.stats());
    assert!(0 < engine.stats().n_block_copies, "{:?}", engine.stats());
    assert!(0 < engine.stats().n_cached_tokens, "{:?}", engine.stats());
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let model = Model::bundled().unwrap();
    let test_model = TestModel::bundled();
    let prompt = model.tokenizer().encode("Once upon a time", AddSpecial::Yes).unwrap();
    let run_with = |stop: &[&str]| {
        let sampling = SamplingParams {
            stop: stop.iter().map(|&text| text.to_owned()).collect(),
            ..SamplingParams::greedy(24)
        };
        let request = GenerateRequest { prompt: prompt.clone(), sampling };
        alone(&test_model, Some(model.tokenizer()), &request).remove(0)
    };
    let free = run_with(&[]);
    // Over the border of two tokens, and not at the start of the text.
    let (start, stop) = free.text.split_at(10);
    let stop = &stop[..6];
    let stopped = run_with(&[stop]);
    assert_eq!(stopped.text, start);
    assert_eq!(stopped.reason, Some(FinishReason::Stop));
    assert!(stopped.tokens.len() < free.tokens.len());
    assert!(free.tokens.starts_with(&stopped.tokens));
}

#[test]
fn a_stop_token_ends_the_output_with_itself() {
    let model = Model::bundled().unwrap();
    let test_model = TestModel::bundled();
    let prompt = model.tokenizer().encode("The sun was warm", AddSpecial::Yes).unwrap();
    let mut request = GenerateRequest { prompt, sampling: SamplingParams::greedy(10) };
    let free = alone(&test_model, None, &request).remove(0);
    assert_eq!(free.reason, Some(FinishReason::Length));
    request.sampling.stop_token_ids = vec![free.tokens[4]];
    let stopped = alone(&test_model, None, &request).remove(0);
    let n_tokens = 1 + free.tokens.iter().position(|token| *token == free.tokens[4]).unwrap();
    assert_eq!(stopped.tokens, free.tokens[..n_tokens]);
    assert_eq!(stopped.reason, Some(FinishReason::Stop));
}
