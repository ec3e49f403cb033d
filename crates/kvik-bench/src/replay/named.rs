//! Conversations with names: how many of their turns stay with the owner of the name.

use kvik_index::holders::IndexError;

use super::{Policy, ReplayConfig, ReplayRequest, run};
use crate::sim::synthetic::Random;

/// Conversations, and turns of each.
const N_CONVERSATIONS: u64 = 1000;
const N_TURNS: u64 = 8;
/// System prompts that conversations share.
const N_SYSTEM_PROMPTS: u64 = 8;
/// Mean time between two turns of a conversation, and the time within which all begin, at speed 1.
const THINK_S: f64 = 30.0;
const START_S: f64 = 4000.0;
/// Tokens behind the last full block of a prompt.
const TAIL_TOKENS: u64 = 100;

/// What became of named conversations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NamedAffinity {
    /// Turns of all conversations.
    pub n_turns: usize,
    /// Part of the time that workers computed prompts.
    pub load: f64,
    /// Part of the turns that went to the owner of the conversation's name.
    pub owner_share: f64,
    /// The largest load of a worker that a turn went to, as a part of its bound and that turn.
    pub max_load_over_bound: f64,
}

/// Replays 1000 conversations of 8 turns at a load, a part of what the workers can compute.
///
/// # Errors
/// If there are more workers than an index takes.
pub fn named_affinity(load: f64, config: &ReplayConfig) -> Result<NamedAffinity, IndexError> {
    let requests = conversations(config.block_tokens);
    let busy = |prefill_s: f64, span_s: f64| prefill_s / (span_s * config.n_workers as f64);
    // What the turns take hardly depends on the speed, as long as they stay with their owners.
    let slow = run(&requests, Policy::Named, 1.0, config)?;
    let speed = load / busy(slow.prefill_s, slow.arrival_span_s);
    let outcome = run(&requests, Policy::Named, speed, config)?;
    Ok(NamedAffinity {
        n_turns: requests.len(),
        load: busy(outcome.prefill_s, outcome.arrival_span_s),
        owner_share: outcome.n_on_owner as f64 / requests.len() as f64,
        max_load_over_bound: outcome.max_load_over_bound,
    })
}

/// Each turn's prompt is the last one, one to three blocks longer.
fn conversations(block_tokens: u64) -> Vec<ReplayRequest> {
    let mut random = Random(1);
    let mut requests = Vec::new();
    for conversation in 0..N_CONVERSATIONS {
        let mut arrival_s = START_S * random.unit();
        let mut blocks = vec![conversation % N_SYSTEM_PROMPTS];
        for turn in 0..N_TURNS {
            let n_new = 1 + random.below(3);
            blocks.extend((0..n_new).map(|number| (conversation + 1) << 32 | turn << 8 | number));
            // The tail is of this turn alone.
            let tail = 1 << 63 | conversation << 32 | turn;
            requests.push(ReplayRequest {
                arrival_us: (arrival_s * 1e6) as u64,
                prompt_tokens: blocks.len() as u64 * block_tokens + TAIL_TOKENS,
                output_tokens: 50 + random.below(350),
                blocks: blocks.iter().copied().chain([tail]).collect(),
            });
            arrival_s += random.exponential(THINK_S);
        }
    }
    requests.sort_by_key(|request| request.arrival_us);
    requests
}
