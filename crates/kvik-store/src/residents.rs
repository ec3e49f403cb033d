//! The residents of one local tier, in the order of its policy.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::chain::Chain;
use crate::policy::{Block, BlockId, Policy, PolicyKind, Request};

/// What a local tier holds, as a policy sees it.
///
/// The tree of the policy is for order alone: the directory says what is there. A block that was cleared while
/// it was pinned stays in the tree until it comes out as a victim with nothing behind it.
///
/// Chunks that were found at the start, whose parents are unknown, are *unplaced*: they wait outside of the
/// tree until a chain shows where they hang. They are the first to leave, in the order in which the tier named
/// them, which for a log is the order in which they were written: so long as one is there, nothing of the
/// tree is a victim, and so no placed parent leaves before an unplaced child.
#[derive(Debug)]
pub(crate) struct Residents {
    policy: Box<dyn Policy>,
    unplaced: HashSet<BlockId>,
    /// The unplaced, oldest first, and some that have been placed or removed since.
    unplaced_order: VecDeque<BlockId>,
}

/// The residents of a tier, shared with the pins on them.
pub(crate) type SharedResidents = Arc<Mutex<Residents>>;

/// Keeps a chunk, and all before it, from being victims of a tier.
#[derive(Debug)]
pub(crate) struct ResidentPin {
    residents: SharedResidents,
    id: BlockId,
}

// === impl Residents ===

impl Residents {
    pub(crate) fn new(kind: PolicyKind, capacity_blocks: usize) -> Self {
        Self {
            policy: kind.build(capacity_blocks),
            unplaced: HashSet::new(),
            unplaced_order: VecDeque::new(),
        }
    }

    /// Adds a block that was found at the start.
    pub(crate) fn add_unplaced(&mut self, id: BlockId) {
        if self.unplaced.insert(id) {
            self.unplaced_order.push_back(id);
        }
    }

    /// Tells the policy of a request.
    pub(crate) fn access(&mut self, now_ms: u64, chain: &Chain, n_generated_tokens: Option<u32>) {
        self.place(now_ms, chain, chain.n_chunks());
        self.policy.access(now_ms, &Request { blocks: chain.blocks(), n_generated_tokens });
    }

    /// Gives the unplaced among the first `n_chunks` chunks of a chain their place in the tree.
    pub(crate) fn place(&mut self, now_ms: u64, chain: &Chain, n_chunks: usize) {
        if self.unplaced.is_empty() {
            return;
        }
        let request = Request::new(chain.blocks());
        for chunk_idx in 0..n_chunks {
            let id = chain.id(chunk_idx);
            if self.policy.tree().contains(id) {
                continue;
            }
            if !self.unplaced.contains(&id) || !self.policy.insert(now_ms, &request, chunk_idx) {
                return;
            }
            self.unplaced.remove(&id);
        }
    }

    /// Makes a chunk a resident. False where its parent is none.
    pub(crate) fn insert(&mut self, now_ms: u64, chain: &Chain, chunk_idx: usize) -> bool {
        let id = chain.id(chunk_idx);
        if self.policy.tree().contains(id) {
            return true;
        }
        if chunk_idx > 0 && !self.policy.tree().contains(chain.id(chunk_idx - 1)) {
            self.place(now_ms, chain, chunk_idx);
        }
        let is_inserted = self.policy.insert(now_ms, &Request::new(chain.blocks()), chunk_idx);
        if is_inserted {
            self.unplaced.remove(&id);
        }
        is_inserted
    }

    /// Says whether another node has a chunk too. One that is not placed is left as it is.
    pub(crate) fn set_copy(&mut self, id: BlockId, is_copy: bool) {
        // Most stores have no copies, and need no search for each chunk.
        if is_copy || self.policy.tree().n_copies() > 0 {
            self.policy.set_copy(id, is_copy);
        }
    }

    /// Says whether a missing chunk is worth that another one leaves.
    pub(crate) fn admits(&mut self, now_ms: u64, chain: &Chain, chunk_idx: usize) -> bool {
        self.policy.admits(now_ms, &Request::new(chain.blocks()), chunk_idx)
    }

    /// Names a block that must leave.
    pub(crate) fn victim(&mut self, now_ms: u64) -> Option<BlockId> {
        while let Some(id) = self.unplaced_order.pop_front() {
            if self.unplaced.remove(&id) {
                return Some(id);
            }
        }
        self.policy.victim(now_ms)
    }

    /// Forgets a block that is gone, where nothing hangs on it and nothing pins it.
    pub(crate) fn remove(&mut self, id: BlockId) {
        if !self.unplaced.remove(&id) {
            self.policy.remove(id);
        }
    }

    /// Says whether resident blocks hang on a block.
    pub(crate) fn n_children(&self, id: BlockId) -> usize {
        self.policy.tree().n_children(id)
    }

    pub(crate) fn contains(&self, id: BlockId) -> bool {
        self.policy.tree().contains(id) || self.unplaced.contains(&id)
    }

    /// What a block hangs on; `None` where it hangs on none, or where that is not known.
    pub(crate) fn parent(&self, id: BlockId) -> Option<BlockId> {
        self.policy.tree().parent(id)
    }

    /// Gives blocks that were found at the start, from the first of a chain on, their places, and pins the last; returns
    /// it, or `None` where one of them was not found.
    pub(crate) fn pin_found(&mut self, now_ms: u64, blocks: &[Block]) -> Option<BlockId> {
        let request = Request::new(blocks);
        for (idx, Block { id, .. }) in blocks.iter().enumerate() {
            if !self.policy.tree().contains(*id) {
                if !self.unplaced.contains(id) || !self.policy.insert(now_ms, &request, idx) {
                    return None;
                }
                self.unplaced.remove(id);
            }
        }
        let last = blocks.last()?.id;
        self.pin(last).then_some(last)
    }

    /// Keeps a chunk and all before it from being victims. False where it is no resident.
    pub(crate) fn pin(&mut self, id: BlockId) -> bool {
        self.policy.pin(id)
    }

    pub(crate) fn unpin(&mut self, id: BlockId) {
        self.policy.unpin(id);
    }
}

// === impl ResidentPin ===

impl ResidentPin {
    /// Pins a chunk; `None` where it is no resident.
    pub(crate) fn new(residents: &SharedResidents, id: BlockId) -> Option<Self> {
        let is_pinned = residents.lock().pin(id);
        is_pinned.then(|| Self { residents: Arc::clone(residents), id })
    }

    /// Takes over a pin that the caller has set with [`Residents::pin`].
    pub(crate) fn of_pinned(residents: &SharedResidents, id: BlockId) -> Self {
        Self { residents: Arc::clone(residents), id }
    }

    /// Pins the deepest of the first `n_chunks` chunks of a chain that is a resident.
    pub(crate) fn deepest(residents: &SharedResidents, chain: &Chain, n_chunks: usize) -> Option<Self> {
        let mut locked = residents.lock();
        let id = (0..n_chunks).rev().map(|chunk_idx| chain.id(chunk_idx)).find(|id| locked.pin(*id))?;
        drop(locked);
        Some(Self { residents: Arc::clone(residents), id })
    }

    /// Leaves the pin to the caller, which takes it away with [`Residents::unpin`].
    pub(crate) fn into_id(self) -> BlockId {
        let id = self.id;
        // Taken twice so that the drop of `self` leaves one.
        self.residents.lock().pin(id);
        id
    }
}

impl Drop for ResidentPin {
    fn drop(&mut self) {
        self.residents.lock().unpin(self.id);
    }
}
