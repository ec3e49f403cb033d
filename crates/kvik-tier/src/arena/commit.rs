//! Which parts of the reservation have memory behind them.

use std::sync::atomic::{AtomicU64, Ordering};

use super::run::{Run, UNIT_BYTES};

/// Units that get their memory together: a huge page.
pub(super) const GRANULE_UNITS: u32 = (2 << 20) / UNIT_BYTES as u32;

/// One bit for every granule of the arena: whether the kernel has given its memory.
///
/// Memory comes when a granule is first handed out and stays until the arena is gone.
#[derive(Debug)]
pub(super) struct Committed {
    n_units: u32,
    granules: Box<[AtomicU64]>,
}

impl Committed {
    /// A book of `n_units` that have no memory yet.
    pub(super) fn new(n_units: u32) -> Self {
        let n_words = n_units.div_ceil(GRANULE_UNITS).div_ceil(64);
        Self { n_units, granules: (0..n_words).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Makes sure that all of `run` has memory: calls `populate` for each part that may have none.
    ///
    /// Two callers may populate the same granule at a time; `populate` must not mind. Returns its error as
    /// soon as it fails.
    pub(super) fn ensure<E>(
        &self,
        run: Run,
        mut populate: impl FnMut(Run) -> Result<(), E>,
    ) -> Result<(), E> {
        let granules = run.start / GRANULE_UNITS..run.end().div_ceil(GRANULE_UNITS);
        let mut granule = granules.start;
        while granule < granules.end {
            if self.is_committed(granule) {
                granule += 1;
                continue;
            }
            let first = granule;
            while granule < granules.end && !self.is_committed(granule) {
                granule += 1;
            }
            let end_unit = (granule * GRANULE_UNITS).min(self.n_units);
            populate(Run::between(first * GRANULE_UNITS, end_unit))?;
            for done in first..granule {
                self.word(done).fetch_or(bit(done), Ordering::Release);
            }
        }
        Ok(())
    }

    /// Bytes that have memory.
    pub(super) fn n_bytes(&self) -> u64 {
        let n_granules: u64 =
            self.granules.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum();
        (n_granules * u64::from(GRANULE_UNITS)).min(u64::from(self.n_units)) * UNIT_BYTES as u64
    }

    /// A thread that sees the bit also sees the pages: the kernel has put them there before it was set, and
    /// the pairing of release and acquire orders the two threads.
    fn is_committed(&self, granule: u32) -> bool {
        self.word(granule).load(Ordering::Acquire) & bit(granule) != 0
    }

    fn word(&self, granule: u32) -> &AtomicU64 {
        &self.granules[granule as usize / 64]
    }
}

fn bit(granule: u32) -> u64 {
    1 << (granule % 64)
}
