//! KV that leaves an engine by blocks and comes into another: nobody can tell from the outputs.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

pub mod support;

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_model::{
    BLOCK_TOKENS, CpuBackendOptions, Engine, EngineEvent, EngineOptions, GenerateRequest, LayerKv,
    MemoryGroup, Model, RequestId, SamplingParams, SequenceKv, SubmitOptions,
};
use kvik_types::Dtype;
use xxhash_rust::xxh3::xxh3_64;

use support::requests::{Output, Outputs, alone, collect, engine, run};
use support::shelf::{Shelf, ShelfKv};
use support::visits::{check_visits_by, for_random_visits};
use support::{KV_DTYPES, TestModel, backend_options, bundled_folder, namespace};

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
    SubmitOptions { name: Some(name.to_owned()), credits: None }
}

fn engine_of_dtype(model: &TestModel, kv_dtype: Dtype, max_batched_tokens: usize) -> Engine {
    let mut backend = backend_options(N_BLOCKS);
    backend.kv_dtype = kv_dtype;
    let mut options = EngineOptions::default();
    options.max_batched_tokens = max_batched_tokens;
    Engine::new(Box::new(model.backend(&backend)), None, &namespace(), options).unwrap()
}

fn submit_from(engine: &mut Engine, request: GenerateRequest, kv: ShelfKv) -> RequestId {
    engine.submit_from(request, SubmitOptions::default(), Some(Box::new(kv))).unwrap()
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

/// The keys and values of a token and head in the bytes of a block, by what the name of the layout says.
fn unpacked(block: &[u8], element_bytes: usize, n_heads: usize, head_dim: usize) -> LayerKv {
    let element = |idx: usize| &block[idx * element_bytes..][..element_bytes];
    let mut kv = LayerKv { n_tokens: BLOCK_TOKENS, ..LayerKv::default() };
    for token in 0..BLOCK_TOKENS {
        for head in 0..n_heads {
            let keys = head * 2 * head_dim * BLOCK_TOKENS;
            let values = keys + head_dim * BLOCK_TOKENS;
            for dim in 0..head_dim {
                kv.keys.extend(element(keys + dim * BLOCK_TOKENS + token));
                kv.values.extend(element(values + token * head_dim + dim));
            }
        }
    }
    kv
}

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
    assert_eq!(engine.matched_tokens(&long), 0);
    engine.submit(greedy(&long[..40], 1)).unwrap();
    run(&mut engine);
    assert_eq!(engine.matched_tokens(&long), 32);
    assert_eq!((engine.matched_tokens(&long[..32]), engine.matched_tokens(&[])), (16, 0));
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
    // Nothing is held, and who comes next finds it.
    assert_eq!((engine.pool_stats().n_free, engine.matched_tokens(&long)), (n_free, 64));
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
        assert_eq!(engine.matched_tokens(&long), 0);
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
    // Waits for its client and holds three blocks of the six; nobody is preempted for what can be computed.
    let paused = greedy(&tokens(40, 5), 6);
    let options = SubmitOptions { name: None, credits: Some(1) };
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
        engine.submit_from(request.clone(), named("a"), Some(Box::new(kv))).unwrap();
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
    let mut kv = source.export_kv("source", 0..model.config.n_layers).unwrap();
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
    let kv = Box::new(shelf.prefix(&long, 0));
    let id = engine.submit_from(greedy(&long, 5), named("a"), Some(kv)).unwrap();
    let output = only(run(&mut engine));
    assert_eq!((output.usage.cached_tokens, output.usage.loaded_tokens), (40, 0));
    // Nor when its client ends it, nor in the next turn.
    let turn = [long.as_slice(), &output.tokens].concat();
    let id_again = engine.submit_with(greedy(&turn, 9), named("a")).unwrap();
    engine.step(&mut Vec::new()).unwrap();
    engine.finish(id_again);
    assert_ne!(id, id_again);
    assert_eq!(shelf.take_offers(), []);
    assert_eq!(engine.matched_tokens(&long), 0);
    // A resident that the pool reaches beyond taints nobody.
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
fn a_preempted_sequence_is_offered_each_time_with_what_it_had() {
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
    let n_preemptions = engine.stats().n_preemptions as usize;
    assert!(2 <= n_preemptions);
    // At its end each has 39 tokens; every preemption here takes somebody who has more than a block.
    let (at_end, preempted): (Vec<_>, Vec<_>) = offers.iter().partition(|offer| offer.tokens.len() == 32);
    assert_eq!(at_end.len() + preempted.len(), 4 + n_preemptions);
    for (request, output) in requests.iter().zip(outputs.values()) {
        assert_as_alone(&model, request, output);
        let all = [request.prompt.as_slice(), &output.tokens].concat();
        assert!(at_end.iter().any(|offer| offer.tokens == all[..32]));
    }
}

#[test]
fn offered_bytes_are_the_exported_kv_in_the_order_that_the_layout_names() {
    let fixtures = FIXTURES.into_iter().map(TestModel::fixture).chain([TestModel::bundled()]);
    for (model, kv_dtype) in fixtures.zip(KV_DTYPES.into_iter().cycle()) {
        let shelf = Shelf::default();
        let mut engine = engine_of_dtype(&model, kv_dtype, 64);
        engine.set_kv_sink(shelf.sink());
        engine.submit_with(greedy(&tokens(40, 1), 3), named("a")).unwrap();
        run(&mut engine);
        let (n_heads, head_dim) = (model.config.n_kv_heads, model.config.head_dim);
        let layout = engine.kv_layout();
        let parts = [
            format!("/layers={}/heads={n_heads}/head_dim={head_dim}/block=16/", model.config.n_layers),
            format!("/{kv_dtype}_le/keys=head,dim,token/values=head,token,dim"),
        ];
        assert!(parts.iter().all(|part| layout.contains(part)), "{layout}");
        let exported = engine.export_kv("a", 0..model.config.n_layers).unwrap();
        let [offer] = &shelf.take_offers()[..] else { panic!("not one offer") };
        assert_eq!(offer.tokens, exported.tokens[..32]);
        let element_bytes = kv_dtype.size_bytes();
        assert_eq!(engine.block_layer_bytes(), 2 * n_heads * head_dim * BLOCK_TOKENS * element_bytes);
        let part_bytes = BLOCK_TOKENS * n_heads * head_dim * element_bytes;
        for (block_idx, layers) in offer.blocks.iter().enumerate() {
            for (bytes, layer) in layers.iter().zip(&exported.layers) {
                let actual = unpacked(bytes.as_ref().unwrap(), element_bytes, n_heads, head_dim);
                let part = block_idx * part_bytes..(block_idx + 1) * part_bytes;
                assert_eq!(actual.keys, layer.keys[part.clone()], "{} {kv_dtype}", model.name);
                assert_eq!(actual.values, layer.values[part], "{} {kv_dtype}", model.name);
            }
        }
    }
}

#[test]
fn the_name_of_the_layout_stands_for_these_bytes() {
    let hashes = ["gpt2", "llama_tied_odd_sizes"].map(|name| {
        let model = TestModel::fixture(name);
        let shelf = shelf_of(&model, &tokens(40, 1));
        let offers = shelf.take_offers();
        let layers = offers[0].blocks.iter().flatten().flatten();
        xxh3_64(&layers.flatten().copied().collect::<Vec<u8>>())
    });
    let layout = engine(&TestModel::fixture("gpt2"), 1, EngineOptions::default()).kv_layout();
    let expected = "kvik_paged_1/layers=2/heads=4/head_dim=8/block=16/f32_le\
                    /keys=head,dim,token/values=head,token,dim";
    // KV that is kept somewhere outlives the program that has computed it.
    let advice = "the order or the arithmetic of KV has changed: count its version up, then change this test";
    assert_eq!(
        (layout.as_str(), hashes),
        (expected, [0xca82_fe2b_e3cf_d5f8, 0x006b_e2e8_5794_f1b8]),
        "{advice}"
    );
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

/// An engine on a device of `n_pages` pages of 2 MiB in each layer.
fn sharing_engine(model: &Model, dir: &Path, n_pages: u64) -> Engine {
    let mut backend = CpuBackendOptions::default();
    backend.n_blocks = 4096;
    backend.memory = Some(MemoryGroup {
        ipc_name: "group".to_owned(),
        label: "test".to_owned(),
        limit_bytes: None,
        device_bytes: n_pages * ((model.config().n_layers as u64) << 21),
        dir: dir.to_owned(),
    });
    model.cpu_engine(&backend, EngineOptions::default()).unwrap()
}

#[test]
fn what_fits_is_loaded_while_others_hold_the_memory_and_the_rest_is_computed_when_they_have_left() {
    let model = Model::bundled().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (0..3000).map(|position| position * 7 % 500 + position % 3 + 4).collect();
    let shelf = Shelf::default();
    let mut own = model.cpu_engine(&CpuBackendOptions::default(), EngineOptions::default()).unwrap();
    own.set_kv_sink(shelf.sink());
    own.submit(greedy(&prompt, 4)).unwrap();
    let expected = only(run(&mut own));
    let mut first = sharing_engine(&model, dir.path(), 2);
    first.submit(greedy(&prompt[..100], 1)).unwrap();
    run(&mut first);
    let page_blocks = first.pool_stats().n_blocks;
    assert_eq!(2 * page_blocks, first.max_blocks());
    let mut second = sharing_engine(&model, dir.path(), 2);
    let id = submit_from(&mut second, greedy(&prompt, 4), shelf.prefix(&prompt, 0));
    let mut events = Vec::new();
    second.step(&mut events).unwrap();
    assert!(second.is_starved());
    let n_loaded = page_blocks * BLOCK_TOKENS;
    let is_admission = |event: &EngineEvent| {
        matches!(event, EngineEvent::Admitted { request, cached_tokens, loaded_tokens }
            if *request == id && *cached_tokens == n_loaded && *loaded_tokens == n_loaded)
    };
    assert!(matches!(&events[..], [event] if is_admission(event)), "{events:?}");
    drop(first);
    let deadline = Instant::now() + Duration::from_mins(1);
    while second.has_work() {
        second.step(&mut events).unwrap();
        assert!(Instant::now() < deadline, "no memory");
    }
    let mut outputs = Outputs::new();
    collect(events, &mut outputs);
    let output = only(outputs);
    assert_eq!((&output.tokens, &output.logprobs), (&expected.tokens, &expected.logprobs));
    assert_eq!(second.stats().n_computed_tokens as usize, prompt.len() - n_loaded + 3);
}

#[test]
fn shared_memory_takes_what_comes_in_and_answers_as_memory_of_its_own() {
    let model = Model::bundled().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let shelf = Shelf::default();
    let requests: Vec<GenerateRequest> = (0..4)
        .map(|salt| {
            greedy(&(0..300).map(|position| (salt * 31 + position * 7) % 500 + 4).collect::<Vec<_>>(), 8)
        })
        .collect();
    let mut own = model.cpu_engine(&CpuBackendOptions::default(), EngineOptions::default()).unwrap();
    own.set_kv_sink(shelf.sink());
    for request in &requests {
        own.submit(request.clone()).unwrap();
    }
    let expected = run(&mut own);
    let deadline = Instant::now() + Duration::from_mins(1);
    for (request, expected) in requests.iter().zip(expected.values()) {
        // Engines of one page each: what one has left lies under the next one's blocks.
        let mut shared = sharing_engine(&model, dir.path(), 1);
        assert_eq!((shared.namespace(), shared.kv_layout()), (own.namespace(), own.kv_layout()));
        shared.set_kv_sink(shelf.sink());
        submit_from(&mut shared, request.clone(), shelf.prefix(&request.prompt, 0));
        let mut events = Vec::new();
        while shared.has_work() {
            shared.step(&mut events).unwrap();
            assert!(Instant::now() < deadline, "no memory");
        }
        let mut outputs = Outputs::new();
        collect(events, &mut outputs);
        let output = only(outputs);
        assert_eq!((&output.tokens, &output.logprobs), (&expected.tokens, &expected.logprobs));
        assert_eq!((output.usage.cached_tokens, output.usage.loaded_tokens), (288, 288));
    }
    assert_eq!(shelf.take_offers().len(), 8);
}

#[test]
fn a_folder_with_other_weights_or_another_configuration_is_another_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("kvik-tiny");
    std::fs::create_dir(&folder).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(bundled_folder().join(name), folder.join(name)).unwrap();
    }
    let open = || Model::open(&folder).unwrap();
    let original = open().namespace(Dtype::F32).unwrap();
    assert_eq!(original, Model::open(&bundled_folder()).unwrap().namespace(Dtype::F32).unwrap());
    assert_ne!(original, open().namespace(Dtype::F16).unwrap());
    let change = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let path = folder.join(name);
        let before = std::fs::read(&path).unwrap();
        let mut changed = before.clone();
        change(&mut changed);
        std::fs::write(&path, changed).unwrap();
        assert_ne!(open().namespace(Dtype::F32).unwrap(), original, "{name}");
        std::fs::write(&path, before).unwrap();
    };
    change("model.safetensors", &|bytes| *bytes.last_mut().unwrap() ^= 1);
    change("model.safetensors", &|bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x80;
    });
    change("config.json", &|bytes| {
        let text = String::from_utf8(std::mem::take(bytes)).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        config["rms_norm_eps"] = 2e-5.into();
        *bytes = config.to_string().into_bytes();
    });
    assert_eq!(open().namespace(Dtype::F32).unwrap(), original);
}

