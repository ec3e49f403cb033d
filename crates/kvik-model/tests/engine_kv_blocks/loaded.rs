//! Blocks that come in with a request.

use std::sync::Arc;

use kvik_model::{EngineEvent, EngineOptions, SequenceKv, SubmitOptions};

use crate::support::requests::{Output, Outputs, alone, collect, engine, run};
use crate::support::shelf::{Shelf, ShelfKv};
use crate::support::{KV_DTYPES, TestModel};
use crate::{
    FIXTURES, N_BLOCKS, assert_as_alone, engine_of_dtype, greedy, matched_tokens, named, only, shelf_of,
    submit_from, submit_with_kv, tokens,
};

#[test]
fn a_prompt_goes_on_from_the_blocks_of_another_engine_to_the_same_bits() {
    for (name, kv_dtype) in FIXTURES.into_iter().flat_map(|name| KV_DTYPES.map(|dtype| (name, dtype))) {
        let model = TestModel::fixture(name);
        let first = greedy(&tokens(21, 1), 25);
        let shelf = Shelf::default();
        let mut source = engine_of_dtype(&model, kv_dtype, 64);
        source.set_kv_sink(shelf.sink());
        source.submit(first.clone()).unwrap();
        let output = only(run(&mut source));
        // Its second turn: the first prompt, its output and a few tokens more.
        let next = greedy(&[first.prompt.as_slice(), &output.tokens, &tokens(6, 2)].concat(), 10);
        let mut fresh = engine_of_dtype(&model, kv_dtype, 512);
        fresh.submit(next.clone()).unwrap();
        let expected = only(run(&mut fresh));
        assert_eq!(expected.usage.cached_tokens, 0);
        for max_batched_tokens in [1, 7, 64] {
            let mut destination = engine_of_dtype(&model, kv_dtype, max_batched_tokens);
            let other = destination.submit(greedy(&tokens(19, 3), 12)).unwrap();
            let kv = shelf.prefix(&next.prompt, 0);
            // The first turn and all but the last of its output, in whole blocks.
            assert_eq!(kv.n_tokens, 32);
            let id = submit_from(&mut destination, next.clone(), kv);
            let mut twin = next.clone();
            twin.prompt.truncate(40);
            let late = submit_from(&mut destination, twin, shelf.prefix(&next.prompt, 0));
            let mut outputs = run(&mut destination);
            assert!(outputs.contains_key(&(other, 0)) && outputs.contains_key(&(late, 0)));
            let actual = outputs.remove(&(id, 0)).unwrap();
            assert_eq!(actual.tokens, expected.tokens, "{name} {kv_dtype}");
            assert_eq!(actual.logprobs, expected.logprobs, "{name} {kv_dtype}");
            assert_eq!((actual.usage.cached_tokens, actual.usage.loaded_tokens), (32, 32));
        }
    }
}

#[test]
fn the_bytes_that_come_in_are_those_that_attention_reads() {
    let model = TestModel::fixture("qwen3");
    let request = greedy(&tokens(40, 1), 4);
    let expected = alone(&model, None, &request).remove(0);
    let shelf = shelf_of(&model, &request.prompt);
    for layer_idx in 0..model.config.n_layers {
        for byte_idx in [3, 500, 1100, 1535] {
            let mut kv = shelf.prefix(&request.prompt, 0);
            // The exponent of a number: too much to be rounded away.
            kv.blocks[1][layer_idx].as_mut().unwrap()[byte_idx | 3] ^= 0x3f;
            let mut engine = engine(&model, N_BLOCKS, EngineOptions::default());
            submit_from(&mut engine, request.clone(), kv);
            let output = only(run(&mut engine));
            assert_eq!(output.usage.loaded_tokens, 32);
            assert_ne!(output.logprobs, expected.logprobs, "layer {layer_idx} byte {byte_idx}");
        }
    }
}

