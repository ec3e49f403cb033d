//! Chunks that stay in memory on request.

use std::sync::Arc;

use super::Store;
use super::core::Core;
use super::publish::{Arrival, Origin, Published};
use super::retrieve::Retrieved;
use crate::chain::Chain;
use crate::residents::ResidentPin;

impl Store {
    /// Brings a chain to memory and keeps it from being evicted until it is unpinned as often as it was
    /// pinned; returns the tokens that are kept.
    ///
    /// What does not arrive in time is not kept. A clear removes pinned chunks too.
    pub fn pin(&self, chain: &Chain) -> usize {
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
        let id = pin.map(ResidentPin::into_id);
        core.pinned.lock().entry(chain.hash(last_idx)).or_default().push(id);
        n_tokens
    }

    /// Takes one pin of a chain away; false where it has none.
    pub fn unpin(&self, chain: &Chain) -> bool {
        let core = self.core();
        let Some(last_idx) = core.n_chunks(chain).checked_sub(1) else { return false };
        let mut pinned = core.pinned.lock();
        let hash = chain.hash(last_idx);
        let Some(pins) = pinned.get_mut(&hash) else { return false };
        let id = pins.pop().flatten();
        if pins.is_empty() {
            pinned.remove(&hash);
        }
        drop(pinned);
        if let Some(id) = id {
            core.ram_residents.lock().unpin(id);
        }
        true
    }

    /// Pins of all chains.
    pub fn n_pins(&self) -> usize {
        self.core().pinned.lock().values().map(Vec::len).sum()
    }
}

impl Core {
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
