//! Replays requests on mock workers in virtual time, to compare ways of placing them.
//!
//! [`run`] takes requests with their arrival times and plays a fleet of equal workers. A worker computes
//! one prompt at a time, in the order of arrival; what its cache has of the prompt it does not compute. Then the
//! request decodes, beside all others. The cache evicts the least recently used block first and of a chain the
//! deepest; blocks of requests under way stay. What it stores and evicts is reported to a real
//! [`HolderIndex`](kvik_index::holders::HolderIndex) some time later. The router is the real
//! [`ring`](kvik_index::ring) and the real [`placement`](kvik_index::placement), fed with what a gateway knows: what the index says, and
//! what it has placed itself. The prompts that it has placed count as held by their workers as long as they are under way (in the
//! index, as a source of their own beside each worker): a request placed now is due only after them.
//!
//! What is left out: decodes do not slow prompts down (a batch of some dozens adds as many tokens to steps of
//! thousands), generated tokens are not cached before they come back as a prompt, and a worker never
//! refuses a request for lack of memory.
//!
//! Everything is a function of the arguments.

mod cache;
mod named;
mod router;
mod run;
mod worker;

pub use named::{NamedAffinity, named_affinity};
pub use router::Policy;
pub use run::{run, saturation};

/// A request as a trace has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplayRequest {
    /// When it comes.
    pub arrival_us: u64,
    /// Tokens of its prompt.
    pub prompt_tokens: u64,
    /// Tokens that are generated for it.
    pub output_tokens: u64,
    /// The blocks of its prompt, the last one perhaps not full; equal ids are equal up to and including the block.
    pub blocks: Vec<u64>,
}

/// What the workers are like, and what the router knows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReplayConfig {
    /// How many workers there are, at least 1; default 8.
    pub n_workers: usize,
    /// Tokens of a block; default 512.
    pub block_tokens: u64,
    /// Blocks that a worker can keep; default 3000.
    pub cache_blocks: usize,
    /// Tokens of a prompt that a worker computes in a second; default 8000.
    pub prefill_tokens_per_s: f64,
    /// What a prompt takes beside its tokens; default 20 ms.
    pub prefill_fixed_us: u64,
    /// What each generated token takes; default 20 ms.
    pub decode_token_us: u64,
    /// How long an event is under way from a worker to the index; default 50 ms.
    pub event_delay_us: u64,
    /// Tokens that the router expects to be generated, since it cannot know; default 256.
    pub expected_output_tokens: u64,
    /// Room above the mean load that the ring gives a worker; default 0.25.
    pub load_factor: f64,
    /// The same for the choice by what workers have; default 1. It weighs load itself, so the bound is there
    /// for hot prefixes only.
    pub kv_load_factor: f64,
    /// Outstanding tokens up to which a worker keeps its named sequences; default
    /// [`NAMED_FLOOR_TOKENS`](kvik_index::placement::NAMED_FLOOR_TOKENS).
    pub named_floor_tokens: u64,
}

/// What a replay came to.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplayOutcome {
    /// Mean time from a request's arrival to its first token.
    pub ttft_mean_s: f64,
    /// What 99 of 100 requests stay below.
    pub ttft_p99_s: f64,
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Those that were not computed.
    pub hit_tokens: u64,
    /// Time that all workers together computed prompts.
    pub prefill_s: f64,
    /// From the first to the last arrival.
    pub arrival_span_s: f64,
    /// Requests that went to each worker.
    pub n_placed: Vec<usize>,
    /// Requests that went to the owner of their name; 0 unless requests are named.
    pub n_on_owner: usize,
    /// The largest load of a worker that a named request went to, as a part of its bound and that request.
    pub max_load_over_bound: f64,
}

impl Default for ReplayConfig {
    fn default() -> Self {
        Self {
            n_workers: 8,
            block_tokens: 512,
            cache_blocks: 3000,
            prefill_tokens_per_s: 8000.0,
            prefill_fixed_us: 20_000,
            decode_token_us: 20_000,
            event_delay_us: 50_000,
            expected_output_tokens: 256,
            load_factor: 0.25,
            kv_load_factor: 1.0,
            named_floor_tokens: kvik_index::placement::NAMED_FLOOR_TOKENS,
        }
    }
}

impl ReplayOutcome {
    /// Tokens that were not computed, of a hundred.
    pub fn hit_percent(&self) -> f64 {
        100.0 * self.hit_tokens as f64 / self.prompt_tokens.max(1) as f64
    }
}
