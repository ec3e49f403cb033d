//! Chunks that stay in memory on request.

use std::sync::Arc;
use std::time::Duration;

use super::Store;
use super::core::Core;
use super::publish::{Arrival, Origin, Published};
use super::retrieve::Retrieved;
use crate::chain::Chain;
use crate::residents::ResidentPin;
use crate::retention::NEVER_MS;

impl Store {
    /// Brings a chain to memory and keeps it from being evicted until it is unpinned as often as it was
    /// pinned; returns the tokens that are kept.
    ///
    /// What does not arrive in time is not kept. A clear removes pinned chunks too.
    pub fn pin(&self, chain: &Chain) -> usize {
        self.pin_until(chain, NEVER_MS)
    }

    /// As [`pin`](Self::pin), for some time at most: after that the chain may be evicted when room is needed.
    pub fn pin_for(&self, chain: &Chain, time: Duration) -> usize {
        let n_ms = u64::try_from(time.as_millis()).unwrap_or(NEVER_MS);
        self.pin_until(chain, self.core().now_ms().saturating_add(n_ms))
    }

    fn pin_until(&self, chain: &Chain, end_ms: u64) -> usize {
        let core = self.core();
        let Some(last_idx) = core.n_chunks(chain).checked_sub(1) else { return 0 };
        let generation = chain.namespace().generation();
        let retrieved = core.bring(chain, None);
        let n_chunks = core.settle(chain, generation, &retrieved);
        let pin = core.pin_deepest(chain, n_chunks);
        let n_tokens = match &pin {
            Some(_) => chain.tokens_between(0..n_chunks),
            None => 0,
        };
        // A chain of which nothing could be kept is remembered too, so that every pin has its unpin.
        let block = pin.map(ResidentPin::into_id);
        core.pins.add(chain.hash(last_idx), block, end_ms);
        n_tokens
    }

    /// Takes one pin of a chain away, one without an end before one with; false where it has none.
    pub fn unpin(&self, chain: &Chain) -> bool {
        let core = self.core();
        core.end_pins();
        let Some(last_idx) = core.n_chunks(chain).checked_sub(1) else { return false };
        let Some(pin) = core.pins.take(chain.hash(last_idx)) else { return false };
        if let Some(id) = pin.block {
            core.ram_residents.lock().unpin(id);
        }
        true
    }

    /// Pins of all chains.
    pub fn n_pins(&self) -> usize {
        self.core().end_pins();
        self.core().pins.n_pins()
    }
}

impl Core {
    /// Ends the pins whose time is over. Called before room is made, so a pin that has ended keeps nothing; the caller holds no
    /// lock of residents.
    pub(crate) fn end_pins(&self) {
        let blocks = self.pins.take_ended(self.now_ms());
        if blocks.is_empty() {
            return;
        }
        let mut residents = self.ram_residents.lock();
        for id in blocks {
            residents.unpin(id);
        }
    }

    /// Makes retrieved chunks, which start with the chain's first, resident in memory; returns how many of
    /// them, from the first on, are.
    pub(crate) fn settle(self: &Arc<Self>, chain: &Chain, generation: u64, retrieved: &Retrieved) -> usize {
        let is_settled = |chunk_idx: usize| {
            (0..chain.n_ranks()).all(|rank| {
                let chunk = &retrieved.chunks()[chunk_idx];
                let Some(lease) = chunk.lease(rank) else { return false };
                let arrival = Arrival { lease: lease.clone(), origin: Origin::Tier(chunk.tier()) };
                let published = self.publish(chain, chunk_idx, rank, generation, arrival);
                matches!(published, Published::Stored(_) | Published::Present)
            })
        };
        (0..retrieved.chunks().len()).take_while(|chunk_idx| is_settled(*chunk_idx)).count()
    }
}
