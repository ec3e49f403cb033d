//! The CUDA backend on a real GPU: the same arithmetic as the references, the same bits in any batch.
//!
//! Needs a GPU and the feature `cuda-tests`; `benches/gpu/run` runs it on a machine that has one.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

pub mod support;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvik_model::{
    Backend, BlockId, BlockSource, Checkpoint, ChosenToken, CpuBackend, CudaBackend, CudaBackendOptions,
    EngineEvent, EngineOptions, GenerateRequest, KvSize, LayerProgress, Logits, Model, ModelConfig,
    RowPositions, SamplingParams, SequenceRows, TokenDraw, WantedLogits, WantedRow, WeightDtype,
};
use kvik_types::Dtype;
use safetensors::SafeTensors;
use support::notes_qa::score_of;
use support::schedule::{RowBits, bits, forward_alone, schedules, whole};
use support::{KV_DTYPES, TestModel, bundled_folder, fixture_folder, runner};

/// Every fixture with reference logits.
const FIXTURES: [&str; 15] = [
    "gpt2",
    "gpt2_hub_names",
    "llama_bf16_weights",
    "llama_f16_weights",
    "llama_gqa",
    "llama_rope_linear_new",
    "llama_rope_linear_old",
    "llama_rope_llama3_new_spelling",
    "llama_rope_llama3_old_spelling",
    "llama_sharded",
    "llama_tied_odd_sizes",
    "mistral_sliding_window",
    "qwen2_max_window_layers",
    "qwen2_sliding_layers",
    "qwen3",
];

fn options(n_blocks: usize, kv_dtype: Dtype) -> CudaBackendOptions {
    let mut options = CudaBackendOptions::default();
    options.kv_size = KvSize::Blocks(n_blocks);
    options.kv_dtype = kv_dtype;
    options.kernel_cache = Some(std::env::temp_dir().join("kvik-cuda-tests"));
    options
}

fn backend(model: &TestModel, n_blocks: usize, kv_dtype: Dtype) -> CudaBackend {
    CudaBackend::load(model.config.clone(), model.checkpoint(), &options(n_blocks, kv_dtype)).unwrap()
}

fn blocks(ids: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    ids.into_iter().map(BlockId::new).collect()
}

/// Tokens that look random; different for each `salt`.
fn tokens(vocab_size: usize, n_tokens: usize, salt: u32) -> Vec<u32> {
    let mut state = salt.wrapping_mul(0x9e37_79b9) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state % vocab_size as u32
    };
    std::iter::repeat_with(next).take(n_tokens).collect()
}

/// Largest difference of a logit, as a share of the largest logit: with 16-bit weights the inputs of products are rounded to
/// their type in each layer, with 16-bit KV keys and values are.
fn tolerance(weights: WeightDtype, kv_dtype: Dtype) -> f32 {
    match (weights, kv_dtype) {
        (WeightDtype::F32, Dtype::F32) => 1e-5,
        (WeightDtype::F32 | WeightDtype::F16, Dtype::F32 | Dtype::F16) => 5e-3,
        _ => 6e-2,
    }
}

