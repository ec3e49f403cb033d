//! Prompts that are put together from segments.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod reference;
#[path = "../support/mod.rs"]
pub mod support;

use std::sync::Arc;

use kvik_model::{
    Backend, Blend, BlendSegment, BlendUsage, BlockId, ComputedSegment, Engine, EngineEvent, EngineOptions,
    GenerateRequest, Logits, ModelError, RequestId, RowPositions, SamplingParams, SegmentKv, SegmentPart,
    SequenceRows, SubmitOptions,
};
use proptest::prelude::*;

use reference::Reference;
use support::requests::{Output, Outputs, collect, engine, run};
use support::shelf::Shelf;
use support::{KV_DTYPES, TestModel, backend_options, runner};

/// How far logits may be from those in double precision; they are between -1 and 1.
const LOGITS_TOLERANCE: f64 = 1e-4;

fn tokens(vocab_size: usize, n_tokens: usize, seed: u64) -> Vec<u32> {
    (0..n_tokens as u64)
        .map(|idx| ((idx * 7919 + seed * 104_729 + idx * idx * 31) % vocab_size as u64) as u32)
        .collect()
}

fn request(prompt: &[u32], n: u32) -> GenerateRequest {
    let mut sampling = SamplingParams::greedy(6);
    sampling.ignore_eos = true;
    sampling.logprobs = Some(4);
    sampling.n = n;
    GenerateRequest { prompt: prompt.to_vec(), sampling }
}

fn segment(engine: &mut Engine, tokens: &[u32]) -> ComputedSegment {
    engine.submit_segment(tokens).unwrap();
    let mut events = engine.run_until_idle().unwrap();
    assert!(matches!(events[0], EngineEvent::Admitted { cached_tokens: 0, .. }) && events.len() == 2);
    match events.pop() {
        Some(EngineEvent::Segment { segment, .. }) => *segment,
        other => panic!("{other:?}"),
    }
}

/// The segments of a prompt at `ranges`, each computed alone.
fn segments(engine: &mut Engine, prompt: &[u32], ranges: &[(usize, usize)]) -> Vec<BlendSegment> {
    let place = |&(first_token, n_tokens): &(usize, usize)| {
        let kv = Arc::new(segment(engine, &prompt[first_token..first_token + n_tokens]));
        BlendSegment { first_token, kv }
    };
    ranges.iter().map(place).collect()
}

fn submit(
    engine: &mut Engine,
    request: GenerateRequest,
    segments: Vec<BlendSegment>,
    selectors: &str,
) -> RequestId {
    let prepared = engine.prepare(request, SubmitOptions::default());
    engine.submit_blended(prepared, None, Blend { segments, selectors: selectors.parse().unwrap() }).unwrap()
}

fn blended(engine: &mut Engine, prompt: &[u32], segments: Vec<BlendSegment>, selectors: &str) -> Output {
    submit(engine, request(prompt, 1), segments, selectors);
    run(engine).into_values().next().unwrap()
}

fn plain(engine: &mut Engine, prompt: &[u32]) -> Output {
    engine.submit(request(prompt, 1)).unwrap();
    run(engine).into_values().next().unwrap()
}

fn assert_same(actual: &Output, expected: &Output) {
    assert_eq!((&actual.tokens, &actual.logprobs), (&expected.tokens, &expected.logprobs));
}

/// An engine that computes prompts in passes of a few rows.
fn small_passes(model: &TestModel) -> Engine {
    let mut options = EngineOptions::default();
    options.max_batched_tokens = 7;
    engine(model, 64, options)
}

#[test]
fn a_prompt_with_every_token_selected_is_plain_prefill_to_the_bit() {
    for name in ["llama_gqa", "mistral_sliding_window", "qwen3"] {
        let model = TestModel::fixture(name);
        let prompt = tokens(model.config.vocab_size, 53, 1);
        for mut engine in [engine(&model, 64, EngineOptions::default()), small_passes(&model)] {
            let expected = plain(&mut engine, &prompt);
            let placed = segments(&mut engine, &prompt, &[(3, 9), (12, 20), (40, 13)]);
            for selectors in
                ["all", "first:20", "position:1", "random:1", "deviation:1", "attention:1", "deviation:1@9"]
            {
                let actual = blended(&mut engine, &prompt, placed.clone(), selectors);
                assert_same(&actual, &expected);
                let usage = BlendUsage { blended_tokens: 42, recomputed_tokens: 42 };
                assert_eq!(actual.usage.blend, usage, "{name} {selectors}");
            }
        }
    }
}

