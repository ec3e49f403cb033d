//! A row's logits are the same to the bit whatever is computed beside it, wherever its blocks lie
//! and however its sequence is cut into passes.

pub mod support;

use kvik_model::{BLOCK_TOKENS, Backend, BlockId, Isa, Logits, RowPositions, SequenceRows};
use kvik_types::Dtype;

use support::schedule::{bits, check_schedules, forward_alone, whole};
use support::{KV_DTYPES, TestModel, all_backend_options, backend_options};

/// One model for each thing the arithmetic does: sliding window, head norm with a head size off
/// the vector width, layer norm with learned positions, biases with odd sizes.
const FIXTURES: [&str; 4] = ["mistral_sliding_window", "qwen3", "gpt2", "llama_tied_odd_sizes"];

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

fn blocks(ids: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    ids.into_iter().map(BlockId::new).collect()
}

#[test]
fn any_schedule_on_any_backend_gives_the_logits_of_each_sequence_alone() {
    for name in FIXTURES {
        let model = TestModel::fixture(name);
        // 31 own tokens and two shared blocks stay below the 64 positions of the GPT-2 fixture.
        check_schedules(&model, &all_backend_options(20), 96, 5, 31);
    }
}

#[test]
fn any_schedule_of_the_bundled_model_gives_the_logits_of_each_sequence_alone() {
    let model = TestModel::bundled();
    let mut all_options = Vec::new();
    for (n_threads, kv_dtype) in (1..=3).zip(KV_DTYPES) {
        let mut options = backend_options(24);
        options.n_threads = n_threads;
        options.kv_dtype = kv_dtype;
        all_options.push(options);
    }
    check_schedules(&model, &all_options, 12, 4, 60);
}

#[test]
fn permuted_blocks_give_the_logits_of_contiguous_ones() {
    for name in FIXTURES {
        let model = TestModel::fixture(name);
        let prompt = tokens(model.config.vocab_size, 60, 1);
        for kv_dtype in KV_DTYPES {
            let mut options = backend_options(16);
            options.kv_dtype = kv_dtype;
            let expected = whole(&mut model.backend(&options), &prompt);
            for table in [[3, 2, 1, 0], [15, 0, 7, 8], [5, 14, 4, 13]] {
                let actual = forward_alone(&mut model.backend(&options), &prompt, 0, &blocks(table), 60);
                assert!(actual == expected, "{name} {kv_dtype} {table:?}");
            }
        }
    }
}

#[test]
fn every_cut_of_a_prefill_gives_the_logits_of_the_whole() {
    for name in FIXTURES {
        let model = TestModel::fixture(name);
        let prompt = tokens(model.config.vocab_size, 50, 2);
        let mut backend = model.backend(&backend_options(4));
        let expected = whole(&mut backend, &prompt);
        let table = blocks(0..4);
        for cut in 1..prompt.len() {
            let mut actual = forward_alone(&mut backend, &prompt[..cut], 0, &table, cut);
            actual.extend(forward_alone(&mut backend, &prompt[cut..], cut, &table, 50 - cut));
            assert!(actual == expected, "{name} cut at {cut}");
        }
    }
}

#[test]
fn decoding_one_token_at_a_time_gives_the_logits_of_a_prefill() {
    for model in [TestModel::bundled(), TestModel::fixture("mistral_sliding_window")] {
        let prompt = tokens(model.config.vocab_size, 70, 3);
        let mut backend = model.backend(&backend_options(5));
        let expected = whole(&mut backend, &prompt);
        let table = blocks([4, 2, 0, 1, 3]);
        for (position, expected_row) in expected.iter().enumerate() {
            let token = &prompt[position..=position];
            let actual = forward_alone(&mut backend, token, position, &table, 1);
            assert!(actual[0] == *expected_row, "{} at {position}", model.name);
        }
    }
}