#[test]
fn every_architecture_gives_the_reference_logits_within_the_tolerance_of_its_types() {
    for name in FIXTURES {
        let folder = fixture_folder(name);
        let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| file.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
        let prompt: Vec<u32> = words("tokens_a").iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let expected: Vec<f32> = words("logits_a").iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let config =
            ModelConfig::from_json(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let name_of_first =
            checkpoint.names().find(|name| name.contains("embed_tokens") || name.contains("wte"));
        let weights = checkpoint.tensor_info(name_of_first.unwrap()).unwrap().dtype;
        for kv_dtype in KV_DTYPES {
            let mut backend = CudaBackend::load(config.clone(), &checkpoint, &options(32, kv_dtype)).unwrap();
            let table = blocks([3, 9, 1]);
            let mut actual = Vec::new();
            for range in [0..5, 5..16, 16..33, 33..34, 34..48] {
                let rows = SequenceRows {
                    tokens: &prompt[range.clone()],
                    positions: RowPositions::From(range.start),
                    block_table: &table,
                    n_logits: range.len(),
                };
                let mut logits = Logits::default();
                backend.forward(&[rows], &mut logits).unwrap();
                (0..logits.n_rows()).for_each(|row| actual.extend_from_slice(logits.row(row)));
            }
            assert_eq!(actual.len(), expected.len());
            let largest = expected.iter().fold(0.0, |largest: f32, logit| largest.max(logit.abs()));
            let worst =
                actual.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest;
            println!("{name} {weights} weights, {kv_dtype} KV: {worst}");
            assert!(
                worst <= tolerance(weights, kv_dtype),
                "{name} {kv_dtype}: logits differ by a share of {worst}"
            );
        }
    }
}

#[test]
fn any_schedule_gives_the_logits_of_each_sequence_alone() {
    let fixtures = [
        "mistral_sliding_window",
        "qwen3",
        "gpt2",
        "llama_tied_odd_sizes",
        "llama_bf16_weights",
        "llama_f16_weights",
    ];
    let models = fixtures.map(TestModel::fixture);
    for model in models.iter().chain(std::iter::once(&TestModel::bundled())) {
        for kv_dtype in KV_DTYPES {
            let tested = RefCell::new(backend(model, 24, kv_dtype));
            let reference = RefCell::new(backend(model, 24, kv_dtype));
            let outcome = runner(24).run(&schedules(model.config.vocab_size, 5, 31, 24), |schedule| {
                schedule.check(&mut *tested.borrow_mut(), &mut *reference.borrow_mut())
            });
            if let Err(error) = outcome {
                panic!("{} {kv_dtype}: {error}", model.name);
            }
        }
    }
}

#[test]
fn long_prompts_give_the_same_bits_whole_cut_and_beside_others() {
    let model = TestModel::bundled();
    let prompt = tokens(model.config.vocab_size, 700, 1);
    for kv_dtype in KV_DTYPES {
        let mut backend = backend(&model, 256, kv_dtype);
        let expected = whole(&mut backend, &prompt);
        for n_rows in [1, 3, 8, 9, 17, 33, 65, 129, 300] {
            let table = blocks((0..44).map(|block| 100 + block * 7 % 44));
            let mut actual = Vec::new();
            for first in (0..prompt.len()).step_by(n_rows) {
                let last = prompt.len().min(first + n_rows);
                // One row at a time only near the ends of chunks, where sums are merged.
                if n_rows == 1 && first % 256 > 2 && first % 256 < 254 {
                    forward_alone(&mut backend, &prompt[first..last], first, &table, 0);
                    actual.push(expected[first].clone());
                    continue;
                }
                actual.extend(forward_alone(&mut backend, &prompt[first..last], first, &table, last - first));
            }
            assert!(actual == expected, "{kv_dtype} cut into {n_rows} rows");
        }
        // The last row beside many others of other lengths.
        let table = blocks(0..44);
        let others: Vec<Vec<u32>> =
            (0..40).map(|salt| tokens(model.config.vocab_size, 1 + salt as usize, salt)).collect();
        let tables: Vec<Vec<BlockId>> = (0..40).map(|idx| blocks(60 + idx * 3..63 + idx * 3)).collect();
        for n_others in [1, 7, 15, 40] {
            let mut batch: Vec<SequenceRows<'_>> = others
                .iter()
                .zip(&tables)
                .take(n_others)
                .map(|(tokens, table)| SequenceRows {
                    tokens,
                    positions: RowPositions::From(0),
                    block_table: table,
                    n_logits: 1,
                })
                .collect();
            let place = n_others / 2;
            let last = SequenceRows {
                tokens: &prompt[699..],
                positions: RowPositions::From(699),
                block_table: &table,
                n_logits: 1,
            };
            batch.insert(place, last);
            let mut logits = Logits::default();
            backend.forward(&batch, &mut logits).unwrap();
            assert!(bits(logits.row(place)) == expected[699], "{kv_dtype} beside {n_others}");
        }
    }
}

/// Heads of these widths have kernels of their own for prompts.
#[test]
fn heads_of_64_and_128_give_the_same_bits_whole_and_cut() {
    for (head_dim, n_kv_heads, kv_dtype) in
        [(64, 4, Dtype::BF16), (128, 1, Dtype::BF16), (128, 4, Dtype::F16), (64, 2, Dtype::F16)]
    {
        let config = format!(
            r#"{{"architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": {n_kv_heads}, "head_dim": {head_dim}, "vocab_size": 1000,
                "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu"}}"#
        );
        let config = ModelConfig::from_json(&config).unwrap();
        let mut backend = CudaBackend::random(config, 7, &options(256, kv_dtype)).unwrap();
        let prompt = tokens(1000, 1100, 2);
        let expected = whole(&mut backend, &prompt);
        assert!(expected.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()));
        for n_rows in [1, 2, 5, 31, 64, 130, 257, 700] {
            let table = blocks((0..69).map(|block| 100 + block * 5 % 69));
            for first in (0..prompt.len()).step_by(n_rows) {
                let last = prompt.len().min(first + n_rows);
                let actual = forward_alone(&mut backend, &prompt[first..last], first, &table, last - first);
                assert!(
                    actual == expected[first..last],
                    "{head_dim} {n_kv_heads} {kv_dtype}: {n_rows} rows from {first}"
                );
            }
        }
    }
}

