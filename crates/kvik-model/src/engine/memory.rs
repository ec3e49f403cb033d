//! What the engine does when its memory is shared: give back, and wait.

use super::{Engine, EngineEvent};
use crate::error::ModelError;

impl Engine {
    /// Sets what is called, on another thread, when other engines ask for memory: call
    /// [`Engine::give_back_memory`] or step then.
    pub fn set_memory_waker(&mut self, waker: Box<dyn Fn() + Send + Sync>) {
        self.pool.set_waker(waker);
    }

    /// Gives back what other engines have asked for, as far as no running sequence holds it: free blocks
    /// first, those used longest ago before others, then residents.
    pub fn give_back_memory(&mut self) {
        let mut n_pages = self.pool.take_asked_pages();
        let mut n_evictions = 1;
        while 0 < n_pages {
            n_pages -= self.pool.give_back_pages(n_pages);
            if n_pages == 0 {
                return;
            }
            // More and more at a time: each look at the pages costs as much as all evictions before.
            let n_evicted = (0..n_evictions).filter(|_| self.residents.evict_oldest(&mut self.pool)).count();
            if n_evicted == 0 {
                return;
            }
            n_evictions *= 2;
        }
    }

    /// Gives back what was asked for, and tells other engines that this one needs no more than it has.
    ///
    /// Call it when there is no work: a request that ended held what others asked for, or waited for memory.
    pub fn rest(&mut self) {
        self.is_starved = false;
        self.loans.take_back(&mut self.pool);
        self.pool.stop_waiting();
        self.give_back_memory();
    }

    /// The most blocks that the engine could have if all others gave back what they can.
    pub fn max_blocks(&self) -> usize {
        self.pool.limit_blocks()
    }

    /// Whether the last step could not run anything because other engines, or ended sequences that are being
    /// copied, hold the memory: step again when some time has passed.
    pub fn is_starved(&self) -> bool {
        self.is_starved
    }

    /// Ends the request that has waited longest for memory with [`ModelError::NoMemory`].
    pub fn fail_starved(&mut self, events: &mut Vec<EngineEvent>) {
        let Some(oldest) = self.waiting.iter().find(|sequence| !sequence.is_paused()) else { return };
        let request = oldest.request;
        let error = ModelError::NoMemory {
            n_blocks: oldest.n_missing_blocks(oldest.n_computed() + oldest.n_pending()),
            n_given: self.pool.stats().n_blocks,
        };
        events.push(EngineEvent::Failed { request, error });
        self.cancel(request);
        self.pool.stop_waiting();
    }
}
