//! The order of tokens by their logits.

use std::cmp::Ordering;

use kvik_types::TokenId;

/// The order of tokens by rank: larger logit first, then smaller id.
pub(super) fn rank_before(logits: &[f32], a: TokenId, b: TokenId) -> Ordering {
    logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b))
}
