//! What comes of a request does not depend on what else the engine does.

pub mod support;

use std::cell::RefCell;
use std::collections::BTreeSet;

use kvik_model::{EngineEvent, EngineOptions, GenerateRequest, SamplingParams};

use support::requests::{alone, engine, run};
use support::visits::{check_random_visits, check_visits, visits};
use support::{TestModel, runner};

#[test]
fn any_schedule_of_requests_gives_the_outputs_of_each_alone() {
    for name in ["mistral_sliding_window", "llama_tied_odd_sizes"] {
        let totals = check_random_visits(&TestModel::fixture(name), 150);
        // The schedules must be rough enough to mean something.
        assert!(20 < totals.n_preemptions, "{totals:?}");
        assert!(40 < totals.n_block_copies, "{totals:?}");
        assert!(200 < totals.n_cached_tokens, "{totals:?}");
        assert!(60 < totals.n_evicted, "{totals:?}");
    }
}

#[test]
fn an_engine_goes_on_exactly_after_any_number_of_earlier_schedules() {
    let model = TestModel::fixture("qwen3");
    let mut options = EngineOptions::default();
    options.max_batched_tokens = 20;
    options.max_sequences = 5;
    // One engine for all cases: prefixes of earlier schedules are found and evicted.
    let engine = RefCell::new(engine(&model, 7, options));
    let outcome = runner(60).run(&visits(), |visits| check_visits(&model, &mut engine.borrow_mut(), &visits));
    if let Err(error) = outcome {
        panic!("{error}");
    }
    assert!(0 < engine.borrow().pool_stats().n_registered);
}

fn greedy(prompt: Vec<u32>, max_tokens: u32) -> GenerateRequest {
    let mut sampling = SamplingParams::greedy(max_tokens);
    sampling.ignore_eos = true;
    sampling.logprobs = Some(2);
    GenerateRequest { prompt, sampling }
}

#[test]
fn preempted_sequences_give_the_outputs_of_undisturbed_ones() {
    let model = TestModel::fixture("llama_tied_odd_sizes");
    // Four sequences of three blocks each, six blocks.
    let mut engine = engine(&model, 6, EngineOptions::default());
    let requests: Vec<GenerateRequest> =
        (0..4).map(|idx| greedy((0..10).map(|token| (token * 7 + idx * 13) % 64).collect(), 30)).collect();
    for request in &requests {
        engine.submit(request.clone()).unwrap();
    }
    let outputs = run(&mut engine);
    assert!(2 <= engine.stats().n_preemptions, "{:?}", engine.stats());
    for (request, output) in requests.iter().zip(outputs.values()) {
        let expected = &alone(&model, None, request)[0];
        assert_eq!(output.tokens, expected.tokens);
        assert_eq!(output.logprobs, expected.logprobs);
    }
}

#[test]
fn a_request_is_admitted_once_and_before_its_first_token_with_what_its_usage_tells() {
    let model = TestModel::fixture("llama_tied_odd_sizes");
    let mut engine = engine(&model, 6, EngineOptions::default());
    engine.submit(greedy(vec![1; 40], 1)).unwrap();
    run(&mut engine);
    let mut ids: Vec<_> = (2..5).map(|first| engine.submit(greedy(vec![first; 10], 30)).unwrap()).collect();
    let mut twins = greedy(vec![1; 40], 8);
    twins.sampling.n = 2;
    ids.push(engine.submit(twins).unwrap());
    let events = engine.run_until_idle().unwrap();
    assert!(0 < engine.stats().n_preemptions);
    for id in ids {
        let mut admitted = None;
        let mut n_finished = 0;
        for event in &events {
            match event {
                EngineEvent::Admitted { request, cached_tokens, .. } if *request == id => {
                    assert_eq!(admitted.replace(*cached_tokens), None);
                }
                EngineEvent::Token(token) if token.request == id => assert!(admitted.is_some()),
                EngineEvent::Finished { request, usage, .. } if *request == id => {
                    n_finished += 1;
                    assert_eq!(admitted, Some(usage.cached_tokens));
                }
                _ => {}
            }
        }
        assert!(0 < n_finished);
    }
}

#[test]
fn an_admission_tells_the_tokens_that_were_found() {
    let model = TestModel::fixture("qwen3");
    let mut engine = engine(&model, 32, EngineOptions::default());
    for expected in [0, 32] {
        engine.submit(greedy((0..40).collect(), 3)).unwrap();
        let mut events = Vec::new();
        engine.step(&mut events).unwrap();
        let EngineEvent::Admitted { cached_tokens, .. } = events[0] else { panic!("{events:?}") };
        assert_eq!(cached_tokens, expected);
        engine.run_until_idle().unwrap();
    }
}

#[test]
fn the_oldest_sequence_gets_a_token_in_every_step_despite_preemptions() {
    let model = TestModel::fixture("llama_tied_odd_sizes");
    let mut engine = engine(&model, 6, EngineOptions::default());
    let oldest = engine.submit(greedy(vec![1; 10], 30)).unwrap();
    for first in 2..5 {
        engine.submit(greedy(vec![first; 10], 30)).unwrap();
    }
    for step in 0..30 {
        let mut events = Vec::new();
        engine.step(&mut events).unwrap();
        let is_of_oldest =
            |event: &EngineEvent| matches!(event, EngineEvent::Token(token) if token.request == oldest);
        assert!(events.iter().any(is_of_oldest), "no token in step {step}");
    }
    assert!(0 < engine.stats().n_preemptions);
}