#[test]
fn a_segment_at_the_start_of_a_prompt_is_exact() {
    let model = TestModel::fixture("llama_gqa");
    let mut engine = engine(&model, 64, EngineOptions::default());
    let prompt = tokens(model.config.vocab_size, 45, 2);
    let expected = plain(&mut engine, &prompt);
    for n_tokens in [1, 16, 31, 44, 45] {
        let placed = segments(&mut engine, &prompt, &[(0, n_tokens)]);
        let actual = blended(&mut engine, &prompt, placed, "none");
        assert_same(&actual, &expected);
        assert_eq!((actual.usage.cached_tokens, actual.usage.blend.blended_tokens), (0, n_tokens));
    }
}

#[test]
fn prompts_of_segments_anywhere_are_those_of_a_reference_in_double_precision() {
    let model = TestModel::fixture("llama_gqa");
    let reference = Reference::new(&model.config, model.checkpoint());
    let cases = (0..1000_u64, prop::collection::vec((0..9_usize, 1..24_usize), 1..4), 1..6_usize, 0..8_usize);
    let check = |(seed, parts, n_tail, n_first): (u64, Vec<(usize, usize)>, usize, usize)| {
        let mut ranges = Vec::new();
        let mut end = 0;
        for (gap, n_tokens) in parts {
            ranges.push((end + gap, n_tokens));
            end += gap + n_tokens;
        }
        let prompt = tokens(model.config.vocab_size, end + n_tail, seed);
        let mut engine = small_passes(&model);
        let placed = segments(&mut engine, &prompt, &ranges);
        let actual = blended(&mut engine, &prompt, placed, &format!("first:{n_first}"));

        let mut cache = reference.empty_cache(prompt.len());
        for &(first, n_tokens) in &ranges {
            for (position, &token) in prompt.iter().enumerate().skip(first).take(n_tokens) {
                reference.row(token, position, &|seen| first <= seen, &mut cache);
            }
        }
        let is_kept = |position: usize| {
            ranges.iter().any(|&(first, n_tokens)| (first + n_first..first + n_tokens).contains(&position))
        };
        let mut logits = Vec::new();
        for position in (0..prompt.len()).filter(|&position| !is_kept(position)) {
            logits = reference.row(prompt[position], position, &|_| true, &mut cache);
        }
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - largest).exp()).sum();
        for &(token, bits) in &actual.logprobs[0] {
            let expected = logits[token as usize] - largest - sum.ln();
            let difference = (f64::from(f32::from_bits(bits)) - expected).abs();
            prop_assert!(difference < LOGITS_TOLERANCE, "token {} is off by {}", token, difference);
        }
        Ok(())
    };
    runner(24).run(&cases, check).unwrap();
}

