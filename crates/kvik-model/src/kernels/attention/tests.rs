use half::{bf16, f16};
use proptest::prelude::*;

use super::super::pages::KvRows;
use super::super::plan::Span;
use super::*;
use crate::paging::BlockId;

/// Attention of one sequence, all of whose tokens lie in its blocks.
#[derive(Debug, Clone)]
struct Case {
    n_kv_heads: usize,
    queries_per_kv_head: usize,
    head_dim: usize,
    window: Option<usize>,
    n_tokens: usize,
    /// Rows whose attention is computed: the last ones.
    n_rows: usize,
    salt: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    (
        1..3_usize,
        1..6_usize,
        prop::sample::select(vec![2_usize, 6, 10, 16, 24, 32, 40]),
        prop_oneof![Just(None), (1..40_usize).prop_map(Some)],
        1..90_usize,
        1..40_usize,
        any::<u64>(),
    )
        .prop_map(|(n_kv_heads, queries_per_kv_head, head_dim, window, n_tokens, n_rows, salt)| Case {
            n_kv_heads,
            queries_per_kv_head,
            head_dim,
            window,
            n_tokens,
            n_rows: n_rows.min(n_tokens),
            salt,
        })
}

/// Numbers in -2..2 that look random.
fn numbers(n: usize, salt: u64) -> Vec<f32> {
    let mut state = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u32 << 22) as f32 - 2.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

impl Case {
    fn n_query_heads(&self) -> usize {
        self.n_kv_heads * self.queries_per_kv_head
    }

    fn query_width(&self) -> usize {
        padded(self.n_query_heads() * self.head_dim)
    }

    fn kv_width(&self) -> usize {
        padded(self.n_kv_heads * self.head_dim)
    }

    fn stride(&self) -> usize {
        self.query_width() + 2 * self.kv_width()
    }

    /// Rows of queries, keys and values of all tokens.
    fn rows(&self) -> Vec<f32> {
        numbers(self.n_tokens * self.stride(), self.salt)
    }

    /// A block table that is not in order, in a pool with more blocks.
    fn table(&self) -> (Vec<BlockId>, usize) {
        let n_blocks = self.n_tokens.div_ceil(LANES);
        let table = (0..n_blocks as u32).rev().map(|block| BlockId::new(2 * block + 1)).collect();
        (table, 2 * n_blocks + 1)
    }

    /// Writes all tokens and computes the last `n_rows` in passes of `chunk` rows.
    fn attend<E: KvElement>(&self, isa: Isa, n_threads: usize, chunk: usize) -> Vec<f32> {
        let mut pool = ThreadPool::new(n_threads);
        let (table, n_blocks) = self.table();
        let shape = PageShape { n_kv_heads: self.n_kv_heads, head_dim: self.head_dim };
        let mut pages = KvPages::<E>::try_new(2, n_blocks, shape).unwrap();
        let rows = self.rows();
        let stride = self.stride();
        // The whole pool is NaN first: unwritten lanes must not matter.
        let garbage = vec![f32::NAN; LANES * stride];
        let kv_rows = |values| KvRows {
            values,
            stride,
            key_column: self.query_width(),
            value_column: self.query_width() + self.kv_width(),
        };
        for block in 0..n_blocks as u32 {
            let block_table = [BlockId::new(block)];
            let span =
                Span { n_rows: LANES, first_position: 0, block_table: &block_table, is_continued: false };
            let plan = RowPlan::try_new(&[span], n_blocks).unwrap();
            pages.write(&mut pool, 1, &plan, kv_rows(&garbage));
        }
        let whole =
            Span { n_rows: self.n_tokens, first_position: 0, block_table: &table, is_continued: false };
        let plan = RowPlan::try_new(&[whole], n_blocks).unwrap();
        pages.write(&mut pool, 1, &plan, kv_rows(&rows));
        let mut out = Vec::new();
        let mut position = self.n_tokens - self.n_rows;
        while position < self.n_tokens {
            let n_rows = chunk.min(self.n_tokens - position);
            let span = Span { n_rows, first_position: position, block_table: &table, is_continued: false };
            let plan = RowPlan::try_new(&[span], n_blocks).unwrap();
            let shape = AttentionShape { n_query_heads: self.n_query_heads(), window: self.window };
            let mut part = vec![0.0; n_rows * self.query_width()];
            let q = &rows[position * stride..];
            attend(isa, &mut pool, shape, &pages, 1, &plan, q, stride, &mut part);
            out.extend(part);
            position += n_rows;
        }
        out
    }