#[test]
fn every_number_of_companions_gives_the_logits_of_the_sequence_alone() {
    for model in [TestModel::bundled(), TestModel::fixture("llama_tied_odd_sizes")] {
        let vocab_size = model.config.vocab_size;
        let prompt = tokens(vocab_size, 20, 4);
        let mut backend = model.backend(&backend_options(64));
        let expected = whole(&mut backend, &prompt);
        // One row each: from the kernel for one row through all sizes of the row tiles.
        for n_companions in 0..20_u32 {
            forward_alone(&mut backend, &prompt[..19], 0, &blocks([40, 41]), 0);
            let companions: Vec<Vec<u32>> =
                (0..n_companions).map(|companion| tokens(vocab_size, 1, 100 + companion)).collect();
            let tables: Vec<Vec<BlockId>> = (0..n_companions).map(|block| blocks([block])).collect();
            let mut batch: Vec<SequenceRows<'_>> = companions
                .iter()
                .zip(&tables)
                .map(|(tokens, table)| SequenceRows {
                    tokens,
                    positions: RowPositions::From(0),
                    block_table: table,
                    n_logits: 1,
                })
                .collect();
            let table = blocks([40, 41]);
            let place = n_companions as usize / 2;
            batch.insert(
                place,
                SequenceRows {
                    tokens: &prompt[19..],
                    positions: RowPositions::From(19),
                    block_table: &table,
                    n_logits: 1,
                },
            );
            let mut logits = Logits::default();
            backend.forward(&batch, &mut logits).unwrap();
            assert!(bits(logits.row(place)) == expected[19], "{} beside {n_companions}", model.name);
        }
    }
}

#[test]
fn every_instruction_set_and_thread_count_gives_the_same_logits_of_the_bundled_model() {
    let model = TestModel::bundled();
    let prompt = tokens(model.config.vocab_size, 19, 5);
    for kv_dtype in KV_DTYPES {
        let mut expected = None;
        for isa in Isa::available() {
            // Without vector instructions a pass takes long; one number of threads is enough.
            let most_threads = if isa == Isa::Scalar { 1 } else { 3 };
            for n_threads in 1..=most_threads {
                let mut options = backend_options(3);
                options.isa = isa;
                options.n_threads = n_threads;
                options.kv_dtype = kv_dtype;
                let actual = whole(&mut model.backend(&options), &prompt);
                let expected = expected.get_or_insert_with(|| actual.clone());
                assert!(actual == *expected, "{isa}, {n_threads} threads, {kv_dtype}");
            }
        }
    }
}

#[test]
fn the_kv_dtypes_differ_so_that_comparing_them_means_something() {
    let model = TestModel::fixture("qwen3");
    let prompt = tokens(model.config.vocab_size, 40, 6);
    let logits = KV_DTYPES.map(|kv_dtype| {
        let mut options = backend_options(3);
        options.kv_dtype = kv_dtype;
        whole(&mut model.backend(&options), &prompt)
    });
    assert!(logits[0] != logits[1] && logits[1] != logits[2] && logits[0] != logits[2]);
    // The first token sees only itself; with one weight of one, only the values are rounded.
    assert!(logits[0][39] != logits[1][39]);
}

/// Fills blocks with NaN, then computes another sequence in the same blocks: a row must not touch
/// what it does not see, neither in the rest of its own block nor in a whole block of its table.
#[test]
fn garbage_in_used_blocks_and_in_stale_lanes_does_not_reach_the_logits() {
    const POISON: u32 = 60;
    for name in ["mistral_sliding_window", "qwen3"] {
        let clean = TestModel::fixture(name);
        let poisoned = TestModel::with_poisoned_token(name, POISON);
        for options in all_backend_options(4) {
            let mut backend = poisoned.backend(&options);
            let table = blocks([2, 0, 3, 1]);
            let garbage = forward_alone(&mut backend, &[POISON; 64], 0, &table, 64);
            let is_nan = |&logit: &u32| f32::from_bits(logit).is_nan();
            assert!(garbage.iter().flatten().all(is_nan), "nothing was poisoned");
            let prompt = tokens(POISON as usize, 64, 7);
            let mut expected_options = backend_options(4);
            expected_options.kv_dtype = options.kv_dtype;
            let expected = whole(&mut clean.backend(&expected_options), &prompt);
            let mut actual = Vec::new();
            // The rest of each block is NaN while its first lanes are read.
            for range in [0..5, 5..6, 6..21, 21..22, 22..47, 47..64] {
                let rows = &prompt[range.clone()];
                let n_logits = range.len();
                actual.extend(forward_alone(&mut backend, rows, range.start, &table, n_logits));
            }
            assert!(actual == expected, "{name} {options:?}");
        }
    }
}

