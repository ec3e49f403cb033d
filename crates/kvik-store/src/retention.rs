//! What a writer says of how long its chunks are worth keeping.

use std::time::Duration;

/// Stands for the end of a time without one, in milliseconds of the store's clock.
pub(crate) const NEVER_MS: u64 = u64::MAX;

/// How long the chunks of a writer are kept, and what leaves before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Retention {
    /// Time after which a chunk is not served any more. Chunks with one stay in the memory of this node: lower tiers and
    /// other nodes could give them out later. Default: none.
    pub time_to_live: Option<Duration>,
    /// Default: normal.
    pub priority: Priority,
}

/// What leaves first where room is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Priority {
    /// Leaves as a copy of what another node has does: before chunks that are hardly worth more to the policy.
    Low,
    /// As the policy says.
    #[default]
    Normal,
}

/// The same at a time of the store's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeptUntil {
    /// When it ends, in milliseconds of the store's clock.
    pub(crate) end_ms: u64,
    pub(crate) is_low: bool,
}

impl Retention {
    pub(crate) fn starting_at(self, now_ms: u64) -> KeptUntil {
        let end_ms = |time: Duration| {
            now_ms.saturating_add(u64::try_from(time.as_millis()).unwrap_or(NEVER_MS)).min(NEVER_MS - 1)
        };
        KeptUntil {
            end_ms: self.time_to_live.map_or(NEVER_MS, end_ms),
            is_low: self.priority == Priority::Low,
        }
    }
}
