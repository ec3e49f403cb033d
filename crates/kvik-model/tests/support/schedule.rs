//! Random schedules of forward passes and what they must give.

use std::cell::RefCell;

use kvik_model::{BLOCK_TOKENS, Backend, BlockId, CpuBackend, CpuBackendOptions, Logits, SequenceRows};
use proptest::prelude::*;

use super::{TestModel, backend_options, runner};

/// A sequence and how its rows are spread over passes.
#[derive(Debug, Clone)]
pub struct SequencePlan {
    /// Tokens after the shared prefix; at least one.
    pub tokens: Vec<u32>,
    /// Rows of each of its passes, over and over until all tokens are computed.
    pub chunks: Vec<usize>,
    /// Passes that go by before its first.
    pub n_waits: usize,
    /// Rows of each pass whose logits are not asked for.
    pub n_unwanted: usize,
}

/// A batch over time.
#[derive(Debug, Clone)]
pub struct Schedule {
    /// Tokens that all sequences start with, whole blocks, computed once and shared.
    pub shared_prefix: Vec<u32>,
    /// The sequences.
    pub sequences: Vec<SequencePlan>,
    /// The order in which blocks are handed out.
    pub block_order: Vec<u32>,
}

/// Logits of one row, as bits.
pub type RowBits = Vec<u32>;

/// Random schedules for a model with `vocab_size` tokens. A sequence has at most
/// `2 * BLOCK_TOKENS + max_tokens` tokens; `n_blocks` must hold `max_sequences` of them.
pub fn schedules(
    vocab_size: usize,
    max_sequences: usize,
    max_tokens: usize,
    n_blocks: usize,
) -> impl Strategy<Value = Schedule> {
    let token = 0..vocab_size as u32;
    // One row at a time is what decoding does; it must be common.
    let chunk = prop_oneof![2 => Just(1_usize), 2 => 1..8_usize, 1 => 1..=max_tokens];
    let sequence = (
        prop::collection::vec(token.clone(), 1..=max_tokens),
        prop::collection::vec(chunk, 1..6),
        0..4_usize,
        prop_oneof![3 => Just(0_usize), 1 => 0..20_usize],
    )
        .prop_map(|(tokens, chunks, n_waits, n_unwanted)| SequencePlan {
            tokens,
            chunks,
            n_waits,
            n_unwanted,
        });
    (
        prop::collection::vec(token, 2 * BLOCK_TOKENS),
        0..=2_usize,
        prop::collection::vec(sequence, 1..=max_sequences),
        Just((0..n_blocks as u32).collect::<Vec<_>>()).prop_shuffle(),
    )
        .prop_map(|(mut shared_prefix, n_shared_blocks, sequences, block_order)| {
            shared_prefix.truncate(n_shared_blocks * BLOCK_TOKENS);
            Schedule { shared_prefix, sequences, block_order }
        })
}

impl Schedule {
    /// Prefix and tokens of each sequence.
    pub fn full_sequences(&self) -> Vec<Vec<u32>> {
        self.sequences
            .iter()
            .map(|sequence| [self.shared_prefix.as_slice(), &sequence.tokens].concat())
            .collect()
    }