/// Draws of all kinds, each with another random number.
fn draws(n_draws: usize) -> Vec<TokenDraw> {
    let kinds: [(f32, u32, f32, f32); 12] = [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 0.9, 0.0),
        (1.0, 50, 1.0, 0.0),
        (1.3, 20, 0.8, 0.0),
        (1.0, 0, 1.0, 0.05),
        (0.3, 1, 0.5, 0.1),
        (1e-30, 0, 1.0, 0.0),
        (100.0, 0, 0.999_999, 0.0),
        (50.0, 3000, 0.5, 0.0),
        (2.0, 7, 1.0, 0.001),
        (1.0, u32::MAX, 0.001, 0.0),
    ];
    let draw = |number: usize| {
        let (temperature, top_k, top_p, min_p) = kinds[number % kinds.len()];
        let params = SamplingParams { temperature, top_k, top_p, min_p, ..SamplingParams::default() };
        TokenDraw::new(&params, (number as f64 * 0.618_033_988_7).fract())
    };
    (0..n_draws).map(draw).collect()
}

#[test]
fn tokens_are_chosen_as_on_the_host_also_among_equal_logits() {
    let model = TestModel::bundled();
    let mut backend = backend(&model, 16, Dtype::BF16);
    let vocab_size = model.config.vocab_size;
    for levels in [0.0, 4.0, 1.0, 0.25] {
        for n_rows in [1, 36] {
            // Logits of a few levels are equal, many of them; 0 stands for as many levels as there are numbers.
            let random = tokens(1 << 20, n_rows * vocab_size, n_rows as u32).into_iter();
            let mut logits: Vec<f32> =
                random.map(|number| number as f32 * (18.0 / 1_048_576.0) - 9.0).collect();
            if levels > 0.0 {
                for logit in &mut logits {
                    *logit = (*logit * levels).round() / levels;
                }
            }
            let draws = draws(n_rows);
            let chosen = backend.choose_tokens(&logits, &draws).unwrap();
            for ((row, draw), chosen) in logits.chunks(vocab_size).zip(&draws).zip(chosen) {
                let expected = ChosenToken { token: draw.choose(row), is_finite: true };
                assert_eq!(chosen, expected, "{draw:?}, {levels} levels");
            }
        }
    }
    for place in [0, vocab_size / 2, vocab_size - 1] {
        let mut logits = vec![1.0; vocab_size];
        logits[place] = f32::NAN;
        let chosen = backend.choose_tokens(&logits, &draws(2)[1..]).unwrap();
        assert!(!chosen[0].is_finite, "{place}");
    }
}