/// Damages some prefixes, in a way that depends on `salt` alone.
fn damaged(mut kv: ShelfKv, salt: usize) -> ShelfKv {
    let n_blocks = kv.blocks.len();
    match salt % 7 {
        0 if 0 < n_blocks => kv.blocks[salt % n_blocks][0] = None,
        1 if 0 < n_blocks => kv.blocks[salt % n_blocks][1] = Some(vec![0xff; salt % 100]),
        2 => kv.n_tokens = salt % 48,
        3 => kv.n_tokens += 1000,
        _ => {}
    }
    kv
}

#[test]
fn any_schedule_with_any_kv_from_outside_gives_the_outputs_of_each_request_alone() {
    for name in ["mistral_sliding_window", "llama_tied_odd_sizes"] {
        let model = TestModel::fixture(name);
        let (n_loaded, n_offers, n_preemptions) = (RefCell::new(0), RefCell::new(0), RefCell::new(0));
        for_random_visits(&model, 100, |setup, visits| {
            let shelf = Shelf::default();
            // The second engine knows nothing but what the first has left on the shelf.
            for turn in 0..2 {
                let mut engine = setup.engine(&model, visits);
                engine.set_kv_sink(shelf.sink());
                check_visits_by(&model, &mut engine, visits, |engine, visit| {
                    let prompt = &visit.request.prompt;
                    if visit.arrival % 3 == turn {
                        engine.forget_prefixes();
                    }
                    let kv = damaged(shelf.prefix(prompt, engine.matched_tokens(prompt)), visit.arrival);
                    submit_from(engine, visit.request.clone(), kv)
                })?;
                *n_loaded.borrow_mut() += engine.stats().n_loaded_tokens;
                *n_preemptions.borrow_mut() += engine.stats().n_preemptions;
                assert!(engine.stats().n_loaded_tokens <= engine.stats().n_cached_tokens);
            }
            *n_offers.borrow_mut() += shelf.take_offers().len();
            Ok(())
        });
        // The schedules must be rough enough to mean something.
        let totals = (n_loaded.into_inner(), n_offers.into_inner(), n_preemptions.into_inner());
        assert!(1000 < totals.0 && 500 < totals.1 && 20 < totals.2, "{totals:?}");
    }
}
