//! What fails, fails alone: damaged weights, bad requests.

pub mod support;

use std::collections::BTreeMap;

use kvik_model::{EngineEvent, EngineOptions, GenerateRequest, ModelError, RequestId, SamplingParams};

use support::TestModel;
use support::requests::{alone, engine, run};

/// The token whose embedding is NaN in the poisoned model.
const POISON: u32 = 60;

fn request(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    let mut sampling = SamplingParams::greedy(max_tokens);
    sampling.ignore_eos = true;
    GenerateRequest { prompt: prompt.to_vec(), sampling }
}

#[test]
fn logits_that_are_not_numbers_fail_their_request_while_the_others_go_on() {
    let poisoned = TestModel::with_poisoned_token("qwen3", POISON);
    let clean = TestModel::fixture("qwen3");
    let mut options = EngineOptions::default();
    options.max_batched_tokens = 7;
    let mut engine = engine(&poisoned, 64, options);
    let prompts: [&[u32]; 4] = [&[1, 2, 3], &[4, POISON, 5, 6, 7], &[8; 30], &[POISON]];
    let ids = prompts.map(|prompt| engine.submit(request(prompt, 6)).unwrap());
    let mut tokens: BTreeMap<RequestId, Vec<u32>> = BTreeMap::new();
    let mut failed = BTreeMap::new();
    for event in engine.run_until_idle().unwrap() {
        match event {
            EngineEvent::Token(token) => tokens.entry(token.request).or_default().push(token.token),
            EngineEvent::Failed { request, error } => {
                let ModelError::NotFinite { position } = error else {
                    panic!("{error}");
                };
                assert!(failed.insert(request, position).is_none(), "failed twice");
            }
            _ => {}
        }
    }
    assert_eq!(failed, BTreeMap::from([(ids[1], 4), (ids[3], 0)]));
    for idx in [0, 2] {
        let expected = &alone(&clean, None, &request(prompts[idx], 6))[0].tokens;
        assert!(!expected.contains(&POISON), "the clean output meets the poison");
        assert_eq!(&tokens[&ids[idx]], expected);
    }
    assert_eq!(tokens.len(), 2);
    assert_eq!(engine.pool_stats().n_free, 64);
}

#[test]
fn blocks_of_a_failed_request_serve_the_next_one() {
    let poisoned = TestModel::with_poisoned_token("qwen3", POISON);
    let mut engine = engine(&poisoned, 3, EngineOptions::default());
    engine.submit(request(&[POISON; 40], 4)).unwrap();
    let events = engine.run_until_idle().unwrap();
    assert!(matches!(events[..], [EngineEvent::Admitted { .. }, EngineEvent::Failed { .. }]), "{events:?}");
    // As long as the pool: every block was full of NaN.
    let next = request(&[3; 40], 7);
    engine.submit(next.clone()).unwrap();
    let outputs = run(&mut engine);
    let expected = alone(&TestModel::fixture("qwen3"), None, &next);
    assert_eq!(outputs.values().next().unwrap().tokens, expected[0].tokens);
}

/// One of several choices meets the poison: the request fails once, and nothing follows.
#[test]
fn a_choice_that_fails_ends_all_choices_of_its_request_with_one_event() {
    let poisoned = TestModel::with_poisoned_token("qwen3", POISON);
    let (mut n_met, mut n_preemptions) = (0, 0);
    // With three blocks the younger choices are often preempted and wait when an older one fails.
    for (seed, n_blocks) in (0..60).flat_map(|seed| [(seed, 64), (seed, 3)]) {
        let sampling = SamplingParams {
            // Nearly every token is equally likely.
            temperature: 100.0,
            n: 4,
            max_tokens: 30,
            ignore_eos: true,
            seed: Some(seed),
            ..SamplingParams::default()
        };
        let prompt = vec![1, 2, 3];
        let mut engine = engine(&poisoned, n_blocks, EngineOptions::default());
        engine.submit(GenerateRequest { prompt, sampling }).unwrap();
        let events = engine.run_until_idle().unwrap();
        let failed_at = events.iter().position(|event| matches!(event, EngineEvent::Failed { .. }));
        if let Some(failed_at) = failed_at {
            n_met += 1;
            n_preemptions += engine.stats().n_preemptions;
            let rest = &events[failed_at + 1..];
            assert!(rest.is_empty(), "seed {seed}: events after the last one: {rest:?}");
        }
        assert_eq!(engine.pool_stats().n_free, n_blocks);
    }
    assert!(20 < n_met, "only {n_met} requests met the poison");
    assert!(5 < n_preemptions, "only {n_preemptions} preemptions");
}

#[test]
fn bad_requests_name_the_field_and_leave_the_engine_as_it_was() {
    let model = TestModel::fixture("qwen3");
    let mut engine = engine(&model, 4, EngineOptions::default());
    let good = SamplingParams::greedy(4);
    let sampling = |change: fn(&mut SamplingParams)| {
        let mut sampling = good.clone();
        change(&mut sampling);
        GenerateRequest { prompt: vec![1], sampling }
    };
    let bad = [
        ("prompt", request(&[], 4)),
        ("prompt", request(&[72], 4)),
        ("prompt", request(&[1; 64], 4)),
        ("max_tokens", sampling(|sampling| sampling.max_tokens = 0)),
        ("n", sampling(|sampling| sampling.n = 0)),
        ("n", sampling(|sampling| sampling.n = 129)),
        ("temperature", sampling(|sampling| sampling.temperature = f32::NAN)),
        ("temperature", sampling(|sampling| sampling.temperature = -0.5)),
        ("top_p", sampling(|sampling| sampling.top_p = 0.0)),
        ("top_p", sampling(|sampling| sampling.top_p = f32::INFINITY)),
        ("min_p", sampling(|sampling| sampling.min_p = 1.5)),
        ("repetition_penalty", sampling(|sampling| sampling.repetition_penalty = 0.0)),
        ("presence_penalty", sampling(|sampling| sampling.presence_penalty = f32::NEG_INFINITY)),
        ("frequency_penalty", sampling(|sampling| sampling.frequency_penalty = 2.5)),
        ("logprobs", sampling(|sampling| sampling.logprobs = Some(5000))),
        // There is no tokenizer.
        ("stop", sampling(|sampling| sampling.stop = vec!["x".to_owned()])),
    ];
    for (field, request) in bad {
        match engine.submit(request) {
            Err(ModelError::InvalidRequest { field: found, allowed, .. }) => {
                assert_eq!(found, field);
                assert!(!allowed.is_empty());
            }
            other => panic!("{field}: {other:?}"),
        }
    }
    assert!(engine.is_idle());
    engine.submit(request(&[1; 60], 4)).unwrap();
    assert_eq!(run(&mut engine).len(), 1);
}

#[test]
fn an_engine_that_could_not_advance_is_refused() {
    let model = TestModel::fixture("qwen3");
    for (field, change) in [
        ("max_batched_tokens", (|options| options.max_batched_tokens = 0) as fn(&mut EngineOptions)),
        ("max_sequences", |options| options.max_sequences = 0),
    ] {
        let mut options = EngineOptions::default();
        change(&mut options);
        let backend = model.backend(&support::backend_options(1));
        let error =
            kvik_model::Engine::new(Box::new(backend), None, &support::namespace(), options).unwrap_err();
        assert!(error.to_string().contains(field), "{error}");
    }
}
