//! The order of tokens by their logits.

use std::cmp::Ordering;

use kvik_types::TokenId;

/// Logits in their order as numbers: those of two logits compare as `total_cmp` says.
pub(super) fn order_of(logit: f32) -> u32 {
    let bits = logit.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// The order of tokens by rank: larger logit first, then smaller id.
pub(super) fn rank_before(logits: &[f32], a: TokenId, b: TokenId) -> Ordering {
    logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b))
}
