//! What the tiers have, for observers that keep a copy of it.

use std::sync::{Arc, Weak};

use kvik_tier::TierKind;
use kvik_types::BlockHash;

use super::Store;
use super::core::Core;
use crate::observer::{ChunkObserver, Observed, TiersOfKind};
use crate::space::Space;

/// Keeps an observer informed until it is dropped.
#[derive(Debug)]
pub struct Observation {
    /// Weak: an observer does not keep a store open.
    core: Weak<Core>,
    observed: Arc<Observed>,
}

impl Drop for Observation {
    fn drop(&mut self) {
        if let Some(core) = self.core.upgrade() {
            core.directory.stop_observing(&self.observed);
        }
    }
}

impl Store {
    /// Tells `observer` which chunks of a space the tiers of each kind have, beginning with those that they have, until the
    /// observation is dropped.
    ///
    /// Of a remote tier, which others write too, only that is known which this store put or found there, and
    /// only as long as a local tier has the chunk too.
    #[must_use = "dropping it ends the observation"]
    pub fn observe(&self, space: &Space, observer: Arc<dyn ChunkObserver>) -> Observation {
        let core = self.core();
        let observed = Observed {
            namespace_idx: space.namespace_idx(),
            all_ranks: space.format().all_ranks(),
            tiers: TiersOfKind::group(&core.labels),
            observer,
        };
        let observed = Arc::new(observed);
        core.directory.observe(&observed);
        Observation { core: Arc::downgrade(core), observed }
    }

    /// Calls `visit` with each chunk of a space and the kinds of tiers that have it, in no order.
    ///
    /// Chunks that come or go meanwhile may be left out. `visit` is called with a lock and MUST NOT call the
    /// store.
    pub fn visit_chunks(&self, space: &Space, mut visit: impl FnMut(BlockHash, &[TierKind])) {
        let core = self.core();
        let all_ranks = space.format().all_ranks();
        core.directory.visit(|hash, entry| {
            if entry.namespace_idx != space.namespace_idx() {
                return;
            }
            let tiers = core.kinds_having(&entry.ranks, all_ranks);
            if !tiers.is_empty() {
                visit(hash, &tiers);
            }
        });
    }
}
