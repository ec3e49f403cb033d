//! Compaction: sweeping what no longer counts, cleaning what is sparse, evicting what is over the budget.
//!
//! Extents are filled like a log. An extent with many dead entries is cleaned: what lives is copied to
//! the tail, in order, and the extent is dropped as a whole. Every new extent pays for a bounded amount
//! of this, so memory stays bounded even without calls of [`HolderIndex::maintain`].

use std::sync::atomic::Ordering::Relaxed;

use super::arena::{EXTENT_BYTES, EXTENT_ENTRIES, EntryIndex};
use super::index::HolderIndex;
use super::reclaim::Freed;
use super::sets::SetRef;
use super::sweep::Sweep;
use super::table::Probe;

/// Extents whose marks eviction respects before it takes the next one whole.
const MAX_SECOND_CHANCES: usize = 8;

/// Bytes of the table for each entry, at most: eight in a page that is at least three eighths full.
const TABLE_BYTES_PER_ENTRY: u64 = 22;

impl HolderIndex {
    /// Does about so many entries' worth of cleaning up; true while more is to be done.
    ///
    /// Nothing depends on it being called, but memory comes back sooner and stores pause less.
    pub fn maintain(&mut self, n_entries: usize) -> bool {
        self.collect_freed();
        self.sweep_some(n_entries);
        let mut n_left = n_entries;
        let mut is_clean = false;
        while n_left > 0 && !is_clean {
            n_left = n_left.saturating_sub(EXTENT_ENTRIES);
            let n_dead = self.arena.n_used - self.arena.n_live;
            is_clean = n_dead * 8 <= self.arena.n_used || !self.clean_sparsest(7);
        }
        let is_tight = self.shrink_pages(n_entries);
        self.collect_freed();
        self.keep_budget();
        !is_clean || !is_tight || self.n_retired() > 0 || self.reclaimer.n_waiting() > 0
    }

    /// All bytes that the index has allocated.
    pub(super) fn bytes(&self) -> u64 {
        self.arena.n_extents as u64 * EXTENT_BYTES + self.table.bytes() + self.bytes_beside_entries()
    }

    pub(super) fn n_retired(&self) -> usize {
        self.sources.retired.len() + self.sweep.as_ref().map_or(0, |sweep| sweep.holders.len())
    }

    /// Makes room for at least one entry at the tail.
    pub(super) fn make_room(&mut self) {
        self.collect_freed();
        self.sweep_some(2 * EXTENT_ENTRIES);
        let n_dead = self.arena.n_used - self.arena.n_live;
        if n_dead * 4 > self.arena.n_used {
            self.clean_sparsest(6);
        }
        let mut n_tries = 0;
        while self.arena.tail_is_full() && self.is_over(2) && !self.arena.sealed.is_empty() {
            self.evict_oldest(n_tries >= MAX_SECOND_CHANCES);
            n_tries += 1;
        }
        let presses = self.planned_bytes(2) > self.config.budget_bytes / 2;
        self.shared.wants_marks.store(presses, Relaxed);
        self.open_extent_if_full();
    }

    /// Whether there is something to clean up or to evict before the tail goes on, given entries that are not dead but
    /// still without holders.
    pub(super) fn wants_upkeep(&self, n_bare: u64) -> bool {
        let n_dead = self.arena.n_used - self.arena.n_live - n_bare;
        n_dead * 4 > self.arena.n_used || self.is_over(2) || self.n_retired() > 0
    }

    /// Evicts until what grew beside the entries (sets, repetitions) fits the budget again.
    pub(super) fn keep_budget(&mut self) {
        let mut n_tries = 0;
        // In an index of one extent that extent has to give.
        while self.bytes() > self.config.budget_bytes
            && (!self.arena.sealed.is_empty() || self.arena.seal_tail())
        {
            self.evict_oldest(n_tries >= MAX_SECOND_CHANCES);
            n_tries += 1;
            self.collect_freed();
        }
    }

    /// Sweeps everything that is retired, and reclaims what readers do not hold back.
    pub(super) fn sweep_all(&mut self) {
        // The pass in progress, and one for what was retired since it began.
        self.sweep_some(usize::MAX);
        self.sweep_some(usize::MAX);
        self.collect_freed();
    }

    fn bytes_beside_entries(&self) -> u64 {
        self.sets.bytes()
            + self.sources.bytes()
            + self.reclaimer.bytes()
            + self.bulk.bytes()
            + size_of::<Self>() as u64
    }