#[test]
fn keys_are_turned_to_their_place_and_values_stay_as_they_are() {
    let model = TestModel::fixture("llama_gqa");
    let prompt = tokens(model.config.vocab_size, 40, 3);
    for kv_dtype in KV_DTYPES {
        let mut options = backend_options(16);
        options.kv_dtype = kv_dtype;
        let mut backend = model.backend(&options);
        let table = |first: u32| (first..first + 4).map(BlockId::new).collect::<Vec<_>>();
        let (whole, alone, placed) = (table(0), table(4), table(8));
        let mut compute = |tokens: &[u32], block_table: &[BlockId]| {
            let rows = SequenceRows { tokens, positions: RowPositions::From(0), block_table, n_logits: 0 };
            backend.forward(&[rows], &mut Logits::default()).unwrap();
        };
        compute(&prompt, &whole);
        compute(&prompt[21..], &alone);
        let kv = backend.export_kv(0, &alone, 19).unwrap();
        let part = SegmentPart { keys: &kv.keys, values: &kv.values };
        backend.place_kv(0, &placed, 21, 21, part).unwrap();
        let (expected, actual) =
            (backend.export_kv(0, &whole, 40).unwrap(), backend.export_kv(0, &placed, 40).unwrap());
        // The first layer's depend on token and position alone.
        let start = 21 * kv.values.len() / 19;
        assert_eq!(actual.values[start..], expected.values[start..]);
        let tolerance = match kv_dtype.size_bytes() {
            4 => 1e-6,
            _ => 0.02,
        };
        let widen = |bytes: &[u8]| -> Vec<f32> {
            let element_bytes = kv_dtype.size_bytes();
            bytes.chunks_exact(element_bytes).map(|element| support::widen(kv_dtype, element)).collect()
        };
        for (actual, expected) in widen(&actual.keys[start..]).iter().zip(widen(&expected.keys[start..])) {
            assert!((actual - expected).abs() < tolerance, "{kv_dtype}: {actual} for {expected}");
        }
        // And back to the start.
        let later = SegmentPart { keys: &expected.keys[start..], values: &expected.values[start..] };
        backend.place_kv(0, &placed, 0, -21, later).unwrap();
        let back = backend.export_kv(0, &placed, 19).unwrap();
        assert_eq!(back.values, kv.values);
        for (actual, expected) in widen(&back.keys).iter().zip(widen(&kv.keys)) {
            assert!(
                (actual - expected).abs() < tolerance,
                "{kv_dtype}: {actual} for {expected}, turned back"
            );
        }
        for wrong in [
            SegmentPart { keys: &kv.keys[1..], values: &kv.values[1..] },
            SegmentPart { keys: &kv.keys, values: &[] },
        ] {
            assert!(backend.place_kv(0, &placed, 21, 21, wrong).is_err());
        }
        assert!(backend.place_kv(0, &placed, 50, 50, part).is_err(), "past the end of the table");
    }
}

#[test]
fn rows_anywhere_see_what_stands_before_them_and_nothing_behind() {
    let model = TestModel::fixture("llama_gqa");
    let prompt = tokens(model.config.vocab_size, 48, 4);
    let table: Vec<BlockId> = (0..3).map(BlockId::new).collect();
    let check = |chosen: Vec<bool>| {
        let mut backend = model.backend(&backend_options(3));
        let mut logits = Logits::default();
        let mut forward = |backend: &mut dyn Backend, tokens: &[u32], positions: RowPositions<'_>| {
            let rows = SequenceRows { tokens, positions, block_table: &table, n_logits: tokens.len() };
            backend.forward(&[rows], &mut logits).unwrap();
            (0..tokens.len()).map(|row| logits.row(row).to_vec()).collect::<Vec<_>>()
        };
        let expected = forward(&mut backend, &prompt, RowPositions::From(0));
        let positions: Vec<u32> = (0..48).filter(|&at| chosen[at as usize]).collect();
        let Some(&last) = positions.last() else { return Ok(()) };
        // What stands behind the last row is poison, and what the rows write themselves too.
        for layer_idx in 0..model.config.n_layers {
            let mut kv = backend.export_kv(layer_idx, &table, 48).unwrap();
            let token_bytes = kv.keys.len() / 48;
            for at in (0..48).filter(|&at| chosen[at] || last < at as u32) {
                for element in kv.keys[at * token_bytes..(at + 1) * token_bytes].as_chunks_mut::<4>().0 {
                    *element = f32::NAN.to_le_bytes();
                }
            }
            backend.import_kv(layer_idx, &table, &kv).unwrap();
        }
        let chosen_tokens: Vec<u32> = positions.iter().map(|&at| prompt[at as usize]).collect();
        let actual = forward(&mut backend, &chosen_tokens, RowPositions::At(&positions));
        for (row, &position) in actual.iter().zip(&positions) {
            prop_assert!(row == &expected[position as usize], "position {}", position);
        }
        Ok(())
    };
    runner(40).run(&prop::collection::vec(any::<bool>(), 48), check).unwrap();
}

