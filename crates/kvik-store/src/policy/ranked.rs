//! Leaves in order of a key: what all policies with a total order of victims share.

use std::collections::BTreeSet;
use std::fmt;

use super::{BlockId, Policy, Request, Tree};

/// Leaves that are looked at for a copy when another block is due.
const N_CANDIDATES: usize = 64;

/// Copies that leave in a row before a block that is due: so a block that is never used leaves too, however many copies come.
const MAX_SPARED: usize = 64;

/// A total order of blocks by a key.
pub trait Ranking: fmt::Debug + Default + Send {
    /// What blocks are ordered by; the smallest leaves first.
    type Key: Ord + Copy + fmt::Debug + Send;

    /// Tells of a request, before the keys of its blocks are asked for.
    fn begin(&mut self, _request: &Request<'_>) {}

    /// The new key of a resident block that was asked for again; `None` keeps the old one.
    fn used(&mut self, request: &Request<'_>, index: usize, old: Self::Key) -> Option<Self::Key>;

    /// The key of a block that becomes resident.
    fn inserted(&mut self, request: &Request<'_>, index: usize) -> Self::Key;

    /// Tells of the key with which a block was evicted.
    fn evicted(&mut self, _key: Self::Key) {}
}

/// Evicts the leaf with the smallest key.
#[derive(Debug)]
pub struct RankedPolicy<R: Ranking> {
    ranked: Ranked<R::Key>,
    ranking: R,
}

impl<R: Ranking> RankedPolicy<R> {
    /// An empty cache.
    pub fn new() -> Self {
        Self { ranked: Ranked::new(), ranking: R::default() }
    }
}

impl<R: Ranking> Default for RankedPolicy<R> {
    fn default() -> Self {
        Self::new()
    }
}

impl<R: Ranking> Policy for RankedPolicy<R> {
    fn access(&mut self, _now_ms: u64, request: &Request<'_>) {
        self.ranking.begin(request);
        for (index, block) in request.blocks.iter().enumerate() {
            let Some(slot) = self.ranked.tree().slot(block.id) else { continue };
            if let Some(key) = self.ranking.used(request, index, self.ranked.key(slot)) {
                self.ranked.set_key(slot, key);
            }
        }
    }

    fn insert(&mut self, _now_ms: u64, request: &Request<'_>, index: usize) -> bool {
        let key = self.ranking.inserted(request, index);
        self.ranked.insert(request, index, key).is_some()
    }

    fn victim(&mut self, _now_ms: u64) -> Option<BlockId> {
        let first = self.ranked.first()?;
        let (key, slot) = self.ranked.spare(first, |_| true);
        self.ranking.evicted(key);
        Some(self.ranked.remove_leaf(slot))
    }

    fn remove(&mut self, id: BlockId) -> bool {
        self.ranked.removable(id).map(|slot| self.ranked.remove_leaf(slot)).is_some()
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

/// A tree whose leaves are ordered by a key; the smallest leaves first.
///
/// The key of a block that is not a leaf waits in its slot until the block is one. Every operation takes
/// O(log n).
#[derive(Debug)]
pub(super) struct Ranked<K> {
    tree: Tree,
    keys: Vec<K>,
    leaves: BTreeSet<(K, u32)>,
    /// Copies that left in a row before a block that was due.
    n_spared: usize,
}

impl<K: Ord + Copy> Ranked<K> {
    pub(super) fn new() -> Self {
        Self { tree: Tree::default(), keys: Vec::new(), leaves: BTreeSet::new(), n_spared: 0 }
    }

    pub(super) fn tree(&self) -> &Tree {
        &self.tree
    }

    pub(super) fn key(&self, slot: u32) -> K {
        self.keys[slot as usize]
    }

    pub(super) fn set_key(&mut self, slot: u32, key: K) {
        let old = std::mem::replace(&mut self.keys[slot as usize], key);
        if self.tree.is_leaf(slot) {
            self.leaves.remove(&(old, slot));
            self.leaves.insert((key, slot));
        }
    }

    /// Adds block `index` of the chain; `None` if it is there already or its parent is not.
    pub(super) fn insert(&mut self, request: &Request<'_>, index: usize, key: K) -> Option<u32> {
        let block = request.blocks.get(index)?;
        let parent = index.checked_sub(1).map(|above| request.blocks[above].id);
        let inserted = self.tree.insert(block.id, parent, block.bytes)?;
        if let Some(covered) = inserted.covered {
            self.leaves.remove(&(self.key(covered), covered));
        }
        match self.keys.get_mut(inserted.slot as usize) {
            Some(place) => *place = key,
            None => self.keys.push(key),
        }
        self.leaves.insert((key, inserted.slot));
        Some(inserted.slot)
    }

    /// The leaf with the smallest key.
    pub(super) fn first(&self) -> Option<(K, u32)> {
        self.leaves.first().copied()
    }

    /// The leaf with the smallest key that is not below `low`.
    pub(super) fn first_from(&self, low: K) -> Option<(K, u32)> {
        self.leaves.range((low, 0)..).next().copied()
    }

    /// The leaf that leaves where `first` is due: the first copy among the next candidates, unless `first` is a copy
    /// itself or was spared often enough. `is_candidate` says which leaves could be due next.
    pub(super) fn spare(&mut self, first: (K, u32), is_candidate: impl Fn(&(K, u32)) -> bool) -> (K, u32) {
        if self.tree.n_copies() == 0 || self.tree.is_copy(first.1) {
            return first;
        }
        let is_copy = |leaf: &&(K, u32)| self.tree.is_copy(leaf.1) && is_candidate(leaf);
        let copy = self.leaves.range(first..).take(N_CANDIDATES).find(is_copy).copied();
        if let Some(copy) = copy.filter(|_| self.n_spared < MAX_SPARED) {
            self.n_spared += 1;
            copy
        } else {
            self.n_spared = 0;
            first
        }
    }

    pub(super) fn set_copy(&mut self, id: BlockId, is_copy: bool) -> bool {
        let Some(slot) = self.tree.slot(id) else { return false };
        self.tree.set_copy(slot, is_copy);
        true
    }

    /// Takes a leaf out.
    pub(super) fn remove_leaf(&mut self, slot: u32) -> BlockId {
        let id = self.tree.id(slot);
        self.leaves.remove(&(self.key(slot), slot));
        if let Some(exposed) = self.tree.remove_leaf(slot) {
            self.leaves.insert((self.key(exposed), exposed));
        }
        id
    }

    /// The slot of a block that may be removed.
    pub(super) fn removable(&self, id: BlockId) -> Option<u32> {
        self.tree.slot(id).filter(|&slot| self.tree.is_leaf(slot))
    }

    pub(super) fn pin(&mut self, id: BlockId) -> bool {
        let Some(slot) = self.tree.slot(id) else { return false };
        if self.tree.pin(slot) {
            self.leaves.remove(&(self.key(slot), slot));
        }
        true
    }

    pub(super) fn unpin(&mut self, id: BlockId) -> bool {
        let Some(slot) = self.tree.slot(id) else { return false };
        match self.tree.unpin(slot) {
            None => false,
            Some(is_leaf) => {
                if is_leaf {
                    self.leaves.insert((self.key(slot), slot));
                }
                true
            }
        }
    }
}
