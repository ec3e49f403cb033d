//! Sources of events, their holders and their generations.
//!
//! A holder counts only while its generation is that of its source. So one store of a source's
//! generation takes everything it held out of every answer; the bits are swept later.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use super::hash_key::HashKey;
use super::ordering::Ordering;
use super::sets::MAX_HOLDERS;
use super::store_counts::StoreCounts;
use super::types::{N_TIERS, SourceId, Tier};

const PRESENT: u64 = 1;
const UNSURE: u64 = 2;
const VALID: u64 = 1 << 2;

/// The worker and rank of a source.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SourceName {
    /// The worker.
    pub worker: Box<str>,
    /// Its data-parallel rank.
    pub rank: u32,
}

/// What readers know of holders and sources.
#[derive(Debug)]
pub(super) struct Roll {
    /// Generation, source and tier of a holder; 0 if there is no such holder.
    holders: Box<[AtomicU64]>,
    /// Generation and flags of a source.
    sources: Box<[AtomicU64]>,
}

/// A holder that counts, as a reader sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct LiveHolder {
    pub(super) source: u32,
    pub(super) tier: usize,
    pub(super) is_unsure: bool,
}

/// What the writer knows of a source.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) name: Arc<SourceName>,
    pub(super) ordering: Ordering,
    pub(super) holders: [Option<u16>; N_TIERS],
    pub(super) generation: u32,
    /// Blocks over all tiers.
    pub(super) n_blocks: u64,
}

/// What the writer knows of a holder.
#[derive(Debug)]
pub(super) struct Holder {
    pub(super) source: u32,
    pub(super) tier: Tier,
    pub(super) n_blocks: u64,
    /// Whether its blocks count as blocks of its source; not while it belongs to a replacement.
    is_shown: bool,
    /// Blocks that were stored more than once.
    pub(super) store_counts: StoreCounts,
}

/// The writer's side.
#[derive(Debug)]
pub(super) struct Sources {
    pub(super) roll: Arc<Roll>,
    pub(super) list: Vec<Option<Source>>,
    pub(super) by_name: HashMap<Arc<SourceName>, u32>,
    pub(super) holders: Vec<Option<Holder>>,
    pub(super) free_holders: Vec<u16>,
    pub(super) free_numbers: Vec<u32>,
    /// Holders that count no more, and whose bits are still in sets.
    pub(super) retired: Vec<u16>,
    /// The same as bits, for the holders of the sweep in progress too.
    retired_bits: Box<[u64]>,
    n_name_bytes: u64,
    pub(super) repeat_bytes: u64,
}

impl Roll {
    fn new(max_sources: usize) -> Self {
        let zeros = |n| (0..n).map(|_| AtomicU64::new(0)).collect();
        Self { holders: zeros(MAX_HOLDERS), sources: zeros(max_sources) }
    }

    /// The source and tier of a holder, unless its time is over.
    #[inline]
    pub(super) fn live(&self, holder: u16) -> Option<LiveHolder> {
        // Acquire on both: a holder is written before its source switches to its generation.
        let word = self.holders.get(usize::from(holder))?.load(Acquire);
        let source = (word as u32) >> 8;
        let state = self.sources.get(source as usize)?.load(Acquire);
        let counts = word & VALID != 0 && state & PRESENT != 0 && word >> 32 == state >> 32;
        counts.then_some(LiveHolder { source, tier: (word & 3) as usize, is_unsure: state & UNSURE != 0 })
    }

    fn put_holder(&self, holder: u16, word: u64) {
        self.holders[usize::from(holder)].store(word, Release);
    }
}

