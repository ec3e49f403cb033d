//! Conversations with names: how many of their turns stay with the owner of the name.

use kvik_index::holders::IndexError;

use super::{Policy, ReplayConfig, ReplayRequest, run};
use crate::sim::synthetic::Random;

/// Conversations, and turns of each.
const N_CONVERSATIONS: u64 = 1000;
const N_TURNS: u64 = 8;
/// System prompts that conversations share.
const N_SYSTEM_PROMPTS: u64 = 8;
/// Mean time from the end of an answer to the next turn.
const THINK_S: f64 = 6.0;
/// From the first start of a conversation to the last, where the costs of the turns are found out.
const SLOW_START_S: f64 = 4000.0;
/// Tokens behind the last full block of a prompt.
const TAIL_TOKENS: u64 = 100;

/// What became of named conversations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NamedAffinity {
    /// Turns of all conversations.
    pub n_turns: usize,
    /// Part of the time that workers compute prompts while about as many conversations end as start.
    pub load: f64,
    /// Part of the turns that went to the owner of the conversation's name.
    pub owner_share: f64,
    /// The largest load of a worker that a turn went to, as a part of its bound and that turn.
    pub max_load_over_bound: f64,
}

/// Replays 1000 conversations of 8 turns that start at such a rate that turns are a load of `load`, a part of what the
/// workers can compute.
///
/// # Errors
/// If there are more workers than an index takes.
pub fn named_affinity(load: f64, config: &ReplayConfig) -> Result<NamedAffinity, IndexError> {
    // What the turns take hardly depends on their rate, as long as they stay with their owners.
    let slow = run(&conversations(SLOW_START_S, config), Policy::Named, 1.0, config)?;
    let start_s = slow.prefill_s / (load * config.n_workers as f64);
    let requests = conversations(start_s, config);
    let outcome = run(&requests, Policy::Named, 1.0, config)?;
    // A conversation takes about 75 s. By half of the time in which they start, as many end as start.
    let steady_s = start_s / 2.0;
    let steady_us = (steady_s * 1e6) as u64..(start_s * 1e6) as u64;
    let n_steady = requests.iter().filter(|request| steady_us.contains(&request.arrival_us)).count();
    let turn_s = outcome.prefill_s / requests.len() as f64;
    Ok(NamedAffinity {
        n_turns: requests.len(),
        load: n_steady as f64 * turn_s / (steady_s * config.n_workers as f64),
        owner_share: outcome.n_on_owner as f64 / requests.len() as f64,
        max_load_over_bound: outcome.max_load_over_bound,
    })
}

/// Conversations that start within a time. Each turn's prompt is the last one, one to three blocks longer, and comes
/// some time after the last answer's end.
fn conversations(start_s: f64, config: &ReplayConfig) -> Vec<ReplayRequest> {
    let mut random = Random(1);
    let mut requests = Vec::new();
    for conversation in 0..N_CONVERSATIONS {
        let mut arrival_s = start_s * random.unit();
        let mut blocks = vec![conversation % N_SYSTEM_PROMPTS];
        for turn in 0..N_TURNS {
            let n_new = 1 + random.below(3);
            blocks.extend((0..n_new).map(|number| (conversation + 1) << 32 | turn << 8 | number));
            let output_tokens = 50 + random.below(350);
            // The tail is of this turn alone.
            let tail = 1 << 63 | conversation << 32 | turn;
            requests.push(ReplayRequest {
                arrival_us: (arrival_s * 1e6) as u64,
                prompt_tokens: blocks.len() as u64 * config.block_tokens + TAIL_TOKENS,
                output_tokens,
                blocks: blocks.iter().copied().chain([tail]).collect(),
            });
            let answer_s = (output_tokens * config.decode_token_us) as f64 / 1e6;
            arrival_s += answer_s + random.exponential(THINK_S);
        }
    }
    requests.sort_by_key(|request| request.arrival_us);
    requests
}