#[test]
fn blended_kv_is_found_by_no_other_request_and_offered_to_no_store() {
    let model = TestModel::fixture("llama_gqa");
    let mut engine = engine(&model, 64, EngineOptions::default());
    let shelf = Shelf::default();
    engine.set_kv_sink(shelf.sink());
    let prompt = tokens(model.config.vocab_size, 64, 5);
    let placed = segments(&mut engine, &prompt, &[(4, 40)]);
    blended(&mut engine, &prompt, placed.clone(), "none");
    assert_eq!((engine.registered_blocks().count(), shelf.take_offers().len()), (0, 0));
    let exact = plain(&mut engine, &prompt);
    assert_eq!((exact.usage.cached_tokens, exact.usage.blend), (0, BlendUsage::default()));
    assert_eq!(shelf.take_offers().len(), 1);
    // And what is exact does not become part of a blended prompt.
    assert_eq!(blended(&mut engine, &prompt, placed, "none").usage.cached_tokens, 0);
    assert!(shelf.take_offers().is_empty());
}

#[test]
fn a_primed_segment_is_computed_behind_its_context_which_is_dropped() {
    let model = TestModel::fixture("llama_gqa");
    let prompt = tokens(model.config.vocab_size, 40, 12);
    let mut options = EngineOptions::default();
    options.segment_priming = prompt[..9].to_vec();
    let mut primed = engine(&model, 64, options);
    let kv = segment(&mut primed, &prompt[9..29]);
    assert_eq!((kv.tokens.as_slice(), kv.first_position), (&prompt[9..29], 9));
    let mut alone = engine(&model, 64, EngineOptions::default());
    assert!(kv.layers[1].values != segment(&mut alone, &prompt[9..29]).layers[1].values);
    // Behind exactly its context it is exact; anywhere else its keys are turned, forth or back.
    let expected = plain(&mut alone, &prompt);
    let at = |first_token| vec![BlendSegment { first_token, kv: Arc::new(kv.clone()) }];
    let actual = blended(&mut primed, &prompt, at(9), "none");
    assert_same(&actual, &expected);
    assert_eq!(actual.usage.blend.blended_tokens, 20);
    let all = blended(&mut primed, &prompt[9..], at(0), "all");
    assert_same(&all, &plain(&mut alone, &prompt[9..]));
    assert_eq!(blended(&mut primed, &prompt[9..], at(0), "none").usage.blend.blended_tokens, 20);
    let refused = primed.submit_segment(&[]).unwrap_err();
    assert!(refused.to_string().contains("at least one token"), "{refused}");
}

#[test]
fn a_segment_that_lacks_a_part_is_computed() {
    #[derive(Debug)]
    struct Damaged(ComputedSegment, usize);

    impl SegmentKv for Damaged {
        fn n_tokens(&self) -> usize {
            self.0.n_tokens()
        }

        fn first_position(&self) -> usize {
            self.0.first_position()
        }

        fn n_parts(&self) -> usize {
            2 - usize::from(self.1 == 3)
        }

        fn part(&self, layer_idx: usize, part_idx: usize) -> Option<SegmentPart<'_>> {
            let part = self.0.part(layer_idx, 0)?;
            let cut = part.keys.len() / self.0.n_tokens() * 5;
            let (first, rest) = (part.keys.split_at(cut), part.values.split_at(cut));
            let whole = [
                SegmentPart { keys: first.0, values: rest.0 },
                SegmentPart { keys: first.1, values: rest.1 },
            ];
            match (self.1, layer_idx, part_idx) {
                (1, 2, 1) => None,
                (2, 1, 1) => Some(SegmentPart { keys: &first.1[..first.1.len() - 1], ..whole[1] }),
                (4, 1, 1) => Some(part),
                _ => Some(whole[part_idx]),
            }
        }
    }

    let model = TestModel::fixture("llama_gqa");
    let mut engine = engine(&model, 64, EngineOptions::default());
    let prompt = tokens(model.config.vocab_size, 40, 6);
    let expected = plain(&mut engine, &prompt);
    let good = segment(&mut engine, &prompt[9..29]);
    for damage in 0..5 {
        let kv = Arc::new(Damaged(good.clone(), damage));
        let actual = blended(&mut engine, &prompt, vec![BlendSegment { first_token: 9, kv }], "none");
        let n_blended = if damage == 0 { 20 } else { 0 };
        assert_eq!(actual.usage.blend.blended_tokens, n_blended, "damage {damage}");
        if damage > 0 {
            assert_same(&actual, &expected);
        }
    }
}