#[test]
fn a_pass_gives_tokens_where_a_draw_is_enough_and_logits_elsewhere() {
    let model = TestModel::bundled();
    let mut backend = backend(&model, 16, Dtype::BF16);
    let prompt = tokens(model.config.vocab_size, 200, 5);
    let table = blocks(0..13);
    let rows = SequenceRows {
        tokens: &prompt,
        positions: RowPositions::From(0),
        block_table: &table,
        n_logits: 200,
    };
    let wanted: Vec<WantedRow> = (0..200)
        .zip(draws(200))
        .map(|(row, draw)| match row % 7 {
            3 => WantedRow::Logits,
            0 | 5 => WantedRow::TokenAndLogits(draw),
            _ => WantedRow::Token(draw),
        })
        .collect();
    let (mut logits, mut given) = (Logits::default(), Logits::default());
    backend.forward(&[rows], &mut logits).unwrap();
    backend.forward_wanted(&[rows], WantedLogits::Tokens(&wanted), &mut given).unwrap();
    assert_eq!(given.n_rows(), 200);
    for (row, wanted) in wanted.iter().enumerate() {
        let token = wanted.draw().map(|draw| draw.choose(logits.row(row)));
        let chosen = token.map(|token| ChosenToken { token, is_finite: true });
        assert_eq!(given.chosen(row), chosen, "{wanted:?}");
        assert_eq!(given.has_row(row), wanted.has_logits(), "{wanted:?}");
        assert!(!given.has_row(row) || bits(given.row(row)) == bits(logits.row(row)), "row {row}");
    }
    let too_few = backend.forward_wanted(&[rows], WantedLogits::Tokens(&wanted[1..]), &mut given);
    assert!(too_few.unwrap_err().to_string().contains("draws"));
}

#[test]
fn a_seed_gives_the_same_text_whether_the_device_or_the_host_draws() {
    let model = Model::bundled().unwrap();
    // A penalty too small to change a logit, which the host applies.
    let text_of = |logprobs: Option<u32>, presence_penalty: f32| {
        let mut engine = model.cuda_engine(&options(2048, Dtype::BF16), EngineOptions::default()).unwrap();
        for number in 0..12 {
            let mut sampling = SamplingParams {
                logprobs,
                presence_penalty,
                seed: Some(number),
                n: 1 + number as u32 % 3,
                ..Default::default()
            };
            (sampling.temperature, sampling.top_p) = (0.8, if number % 2 == 0 { 0.9 } else { 1.0 });
            sampling.top_k = if number % 3 == 0 { 40 } else { 0 };
            sampling.max_tokens = 60;
            let prompt = tokens(model.config().vocab_size, 5 + number as usize, number as u32);
            engine.submit(GenerateRequest { prompt, sampling }).unwrap();
        }
        let events = engine.run_until_idle().unwrap();
        let tokens = events.into_iter().filter_map(|event| match event {
            EngineEvent::Token(token) => Some((token.request, token.choice, token.token)),
            _ => None,
        });
        let mut tokens: Vec<_> = tokens.collect();
        tokens.sort_by_key(|(request, choice, _)| (*request, *choice));
        tokens
    };
    let drawn = text_of(None, 0.0);
    assert!(drawn.len() > 1000);
    assert!(drawn == text_of(None, f32::MIN_POSITIVE));
    assert!(drawn == text_of(Some(3), 0.0), "with log probabilities");
}

#[test]
fn greedy_tokens_of_the_bundled_model_are_the_references_where_the_margin_allows() {
    let model = Model::bundled().unwrap();
    let text = std::fs::read_to_string(bundled_folder().join("golden.jsonl")).unwrap();
    let mut engine = model.cuda_engine(&options(2048, Dtype::BF16), EngineOptions::default()).unwrap();
    let (mut n_compared, mut n_equal) = (0, 0);
    for line in text.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let ids = |field: &str| -> Vec<u32> {
            line[field].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let expected = ids("greedy_ids");
        let sampling = SamplingParams::greedy(expected.len() as u32);
        engine.submit(GenerateRequest { prompt: ids("prompt_ids"), sampling }).unwrap();
        let events = engine.run_until_idle().unwrap();
        let actual: Vec<u32> = events
            .iter()
            .filter_map(|event| if let EngineEvent::Token(token) = event { Some(token.token) } else { None })
            .collect();
        let is_equal = actual == expected;
        n_equal += usize::from(is_equal);
        // bf16 activations move logits by up to a few hundredths.
        if 0.1 < line["smallest_margin"].as_f64().unwrap() {
            n_compared += 1;
            assert!(is_equal, "{}: {actual:?} is not {expected:?}", line["prompt"]);
        }
    }
    println!("golden: {n_equal} lines equal, {n_compared} with a margin above 0.1");
    assert!(n_compared > 0);
}

