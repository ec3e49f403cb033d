//! Blocks that are offered to a sink.

use kvik_model::{EngineEvent, EngineOptions, GenerateRequest};
use kvik_types::Dtype;

use crate::support::TestModel;
use crate::support::requests::{engine, run};
use crate::support::shelf::Shelf;
use crate::{N_BLOCKS, assert_as_alone, engine_of_dtype, greedy, named, only, tokens};

#[test]
fn every_sequence_with_a_full_block_is_offered_when_it_ends() {
    let model = TestModel::fixture("llama_tied_odd_sizes");
    let shelf = Shelf::default();
    let mut engine = engine(&model, N_BLOCKS, EngineOptions::default());
    engine.set_kv_sink(shelf.sink());
    // Fifteen tokens of its prompt and output are computed: not a block.
    engine.submit(greedy(&tokens(10, 1), 6)).unwrap();
    run(&mut engine);
    assert_eq!(shelf.take_offers(), []);
    engine.submit(greedy(&tokens(10, 1), 7)).unwrap();
    let output = only(run(&mut engine));
    let offers = shelf.take_offers();
    assert_eq!(offers.len(), 1);
    assert_eq!(offers[0].tokens, [tokens(10, 1), output.tokens[..6].to_vec()].concat());
    assert_eq!((offers[0].n_prompt_tokens, offers[0].n_generated_tokens), (10, 6));
    // Two choices, one offer each; then a request that is canceled, and one that its client ends.
    let mut twins = greedy(&tokens(20, 2), 20);
    twins.sampling.n = 2;
    engine.submit(twins).unwrap();
    run(&mut engine);
    let offers = shelf.take_offers();
    assert_eq!(offers.iter().map(|offer| offer.tokens.len()).collect::<Vec<_>>(), [32, 32]);
    assert_eq!((offers[1].n_prompt_tokens, offers[1].n_generated_tokens), (20, 12));
    for ends_by_cancel in [true, false] {
        let id = engine.submit_with(greedy(&tokens(50, 3), 20), named("a")).unwrap();
        engine.step(&mut Vec::new()).unwrap();
        if ends_by_cancel {
            engine.cancel(id);
        } else {
            engine.finish(id);
        }
        let offers = shelf.take_offers();
        assert_eq!(offers.len(), 1);
        assert_eq!((offers[0].tokens.len(), offers[0].n_prompt_tokens), (48, 48));
        engine.cancel(id);
        engine.finish(id);
        assert_eq!(shelf.take_offers(), []);
    }
    // A resident was offered when it ended, not when it goes.
    assert!(engine.forget_resident("a"));
    assert_eq!(shelf.take_offers(), []);
}

#[test]
fn a_canceled_prompt_is_offered_as_far_as_it_was_computed() {
    let model = TestModel::fixture("qwen3");
    let shelf = Shelf::default();
    let mut engine = engine_of_dtype(&model, Dtype::F32, 20);
    engine.set_kv_sink(shelf.sink());
    for (n_steps, expected) in [(0, None), (1, Some(16)), (2, Some(32)), (3, Some(48))] {
        engine.forget_prefixes();
        let id = engine.submit(greedy(&tokens(80, 1), 4)).unwrap();
        for _ in 0..n_steps {
            engine.step(&mut Vec::new()).unwrap();
        }
        engine.cancel(id);
        let offers = shelf.take_offers();
        assert_eq!(offers.first().map(|offer| offer.tokens.len()), expected);
        assert_eq!(offers.len(), usize::from(expected.is_some()));
    }
}

#[test]
fn a_preempted_sequence_is_offered_when_it_ends() {
    let model = TestModel::fixture("llama_tied_odd_sizes");
    let shelf = Shelf::default();
    let mut engine = engine(&model, 6, EngineOptions::default());
    engine.set_kv_sink(shelf.sink());
    let requests: Vec<GenerateRequest> = (0..4).map(|salt| greedy(&tokens(10, salt), 30)).collect();
    for request in &requests {
        engine.submit(request.clone()).unwrap();
    }
    let outputs = run(&mut engine);
    let offers = shelf.take_offers();
    assert!(2 <= engine.stats().n_preemptions);
    assert_eq!(offers.len(), 4);
    for (request, output) in requests.iter().zip(outputs.values()) {
        assert_as_alone(&model, request, output);
        let all = [request.prompt.as_slice(), &output.tokens].concat();
        assert!(offers.iter().any(|offer| offer.tokens == all[..32]));
    }
}

#[test]
fn a_sequence_without_finite_logits_is_not_offered() {
    let model = TestModel::with_poisoned_token("qwen3", 7);
    let shelf = Shelf::default();
    let mut engine = engine(&model, N_BLOCKS, EngineOptions::default());
    engine.set_kv_sink(shelf.sink());
    let mut prompt = vec![1; 40];
    prompt[35] = 7;
    engine.submit(greedy(&prompt, 4)).unwrap();
    engine.submit(greedy(&[2; 40], 4)).unwrap();
    let events = engine.run_until_idle().unwrap();
    assert!(events.iter().any(|event| matches!(event, EngineEvent::Failed { .. })));
    let offers = shelf.take_offers();
    assert_eq!(offers.iter().map(|offer| offer.tokens.as_slice()).collect::<Vec<_>>(), [&[2; 32]]);
}