#[test]
fn choices_share_the_blocks_of_their_prompt_and_copy_the_one_they_write() {
    let model = TestModel::fixture("qwen3");
    let mut engine = engine(&model, 32, EngineOptions::default());
    let sampling = SamplingParams {
        temperature: 2.0,
        seed: Some(5),
        n: 4,
        max_tokens: 8,
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let request = GenerateRequest { prompt: (0..20).collect(), sampling };
    engine.submit(request.clone()).unwrap();
    let outputs: Vec<_> = run(&mut engine).into_values().collect();
    assert_eq!(outputs, alone(&model, None, &request));
    // The last of the four writes to the block that the others have left to it.
    assert_eq!(engine.stats().n_block_copies, 3);
    assert_eq!(engine.stats().n_computed_tokens, 20 + 4 * 7);
    let distinct: BTreeSet<_> = outputs.iter().map(|output| &output.tokens).collect();
    assert_eq!(distinct.len(), 4, "the choices are not independent");
}

#[test]
fn a_second_identical_prompt_starts_from_the_blocks_of_the_first() {
    let model = TestModel::fixture("mistral_sliding_window");
    let mut engine = engine(&model, 32, EngineOptions::default());
    let mut cached = |n_prompt: u32| {
        engine.submit(greedy((0..n_prompt).map(|token| token % 64).collect(), 1)).unwrap();
        let outputs = run(&mut engine);
        outputs.values().next().unwrap().usage.cached_tokens
    };
    assert_eq!(cached(40), 0);
    assert_eq!(cached(40), 32);
    assert_eq!(cached(33), 32);
    // The logits of the last token are needed, so its block is computed again.
    assert_eq!(cached(32), 16);
    assert_eq!(cached(16), 0);
    assert_eq!(cached(50), 32);
    assert_eq!(cached(50), 48);
    assert_eq!(engine.stats().n_cached_tokens, 32 + 32 + 16 + 32 + 48);
    engine.forget_prefixes();
    assert_eq!(engine.pool_stats().n_registered, 0);
    engine.submit(greedy((0..40).collect(), 1)).unwrap();
    assert_eq!(run(&mut engine).values().next().unwrap().usage.cached_tokens, 0);
}

#[test]
fn the_output_of_a_request_is_part_of_the_prefix_of_the_next_turn() {
    let model = TestModel::fixture("qwen3");
    let mut engine = engine(&model, 32, EngineOptions::default());
    let mut prompt: Vec<u32> = (0..12).collect();
    engine.submit(greedy(prompt.clone(), 30)).unwrap();
    prompt.extend(&run(&mut engine).values().next().unwrap().tokens);
    prompt.extend([1, 2, 3, 4]);
    let request = greedy(prompt, 3);
    engine.submit(request.clone()).unwrap();
    let outputs = run(&mut engine);
    let output = outputs.values().next().unwrap();
    assert_eq!(output.usage.cached_tokens, 32);
    assert_eq!(output.logprobs, alone(&model, None, &request)[0].logprobs);
}

#[test]
fn an_engine_that_does_not_reuse_prefixes_reports_none() {
    let model = TestModel::fixture("qwen3");
    let mut options = EngineOptions::default();
    options.reuses_prefixes = false;
    let mut engine = engine(&model, 32, options);
    for _ in 0..2 {
        engine.submit(greedy((0..40).collect(), 1)).unwrap();
        assert_eq!(run(&mut engine).values().next().unwrap().usage.cached_tokens, 0);
    }
    assert_eq!(engine.stats().n_cached_tokens, 0);
}

#[test]
fn requests_without_a_seed_differ_and_those_of_an_equal_engine_repeat() {
    let model = TestModel::fixture("qwen3");
    let sampling =
        SamplingParams { max_tokens: 12, ignore_eos: true, temperature: 3.0, ..SamplingParams::default() };
    let prompt = vec![1, 2, 3];
    let outputs = [(); 2].map(|()| {
        let mut engine = engine(&model, 32, EngineOptions::default());
        for _ in 0..3 {
            let (prompt, sampling) = (prompt.clone(), sampling.clone());
            engine.submit(GenerateRequest { prompt, sampling }).unwrap();
        }
        run(&mut engine)
    });
    assert_eq!(outputs[0], outputs[1]);
    let tokens: BTreeSet<_> = outputs[0].values().map(|output| &output.tokens).collect();
    assert_eq!(tokens.len(), 3);
}

#[test]
fn every_token_of_an_output_is_a_draw_of_its_own() {
    let model = TestModel::fixture("qwen3");
    let sampling = SamplingParams {
        // Nearly every token is equally likely, so a repeated random number repeats the token.
        temperature: 100.0,
        max_tokens: 40,
        ignore_eos: true,
        seed: Some(1),
        ..SamplingParams::default()
    };
    let request = GenerateRequest { prompt: vec![1, 2, 3], sampling };
    let output = alone(&model, None, &request).remove(0);
    let distinct: BTreeSet<_> = output.tokens.iter().collect();
    // 40 draws of 72 tokens give 31 different ones on average.
    assert!(20 < distinct.len(), "{:?}", output.tokens);
}

#[test]
fn an_output_ends_where_the_pool_or_the_context_ends() {
    let model = TestModel::fixture("mistral_sliding_window");
    for (n_blocks, longest) in [(2, 32), (100, model.config.max_positions)] {
        let mut engine = engine(&model, n_blocks, EngineOptions::default());
        assert_eq!(engine.max_sequence_tokens(), longest);
        engine.submit(greedy(vec![1; 10], 10_000)).unwrap();
        let outputs = run(&mut engine);
        assert_eq!(outputs.values().next().unwrap().tokens.len(), longest - 10);
        assert!(engine.submit(greedy(vec![1; longest], 1)).is_err());
        assert!(engine.submit(greedy(vec![1; longest - 1], 5)).is_ok());
        assert_eq!(run(&mut engine).values().next().unwrap().tokens.len(), 1);
    }
}