#[test]
fn answers_are_within_one_point_of_the_float32_reference() {
    let model = Model::bundled().unwrap();
    let mut engine_options = EngineOptions::default();
    engine_options.max_batched_tokens = 4096;
    engine_options.max_sequences = 128;
    for kv_dtype in [Dtype::BF16, Dtype::F16] {
        let engine = model.cuda_engine(&options(32768, kv_dtype), engine_options.clone()).unwrap();
        let n_right: usize = score_of(&model, engine).values().sum();
        println!("notes_qa with {kv_dtype} KV: {n_right} of 300");
        assert!(n_right.abs_diff(252) <= 3, "{kv_dtype}: {n_right} of 300");
    }
}

#[test]
fn blocks_go_out_and_in_as_they_are_and_tokens_go_on_from_them() {
    let model = TestModel::bundled();
    let prompt = tokens(model.config.vocab_size, 64, 9);
    for kv_dtype in KV_DTYPES {
        let (mut from, mut to) = (backend(&model, 8, kv_dtype), backend(&model, 16, kv_dtype));
        let expected = whole(&mut from, &prompt);
        let pinned = from.pin_blocks(&blocks(0..4)).unwrap();
        let mut bytes = vec![0; from.block_layer_bytes()];
        let mut many = vec![0; model.config.n_layers * 3 * bytes.len()];
        pinned.read_blocks(0..model.config.n_layers, 0..3, &mut many).unwrap();
        let mut many = many.chunks_exact(bytes.len());
        for layer_idx in 0..model.config.n_layers {
            for block in 0..3 {
                pinned.read_block(layer_idx, block as usize, &mut bytes).unwrap();
                assert!(many.next().unwrap() == bytes, "{kv_dtype} block {block} of layer {layer_idx}");
                to.import_block(layer_idx, BlockId::new(12 - block), &bytes).unwrap();
            }
            let kv = from.export_kv(layer_idx, &blocks(0..4), 48).unwrap();
            assert_eq!(kv, to.export_kv(layer_idx, &blocks([12, 11, 10]), 48).unwrap());
            to.import_kv(layer_idx, &blocks([1, 2, 3]), &kv).unwrap();
            assert_eq!(kv, to.export_kv(layer_idx, &blocks([1, 2, 3]), 48).unwrap());
        }
        let actual = forward_alone(&mut to, &prompt[48..], 48, &blocks([12, 11, 10, 9]), 16);
        assert!(actual == expected[48..], "{kv_dtype} imported");
        to.copy_block(BlockId::new(3), BlockId::new(5)).unwrap();
        let actual = forward_alone(&mut to, &prompt[48..], 48, &blocks([1, 2, 5, 6]), 16);
        assert!(actual == expected[48..], "{kv_dtype} copied");
    }
}

/// Blocks of one layer behind the other, as they were exported.
#[derive(Debug)]
struct Exported {
    layers: Vec<Vec<Vec<u8>>>,
}

impl Exported {
    /// The first `n_blocks` blocks of a backend.
    fn first_blocks(from: &dyn Backend, n_blocks: u32) -> Self {
        let block_of = |layer_idx, block| {
            let mut bytes = vec![0; from.block_layer_bytes()];
            from.export_block(layer_idx, BlockId::new(block), &mut bytes).unwrap();
            bytes
        };
        let layer_of = |layer_idx| (0..n_blocks).map(|block| block_of(layer_idx, block)).collect();
        Self { layers: (0..from.config().n_layers).map(layer_of).collect() }
    }
}

