//! Stretches of the arena.

use std::ops::Range;

/// The unit in which the arena is divided: what direct I/O and every processor's smallest page ask for.
pub(crate) const UNIT_BYTES: usize = 4096;

/// Neighboring units of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Run {
    /// The first unit.
    pub(crate) start: u32,
    /// How many there are.
    pub(crate) n_units: u32,
}

impl Run {
    pub(crate) fn new(start: u32, n_units: u32) -> Self {
        Self { start, n_units }
    }

    /// The run between two units, the second one excluded.
    pub(crate) fn between(start: u32, end: u32) -> Self {
        Self { start, n_units: end.saturating_sub(start) }
    }

    /// The unit after the last.
    pub(crate) fn end(self) -> u32 {
        self.start + self.n_units
    }

    pub(crate) fn n_bytes(self) -> usize {
        self.n_units as usize * UNIT_BYTES
    }

    /// The run's bytes, counted from the start of the arena.
    pub(crate) fn byte_range(self) -> Range<usize> {
        let start = self.start as usize * UNIT_BYTES;
        start..start + self.n_bytes()
    }

    /// What both have; of no units where they have nothing.
    pub(crate) fn intersection(self, other: Self) -> Self {
        Self::between(self.start.max(other.start), self.end().min(other.end()))
    }
}

/// Units that `n_bytes` take: at least one, so that also an empty chunk has a place.
///
/// `None` where no arena can have so many.
pub(crate) fn units_for(n_bytes: usize) -> Option<u32> {
    u32::try_from(n_bytes.div_ceil(UNIT_BYTES).max(1)).ok()
}