#[test]
fn what_comes_in_is_used_as_far_as_it_is_whole_and_goes_on_from_the_pool() {
    let model = TestModel::fixture("llama_tied_odd_sizes");
    let long = tokens(70, 1);
    let shelf = shelf_of(&model, &long);
    let damage = |kv: &mut ShelfKv, block_idx: usize, layer_idx: usize, bytes: Option<Vec<u8>>| {
        kv.blocks[block_idx][layer_idx] = bytes;
    };
    let whole = |n_prompt: usize| (n_prompt, shelf.prefix(&long, 0));
    let block_bytes = shelf.prefix(&long, 0).blocks[0][0].as_ref().unwrap().len();
    let mut cases = vec![
        ("is all there", whole(70), 64),
        ("is longer than the prompt", whole(50), 48),
        ("ends where the prompt ends", whole(64), 48),
        ("has all but the last token", whole(65), 64),
        ("has nothing for a prompt of one block", whole(16), 0),
        ("has nothing for a prompt of one token", whole(1), 0),
    ];
    let mut add = |what, expected, change: &dyn Fn(&mut ShelfKv)| {
        let (n_prompt, mut kv) = whole(70);
        change(&mut kv);
        cases.push((what, (n_prompt, kv), expected));
    };
    add("ends inside of the prompt", 32, &|kv| kv.n_tokens = 32);
    add("ends inside of a block", 32, &|kv| kv.n_tokens = 47);
    add("says that it has more than it has", 64, &|kv| kv.n_tokens = usize::MAX);
    add("has no tokens", 0, &|kv| kv.n_tokens = 0);
    add("has no first block", 0, &|kv| damage(kv, 0, 0, None));
    add("lacks one layer", 32, &|kv| damage(kv, 2, 1, None));
    add("has a short block", 16, &|kv| damage(kv, 1, 1, Some(vec![0; block_bytes - 1])));
    add("has a long block", 48, &|kv| damage(kv, 3, 0, Some(vec![0; block_bytes + 1])));
    add("has an empty block", 48, &|kv| damage(kv, 3, 1, Some(Vec::new())));
    add("starts behind the pool", 0, &|kv| *kv = shelf.prefix(&long, 16));
    add("starts inside of a block", 0, &|kv| kv.first_token = 1);
    add("starts at the end of the address space", 0, &|kv| kv.first_token = usize::MAX);
    for (what, (n_prompt, kv), expected) in cases {
        let mut engine = engine(&model, N_BLOCKS, EngineOptions::default());
        let request = greedy(&long[..n_prompt], 6);
        submit_from(&mut engine, request.clone(), kv);
        let output = only(run(&mut engine));
        assert_eq!((output.usage.loaded_tokens, output.usage.cached_tokens), (expected, expected), "{what}");
        assert_eq!(engine.stats().n_loaded_tokens, expected as u64, "{what}");
        assert_eq!(engine.stats().n_computed_tokens as usize, n_prompt - expected + 5, "{what}");
        assert_eq!(engine.pool_stats().n_free, N_BLOCKS, "{what}");
        assert_as_alone(&model, &request, &output);
    }
}

#[test]
fn only_what_lies_behind_the_blocks_of_the_pool_is_loaded_and_then_lies_there_too() {
    let model = TestModel::fixture("qwen3");
    let long = tokens(70, 1);
    let shelf = shelf_of(&model, &long);
    let mut engine = engine(&model, N_BLOCKS, EngineOptions::default());
    assert_eq!(matched_tokens(&engine, &long), 0);
    engine.submit(greedy(&long[..40], 1)).unwrap();
    run(&mut engine);
    assert_eq!(matched_tokens(&engine, &long), 32);
    assert_eq!((matched_tokens(&engine, &long[..32]), matched_tokens(&engine, &[])), (16, 0));
    let n_free = engine.pool_stats().n_free;
    let id = submit_from(&mut engine, greedy(&long, 4), shelf.prefix(&long, 32));
    let mut events = Vec::new();
    engine.step(&mut events).unwrap();
    assert!(
        matches!(events[0], EngineEvent::Admitted { request, cached_tokens: 64, loaded_tokens: 32 } if request == id),
        "{events:?}"
    );
    let mut outputs = Outputs::new();
    collect(events, &mut outputs);
    collect(engine.run_until_idle().unwrap(), &mut outputs);
    assert_as_alone(&model, &greedy(&long, 4), &only(outputs));
    // Nothing is held, and the next request finds it.
    assert_eq!((engine.pool_stats().n_free, matched_tokens(&engine, &long)), (n_free, 64));
    submit_from(&mut engine, greedy(&long, 4), shelf.prefix(&long, 0));
    let again = only(run(&mut engine));
    assert_eq!((again.usage.cached_tokens, again.usage.loaded_tokens), (64, 0));
    assert_as_alone(&model, &greedy(&long, 4), &again);
    assert_eq!(engine.stats().n_loaded_tokens, 32);
}

