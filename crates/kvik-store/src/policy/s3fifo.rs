//! A small queue for what was seen once, a main queue for the rest.

use super::ghosts::Ghosts;
use super::ranked::Ranked;
use super::{BlockId, Policy, Request, Tree};

/// Part of the cache that new blocks go through, as the authors of S3-FIFO propose.
const SMALL_PERCENT: usize = 10;

/// Uses are counted up to here.
const MAX_USES: u8 = 3;

/// S3-FIFO over leaves: a block keeps its place in its queue while it is not a leaf.
///
/// A new block enters the small queue; at its head it moves to the main queue if it was used since and
/// leaves otherwise. A block that comes back soon after it left enters the main queue. At the head of the
/// main queue a block that was used goes round once more.
#[derive(Debug)]
pub struct S3FifoPolicy {
    ranked: Ranked<(Queue, u64)>,
    n_uses: Vec<u8>,
    n_small: usize,
    small_limit: usize,
    ghosts: Ghosts<()>,
    ghost_limit: usize,
    sequence: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Queue {
    Small,
    Main,
}

impl S3FifoPolicy {
    /// An empty cache of about that many blocks.
    pub fn new(capacity_blocks: usize) -> Self {
        Self {
            ranked: Ranked::new(),
            n_uses: Vec::new(),
            n_small: 0,
            small_limit: (capacity_blocks * SMALL_PERCENT / 100).max(1),
            ghosts: Ghosts::new(),
            ghost_limit: capacity_blocks,
            sequence: 0,
        }
    }

    fn forget(&mut self, slot: u32) -> BlockId {
        if self.ranked.key(slot).0 == Queue::Small {
            self.n_small -= 1;
        }
        self.ranked.remove_leaf(slot)
    }
}

impl Policy for S3FifoPolicy {
    fn access(&mut self, _now_ms: u64, request: &Request<'_>) {
        for block in request.blocks {
            if let Some(slot) = self.ranked.tree().slot(block.id) {
                let n_uses = &mut self.n_uses[slot as usize];
                *n_uses = (*n_uses + 1).min(MAX_USES);
            }
        }
    }

    fn insert(&mut self, _now_ms: u64, request: &Request<'_>, index: usize) -> bool {
        let Some(block) = request.blocks.get(index) else { return false };
        let queue = if self.ghosts.take(block.id).is_some() { Queue::Main } else { Queue::Small };
        self.sequence += 1;
        let Some(slot) = self.ranked.insert(request, index, (queue, self.sequence)) else { return false };
        match self.n_uses.get_mut(slot as usize) {
            Some(n_uses) => *n_uses = 0,
            None => self.n_uses.push(0),
        }
        self.n_small += usize::from(queue == Queue::Small);
        true
    }

    fn victim(&mut self, _now_ms: u64) -> Option<BlockId> {
        loop {
            let small = self.ranked.first().filter(|((queue, _), _)| *queue == Queue::Small);
            let main = self.ranked.first_from((Queue::Main, 0));
            let from_small = small.filter(|_| self.n_small > self.small_limit || main.is_none());
            let (key, slot) = from_small.or(main)?;
            let (queue, _) = key;
            let n_uses = self.n_uses[slot as usize];
            if n_uses == 0 {
                let n_uses = &self.n_uses;
                let is_candidate =
                    |((other, _), slot): &((Queue, u64), u32)| *other == queue && n_uses[*slot as usize] == 0;
                let (_, slot) = self.ranked.spare((key, slot), is_candidate);
                let id = self.forget(slot);
                if queue == Queue::Small {
                    self.ghosts.add(id, (), self.ghost_limit);
                }
                return Some(id);
            }
            self.sequence += 1;
            self.ranked.set_key(slot, (Queue::Main, self.sequence));
            if queue == Queue::Small {
                self.n_small -= 1;
                self.n_uses[slot as usize] = 0;
            } else {
                self.n_uses[slot as usize] = n_uses - 1;
            }
        }
    }

    fn remove(&mut self, id: BlockId) -> bool {
        self.ranked.removable(id).map(|slot| self.forget(slot)).is_some()
    }

    fn pin(&mut self, id: BlockId) -> bool {
        self.ranked.pin(id)
    }

    fn unpin(&mut self, id: BlockId) -> bool {
        self.ranked.unpin(id)
    }

    fn set_copy(&mut self, id: BlockId, is_copy: bool) -> bool {
        self.ranked.set_copy(id, is_copy)
    }

    fn tree(&self) -> &Tree {
        self.ranked.tree()
    }
}
