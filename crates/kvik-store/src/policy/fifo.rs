//! First in, first out.

use super::Request;
use super::ranked::{RankedPolicy, Ranking};

/// Evicts the leaf that was inserted first, however often it was used.
pub type FifoPolicy = RankedPolicy<Arrival>;

/// The order of [`FifoPolicy`].
#[derive(Debug, Default)]
pub struct Arrival {
    n_inserted: u64,
}

impl Ranking for Arrival {
    type Key = u64;

    fn used(&mut self, _request: &Request<'_>, _index: usize, _old: u64) -> Option<u64> {
        None
    }

    fn inserted(&mut self, _request: &Request<'_>, _index: usize) -> u64 {
        self.n_inserted += 1;
        self.n_inserted
    }
}