    /// Softmax attention by its definition, on keys and values as they are stored.
    fn exact<E: KvElement>(&self, widen: fn(E) -> f32) -> Vec<f64> {
        let (rows, stride) = (self.rows(), self.stride());
        let stored = |value: f32| f64::from(widen(E::from_f32(value)));
        let mut out = Vec::new();
        for position in self.n_tokens - self.n_rows..self.n_tokens {
            let mut out_row = vec![0.0; self.query_width()];
            let start = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
            for head in 0..self.n_query_heads() {
                let kv_head = head / self.queries_per_kv_head;
                let query = &rows[position * stride + head * self.head_dim..][..self.head_dim];
                let element = |token: usize, column: usize, dim: usize| {
                    stored(rows[token * stride + column + kv_head * self.head_dim + dim])
                };
                let scores: Vec<f64> = (start..=position)
                    .map(|token| {
                        let products = query
                            .iter()
                            .enumerate()
                            .map(|(dim, &q)| f64::from(q) * element(token, self.query_width(), dim));
                        products.sum::<f64>() / (self.head_dim as f64).sqrt()
                    })
                    .collect();
                let largest = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                let total: f64 = weights.iter().sum();
                for dim in 0..self.head_dim {
                    let column = self.query_width() + self.kv_width();
                    let values = weights
                        .iter()
                        .enumerate()
                        .map(|(idx, weight)| weight * element(start + idx, column, dim));
                    out_row[head * self.head_dim + dim] = values.sum::<f64>() / total;
                }
            }
            out.extend(out_row);
        }
        out
    }

    fn check<E: KvElement>(
        &self,
        widen: fn(E) -> f32,
        n_threads: usize,
        chunk: usize,
    ) -> Result<(), TestCaseError> {
        let expected = self.attend::<E>(Isa::detect(), 1, self.n_rows);
        for (idx, (value, exact)) in expected.iter().zip(self.exact(widen)).enumerate() {
            let error = (f64::from(*value) - exact).abs();
            prop_assert!(error <= 1e-5, "element {} is off by {}", idx, error);
        }
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        for isa in Isa::available() {
            let actual = self.attend::<E>(isa, n_threads, chunk);
            prop_assert_eq!(bits(&actual), bits(&expected), "{}", isa);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn attention_is_that_of_f64_and_the_same_to_the_bit_however_it_is_cut(
        case in cases(),
        chunk in 1..20_usize,
        n_threads in 1..4_usize,
    ) {
        case.check::<f32>(|value| value, n_threads, chunk)?;
        case.check::<f16>(f16::to_f32, n_threads, chunk)?;
        case.check::<bf16>(bf16::to_f32, n_threads, chunk)?;
    }
}

#[test]
fn a_window_of_one_gives_each_token_its_own_value() {
    let case = Case {
        n_kv_heads: 2,
        queries_per_kv_head: 1,
        head_dim: 10,
        window: Some(1),
        n_tokens: 35,
        n_rows: 35,
        salt: 3,
    };
    let out = case.attend::<f32>(Isa::detect(), 1, 35);
    for (row, out) in case.rows().chunks(case.stride()).zip(out.chunks(case.query_width())) {
        let values = &row[case.query_width() + case.kv_width()..][..20];
        assert!(out.iter().zip(values).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn scores_far_apart_neither_overflow_nor_vanish() {
    let shape = PageShape { n_kv_heads: 1, head_dim: 2 };
    let (stride, n_tokens) = (3 * LANES, 20);
    let mut rows = vec![0.0; n_tokens * stride];
    for (token, row) in rows.chunks_mut(stride).enumerate() {
        // Scores from -1e30 to 1e30.
        row[0] = 1e15;
        row[LANES] = (token as f32 - 9.5) * 1e14;
        row[2 * LANES] = token as f32;
    }
    let table = [BlockId::new(0), BlockId::new(1)];
    let span = Span { n_rows: n_tokens, first_position: 0, block_table: &table, is_continued: false };
    let plan = RowPlan::try_new(&[span], 2).unwrap();
    let mut pool = ThreadPool::new(1);
    let mut pages = KvPages::<f32>::try_new(1, 2, shape).unwrap();
    let kv_rows = KvRows { values: &rows, stride, key_column: LANES, value_column: 2 * LANES };
    pages.write(&mut pool, 0, &plan, kv_rows);
    let attention = AttentionShape { n_query_heads: 1, window: None };
    let mut out = vec![0.0; n_tokens * LANES];
    attend(Isa::detect(), &mut pool, attention, &pages, 0, &plan, &rows, stride, &mut out);
    // All weight is on the token with the largest score, which is the last one.
    for (token, row) in out.chunks(LANES).enumerate() {
        assert_eq!(row[0].to_bits(), (token as f32).to_bits());
    }
}
