//! Scores: what a row of an answer is worth. Pure functions.

use super::matches::{LookupOptions, Walk, WorkerMatch};
use super::tiers::TierWeights;
use super::types::{N_TIERS, Tier};

/// A rule that turns what a source has of a prompt into a number; the highest is the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scorer {
    /// The weight of each block from the first on, as long as the source has every one.
    LongestPrefix,
    /// The 1-based place of the highest block that the source has, whatever is before it.
    HighestBlockHit,
    /// The weight of every block that the source has, wherever it is.
    Coverage,
}

/// What a request costs on a worker, apart from what the index knows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostQuery {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Bytes of a block's KV.
    pub block_bytes: u64,
    /// Tokens that the worker has to compute before it gets to this request.
    pub queued_tokens: u64,
}

/// What work takes, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostModel {
    /// To compute one token of a prompt.
    pub prefill_token_s: f64,
    /// To work off one token of the queue.
    pub queued_token_s: f64,
    /// To bring one byte from each tier to the device; 0 for the device itself.
    pub move_byte_s: [f64; N_TIERS],
    /// How much of a match counts if the source is unsure, from 0 to 1.
    pub unsure_credit: f64,
}

impl LookupOptions<'_> {
    /// What a scorer with these weights needs.
    pub fn for_scorer(scorer: Scorer, weights: &TierWeights) -> Self {
        Self { walk: scorer.walk(), only: None, order: weights.order() }
    }
}

impl Scorer {
    /// How far a lookup must look for this score.
    pub fn walk(self) -> Walk {
        match self {
            Self::LongestPrefix => Walk::Prefix,
            Self::HighestBlockHit | Self::Coverage => Walk::All,
        }
    }

    /// The score of a row of a lookup made with
    /// [`LookupOptions::for_scorer`](super::LookupOptions::for_scorer) for the same weights.
    pub fn score(self, row: &WorkerMatch, weights: &TierWeights) -> f64 {
        match self {
            Self::LongestPrefix => weights.sum(|tier| row.prefix_in(tier)),
            Self::HighestBlockHit => f64::from(row.highest_block()),
            Self::Coverage => weights.sum(|tier| row.covered_in(tier)),
        }
    }
}

impl CostModel {
    /// The seconds until a worker has computed the prompt: its queue, what is left of the prompt, and
    /// what must be moved to the device. The lowest is the best; `None` is a worker without a match.
    pub fn cost_s(&self, row: Option<&WorkerMatch>, query: &CostQuery) -> f64 {
        let credit =
            row.map_or(0.0, |row| if row.is_unsure() { self.unsure_credit.clamp(0.0, 1.0) } else { 1.0 });
        let matched = |row: &WorkerMatch| u64::from(row.prefix_blocks()).saturating_mul(query.block_tokens);
        let matched_tokens = row.map_or(0, matched).min(query.prompt_tokens) as f64 * credit;
        let move_s: f64 = row.map_or(0.0, |row| {
            Tier::ALL
                .iter()
                .map(|tier| f64::from(row.prefix_in(*tier)) * self.move_byte_s[tier.as_index()])
                .sum::<f64>()
                * query.block_bytes as f64
        });
        (query.prompt_tokens as f64 - matched_tokens) * self.prefill_token_s
            + query.queued_tokens as f64 * self.queued_token_s
            + move_s * credit
    }
}
