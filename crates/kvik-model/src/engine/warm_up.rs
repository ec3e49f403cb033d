//! The first passes of an engine, before it serves.

use std::time::{Duration, Instant};

use kvik_types::TokenId;

use super::{Engine, EngineStats, GenerateRequest};
use crate::BLOCK_TOKENS;
use crate::error::Result;
use crate::sampling::SamplingParams;

/// Tokens of the first prompt: enough that a pass costs more than what comes with every pass.
const FIRST_TOKENS: usize = 64;
/// How much longer each prompt is than the one before.
const GROWTH: usize = 4;

/// What a pass of the engine took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimedPass {
    /// Tokens that were computed.
    pub n_tokens: usize,
    /// Tokens that these looked at, themselves included.
    pub n_attended: u64,
    /// Seconds from its begin to its end.
    pub seconds: f64,
}

impl Engine {
    /// Computes prompts of growing length for about `time`, and returns what their passes took.
    ///
    /// The first request then finds a device whose programs are loaded. The first pass pays for that: it is not returned, and
    /// its time does not count. Only memory that the engine has already is used; an engine that would have to take memory from
    /// others, or has room for less than a prompt, does nothing. No block, count or request number is left behind.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn warm_up(&mut self, time: Duration) -> Result<Vec<TimedPass>> {
        let n_present_tokens = self.pool.stats().n_blocks * BLOCK_TOKENS;
        // One more token is chosen behind the prompt.
        let max_tokens = self.max_sequence_tokens().min(n_present_tokens).saturating_sub(1);
        let limit = max_tokens.min(self.options.max_batched_tokens);
        if !self.is_idle() || limit < FIRST_TOKENS {
            return Ok(Vec::new());
        }
        let (stats, n_submitted) = (self.stats, self.n_submitted);
        let passes = self.timed_passes(limit, time);
        self.forget_prefixes();
        (self.stats, self.n_submitted) = (stats, n_submitted);
        passes
    }

    fn timed_passes(&mut self, limit: usize, time: Duration) -> Result<Vec<TimedPass>> {
        self.timed_pass(FIRST_TOKENS)?;
        let begin = Instant::now();
        let mut passes = Vec::new();
        let mut n_tokens = FIRST_TOKENS;
        loop {
            let pass = self.timed_pass(n_tokens)?;
            passes.push(pass);
            let next = (n_tokens * GROWTH).min(limit);
            let next_s = pass.seconds * next as f64 / n_tokens as f64;
            if next == n_tokens || time.as_secs_f64() < begin.elapsed().as_secs_f64() + next_s {
                return Ok(passes);
            }
            n_tokens = next;
        }
    }

    fn timed_pass(&mut self, n_tokens: usize) -> Result<TimedPass> {
        // Not the blocks of the prompt before it.
        self.forget_prefixes();
        let vocab_size = self.config().vocab_size.max(1);
        let prompt = (0..n_tokens).map(|place| (place % vocab_size) as TokenId).collect();
        let before: EngineStats = self.stats;
        let begin = Instant::now();
        self.submit(GenerateRequest { prompt, sampling: SamplingParams::greedy(1) })?;
        self.run_until_idle()?;
        Ok(TimedPass {
            n_tokens: (self.stats.n_computed_tokens - before.n_computed_tokens) as usize,
            n_attended: self.stats.n_attended_tokens - before.n_attended_tokens,
            seconds: begin.elapsed().as_secs_f64(),
        })
    }
}