#[test]
fn blocks_outside_of_the_sliding_window_do_not_reach_the_logits() {
    const POISON: u32 = 60;
    let clean = TestModel::fixture("mistral_sliding_window");
    let window = clean.config.sliding_windows[0].unwrap();
    // What a row sees through all layers, one window deeper each.
    let reach = clean.config.n_layers * (window - 1);
    let mut backend =
        TestModel::with_poisoned_token("mistral_sliding_window", POISON).backend(&backend_options(6));
    let mut prompt = tokens(POISON as usize, 96, 8);
    let mut expected_backend = clean.backend(&backend_options(6));
    let expected = whole(&mut expected_backend, &prompt);
    prompt[20] = POISON;
    let actual = whole(&mut backend, &prompt);
    assert!(actual[19] == expected[19]);
    assert!(actual[20..=20 + reach].iter().all(|row| f32::from_bits(row[0]).is_nan()));
    // Past the reach other logits are expected than with the original token nowhere in sight, but
    // they are numbers, and those of a sequence that holds any other token there.
    prompt[20] = 7;
    let replaced = whole(&mut expected_backend, &prompt);
    assert!(actual[21 + reach..] == replaced[21 + reach..]);
    assert!(actual[21 + reach..] == expected[21 + reach..]);
}

#[test]
fn a_copied_block_holds_the_keys_and_values_of_the_original() {
    for kv_dtype in KV_DTYPES {
        let model = TestModel::fixture("gpt2");
        let prompt = tokens(model.config.vocab_size, 30, 9);
        let mut options = backend_options(8);
        options.kv_dtype = kv_dtype;
        let mut backend = model.backend(&options);
        let expected = whole(&mut backend, &prompt);
        forward_alone(&mut backend, &prompt[..25], 0, &blocks([2, 3]), 0);
        backend.copy_block(BlockId::new(2), BlockId::new(6)).unwrap();
        backend.copy_block(BlockId::new(3), BlockId::new(5)).unwrap();
        // Other tokens where the copies came from.
        let other = tokens(model.config.vocab_size, 32, 10);
        forward_alone(&mut backend, &other, 0, &blocks([2, 3]), 0);
        let actual = forward_alone(&mut backend, &prompt[25..], 25, &blocks([6, 5]), 5);
        assert!(actual == expected[25..], "{kv_dtype}");
    }
}

#[test]
fn a_refused_pass_writes_nothing() {
    let model = TestModel::fixture("qwen3");
    let vocab_size = model.config.vocab_size as u32;
    let prompt = tokens(model.config.vocab_size, 33, 11);
    let mut backend = model.backend(&backend_options(6));
    let expected = whole(&mut backend, &prompt);
    let table = blocks(0..3);
    let fresh = blocks(3..6);
    forward_alone(&mut backend, &prompt[..32], 0, &table, 0);
    let good = SequenceRows {
        tokens: &[1, 2, 3],
        positions: RowPositions::From(0),
        block_table: &fresh,
        n_logits: 1,
    };
    let (outside, unknown) = (blocks([6]), [vocab_size]);
    let bad = [
        SequenceRows { tokens: &unknown, ..good },
        SequenceRows { positions: (model.config.max_positions - 2).into(), ..good },
        SequenceRows { positions: RowPositions::From(46), ..good },
        SequenceRows { block_table: &outside, ..good },
        // A block that the other sequence of the pass writes.
        good,
    ];
    for rows in bad {
        // The first sequence of the refused pass would overwrite the prompt's blocks.
        let overwriting = SequenceRows { block_table: &table, ..good };
        let first = if rows.block_table == good.block_table
            && rows.positions == good.positions
            && rows.tokens == good.tokens
        {
            good
        } else {
            overwriting
        };
        assert!(backend.forward(&[first, rows], &mut Logits::default()).is_err());
        let actual = forward_alone(&mut backend, &prompt[32..], 32, &table, 1);
        assert!(actual[0] == expected[32]);
    }
}

#[test]
fn keys_and_values_of_eight_bits_are_refused() {
    let model = TestModel::fixture("qwen3");
    let mut options = backend_options(2);
    options.kv_dtype = Dtype::Fp8E4M3;
    let error = model.try_backend(&options).unwrap_err().to_string();
    assert!(error.contains("kv_dtype") && error.contains("f32, f16, bf16"), "{error}");
    assert_eq!(BLOCK_TOKENS, 16);
}
