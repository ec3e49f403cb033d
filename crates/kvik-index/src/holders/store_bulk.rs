//! Blocks that are stored in bulk: what is slow about them, the way into the table, is done for many at a time.
//!
//! A new block needs a line of the table, which is anywhere in memory. Within a bulk store, blocks that look new get entries
//! without holders, side by side and in the order of their prompts. At the end of the bulk store the sections of the table
//! insert them, several threads at a time; only then it turns out which of them were there already. The others get
//! their holders, and those are added to the entries that there are.
//!
//! Invariants:
//!
//! * What is appended while a bulk store has entries belongs to it. Such an entry has no holders until the bulk store ends: to
//!   readers it is not there.
//! * Whatever takes away holders or blocks of the bulk store, moves entries or drops extents ends the bulk store first. Other blocks
//!   may be taken away meanwhile: a filter says which ones those are.
//! * A bulk store that has ended leaves what its events would have left one after the other: adding holders commutes, and
//!   the bound of a source is not reached within a bulk store.

use super::arena::EntryIndex;
use super::bulk::{Bulk, PutOff};
use super::index::HolderIndex;
use super::ordering::Verdict;
use super::sets::SetRef;
use super::types::{Batch, BlockKey, Event};

/// New entries of a bulk store at which it ends: the table inserts them in some ten milliseconds.
const MAX_BULK_BLOCKS: usize = 1 << 19;
/// Blocks that are worth a thread: a thread inserts a thousand in the time that it takes to start.
const BLOCKS_PER_THREAD: usize = 1 << 14;
/// New entries of a bulk store that are worth putting in order.
const MIN_MANY_BLOCKS: usize = 1 << 10;
/// Blocks of one batch from which it is a bulk store by itself.
const MIN_BULK_BLOCKS: usize = 1 << 12;
/// Batches whose first table lines are asked for ahead.
const BATCHES_AHEAD: usize = 8;

/// Whether a batch begins where another one ends: what is put off then asks for no line of the table.
fn goes_on(before: &Batch<'_>, batch: &Batch<'_>) -> bool {
    match (before.events.last(), batch.events.first()) {
        (Some(Event::Stored { keys: [.., last], .. }), Some(Event::Stored { parent: Some(parent), .. })) => {
            last == parent
        }
        _ => false,
    }
}

