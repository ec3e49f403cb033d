//! The engine's state as others see it.

use kvik_model::{EngineStats, PoolStats};

/// The engine's state between two steps.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Snapshot {
    pub(crate) n_running: usize,
    pub(crate) n_waiting: usize,
    pub(crate) n_residents: usize,
    /// Blocks that only residents hold.
    pub(crate) n_resident_blocks: usize,
    pub(crate) outstanding_tokens: usize,
    pub(crate) pool: PoolStats,
    pub(crate) stats: EngineStats,
    /// Token rows computed in a second of computing; 0 before the first.
    pub(crate) tokens_per_second: f64,
}

impl Snapshot {
    /// Share of the blocks that there could be which running sequences hold, 0 to 1; those of residents
    /// are for the taking.
    pub(crate) fn kv_usage(&self) -> f64 {
        let n_held = self.pool.n_blocks.saturating_sub(self.pool.n_free + self.n_resident_blocks);
        (n_held as f64 / self.pool.limit_blocks.max(1) as f64).min(1.0)
    }

    /// Seconds, 1 to 60, until about half of what is outstanding is done.
    pub(crate) fn retry_after(&self) -> u64 {
        if self.tokens_per_second <= 0.0 {
            return 1;
        }
        let seconds = self.outstanding_tokens as f64 / 2.0 / self.tokens_per_second;
        (seconds.ceil() as u64).clamp(1, 60)
    }
}