#[test]
fn an_engine_that_does_not_reuse_prefixes_still_takes_what_comes_with_a_request() {
    let model = TestModel::fixture("qwen3");
    let long = tokens(40, 1);
    let shelf = shelf_of(&model, &long);
    let mut options = EngineOptions::default();
    options.reuses_prefixes = false;
    let mut engine = engine(&model, N_BLOCKS, options);
    for _ in 0..2 {
        assert_eq!(matched_tokens(&engine, &long), 0);
        submit_from(&mut engine, greedy(&long, 4), shelf.prefix(&long, 0));
        let output = only(run(&mut engine));
        assert_eq!((output.usage.cached_tokens, output.usage.loaded_tokens), (32, 32));
        assert_as_alone(&model, &greedy(&long, 4), &output);
    }
    assert_eq!(engine.pool_stats().n_free, N_BLOCKS);
}

#[test]
fn all_choices_of_a_request_start_from_what_came_with_it() {
    let model = TestModel::fixture("mistral_sliding_window");
    let mut request = greedy(&tokens(40, 1), 9);
    request.sampling.n = 3;
    request.sampling.temperature = 2.0;
    request.sampling.seed = Some(4);
    let shelf = shelf_of(&model, &request.prompt);
    let mut engine = engine(&model, N_BLOCKS, EngineOptions::default());
    submit_from(&mut engine, request.clone(), shelf.prefix(&request.prompt, 0));
    let outputs: Vec<Output> = run(&mut engine).into_values().collect();
    for (output, expected) in outputs.iter().zip(alone(&model, None, &request)) {
        assert_eq!((&output.tokens, &output.logprobs), (&expected.tokens, &expected.logprobs));
        assert_eq!((output.usage.cached_tokens, output.usage.loaded_tokens), (32, 32));
    }
    assert_eq!(outputs.len(), 3);
}

#[test]
fn as_many_blocks_are_loaded_as_there_is_room_for_and_the_rest_is_computed() {
    let model = TestModel::fixture("llama_tied_odd_sizes");
    let long = tokens(80, 1);
    let shelf = shelf_of(&model, &long);
    let mut engine = engine(&model, 6, EngineOptions::default());
    // Waits for its client and holds three blocks of the six; no sequence is preempted for what can be computed.
    let paused = greedy(&tokens(40, 5), 6);
    let options = SubmitOptions { credits: Some(1), ..SubmitOptions::default() };
    let paused_id = engine.submit_with(paused.clone(), options).unwrap();
    let mut outputs = run(&mut engine);
    assert_eq!(engine.pool_stats().n_free, 3);
    let request = greedy(&long, 4);
    let id = submit_from(&mut engine, request.clone(), shelf.prefix(&long, 0));
    collect(engine.run_until_idle().unwrap(), &mut outputs);
    assert_eq!(outputs[&(id, 0)].usage.loaded_tokens, 48);
    assert_as_alone(&model, &request, &outputs[&(id, 0)]);
    assert_eq!(engine.stats().n_preemptions, 1);
    engine.grant(paused_id, 9);
    collect(engine.run_until_idle().unwrap(), &mut outputs);
    assert_as_alone(&model, &paused, &outputs[&(paused_id, 0)]);
    assert_eq!(engine.pool_stats().n_free, 6);
}

#[test]
fn what_came_with_a_request_waits_with_it_and_is_dropped_when_it_is_admitted_or_ends() {
    let model = TestModel::fixture("qwen3");
    let long = tokens(70, 1);
    let shelf = shelf_of(&model, &long);
    let mut engine = engine(&model, 6, EngineOptions::default());
    let first = greedy(&tokens(40, 2), 6);
    let first_id = engine.submit(first.clone()).unwrap();
    let (waiting, ending) = (shelf.prefix(&long, 0), shelf.prefix(&long, 0));
    let alive = [Arc::downgrade(&waiting.alive), Arc::downgrade(&ending.alive)];
    let n_alive = || alive.iter().map(std::sync::Weak::strong_count).collect::<Vec<_>>();
    let id = submit_from(&mut engine, greedy(&long, 4), waiting);
    let ended = submit_from(&mut engine, greedy(&long, 4), ending);
    let mut events = Vec::new();
    engine.step(&mut events).unwrap();
    engine.step(&mut events).unwrap();
    assert_eq!((engine.n_waiting(), n_alive()), (2, vec![1, 1]));
    engine.cancel(ended);
    assert_eq!(n_alive(), [1, 0]);
    while events.iter().all(|event| !matches!(event, EngineEvent::Admitted { request, .. } if *request == id))
    {
        engine.step(&mut events).unwrap();
    }
    assert_eq!(n_alive(), [0, 0]);
    let mut outputs = Outputs::new();
    collect(events, &mut outputs);
    collect(engine.run_until_idle().unwrap(), &mut outputs);
    assert_eq!(outputs[&(id, 0)].usage.loaded_tokens, 64);
    assert_as_alone(&model, &greedy(&long, 4), &outputs[&(id, 0)]);
    assert_as_alone(&model, &first, &outputs[&(first_id, 0)]);
}