    /// What the index would take with some more extents, all of them full.
    fn planned_bytes(&self, n_more_extents: usize) -> u64 {
        let n_extents = (self.arena.n_extents + n_more_extents) as u64;
        let table_bytes = n_extents * EXTENT_ENTRIES as u64 * TABLE_BYTES_PER_ENTRY;
        n_extents * EXTENT_BYTES + table_bytes.max(self.table.bytes()) + self.bytes_beside_entries()
    }

    fn is_over(&self, n_more_extents: usize) -> bool {
        self.planned_bytes(n_more_extents) > self.config.budget_bytes
    }

    pub(super) fn open_extent_if_full(&mut self) {
        if self.arena.tail_is_full() && self.arena.open_extent().is_some() {
            self.publish_extents();
        }
    }

    /// Looks at some pages of the table, one at a time round and round, and builds those smaller that have
    /// become too large. True if a whole round has found none.
    fn shrink_pages(&mut self, n_entries: usize) -> bool {
        for _ in 0..n_entries.div_ceil(EXTENT_ENTRIES).min(self.table.n_places()) {
            self.shrink_at = (self.shrink_at + 1) % self.table.n_places();
            self.n_tight_pages += 1;
            if self.table.shrink_page(self.shrink_at) {
                self.publish_directory();
                self.n_tight_pages = 0;
            }
        }
        self.n_tight_pages >= self.table.n_places()
    }

    /// Cleans the extent with the fewest live entries, if at most so many eighths of it live.
    fn clean_sparsest(&mut self, max_eighths: usize) -> bool {
        let n_live = |slot: &u32| self.arena.state(*slot as usize).map_or(0, |state| state.n_live);
        let sparsest = self.arena.sealed.iter().copied().min_by_key(n_live);
        let Some(slot) = sparsest.filter(|slot| n_live(slot) * 8 <= EXTENT_ENTRIES * max_eighths) else {
            return false;
        };
        self.drop_extent(slot);
        true
    }

    /// Copies what lives in an extent to the tail and takes the extent out.
    fn drop_extent(&mut self, slot: u32) {
        let Some(state) = self.arena.state(slot as usize) else { return };
        let n_used = state.n_used;
        let mut change = (SetRef::EMPTY, SetRef::EMPTY);
        let mut starts_run = true;
        for offset in 0..n_used {
            let from = EntryIndex::new(slot, offset);
            starts_run |= self.arena.state(slot as usize).is_some_and(|state| state.starts_run(offset));
            let Some((key, set)) = self.arena.entry(from) else { return };
            if !set.is_live() {
                continue;
            }
            let tag = self.hash_key.tag(key);
            let Probe::Found { page, slot: table_slot, .. } = self.probe(tag, key) else { continue };
            // An entry that moves is swept too, so that a sweep in progress need not look at it again.
            let kept = self.without_retired(set, &mut change);
            if !kept.is_live() {
                self.put_entry_set(from, key, set, kept);
                continue;
            }
            self.open_extent_if_full();
            self.sets.retain(kept, 1);
            let Some(to) = self.arena.append(key, kept, starts_run) else {
                self.sets.release(kept, 1);
                return;
            };
            starts_run = false;
            self.move_store_counts(kept, from, to);
            // The new place first, then the way to it, then the end of the old one: a reader finds one of them.
            self.table.redirect(page, table_slot, tag, to);
            self.arena.put_set(from, SetRef::MOVED);
            self.sets.release(set, 1);
            self.counters.entries_moved += 1;
        }
        self.arena.close_extent(slot);
        self.publish_extents();
        self.reclaimer.free(Freed::Extent(slot));
    }

    /// Lets the repetitions of an entry follow it to its new place.
    fn move_store_counts(&mut self, set: SetRef, from: EntryIndex, to: EntryIndex) {
        if !self.arena.may_be_repeated(from) {
            return;
        }
        let mut members = Vec::new();
        self.sets.members(set, &mut members);
        for holder in members {
            let n_times = self.take_store_counts(holder, from);
            if n_times > 0 {
                self.arena.set_repeated(to, 1);
                self.sources.with_store_counts(holder, |store_counts| store_counts.add(to, n_times));
            }
        }
    }