impl HolderIndex {
    /// Applies batches one after the other, like [`Self::apply`] does, but faster where there are many; a verdict for
    /// each is appended.
    ///
    /// Readers may see a later batch before an earlier one until the call returns.
    pub fn apply_all(&mut self, batches: &[Batch<'_>], verdicts: &mut Vec<Verdict>) {
        self.in_bulk(|index| {
            for (at, batch) in batches.iter().enumerate() {
                let coming = batches.get(at + BATCHES_AHEAD - 1..at + BATCHES_AHEAD + 1);
                if let Some([before, ahead]) = coming
                    && !goes_on(before, ahead)
                {
                    index.prefetch_events(&ahead.events[..ahead.events.len().min(1)]);
                }
                verdicts.push(index.apply_one(batch));
            }
        });
        self.settle();
    }

    /// Whether a batch is worth a bulk store of its own.
    pub(super) fn is_bulk(events: &[Event<'_>]) -> bool {
        let n_blocks = |event: &Event<'_>| match event {
            Event::Stored { keys, .. } => keys.len(),
            _ => 0,
        };
        events.iter().map(n_blocks).sum::<usize>() >= MIN_BULK_BLOCKS
    }

    /// Lets `store` put blocks off, and ends the bulk store after it.
    pub(super) fn in_bulk<T>(&mut self, store: impl FnOnce(&mut Self) -> T) -> T {
        self.bulk.is_open = true;
        let stored = store(self);
        self.end_bulk();
        self.bulk.is_open = false;
        self.bulk.give_back();
        stored
    }

    /// The entry that the last event of the bulk store ended with, if it has this key.
    pub(super) fn end_of_last_event(&self, key: BlockKey) -> Option<EntryIndex> {
        self.bulk.cursor.filter(|index| self.arena.has_key(*index, key.0))
    }

    /// Whether an entry is the last one of all and waits for the end of the bulk: what comes behind it is new.
    pub(super) fn is_last_of_bulk(&self, index: EntryIndex) -> bool {
        self.arena.is_last(index) && self.bulk.contains(index)
    }

    /// Whether an entry is one of the bulk store's.
    pub(super) fn is_in_bulk(&self, index: EntryIndex) -> bool {
        self.bulk.contains(index)
    }

    /// Puts off blocks that are entries of the bulk store already, from `index` on, which has the first key; gives how many.
    pub(super) fn share_run(&mut self, holder: u16, index: EntryIndex, keys: &[BlockKey]) -> usize {
        let n_equal = self.arena.n_equal(index, keys);
        self.bulk.add(holder, index, n_equal);
        n_equal
    }

    /// The entry of the bulk store at which a run begins with this block.
    pub(super) fn start_in_bulk(&self, key: BlockKey) -> Option<EntryIndex> {
        self.bulk.starts.get(&key.0).copied()
    }

    /// Puts off blocks that look new.
    pub(super) fn put_off(&mut self, holder: u16, mut keys: &[BlockKey], mut starts_run: bool) {
        while !keys.is_empty() {
            if self.arena.tail_is_full() {
                self.extend_bulk();
            }
            let Some((first, n_entries)) = self.arena.append_bare(keys, starts_run) else {
                self.counters.blocks_refused += keys.len() as u64;
                return;
            };
            let (appended, rest) = keys.split_at(n_entries);
            if starts_run {
                self.bulk.starts.insert(appended[0].0, first);
            }
            if self.bulk.places.last().is_none_or(|place| place.slot() != first.slot()) {
                self.bulk.places.push(first);
            }
            self.bulk.n_bare += n_entries;
            self.bulk.add(holder, first, n_entries);
            if !self.bulk.filter.bits.is_empty() {
                self.filter_from(first);
            }
            keys = rest;
            starts_run = true;
        }
    }

    /// Ends the bulk store if a block may wait for that, so that it can be taken away; true if it was ended.
    pub(super) fn end_bulk_of(&mut self, key: BlockKey) -> bool {
        if self.bulk.n_bare == 0 {
            return false;
        }
        if self.bulk.filter.bits.is_empty() {
            self.filter_all();
        }
        let may_wait = self.bulk.filter.may_have(self.hash_key.tag(key.0));
        if may_wait {
            self.end_bulk();
        }
        may_wait
    }

    /// Enters the last entries, from `first` on, in the filter.
    fn filter_from(&mut self, first: EntryIndex) {
        if self.bulk.filter.is_full(self.bulk.n_bare) {
            return self.filter_all();
        }
        let (filter, hash_key) = (&mut self.bulk.filter, self.hash_key);
        self.arena
            .for_each_key(first, self.arena.n_entries_from(first), |_, key| filter.add(hash_key.tag(key)));
    }

    fn filter_all(&mut self) {
        let Bulk { filter, places, n_bare, .. } = &mut self.bulk;
        filter.begin(*n_bare);
        let hash_key = self.hash_key;
        for place in places {
            let n_entries = self.arena.n_entries_from(*place);
            self.arena.for_each_key(*place, n_entries, |_, key| filter.add(hash_key.tag(key)));
        }
    }

    /// Gives the tail room, and ends the bulk store where it is large or something is to be cleaned up first.
    pub(super) fn extend_bulk(&mut self) {
        let is_over = self.bulk.n_bare == 0 || self.bulk.n_bare >= MAX_BULK_BLOCKS;
        if is_over || self.wants_upkeep(self.bulk.n_bare as u64) {
            self.end_bulk();
            self.make_room();
        } else {
            self.open_extent_if_full();
        }
    }

    /// Inserts all new entries into the table, and gives their holders to all blocks that were put off.
    pub(super) fn end_bulk(&mut self) {
        if self.bulk.n_blocks == 0 {
            return;
        }
        let places = &self.bulk.places;
        let absorbed = if self.bulk.n_bare < MIN_MANY_BLOCKS {
            self.table.absorb_few(&self.arena, places, self.hash_key)
        } else {
            let n_threads = self.config.n_threads.min(self.bulk.n_bare / BLOCKS_PER_THREAD).max(1);
            self.table.absorb_many(&self.arena, places, self.hash_key, n_threads)
        };
        if absorbed.has_grown {
            self.publish_directory();
        }
        let put_off = std::mem::take(&mut self.bulk.put_off);
        for run in &put_off {
            self.give_holder(run);
        }
        self.bulk.put_off = put_off;
        self.bulk.clear();
    }

    fn give_holder(&mut self, run: &PutOff) {
        let mut n_stored = 0;
        let mut index = run.first;
        let mut n_left = run.n_entries;
        while n_left > 0 {
            let Some((key, set)) = self.arena.entry(index) else { return };
            let n_alike = if set == SetRef::EMPTY {
                let n_alike = self.arena.put_first_sets(index, n_left, SetRef::one(run.holder));
                n_stored += n_alike as u64;
                n_alike
            } else if set == SetRef::MOVED {
                n_stored += self.add_to_twin(run.holder, BlockKey(key));
                1
            } else {
                let n_alike = self.arena.n_with_set(index, set, n_left);
                n_stored += self.add_to_neighbors(index, n_alike, set, run.holder, u64::MAX);
                n_alike
            };
            index.0 += n_alike as u32;
            n_left -= n_alike;
        }
        self.sources.count(run.holder, n_stored as i64);
        self.counters.blocks_stored += n_stored;
    }

    /// Gives a holder a block that has another entry than was thought; says how many it got.
    fn add_to_twin(&mut self, holder: u16, key: BlockKey) -> u64 {
        let Some((index, set)) = self.find_entry(key.0) else { return 0 };
        if set == SetRef::EMPTY {
            return self.arena.put_first_sets(index, 1, SetRef::one(holder)) as u64;
        }
        self.add_to_neighbors(index, 1, set, holder, u64::MAX)
    }
}
