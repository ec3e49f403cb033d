//! What a worker's part of a prompt is worth.

use std::collections::BTreeMap;
use std::str::FromStr;

use crate::backend::Row;
use crate::book::Match;
use crate::error::IndexerError;
use kvik_index::holders::{CostModel, N_TIERS, Tier, TierWeights, Walk};

/// A rule that turns what a worker has of a prompt into a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ScorerKind {
    /// The weight of each block from the first on, as long as the worker has every one.
    #[default]
    LongestPrefix,
    /// The 1-based place of the highest block that the worker has, whatever is before it.
    HighestBlockHit,
    /// The weight of every block that the worker has, wherever it is.
    Coverage,
    /// Seconds until the worker has computed the prompt: its queue, what is left of the prompt, what must be
    /// moved to the device. The lowest is the best.
    Cost,
}

/// What scores are computed with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scoring {
    /// What a block is worth in each tier.
    pub weights: TierWeights,
    /// What work takes.
    pub costs: CostModel,
    /// Bytes of KV of one token, for what must be moved.
    pub token_bytes: u64,
}

/// What a prompt is worth to one worker.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct WorkerScore {
    /// By the scorer that was asked for.
    pub score: f64,
    /// Tokens from the first on that it has in some tier.
    pub matched_tokens: u64,
    /// Tokens from the first on by the fastest tier that has them.
    pub matched_in: [u64; N_TIERS],
    /// What it is worth by the scorer, in tokens of prefill that it saves.
    pub saved_tokens: f64,
    /// Whether events of it are missing.
    pub is_unsure: bool,
}

impl ScorerKind {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::LongestPrefix => "longest_prefix",
            Self::HighestBlockHit => "highest_block_hit",
            Self::Coverage => "coverage",
            Self::Cost => "cost",
        }
    }

    /// How far a lookup must look for this score.
    pub fn walk(self) -> Walk {
        match self {
            Self::LongestPrefix | Self::Cost => Walk::Prefix,
            Self::HighestBlockHit | Self::Coverage => Walk::All,
        }
    }

    /// Whether the first of two scores is better.
    pub fn is_better(self, one: f64, other: f64) -> bool {
        match self {
            Self::Cost => one < other,
            Self::LongestPrefix | Self::HighestBlockHit | Self::Coverage => one > other,
        }
    }

    fn score(self, row: &Row, block_tokens: usize, scoring: &Scoring, query: &Query<'_>) -> f64 {
        match self {
            Self::LongestPrefix => weigh(&row.prefix_in, &scoring.weights),
            Self::HighestBlockHit => f64::from(row.highest_block),
            Self::Coverage => weigh(&row.covered_in, &scoring.weights),
            Self::Cost => {
                let matched = tokens_in(row, block_tokens, query.prompt_tokens);
                cost_s(&matched, row.is_unsure, &row.source.worker, scoring, query)
            }
        }
    }
}

/// What a row is worth by a scorer in tokens of prefill that the worker saves, less where events of it are missing.
fn saved_tokens(
    scorer: ScorerKind,
    row: &Row,
    block_tokens: usize,
    scoring: &Scoring,
    query: &Query<'_>,
) -> f64 {
    let Scoring { weights, costs, .. } = scoring;
    let matched_in = tokens_in(row, block_tokens, query.prompt_tokens);
    let credit = if row.is_unsure { costs.unsure_credit.clamp(0.0, 1.0) } else { 1.0 };
    let saved = match scorer {
        ScorerKind::LongestPrefix => {
            let weigh = |tier: &Tier| weights.weight(*tier) * matched_in[tier.as_index()] as f64;
            credit * Tier::ALL.iter().map(weigh).sum::<f64>()
        }
        ScorerKind::HighestBlockHit => credit * f64::from(row.highest_block) * block_tokens as f64,
        ScorerKind::Coverage => credit * weigh(&row.covered_in, weights) * block_tokens as f64,
        ScorerKind::Cost => {
            let worker = &row.source.worker;
            let without = cost_s(&[0; N_TIERS], false, worker, scoring, query);
            (without - cost_s(&matched_in, row.is_unsure, worker, scoring, query)) / costs.prefill_token_s
        }
    };
    saved.clamp(0.0, query.prompt_tokens as f64)
}

impl FromStr for ScorerKind {
    type Err = IndexerError;

