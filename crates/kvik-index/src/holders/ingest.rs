//! Blocks that holders get and lose: the inner loops of the writer.
//!
//! Blocks of an event follow each other in a prompt, and so do their entries: neighbors are compared before the
//! table is asked, and neighbors with one set change together. What is new has to go to the table, whose lines
//! are anywhere in memory; they are asked for some keys ahead, so that their misses overlap.

use super::arena::EntryIndex;
use super::index::HolderIndex;
use super::sets::SetRef;
use super::table::Probe;
use super::types::{BlockKey, Event, SourceId};

/// Keys whose lines of the table are on their way at a time: some more than a core waits for at once, so that it
/// always does.
const KEYS_AHEAD: usize = 32;
/// Events of a batch whose first lines are asked for ahead; more would push the first out of the cache again.
const MAX_EVENTS_AHEAD: usize = 256;

/// How far a store has come.
#[derive(Debug)]
struct Store {
    holder: u16,
    /// Whether new blocks wait for the end of a bulk store.
    puts_off: bool,
    /// Blocks that the source may still get.
    n_allowed: u64,
    /// Blocks that the holder got.
    n_stored: u64,
    /// The entry of the block before.
    previous: Option<EntryIndex>,
    /// Next keys whose lines of the table are asked for.
    n_asked: usize,
}

impl Store {
    /// Notes that the next blocks have entries from `first` on; gives how many.
    fn done(&mut self, first: EntryIndex, n_blocks: usize) -> usize {
        self.previous = Some(EntryIndex(first.0 + n_blocks as u32 - 1));
        n_blocks
    }
}