    /// Runs the schedule and returns, for each sequence, the logits that were asked for with
    /// their positions.
    pub fn run(&self, backend: &mut dyn Backend) -> Vec<Vec<(usize, RowBits)>> {
        let mut unused = self.block_order.iter().copied().map(BlockId::new);
        let n_shared = self.shared_prefix.len();
        let shared: Vec<BlockId> = unused.by_ref().take(n_shared / BLOCK_TOKENS).collect();
        if 0 < n_shared {
            forward_alone(backend, &self.shared_prefix, 0, &shared, 0);
        }
        let tokens = self.full_sequences();
        let tables: Vec<Vec<BlockId>> = tokens
            .iter()
            .map(|tokens| {
                let n_own = tokens.len().div_ceil(BLOCK_TOKENS) - shared.len();
                shared.iter().copied().chain(unused.by_ref().take(n_own)).collect()
            })
            .collect();
        let mut n_computed = vec![n_shared; tokens.len()];
        let mut results = vec![Vec::new(); tokens.len()];
        for pass in 0.. {
            let mut batch = Vec::new();
            // Rotated, so that a sequence stands at different places of the batch.
            for idx in (0..tokens.len()).map(|idx| (idx + pass) % tokens.len()) {
                let plan = &self.sequences[idx];
                let n_left = tokens[idx].len() - n_computed[idx];
                if 0 < n_left && plan.n_waits <= pass {
                    let n_rows = plan.chunks[pass % plan.chunks.len()].min(n_left);
                    batch.push((idx, n_rows, n_rows.saturating_sub(plan.n_unwanted).max(1)));
                }
            }
            if batch.is_empty() && n_computed.iter().zip(&tokens).all(|(&n, all)| n == all.len()) {
                break;
            }
            if batch.is_empty() {
                continue;
            }
            let rows: Vec<SequenceRows<'_>> = batch
                .iter()
                .map(|&(idx, n_rows, n_logits)| SequenceRows {
                    tokens: &tokens[idx][n_computed[idx]..][..n_rows],
                    positions: n_computed[idx].into(),
                    block_table: &tables[idx],
                    n_logits,
                })
                .collect();
            let mut logits = Logits::default();
            backend.forward(&rows, &mut logits).unwrap();
            let mut row = 0;
            for (idx, n_rows, n_logits) in batch {
                n_computed[idx] += n_rows;
                for position in n_computed[idx] - n_logits..n_computed[idx] {
                    results[idx].push((position, bits(logits.row(row))));
                    row += 1;
                }
            }
            assert_eq!(row, logits.n_rows());
        }
        results
    }

    /// Asserts that `backend` gives each row the logits of its sequence alone, computed by
    /// `reference` in one pass on blocks that lie side by side.
    pub fn check(&self, backend: &mut dyn Backend, reference: &mut dyn Backend) -> Result<(), TestCaseError> {
        let actual = self.run(backend);
        for (tokens, rows) in self.full_sequences().iter().zip(actual) {
            let expected = whole(reference, tokens);
            for (position, row) in rows {
                prop_assert!(
                    row == expected[position],
                    "the logits at position {position} of {} differ",
                    tokens.len()
                );
            }
        }
        Ok(())
    }
}

/// The bits of a row: equality of floats would take -0.0 for 0.0 and no NaN for itself.
pub fn bits(row: &[f32]) -> RowBits {
    row.iter().map(|logit| logit.to_bits()).collect()
}

/// Logits of every row of a sequence that is computed alone, in one pass, on blocks 0, 1, 2, ...
pub fn whole(backend: &mut dyn Backend, tokens: &[u32]) -> Vec<RowBits> {
    let table: Vec<BlockId> = (0..tokens.len().div_ceil(BLOCK_TOKENS) as u32).map(BlockId::new).collect();
    forward_alone(backend, tokens, 0, &table, tokens.len())
}

/// Computes rows of one sequence and returns the last `n_logits` rows of logits.
pub fn forward_alone(
    backend: &mut dyn Backend,
    tokens: &[u32],
    first_position: usize,
    block_table: &[BlockId],
    n_logits: usize,
) -> Vec<RowBits> {
    let mut logits = Logits::default();
    let rows = SequenceRows { tokens, positions: first_position.into(), block_table, n_logits };
    backend.forward(&[rows], &mut logits).unwrap();
    (0..logits.n_rows()).map(|row| bits(logits.row(row))).collect()
}

/// Runs `n_cases` random schedules of at most `max_sequences` sequences, each on a backend that is
/// set up like one of `all_options` and keeps what earlier schedules left in its blocks.
///
/// # Panics
/// If a row has other logits than its sequence alone.
pub fn check_schedules(
    model: &TestModel,
    all_options: &[CpuBackendOptions],
    n_cases: u32,
    max_sequences: usize,
    max_tokens: usize,
) {
    let n_blocks = all_options[0].n_blocks;
    let backends: RefCell<Vec<CpuBackend>> =
        RefCell::new(all_options.iter().map(|options| model.backend(options)).collect());
    let strategy =
        (0..all_options.len(), schedules(model.config.vocab_size, max_sequences, max_tokens, n_blocks));
    let outcome = runner(n_cases).run(&strategy, |(idx, schedule)| {
        let mut options = backend_options(n_blocks);
        options.kv_dtype = all_options[idx].kv_dtype;
        // Never used before: what lies in a used block cannot be in the expected logits.
        let mut reference = model.backend(&options);
        schedule.check(&mut backends.borrow_mut()[idx], &mut reference)
    });
    if let Err(error) = outcome {
        panic!("{}: {error}", model.name);
    }
}