#[test]
fn a_resident_comes_before_what_came_with_a_request_unless_that_reaches_further() {
    let model = TestModel::fixture("qwen3");
    let long = tokens(90, 1);
    let shelf = shelf_of(&model, &long);
    // The resident has 39 tokens of the prompt: two blocks and a part of the third.
    for (n_loadable, expected) in [(16, (39, 0)), (32, (39, 0)), (48, (48, 9)), (80, (80, 41))] {
        let mut engine = engine(&model, N_BLOCKS, EngineOptions::default());
        engine.submit_with(greedy(&long[..39], 1), named("a")).unwrap();
        run(&mut engine);
        assert_eq!(engine.resident_tokens("a").unwrap().len(), 39);
        let mut kv = shelf.prefix(&long, 0);
        kv.n_tokens = n_loadable;
        let request = greedy(&long, 5);
        submit_with_kv(&mut engine, request.clone(), named("a"), kv);
        let output = only(run(&mut engine));
        assert_eq!((output.usage.cached_tokens, output.usage.loaded_tokens), expected);
        assert_as_alone(&model, &request, &output);
        assert_eq!(engine.resident_tokens("a").unwrap().len(), 94);
        assert_eq!(engine.pool_stats().n_free + engine.n_resident_blocks(), N_BLOCKS);
    }
}

/// KV of `tokens` as no engine has computed it.
fn wrong_kv(model: &TestModel, tokens: &[u32]) -> SequenceKv {
    let mut source = engine(model, N_BLOCKS, EngineOptions::default());
    source.submit_with(greedy(tokens, 1), named("source")).unwrap();
    run(&mut source);
    let mut kv = source.export_kv("source", 0..model.config.n_layers).unwrap().unwrap();
    kv.layers.iter_mut().for_each(|layer| layer.values.fill(0));
    kv
}

#[test]
fn blocks_behind_kv_that_came_by_name_are_neither_loaded_nor_offered() {
    let model = TestModel::fixture("qwen3");
    let long = tokens(70, 1);
    let shelf = shelf_of(&model, &long);
    shelf.take_offers();
    let mut engine = engine(&model, 8, EngineOptions::default());
    engine.set_kv_sink(shelf.sink());
    engine.import_kv("a", &wrong_kv(&model, &long[..40])).unwrap();
    let kv = std::sync::Arc::new(shelf.prefix(&long, 0));
    let prepared = engine.prepare(greedy(&long, 5), named("a"));
    let id = engine.submit_prepared(prepared, Some(kv)).unwrap();
    let output = only(run(&mut engine));
    assert_eq!((output.usage.cached_tokens, output.usage.loaded_tokens), (40, 0));
    // Nor when its client ends it, nor in the next turn.
    let turn = [long.as_slice(), &output.tokens].concat();
    let id_again = engine.submit_with(greedy(&turn, 9), named("a")).unwrap();
    engine.step(&mut Vec::new()).unwrap();
    engine.finish(id_again);
    assert_ne!(id, id_again);
    assert_eq!(shelf.take_offers(), []);
    assert_eq!(matched_tokens(&engine, &long), 0);
    // A resident that the pool reaches beyond taints no request.
    engine.forget_resident("a");
    engine.submit(greedy(&long, 1)).unwrap();
    run(&mut engine);
    engine.import_kv("a", &wrong_kv(&model, &long[..20])).unwrap();
    engine.submit_with(greedy(&long, 5), named("a")).unwrap();
    let output = only(run(&mut engine));
    assert_as_alone(&model, &greedy(&long, 5), &output);
    let offers = shelf.take_offers();
    assert_eq!(offers.iter().map(|offer| offer.tokens.len()).collect::<Vec<_>>(), [64, 64]);
}