#[test]
fn blended_prompts_beside_others_and_after_preemptions_give_the_same_tokens() {
    let model = TestModel::fixture("llama_gqa");
    let prompts: Vec<Vec<u32>> = (0..6).map(|seed| tokens(model.config.vocab_size, 40, seed)).collect();
    let selectors = ["none", "first:3", "deviation:0.3", "attention:0.2", "random:0.5", "all"];
    let long_request = |prompt: &[u32], n| {
        let mut request = request(prompt, n);
        request.sampling.max_tokens = 24;
        request
    };
    let mut roomy = engine(&model, 64, EngineOptions::default());
    let placed: Vec<_> =
        prompts.iter().map(|prompt| segments(&mut roomy, prompt, &[(2, 11), (17, 19)])).collect();
    let mut expected = Vec::new();
    for (idx, prompt) in prompts.iter().enumerate() {
        submit(&mut roomy, long_request(prompt, 2), placed[idx].clone(), selectors[idx]);
        expected.push(run(&mut roomy));
    }
    let mut options = EngineOptions::default();
    options.max_batched_tokens = 13;
    let mut tight = engine(&model, 7, options);
    let mut ids = Vec::new();
    for (idx, prompt) in prompts.iter().enumerate() {
        ids.push(submit(&mut tight, long_request(prompt, 2), placed[idx].clone(), selectors[idx]));
        tight.submit(long_request(prompt, 1)).unwrap();
    }
    let mut outputs = Outputs::new();
    collect(tight.run_until_idle().unwrap(), &mut outputs);
    assert!(tight.stats().n_preemptions > 0, "the pool was not too small");
    for (id, expected) in ids.iter().zip(&expected) {
        for (choice, expected) in expected.values().enumerate() {
            let actual = &outputs[&(*id, choice as u32)];
            assert_same(actual, expected);
            assert_eq!(actual.usage.blend, expected.usage.blend);
        }
    }
    let stats = tight.pool_stats();
    assert_eq!(stats.n_free, stats.n_blocks, "every block came back");
}

#[test]
fn segments_that_cannot_be_placed_are_refused_by_name() {
    let model = TestModel::fixture("llama_gqa");
    let mut engine = engine(&model, 16, EngineOptions::default());
    let prompt = tokens(model.config.vocab_size, 30, 7);
    let one = segment(&mut engine, &prompt[..10]);
    let kv: Arc<dyn SegmentKv> = Arc::new(one);
    let at = |first_token| BlendSegment { first_token, kv: Arc::clone(&kv) };
    let mut try_submit = |segments: Vec<BlendSegment>, name: Option<&str>| {
        let options = SubmitOptions { name: name.map(str::to_owned), ..SubmitOptions::default() };
        let prepared = engine.prepare(request(&prompt, 1), options);
        let blend = Blend { segments, selectors: "none".parse().unwrap() };
        engine.submit_blended(prepared, None, blend).map_err(|error| error.to_string())
    };
    for wrong in [vec![at(21)], vec![at(5), at(14)], vec![at(15), at(0)], vec![at(usize::MAX)]] {
        assert!(try_submit(wrong, None).unwrap_err().contains("segments"));
    }
    assert!(try_submit(vec![at(0)], Some("chat")).unwrap_err().contains("seq_id"));
    assert!(engine.is_idle(), "nothing was taken");

    let learned = TestModel::fixture("gpt2");
    let mut engine = support::requests::engine(&learned, 16, EngineOptions::default());
    let error = engine.submit_segment(&[1, 2, 3]).unwrap_err();
    assert!(
        matches!(error, ModelError::InvalidRequest { .. })
            && error.to_string().contains("positions are learned")
    );
}
