//! A mock worker: a queue of prompts, and a cache.

use std::collections::VecDeque;

use super::cache::Cache;
use super::{ReplayConfig, ReplayRequest};

/// One worker. Requests are named by their place in the trace.
#[derive(Debug)]
pub(super) struct Worker {
    queue: VecDeque<usize>,
    computing: Option<Computing>,
    cache: Cache,
    pub(super) prefill_us: u64,
    pub(super) hit_tokens: u64,
    pub(super) n_placed: usize,
}

/// The prompt that is computed.
#[derive(Debug, Clone, Copy)]
struct Computing {
    request: usize,
    /// Blocks of it that are held in the cache.
    n_held: usize,
}

/// What the end of a prompt leaves behind.
#[derive(Debug, Default)]
pub(super) struct FirstToken {
    pub(super) request: usize,
    /// Blocks that stay held until the request ends.
    pub(super) n_held: usize,
    pub(super) stored: Vec<u64>,
    pub(super) evicted: Vec<u64>,
}

impl Worker {
    pub(super) fn new(cache_blocks: usize) -> Self {
        Self {
            queue: VecDeque::new(),
            computing: None,
            cache: Cache::new(cache_blocks),
            prefill_us: 0,
            hit_tokens: 0,
            n_placed: 0,
        }
    }

    pub(super) fn enqueue(&mut self, request: usize) {
        self.queue.push_back(request);
        self.n_placed += 1;
    }

    /// Begins with the next prompt if there is one and none is computed; gives the time that it takes.
    pub(super) fn start_next(&mut self, requests: &[ReplayRequest], config: &ReplayConfig) -> Option<u64> {
        if self.computing.is_some() {
            return None;
        }
        let number = self.queue.pop_front()?;
        let request = &requests[number];
        let n_held = self.cache.hold_prefix(full_blocks(request, config));
        // The last token is always computed: its logits are the answer's beginning.
        let hit_tokens = (n_held as u64 * config.block_tokens).min(request.prompt_tokens.saturating_sub(1));
        let left_tokens = request.prompt_tokens - hit_tokens;
        let duration_us =
            config.prefill_fixed_us + (left_tokens as f64 / config.prefill_tokens_per_s * 1e6) as u64;
        self.computing = Some(Computing { request: number, n_held });
        self.hit_tokens += hit_tokens;
        self.prefill_us += duration_us;
        Some(duration_us)
    }

    /// Ends the prompt that was computed: its full blocks are in the cache now.
    pub(super) fn finish_prompt(
        &mut self,
        requests: &[ReplayRequest],
        config: &ReplayConfig,
    ) -> Option<FirstToken> {
        let Computing { request, n_held } = self.computing.take()?;
        let mut first_token = FirstToken { request, ..FirstToken::default() };
        let blocks = full_blocks(&requests[request], config);
        first_token.n_held =
            self.cache.store_rest(blocks, n_held, &mut first_token.stored, &mut first_token.evicted);
        Some(first_token)
    }

    /// Ends a request.
    pub(super) fn finish(&mut self, request: &ReplayRequest, n_held: usize) {
        self.cache.release(&request.blocks[..n_held]);
    }
}

/// The blocks that can be found again.
pub(super) fn full_blocks<'a>(request: &'a ReplayRequest, config: &ReplayConfig) -> &'a [u64] {
    let n_full = (request.prompt_tokens / config.block_tokens.max(1)) as usize;
    &request.blocks[..n_full.min(request.blocks.len())]
}