impl BlockSource for Exported {
    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]> {
        self.layers.get(layer_idx)?.get(block_idx).map(Vec::as_slice)
    }
}

#[test]
fn blocks_come_in_beside_passes_and_tokens_go_on_from_them() {
    let model = TestModel::bundled();
    let (prompt, other) = (tokens(model.config.vocab_size, 64, 9), tokens(model.config.vocab_size, 40, 2));
    for kv_dtype in KV_DTYPES {
        let (mut from, mut to) = (backend(&model, 8, kv_dtype), backend(&model, 16, kv_dtype));
        let expected = whole(&mut from, &prompt);
        let expected_other = whole(&mut from, &other);
        whole(&mut from, &prompt);
        let source: Arc<dyn BlockSource> = Arc::new(Exported::first_blocks(&from, 3));
        let pairs = [(0, BlockId::new(12)), (1, BlockId::new(11)), (2, BlockId::new(10))];
        assert!(to.imports_beside_passes());
        let import = to.start_import(&source, &pairs).unwrap();
        assert!(whole(&mut to, &other) == expected_other, "{kv_dtype} beside");
        import.finish().unwrap();
        let actual = forward_alone(&mut to, &prompt[48..], 48, &blocks([12, 11, 10, 9]), 16);
        assert!(actual == expected[48..], "{kv_dtype} imported");
        let missing = to.start_import(&source, &[(3, BlockId::new(5))]).unwrap();
        assert!(missing.finish().unwrap_err().to_string().contains("block"));
    }
}

/// The largest difference of two logits, as a share of the largest logit.
fn largest_share(actual: &[RowBits], expected: &[RowBits]) -> f32 {
    assert_eq!(actual.len(), expected.len());
    let logits =
        |rows: &[RowBits]| -> Vec<f32> { rows.iter().flatten().map(|bits| f32::from_bits(*bits)).collect() };
    let (actual, expected) = (logits(actual), logits(expected));
    let largest = expected.iter().fold(0.0, |largest: f32, logit| largest.max(logit.abs()));
    actual.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest
}

#[test]
fn tokens_go_on_from_blocks_of_a_cpu_on_a_gpu_and_the_other_way() {
    let model = TestModel::bundled();
    let prompt = tokens(model.config.vocab_size, 64, 9);
    for kv_dtype in KV_DTYPES {
        let mut cpu_options = support::backend_options(16);
        cpu_options.kv_dtype = kv_dtype;
        let mut cpu = CpuBackend::load(model.config.clone(), model.checkpoint(), &cpu_options).unwrap();
        let mut gpu = backend(&model, 16, kv_dtype);
        let expected = [whole(&mut cpu, &prompt), whole(&mut gpu, &prompt)];
        let exported = [Exported::first_blocks(&gpu, 3), Exported::first_blocks(&cpu, 3)];
        let backends: [&mut dyn Backend; 2] = [&mut cpu, &mut gpu];
        for ((backend, expected), exported) in backends.into_iter().zip(expected).zip(exported) {
            for (layer_idx, blocks) in exported.layers.iter().enumerate() {
                for (block, bytes) in (8..).zip(blocks) {
                    backend.import_block(layer_idx, BlockId::new(block), bytes).unwrap();
                }
            }
            let share_of = |backend: &mut dyn Backend, table: [u32; 4]| {
                let actual = forward_alone(backend, &prompt[48..], 48, &blocks(table), 16);
                largest_share(&actual, &expected[48..])
            };
            let (share, wrong) = (share_of(backend, [8, 9, 10, 11]), share_of(backend, [8, 9, 9, 11]));
            println!("{kv_dtype}: {share}, with a wrong block {wrong}");
            let allowed = tolerance(WeightDtype::BF16, kv_dtype);
            assert!(share <= allowed && wrong > 2.0 * share, "{kv_dtype}: {share}, {wrong}");
        }
    }
}

/// Blocks of which a layer comes when it is waited for, up to a last one.
#[derive(Debug)]
struct Layered {
    exported: Exported,
    n_there: AtomicUsize,
    n_layers: usize,
}

