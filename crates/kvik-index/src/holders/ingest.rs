//! Blocks that holders get and lose: the inner loops of the writer.
//!
//! Blocks of an event follow each other in a prompt, and so do their entries: neighbors are compared before the
//! table is asked, and neighbors with one set change together. What is new has to go to the table, whose lines
//! are anywhere in memory; they are asked for some keys ahead, so that their misses overlap.

use super::arena::EntryIndex;
use super::sets::SetRef;
use super::table::Probe;
use super::{BlockKey, Event, HolderIndex, SourceId};

/// Keys whose lines of the table are on their way at a time: some more than a core waits for at once, so that it
/// always does.
const KEYS_AHEAD: usize = 32;
/// Events of a batch whose first lines are asked for ahead; more would push the first out of the cache again.
const MAX_EVENTS_AHEAD: usize = 256;

/// What a store may still add and has added.
#[derive(Debug)]
struct Quota {
    n_allowed: u64,
    n_stored: u64,
}

impl HolderIndex {
    /// Asks for the first table line of every event, since most events of a step are of one block.
    pub(super) fn prefetch_events(&self, events: &[Event<'_>]) {
        if events.len() < 2 {
            return;
        }
        for event in events.iter().take(MAX_EVENTS_AHEAD) {
            if let Event::Stored { keys: [first, ..], .. } | Event::Removed { keys: [first, ..], .. } = event
            {
                self.table.prefetch(self.salt.tag(first.0));
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
        // Within a group nothing is put off that the source's bound might refuse.
        let mut may_put_off = self.group.has_room(keys.len(), self.n_allowed(source));
        if !may_put_off {
            self.end_group();
            may_put_off = self.group.has_room(keys.len(), self.n_allowed(source));
        }
        let mut quota = Quota { n_allowed: self.n_allowed(source), n_stored: 0 };
        let in_group = parent.filter(|_| may_put_off).and_then(|parent| self.end_of_last_event(parent));
        let mut previous = in_group.or_else(|| self.arena.last_if(parent?.0));
        let mut asked_to = 0;
        let mut at = 0;
        while at < keys.len() {
            // First of all: it may move entries, empty slots of the table and forget sets.
            if self.arena.tail_is_full() {
                self.extend_group();
            }
            let BlockKey(key) = keys[at];
            let beside = previous.and_then(|index| self.arena.entry_behind(index, key));
            if let Some((index, set)) = beside
                && set.is_live()
            {
                let n_alike = self.add_to_run(index, set, holder, &keys[at..], &mut quota);
                previous = Some(EntryIndex(index.0 + n_alike as u32 - 1));
                at += n_alike;
                continue;
            }
            let ends_group = previous.is_some_and(|index| self.is_last_of_group(index));
            if may_put_off && ends_group {
                self.put_off(holder, &keys[at..], false);
                break;
            }
            if may_put_off && let Some((index, SetRef::EMPTY)) = beside {
                let n_shared = self.share_run(holder, index, &keys[at..]);
                if n_shared > 0 {
                    previous = Some(EntryIndex(index.0 + n_shared as u32 - 1));
                    at += n_shared;
                    continue;
                }
            }
            // A dead entry with this key at this place comes back to life: the run stays whole.
            let revived = beside.filter(|(_, set)| *set == SetRef::EMPTY).map(|(index, _)| index);
            let tag = self.salt.tag(key);
            match self.probe(tag, key) {
                Probe::Found { index, .. } => {
                    let set = self.arena.entry(index).map_or(SetRef::EMPTY, |(_, set)| set);
                    let n_alike = self.add_to_run(index, set, holder, &keys[at..], &mut quota);
                    previous = Some(EntryIndex(index.0 + n_alike as u32 - 1));
                    at += n_alike;
                }
                // Always, so that a group has no other entries between its own.
                Probe::Absent { .. } if may_put_off && revived.is_none() => {
                    let Some(index) = self.start_in_group(keys[at]) else {
                        let starts_run = previous.is_none_or(|index| !self.arena.is_last(index));
                        self.put_off(holder, &keys[at..], starts_run);
                        break;
                    };
                    let n_shared = self.share_run(holder, index, &keys[at..]);
                    previous = Some(EntryIndex(index.0 + n_shared as u32 - 1));
                    at += n_shared;
                }
                Probe::Absent { page, slot } => {
                    previous = if quota.n_allowed == 0 {
                        None
                    } else if let Some(index) = revived {
                        self.arena.put_set(index, SetRef::one(holder));
                        Some(index)
                    } else {
                        let starts_run = previous.is_none_or(|index| !self.arena.is_last(index));
                        self.arena.append(key, SetRef::one(holder), starts_run)
                    };
                    if let Some(index) = previous {
                        if self.table.insert(page, slot, tag, index) {
                            self.publish_directory();
                        }
                        quota.n_stored += 1;
                        quota.n_allowed -= 1;
                    } else {
                        self.counters.blocks_refused += 1;
                    }
                    at += 1;
                    // What follows a new block is mostly new.
                    self.prefetch_ahead(keys, at, &mut asked_to);
                }
            }
        }
        self.sources.count(holder, quota.n_stored as i64);
        self.counters.blocks_stored += quota.n_stored;
    }

    /// How many blocks a source may still get.
    fn n_allowed(&self, source: SourceId) -> u64 {
        let n_held = self.sources.get(source).map_or(0, |entry| entry.n_blocks);
        self.config.max_blocks_per_source.saturating_sub(n_held)
    }

    /// Adds a holder to the entry of the first key and to its neighbors with the next keys and the same set;
    /// says how many they are.
    fn add_to_run(
        &mut self,
        first: EntryIndex,
        set: SetRef,
        holder: u16,
        keys: &[BlockKey],
        quota: &mut Quota,
    ) -> usize {
        let n_alike = self.arena.n_alike(first, set, keys);
        let n_added = self.add_to_neighbors(first, n_alike, set, holder, quota.n_allowed);
        quota.n_stored += n_added;
        quota.n_allowed -= n_added;
        n_alike
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
            self.sources.with_repeats(holder, |repeats| repeats.add_run(first, n_alike));
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
        let mut asked_to = 0;
        for (at, &BlockKey(key)) in keys.iter().enumerate() {
            self.prefetch_ahead(keys, at, &mut asked_to);
            if self.end_group_of(keys[at]) {
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
                && self.sources.with_repeats(holder, |repeats| repeats.take_one(index)) == Some(true)
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

    /// Asks for the table lines of the keys from `at` on that were not asked for; those before `asked_to` were.
    #[inline]
    fn prefetch_ahead(&self, keys: &[BlockKey], at: usize, asked_to: &mut usize) {
        let end = (at + KEYS_AHEAD).min(keys.len());
        for key in keys.get((*asked_to).max(at)..end).unwrap_or_default() {
            self.table.prefetch(self.salt.tag(key.0));
        }
        *asked_to = end;
    }
}
