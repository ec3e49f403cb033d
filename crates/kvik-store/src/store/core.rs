//! The state that all parts of a store share.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use kvik_tier::{ChunkKey, NamespaceId, RamTier, TierKind};
use kvik_types::BlockHash;
use parking_lot::{Mutex, RwLock};

use super::reclaim::Reclaimer;
use super::stats::Counters;
use crate::book::Book;
use crate::chain::{Chain, NamespaceState};
use crate::directory::{Directory, Entry, RAM, TierIdx};
use crate::flight::Flights;
use crate::lower::Lower;
use crate::options::StoreOptions;
use crate::policy::BlockId;

/// What all clones of a store, its threads and its guards share.
///
/// Locks are taken in this order, each for a few operations on memory, and none while a lower tier is called:
/// a book, a shard of the directory, the index of the memory tier. Of the books at most one is held.
///
/// What is resident changes under the lock of the tier's book, so that book and directory agree; it becomes
/// visible under the lock of the directory's shard, together with the check of the generation, so that
/// nothing slips past a clear.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) options: StoreOptions,
    pub(crate) ram: RamTier,
    pub(crate) ram_book: Mutex<Book>,
    pub(crate) directory: Directory,
    /// The tiers below memory: local ones, then remote ones. A lower tier's index is one less than its
    /// [`TierIdx`].
    pub(crate) lowers: Vec<Lower>,
    pub(crate) flights: Arc<Flights>,
    pub(crate) namespaces: Namespaces,
    /// The blocks that users have pinned, by the last chunk of the chain they pinned.
    pub(crate) pinned: Mutex<HashMap<BlockHash, Vec<Option<BlockId>>>>,
    pub(crate) reclaimer: Reclaimer,
    pub(crate) counters: Counters,
    pub(crate) opened: Instant,
}

/// The namespaces that were seen.
#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    known: RwLock<Known>,
}

#[derive(Debug, Default)]
struct Known {
    list: Vec<Arc<NamespaceState>>,
    by_id: HashMap<NamespaceId, Arc<NamespaceState>>,
}

/// Keeps a chunk in memory, and all before it, from being victims.
#[derive(Debug)]
pub(crate) struct BookPin {
    core: Arc<Core>,
    id: BlockId,
}

// === impl Core ===

impl Core {
    /// Milliseconds since the store was opened.
    pub(crate) fn now_ms(&self) -> u64 {
        self.opened.elapsed().as_millis() as u64
    }

    /// The lower tier of an index; `None` for memory.
    pub(crate) fn lower(&self, tier: TierIdx) -> Option<&Lower> {
        tier.checked_sub(1).and_then(|lower_idx| self.lowers.get(lower_idx))
    }

    pub(crate) fn tier_idx(&self, kind: TierKind) -> Option<TierIdx> {
        if kind == TierKind::Ram {
            return Some(RAM);
        }
        self.lowers.iter().position(|lower| lower.kind == kind).map(|lower_idx| lower_idx + 1)
    }

    /// The book of a local tier.
    pub(crate) fn book(&self, tier: TierIdx) -> Option<&Mutex<Book>> {
        match self.lower(tier) {
            None => Some(&self.ram_book),
            Some(lower) => lower.book.as_ref(),
        }
    }

    /// Keys of those ranks of a chunk whose bits are set.
    pub(crate) fn keys(&self, hash: BlockHash, entry: &Entry, ranks: u64) -> Vec<ChunkKey> {
        let namespace = self.namespaces.id(entry.namespace_idx);
        ranks_of(ranks).map(|rank| ChunkKey { namespace, chunk: hash, rank }).collect()
    }

    /// The chunks of a chain; none of one that another store made, whose keys mean nothing here.
    pub(crate) fn n_chunks(&self, chain: &Chain) -> usize {
        if self.namespaces.is_ours(chain.namespace()) { chain.n_chunks() } else { 0 }
    }

    /// Whether a chunk may be in a local tier: its parent is.
    pub(crate) fn has_parent_in(&self, tier: TierIdx, chain: &Chain, chunk_idx: usize, rank: u16) -> bool {
        match chunk_idx.checked_sub(1) {
            None => true,
            Some(parent_idx) => self.directory.view(chain.hash(parent_idx)).ranks[tier] & (1 << rank) != 0,
        }
    }

    /// Pins the deepest of the first `n_chunks` chunks that is resident in memory.
    pub(crate) fn pin_deepest(self: &Arc<Self>, chain: &Chain, n_chunks: usize) -> Option<BookPin> {
        let mut book = self.ram_book.lock();
        let id = (0..n_chunks).rev().map(|chunk_idx| chain.id(chunk_idx)).find(|id| book.pin(*id))?;
        Some(BookPin { core: Arc::clone(self), id })
    }

    /// A pin that was taken while the caller held the book.
    pub(crate) fn adopt_pin(self: &Arc<Self>, id: BlockId) -> BookPin {
        BookPin { core: Arc::clone(self), id }
    }
}

/// The ranks whose bits are set.
pub(crate) fn ranks_of(ranks: u64) -> impl Iterator<Item = u16> {
    (0..64).filter(move |rank| ranks & (1 << rank) != 0)
}

// === impl Namespaces ===

impl Namespaces {
    /// Finds or adds a namespace.
    pub(crate) fn intern(&self, id: NamespaceId) -> Arc<NamespaceState> {
        if let Some(known) = self.find(id) {
            return known;
        }
        let mut known = self.known.write();
        let Known { list, by_id } = &mut *known;
        let namespace = by_id.entry(id).or_insert_with(|| {
            let added = Arc::new(NamespaceState::new(id, list.len() as u32));
            list.push(Arc::clone(&added));
            added
        });
        Arc::clone(namespace)
    }

    pub(crate) fn find(&self, id: NamespaceId) -> Option<Arc<NamespaceState>> {
        self.known.read().by_id.get(&id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<NamespaceState>> {
        self.known.read().list.clone()
    }

    fn id(&self, namespace_idx: u32) -> NamespaceId {
        self.known.read().list[namespace_idx as usize].id
    }

    fn is_ours(&self, namespace: &Arc<NamespaceState>) -> bool {
        let known = self.known.read();
        known.list.get(namespace.idx as usize).is_some_and(|ours| Arc::ptr_eq(ours, namespace))
    }
}

// === impl BookPin ===

impl BookPin {
    /// Gives the pin to who will take it away by itself.
    pub(crate) fn into_id(self) -> BlockId {
        let id = self.id;
        // Taken twice so that the drop of `self` leaves one.
        self.core.ram_book.lock().pin(id);
        id
    }
}

impl Drop for BookPin {
    fn drop(&mut self) {
        self.core.ram_book.lock().unpin(self.id);
    }
}