impl BlockSource for Layered {
    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]> {
        (layer_idx < self.n_there.load(Ordering::Acquire))
            .then(|| self.exported.block(layer_idx, block_idx))?
    }

    fn layers(&self) -> LayerProgress {
        LayerProgress { n_there: self.n_there.load(Ordering::Acquire), has_ended: false }
    }

    fn wait_layer(&self, layer_idx: usize, _timeout: Duration) -> bool {
        self.n_there.fetch_max((layer_idx + 1).min(self.n_layers), Ordering::AcqRel);
        layer_idx < self.n_layers
    }
}

#[test]
fn a_pass_waits_for_each_layer_of_blocks_that_come_in() {
    let model = TestModel::bundled();
    let (prompt, other) = (tokens(model.config.vocab_size, 64, 9), tokens(model.config.vocab_size, 30, 2));
    for kv_dtype in KV_DTYPES {
        let (mut from, mut to) = (backend(&model, 8, kv_dtype), backend(&model, 16, kv_dtype));
        let expected_other = whole(&mut from, &other);
        let expected = whole(&mut from, &prompt);
        let n_all = model.config.n_layers;
        for n_layers in [n_all, n_all - 1] {
            let exported = Exported::first_blocks(&from, 3);
            let source: Arc<dyn BlockSource> =
                Arc::new(Layered { exported, n_there: AtomicUsize::new(1), n_layers });
            let pairs = [(0, BlockId::new(12)), (1, BlockId::new(11)), (2, BlockId::new(10))];
            let import = to.start_import(&source, &pairs).unwrap();
            let (table, other_table) = (blocks([12, 11, 10, 9]), blocks([1, 2]));
            let rows = [
                SequenceRows {
                    tokens: &prompt[48..],
                    positions: 48.into(),
                    block_table: &table,
                    n_logits: 16,
                },
                SequenceRows { tokens: &other, positions: 0.into(), block_table: &other_table, n_logits: 30 },
            ];
            let mut logits = Logits::default();
            to.forward_arriving(&rows, &[import.as_ref()], WantedLogits::Rows, &mut logits).unwrap();
            let actual: Vec<_> = (0..logits.n_rows()).map(|row| bits(logits.row(row))).collect();
            assert_eq!(to.finish_import(import).is_ok(), n_layers == n_all, "{kv_dtype}");
            assert!(n_layers < n_all || actual[..16] == expected[48..], "{kv_dtype} behind");
            // A layer that does not come is of no importance to the others.
            assert!(actual[16..] == expected_other, "{kv_dtype} beside");
        }
    }
}

#[test]
fn what_lies_behind_a_sequence_in_its_last_block_changes_nothing() {
    let model = TestModel::bundled();
    let prompt = tokens(model.config.vocab_size, 41, 3);
    for kv_dtype in KV_DTYPES {
        let mut clean = backend(&model, 4, kv_dtype);
        let expected = whole(&mut clean, &prompt);
        let mut dirty = backend(&model, 4, kv_dtype);
        // Not numbers in every type.
        let bytes = vec![0xff; dirty.block_layer_bytes()];
        for layer_idx in 0..model.config.n_layers {
            for block in 0..4 {
                dirty.import_block(layer_idx, BlockId::new(block), &bytes).unwrap();
            }
        }
        assert!(whole(&mut dirty, &prompt) == expected, "{kv_dtype}");
    }
}

#[test]
fn a_device_that_does_not_exist_is_refused_by_name() {
    let model = TestModel::bundled();
    let mut options = options(4, Dtype::BF16);
    options.ordinal = 97;
    let error =
        CudaBackend::load(model.config.clone(), model.checkpoint(), &options).unwrap_err().to_string();
    assert!(error.starts_with("cuda:97: "), "{error}");
    let mut options = self::options(4, Dtype::BF16);
    options.kv_size = KvSize::Bytes(1 << 60);
    let error =
        CudaBackend::load(model.config.clone(), model.checkpoint(), &options).unwrap_err().to_string();
    assert!(error.contains("kv_memory"), "{error}");
}