    fn from_str(name: &str) -> Result<Self, IndexerError> {
        Ok(match name {
            "longest_prefix" | "LongestPrefix" | "LongestPrefixMatch" => Self::LongestPrefix,
            "highest_block_hit" | "HighestBlockHit" => Self::HighestBlockHit,
            "coverage" | "CoverageBased" | "CoverageBasedMatching" => Self::Coverage,
            "cost" => Self::Cost,
            _ => {
                let allowed = "longest_prefix, highest_block_hit, coverage, cost";
                return Err(IndexerError::invalid("scorer", name, allowed));
            }
        })
    }
}

/// What is scored.
#[derive(Clone, Copy)]
pub struct Query<'a> {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens that a worker has to compute before it gets to this prompt.
    pub queued_tokens: &'a (dyn Fn(&str) -> u64 + Sync),
}

impl std::fmt::Debug for Query<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Query").field("prompt_tokens", &self.prompt_tokens).finish_non_exhaustive()
    }
}

/// Scores by worker: the best of its ranks and of the books that know it.
pub fn score_workers(
    matches: &[Match],
    scorer: ScorerKind,
    scoring: &Scoring,
    query: &Query<'_>,
) -> BTreeMap<String, WorkerScore> {
    let mut workers: BTreeMap<String, WorkerScore> = BTreeMap::new();
    for Match { row, block_tokens } in matches {
        let matched_in = tokens_in(row, *block_tokens, query.prompt_tokens);
        let found = WorkerScore {
            score: scorer.score(row, *block_tokens, scoring, query),
            matched_tokens: matched_in.iter().sum(),
            matched_in,
            saved_tokens: saved_tokens(scorer, row, *block_tokens, scoring, query),
            is_unsure: row.is_unsure,
        };
        let place = workers.entry(row.source.worker.to_string());
        place
            .and_modify(|best| {
                // The tokens and the score may be best under different names of the same blocks.
                if found.matched_tokens > best.matched_tokens {
                    (best.matched_tokens, best.matched_in) = (found.matched_tokens, found.matched_in);
                    best.is_unsure = found.is_unsure;
                }
                best.saved_tokens = best.saved_tokens.max(found.saved_tokens);
                if scorer.is_better(found.score, best.score) {
                    best.score = found.score;
                }
            })
            .or_insert(found);
    }
    workers
}

/// The score of a worker that has nothing of a prompt.
pub fn score_of_nothing(worker: &str, scorer: ScorerKind, scoring: &Scoring, query: &Query<'_>) -> f64 {
    match scorer {
        ScorerKind::Cost => cost_s(&[0; N_TIERS], false, worker, scoring, query),
        ScorerKind::LongestPrefix | ScorerKind::HighestBlockHit | ScorerKind::Coverage => 0.0,
    }
}

fn weigh(n_blocks: &[u32; N_TIERS], weights: &TierWeights) -> f64 {
    Tier::ALL.iter().map(|tier| weights.weight(*tier) * f64::from(n_blocks[tier.as_index()])).sum()
}

fn tokens_in(row: &Row, block_tokens: usize, prompt_tokens: usize) -> [u64; N_TIERS] {
    let mut left = prompt_tokens as u64;
    let mut tokens = [0; N_TIERS];
    for (tokens, n_blocks) in tokens.iter_mut().zip(row.prefix_in) {
        *tokens = (u64::from(n_blocks) * block_tokens as u64).min(left);
        left -= *tokens;
    }
    tokens
}

fn cost_s(
    matched_in: &[u64; N_TIERS],
    is_unsure: bool,
    worker: &str,
    scoring: &Scoring,
    query: &Query<'_>,
) -> f64 {
    let Scoring { costs, token_bytes, .. } = scoring;
    let credit = if is_unsure { costs.unsure_credit.clamp(0.0, 1.0) } else { 1.0 };
    let matched_tokens = matched_in.iter().sum::<u64>() as f64 * credit;
    let move_s: f64 = matched_in
        .iter()
        .zip(costs.move_byte_s)
        .map(|(n_tokens, byte_s)| *n_tokens as f64 * *token_bytes as f64 * byte_s)
        .sum();
    (query.prompt_tokens as f64 - matched_tokens) * costs.prefill_token_s
        + (query.queued_tokens)(worker) as f64 * costs.queued_token_s
        + move_s * credit
}