impl HolderIndex {
    /// Asks for the first table line of every event, since most events of a step are of one block.
    pub(super) fn prefetch_events(&self, events: &[Event<'_>]) {
        for event in events.iter().take(MAX_EVENTS_AHEAD) {
            if let Event::Stored { keys: [first, ..], .. } | Event::Removed { keys: [first, ..], .. } = event
            {
                self.table.prefetch(self.hash_key.tag(first.0));
            }
        }
    }

    /// Gives a holder blocks that follow each other, behind `parent`.
    pub(super) fn store(
        &mut self,
        source: SourceId,
        holder: u16,
        parent: Option<BlockKey>,
        keys: &[BlockKey],
    ) {
        // Within a bulk store nothing is put off that the source's bound might refuse.
        let mut puts_off = self.bulk.has_room(keys.len(), self.n_allowed(source, holder));
        if !puts_off {
            self.end_bulk();
            puts_off = self.bulk.has_room(keys.len(), self.n_allowed(source, holder));
        }
        let in_bulk = parent.filter(|_| puts_off).and_then(|parent| self.end_of_last_event(parent));
        let previous = in_bulk.or_else(|| self.arena.last_if(parent?.0));
        let n_allowed = self.n_allowed(source, holder);
        let mut store = Store { holder, puts_off, n_allowed, n_stored: 0, previous, n_asked: 0 };
        let mut rest = keys;
        while !rest.is_empty() {
            // First of all: it may move entries, empty slots of the table and forget sets.
            if self.arena.tail_is_full() {
                self.extend_bulk();
            }
            let n_done = self.store_some(&mut store, rest);
            rest = &rest[n_done..];
            store.n_asked = store.n_asked.saturating_sub(n_done);
        }
        self.sources.count(holder, store.n_stored as i64);
        self.counters.blocks_stored += store.n_stored;
    }

    /// How many blocks a source, or a replacement of what it holds, may still get.
    fn n_allowed(&self, source: SourceId, holder: u16) -> u64 {
        let n_held = self.n_blocks_of_replacement(holder);
        let n_held = n_held.or_else(|| self.sources.get(source).map(|entry| entry.n_blocks));
        self.config.max_blocks_per_source.saturating_sub(n_held.unwrap_or(0))
    }

    /// Stores the first of some keys, and as many as go with it; says how many.
    fn store_some(&mut self, store: &mut Store, keys: &[BlockKey]) -> usize {
        let BlockKey(key) = keys[0];
        let beside = store.previous.and_then(|index| self.arena.entry_behind(index, key));
        match beside {
            Some((index, set)) if set.is_live() => return self.add_to_run(store, index, set, keys),
            Some((index, SetRef::EMPTY)) if store.puts_off && self.is_in_bulk(index) => {
                return store.done(index, self.share_run(store.holder, index, keys));
            }
            _ => {}
        }
        if store.puts_off && store.previous.is_some_and(|index| self.is_last_of_bulk(index)) {
            self.put_off(store.holder, keys, false);
            return keys.len();
        }
        // A dead entry with this key at this place comes back to life: the run stays whole.
        let revived = beside.filter(|(_, set)| *set == SetRef::EMPTY).map(|(index, _)| index);
        let tag = self.hash_key.tag(key);
        match self.probe(tag, key) {
            Probe::Found { index, .. } => {
                let set = self.arena.entry(index).map_or(SetRef::EMPTY, |(_, set)| set);
                self.add_to_run(store, index, set, keys)
            }
            // Always, so that a bulk store has no other entries between its own.
            Probe::Absent { .. } if store.puts_off && revived.is_none() => {
                if let Some(index) = self.start_in_bulk(keys[0]) {
                    return store.done(index, self.share_run(store.holder, index, keys));
                }
                self.put_off(store.holder, keys, self.starts_run(store));
                keys.len()
            }
            Probe::Absent { page, slot } => {
                let set = SetRef::one(store.holder);
                store.previous = if store.n_allowed == 0 {
                    None
                } else if let Some(index) = revived {
                    self.arena.put_set(index, set);
                    Some(index)
                } else {
                    self.arena.append(key, set, self.starts_run(store))
                };
                if let Some(index) = store.previous {
                    if self.table.insert(page, slot, tag, index) {
                        self.publish_directory();
                    }
                    store.n_stored += 1;
                    store.n_allowed -= 1;
                } else {
                    self.counters.blocks_refused += 1;
                }
                // What follows a new block is mostly new.
                store.n_asked = self.prefetch_ahead(keys, store.n_asked.max(1));
                1
            }
        }
    }

    /// Whether the next entry begins a run: it does not come right behind the one before.
    fn starts_run(&self, store: &Store) -> bool {
        store.previous.is_none_or(|index| !self.arena.is_last(index))
    }

    /// Adds a holder to the entry of the first key and to its neighbors with the next keys and the same set;
    /// says how many they are.
    fn add_to_run(&mut self, store: &mut Store, first: EntryIndex, set: SetRef, keys: &[BlockKey]) -> usize {
        let n_alike = self.arena.n_alike(first, set, keys);
        let n_added = self.add_to_neighbors(first, n_alike, set, store.holder, store.n_allowed);
        store.n_stored += n_added;
        store.n_allowed -= n_added;
        store.done(first, n_alike)
    }

    /// Adds a holder to neighbors that have one set, as far as it is allowed; says how many blocks it got.
    pub(super) fn add_to_neighbors(
        &mut self,
        first: EntryIndex,
        n_alike: usize,
        set: SetRef,
        holder: u16,
        n_allowed: u64,
    ) -> u64 {
        if self.sets.contains(set, holder) {
            self.arena.set_repeated(first, n_alike);
            self.sources.with_store_counts(holder, |store_counts| store_counts.add_run(first, n_alike));
            self.counters.blocks_repeated += n_alike as u64;
            return 0;
        }
        let n_added = n_allowed.min(n_alike as u64);
        self.counters.blocks_refused += n_alike as u64 - n_added;
        if n_added > 0 {
            let larger = self.sets.with(set, holder);
            self.publish_grown_sets();
            self.sets.retain(larger, n_added as u32);
            for offset in 0..n_added as u32 {
                self.arena.put_set(EntryIndex(first.0 + offset), larger);
            }
            self.sets.release(set, n_added as u32);
        }
        n_added
    }

    /// Takes blocks away from a holder.
    pub(super) fn remove(&mut self, holder: u16, keys: &[BlockKey]) {
        let mut n_removed = 0;
        // The last change of a set, since neighbors mostly make the same one.
        let mut change = (SetRef::EMPTY, SetRef::EMPTY);
        let mut previous = None;
        let mut n_asked = 0;
        for (at, &BlockKey(key)) in keys.iter().enumerate() {
            n_asked = self.prefetch_ahead(&keys[at..], n_asked).saturating_sub(1);
            if self.end_bulk_of(keys[at]) {
                change = (SetRef::EMPTY, SetRef::EMPTY);
            }
            let beside = previous.and_then(|index| self.arena.entry_behind(index, key));
            let found = beside.filter(|(_, set)| set.is_live()).or_else(|| self.find_entry(key));
            let Some((index, set)) = found else {
                self.counters.removals_unknown += 1;
                continue;
            };
            previous = Some(index);
            if change.0 != set {
                if !self.sets.contains(set, holder) {
                    self.counters.removals_unknown += 1;
                    continue;
                }
                change = (set, self.sets.without(set, |member| member == holder));
                self.publish_grown_sets();
            }
            if self.arena.may_be_repeated(index)
                && self.sources.with_store_counts(holder, |store_counts| store_counts.take_one(index))
                    == Some(true)
            {
                self.sets.release_if_unused(change.1);
                change = (SetRef::EMPTY, SetRef::EMPTY);
                continue;
            }
            self.put_entry_set(index, key, set, change.1);
            n_removed += 1;
        }
        self.sources.count(holder, -n_removed);
        self.counters.blocks_removed += n_removed as u64;
    }

    /// Asks for the table lines of the first keys but for those that were asked for; gives how many are then.
    #[inline]
    fn prefetch_ahead(&self, keys: &[BlockKey], n_asked: usize) -> usize {
        let n_ahead = KEYS_AHEAD.min(keys.len());
        for key in keys.get(n_asked..n_ahead).unwrap_or_default() {
            self.table.prefetch(self.hash_key.tag(key.0));
        }
        n_ahead.max(n_asked)
    }
}