impl Sources {
    pub(super) fn new(max_sources: usize) -> Self {
        Self {
            roll: Arc::new(Roll::new(max_sources)),
            list: Vec::new(),
            by_name: HashMap::new(),
            holders: Vec::new(),
            free_holders: Vec::new(),
            free_numbers: Vec::new(),
            retired: Vec::new(),
            retired_bits: vec![0; MAX_HOLDERS / 64 + 1].into_boxed_slice(),
            n_name_bytes: 0,
            repeat_bytes: 0,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        let fixed = (self.roll.holders.len() + self.roll.sources.len() + self.retired_bits.len()) * 8;
        let lists = self.list.capacity() * size_of::<Option<Source>>()
            + self.holders.capacity() * size_of::<Option<Holder>>()
            + (self.free_holders.capacity() + self.retired.capacity()) * 2
            + self.free_numbers.capacity() * 4
            + self.by_name.capacity() * (size_of::<(Arc<SourceName>, u32)>() + 1);
        (fixed + lists) as u64 + self.n_name_bytes + self.repeat_bytes
    }

    pub(super) fn get(&self, source: SourceId) -> Option<&Source> {
        self.list.get(source.as_index())?.as_ref()
    }

    pub(super) fn get_mut(&mut self, source: SourceId) -> Option<&mut Source> {
        self.list.get_mut(source.as_index())?.as_mut()
    }

    /// Enters a source; `None` if there is no room.
    pub(super) fn add(&mut self, name: SourceName, ordering: Ordering) -> Option<SourceId> {
        let number = match self.free_numbers.pop() {
            Some(number) => number,
            None if self.list.len() < self.roll.sources.len() => {
                self.list.push(None);
                self.list.len() as u32 - 1
            }
            None => return None,
        };
        // A source that had the number before may have left holders of its generations behind.
        let generation = (self.roll.sources[number as usize].load(Relaxed) >> 32) as u32 + 1;
        let name = Arc::new(name);
        self.n_name_bytes += (name.worker.len() + size_of::<SourceName>() + 16) as u64;
        self.by_name.insert(Arc::clone(&name), number);
        let source = Source { name, ordering, holders: [None; N_TIERS], generation, n_blocks: 0 };
        self.list[number as usize] = Some(source);
        self.show(SourceId(number));
        Some(SourceId(number))
    }

    /// Takes a source out with all it held; its number must wait for the sweep.
    pub(super) fn remove(&mut self, source: SourceId) -> Option<Source> {
        self.forget(source);
        let removed = self.list.get_mut(source.as_index())?.take()?;
        self.by_name.remove(&removed.name);
        self.n_name_bytes -= (removed.name.worker.len() + size_of::<SourceName>() + 16) as u64;
        self.roll.sources[source.as_index()].store(u64::from(removed.generation) << 32, Release);
        Some(removed)
    }

    /// Starts the next generation of a source: nothing that it held counts any more.
    pub(super) fn forget(&mut self, source: SourceId) {
        let Some(entry) = self.get_mut(source) else { return };
        entry.n_blocks = 0;
        // A wrap would need 2^32 restarts between two sweeps.
        entry.generation = entry.generation.wrapping_add(1);
        let holders = std::mem::take(&mut entry.holders);
        self.show(source);
        for holder in holders.into_iter().flatten() {
            self.retire(holder);
        }
    }

    /// Tells readers the generation and the doubts about a source.
    pub(super) fn show(&self, source: SourceId) {
        let Some(entry) = self.get(source) else { return };
        let unsure = if entry.ordering.gap == super::ordering::Gap::None { 0 } else { UNSURE };
        let word = u64::from(entry.generation) << 32 | PRESENT | unsure;
        self.roll.sources[source.as_index()].store(word, Release);
    }

    /// Makes a holder of a free number. No reader sees it before [`Self::show_holder`].
    pub(super) fn open_holder(&mut self, source: SourceId, tier: Tier, hash_key: HashKey) -> Option<u16> {
        let number = match self.free_holders.pop() {
            Some(number) => number,
            None if self.holders.len() < MAX_HOLDERS => {
                self.holders.push(None);
                self.holders.len() as u16 - 1
            }
            None => return None,
        };
        let store_counts = StoreCounts::new(hash_key);
        let holder = Holder { source: source.0, tier, n_blocks: 0, is_shown: false, store_counts };
        self.holders[usize::from(number)] = Some(holder);
        Some(number)
    }

    /// Makes a holder visible to readers as soon as its source has this generation. From now on its further blocks
    /// count as blocks of the source.
    pub(super) fn show_holder(&mut self, number: u16, generation: u32) {
        let Some(Some(holder)) = self.holders.get_mut(usize::from(number)) else { return };
        holder.is_shown = true;
        let place = u64::from(holder.source) << 8 | holder.tier.as_index() as u64;
        self.roll.put_holder(number, u64::from(generation) << 32 | VALID | place);
    }

    /// Takes a holder out of all answers and leaves its bits to the sweep.
    pub(super) fn retire(&mut self, holder: u16) {
        self.roll.put_holder(holder, 0);
        if let Some(old) = self.holders.get_mut(usize::from(holder)).and_then(Option::take) {
            self.repeat_bytes -= old.store_counts.bytes();
        }
        self.retired_bits[usize::from(holder) / 64] |= 1 << (holder % 64);
        self.retired.push(holder);
    }

    /// Whether a holder's bits are to be swept.
    pub(super) fn is_retired(&self, holder: u16) -> bool {
        self.retired_bits[usize::from(holder) / 64] >> (holder % 64) & 1 == 1
    }

    /// Notes that no set names a retired holder any more.
    pub(super) fn swept(&mut self, holder: u16) {
        self.retired_bits[usize::from(holder) / 64] &= !(1 << (holder % 64));
    }

    /// How many blocks a holder has.
    pub(super) fn n_blocks_of(&self, holder: u16) -> u64 {
        self.holders.get(usize::from(holder)).and_then(Option::as_ref).map_or(0, |holder| holder.n_blocks)
    }

    /// Counts blocks that a holder has more (or, negative, fewer).
    pub(super) fn count(&mut self, holder: u16, n_blocks: i64) {
        let Some(Some(entry)) = self.holders.get_mut(usize::from(holder)) else { return };
        entry.n_blocks = entry.n_blocks.saturating_add_signed(n_blocks);
        if entry.is_shown
            && let Some(Some(source)) = self.list.get_mut(entry.source as usize)
        {
            source.n_blocks = source.n_blocks.saturating_add_signed(n_blocks);
        }
    }

    /// Changes the repetitions of a holder; `None` if there is no such holder.
    pub(super) fn with_store_counts<T>(
        &mut self,
        holder: u16,
        change: impl FnOnce(&mut StoreCounts) -> T,
    ) -> Option<T> {
        let store_counts = &mut self.holders.get_mut(usize::from(holder))?.as_mut()?.store_counts;
        let n_bytes_before = store_counts.bytes();
        let changed = change(store_counts);
        self.repeat_bytes = self.repeat_bytes + store_counts.bytes() - n_bytes_before;
        Some(changed)
    }
}