    /// Takes all repetitions of an entry away from a holder and says how many there were.
    pub(super) fn take_store_counts(&mut self, holder: u16, index: EntryIndex) -> u32 {
        if !self.arena.may_be_repeated(index) {
            return 0;
        }
        self.sources.with_store_counts(holder, |store_counts| store_counts.take_all(index)).unwrap_or(0)
    }

    /// Takes the next extent of the clock: runs leave from their tails up to the last mark of a reader.
    fn evict_oldest(&mut self, ignore_marks: bool) {
        let Some(slot) = self.arena.sealed.front().copied() else { return };
        let Some(state) = self.arena.state(slot as usize) else { return };
        let n_used = state.n_used;
        let mut is_kept = false;
        for offset in (0..n_used).rev() {
            let Some(state) = self.arena.state(slot as usize) else { return };
            is_kept |= state.extent.take_mark(offset) && !ignore_marks;
            let ends_run = state.starts_run(offset);
            if !is_kept {
                self.evict_entry(EntryIndex::new(slot, offset));
            }
            is_kept &= !ends_run;
        }
        let n_live = self.arena.state(slot as usize).map_or(0, |state| state.n_live);
        if n_live * 4 > EXTENT_ENTRIES * 3 {
            self.arena.sealed.rotate_left(1);
        } else {
            self.drop_extent(slot);
        }
    }

    fn evict_entry(&mut self, index: EntryIndex) {
        let Some((key, set)) = self.arena.entry(index) else { return };
        if !set.is_live() {
            return;
        }
        let mut members = Vec::new();
        self.sets.members(set, &mut members);
        for holder in members {
            self.sources.count(holder, -1);
            self.take_store_counts(holder, index);
            self.counters.blocks_evicted += u64::from(!self.sources.is_retired(holder));
        }
        self.put_entry_set(index, key, set, SetRef::EMPTY);
    }

    /// Visits so many entries of the sweep in progress, or of a new one if there is a reason for it.
    fn sweep_some(&mut self, n_entries: usize) {
        if self.sweep.is_none() && (!self.sources.retired.is_empty() || !self.gone_sources.is_empty()) {
            let slots =
                (0..self.arena.states.len() as u32).filter(|slot| self.arena.state(*slot as usize).is_some());
            self.sweep = Some(Sweep {
                slots: slots.collect(),
                holders: std::mem::take(&mut self.sources.retired),
                sources: std::mem::take(&mut self.gone_sources),
                offset: 0,
                change: (SetRef::EMPTY, SetRef::EMPTY),
            });
        }
        let Some(mut sweep) = self.sweep.take() else { return };
        let mut n_left = n_entries;
        // A set may have been forgotten since the last call.
        sweep.change = (SetRef::EMPTY, SetRef::EMPTY);
        while n_left > 0
            && let Some(slot) = sweep.slots.last().copied()
        {
            let n_used = self.arena.state(slot as usize).map_or(0, |state| state.n_used);
            let end = n_used.min(sweep.offset.saturating_add(n_left));
            for offset in sweep.offset..end {
                self.sweep_entry(EntryIndex::new(slot, offset), &mut sweep.change);
            }
            n_left -= end.saturating_sub(sweep.offset);
            sweep.offset = end;
            if end >= n_used {
                sweep.slots.pop();
                sweep.offset = 0;
            }
        }
        if !sweep.slots.is_empty() {
            self.sweep = Some(sweep);
            return;
        }
        for holder in sweep.holders {
            self.sources.swept(holder);
            self.reclaimer.free(Freed::Holder(holder));
        }
        for source in sweep.sources {
            self.reclaimer.free(Freed::Source(source));
        }
    }

    fn sweep_entry(&mut self, index: EntryIndex, change: &mut (SetRef, SetRef)) {
        let Some((key, set)) = self.arena.entry(index) else { return };
        if !set.is_live() {
            return;
        }
        let kept = self.without_retired(set, change);
        if kept == set {
            return;
        }
        self.counters.blocks_swept += 1;
        self.put_entry_set(index, key, set, kept);
    }

    /// A set without its retired holders.
    fn without_retired(&mut self, set: SetRef, change: &mut (SetRef, SetRef)) -> SetRef {
        if change.0 != set {
            let sources = &self.sources;
            *change = (set, self.sets.without(set, |holder| sources.is_retired(holder)));
            self.publish_grown_sets();
        }
        change.1
    }
}
