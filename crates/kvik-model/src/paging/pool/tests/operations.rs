//! Random things that happen to a pool.

use kvik_types::{BlockHash, TokenId};
use proptest::prelude::*;

use super::super::BLOCK_TOKENS;

/// What the tables of an engine do to the pool.
#[derive(Debug, Clone)]
pub(super) enum Operation {
    /// A new sequence with the tokens of this stem takes its known prefix.
    Start {
        stem: usize,
    },
    /// A sequence computes its next block and registers it.
    Grow {
        table: usize,
    },
    /// A sequence takes a block that it does not fill.
    GrowPartly {
        table: usize,
    },
    /// Another choice of a sequence.
    Fork {
        table: usize,
    },
    /// A sequence ends.
    End {
        table: usize,
    },
    Forget,
    /// The memory of the pool is limited to so many pages, and of what is to spare to so many.
    Limit {
        limit_pages: usize,
        spare_pages: usize,
    },
    /// So many blocks are needed.
    Ensure {
        n_blocks: usize,
    },
    /// Others ask for pages.
    GiveBack {
        n_pages: usize,
    },
}

pub(super) fn operations() -> impl Strategy<Value = Vec<Operation>> {
    prop::collection::vec(table_operation(), 1..120)
}

pub(super) fn elastic_operations() -> impl Strategy<Value = Vec<Operation>> {
    let operation = prop_oneof![
        16 => table_operation(),
        2 => (0..6_usize, 0..6_usize)
            .prop_map(|(limit_pages, spare_pages)| Operation::Limit { limit_pages, spare_pages }),
        1 => (0..6_usize).prop_map(|n_blocks| Operation::Ensure { n_blocks }),
        3 => (0..4_usize).prop_map(|n_pages| Operation::GiveBack { n_pages }),
    ];
    prop::collection::vec(operation, 1..200)
}

pub(super) fn table_operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        3 => (0..6_usize).prop_map(|stem| Operation::Start { stem }),
        8 => (0..8_usize).prop_map(|table| Operation::Grow { table }),
        1 => (0..8_usize).prop_map(|table| Operation::GrowPartly { table }),
        1 => (0..8_usize).prop_map(|table| Operation::Fork { table }),
        3 => (0..8_usize).prop_map(|table| Operation::End { table }),
        1 => Just(Operation::Forget),
    ]
}

/// The tokens of block `idx` of a stem. Stems share beginnings, and every stem has its own end.
pub(super) fn block_tokens(stem: usize, idx: usize) -> [TokenId; BLOCK_TOKENS] {
    let n_shared = stem % 3 + 1;
    let branch = if idx < n_shared { 0 } else { stem };
    [(idx * 10 + branch) as TokenId; BLOCK_TOKENS]
}

/// A hash with few values, so that different blocks often collide.
pub(super) fn weak_hash(stem: usize, idx: usize) -> BlockHash {
    let tokens = block_tokens(stem, idx);
    BlockHash::from_u128(u128::from(tokens[0]) % 23)
}
