//! Blocks, and those that are free only when the device has passed an event.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvik_memory::BlockId;
use kvik_memory::blocks::Epoch;
use kvik_memory::pool::KvPool;
use kvik_memory::vmm::Fence;
use parking_lot::Mutex;

use crate::status::Failure;

#[cfg(test)]
mod tests;

/// The part of a pool that its agent looks after as well.
#[derive(Debug)]
pub(crate) struct BlockPool {
    pub(crate) pool: KvPool,
    pending: Mutex<Pending>,
    /// As long as the queue, for a check whether it is empty.
    n_pending: AtomicUsize,
}

/// Fences in the order of their frees; each is an epoch of the pool.
#[derive(Debug, Default)]
struct Pending {
    last_epoch: u64,
    fences: VecDeque<(Epoch, Box<dyn Fence>)>,
}

impl BlockPool {
    pub(crate) fn new(pool: KvPool) -> Self {
        Self { pool, pending: Mutex::default(), n_pending: AtomicUsize::new(0) }
    }

    /// Frees `blocks` when the device has passed `fence`, and those of earlier calls.
    pub(crate) fn free_after(&self, blocks: &[BlockId], fence: Box<dyn Fence>) -> Result<(), Failure> {
        let mut pending = self.pending.lock();
        pending.fences.try_reserve(1).map_err(|_| Failure::no_heap())?;
        let epoch = Epoch(pending.last_epoch + 1);
        self.pool.free_after(blocks, epoch)?;
        pending.last_epoch = epoch.0;
        pending.fences.push_back((epoch, fence));
        self.n_pending.store(pending.fences.len(), Ordering::Release);
        Ok(())
    }

    /// Frees what the device is done with; says whether something is pending still.
    ///
    /// Where the device cannot tell, blocks stay in limbo: memory that a kernel writes to is not handed out.
    pub(crate) fn poll(&self) -> bool {
        if !self.has_pending() {
            return false;
        }
        let mut pending = self.pending.lock();
        let mut complete = None;
        while let Some((epoch, fence)) = pending.fences.front() {
            match fence.is_complete() {
                Ok(true) => complete = Some(*epoch),
                Ok(false) => break,
                Err(error) => {
                    tracing::warn!(%error, "cannot tell whether the device is done with blocks");
                    break;
                }
            }
            pending.fences.pop_front();
        }
        self.n_pending.store(pending.fences.len(), Ordering::Release);
        drop(pending);
        if let Some(epoch) = complete {
            self.pool.advance(epoch);
        }
        self.has_pending()
    }

    pub(crate) fn has_pending(&self) -> bool {
        self.n_pending.load(Ordering::Acquire) > 0
    }
}
