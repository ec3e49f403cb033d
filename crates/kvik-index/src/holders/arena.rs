//! Where entries lie: extents that are filled from the front and given back as a whole.
//!
//! A key is written once and stays until its extent is dropped; only the set of an entry changes. So a
//! reader that stands on an entry cannot be moved to another key under its feet.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use super::sets::SetRef;
use super::types::BlockKey;
use crate::kernels::{zeroed_half_words, zeroed_words};

/// Entries of an extent: 400 KiB, so that cleaning one is well below a millisecond of memory traffic
/// and ten million blocks are a few hundred extents.
pub(super) const EXTENT_ENTRIES: usize = 1 << EXTENT_BITS;
const EXTENT_BITS: u32 = 15;

/// What an extent takes: keys, sets, and three bits for marks of readers, starts of runs and repetitions.
pub(super) const EXTENT_BYTES: u64 = (EXTENT_ENTRIES * 12 + EXTENT_ENTRIES / 8 * 3 + 128) as u64;

/// The place of an entry: extent and offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EntryIndex(pub(super) u32);

/// A piece of the arena, as readers see it.
#[derive(Debug)]
pub(super) struct Extent {
    pub(super) keys: Box<[AtomicU64]>,
    pub(super) sets: Box<[AtomicU32]>,
    /// One bit an entry: a lookup ended here. A hint for eviction, hence relaxed everywhere.
    marks: Box<[AtomicU64]>,
}

/// What readers find entries by.
pub(super) type Extents = Vec<Option<Arc<Extent>>>;

/// What the writer knows of an extent.
#[derive(Debug)]
pub(super) struct ExtentState {
    pub(super) extent: Arc<Extent>,
    /// Entries written so far.
    pub(super) n_used: usize,
    /// Those whose set is not empty.
    pub(super) n_live: usize,
    run_starts: Box<[u64]>,
    /// Entries that some holder may have stored more than once.
    repeated: Box<[u64]>,
}

/// The writer's side of all extents.
#[derive(Debug)]
pub(super) struct Arena {
    pub(super) states: Vec<Option<ExtentState>>,
    /// Extents that are full, oldest first; the clock hand is its front.
    pub(super) sealed: std::collections::VecDeque<u32>,
    /// The extent that is being filled.
    pub(super) tail: Option<u32>,
    /// Numbers of extents that no reader can mistake for the old ones.
    pub(super) free_slots: Vec<u32>,
    pub(super) n_extents: usize,
    pub(super) n_live: u64,
    pub(super) n_used: u64,
}

impl EntryIndex {
    pub(super) fn new(slot: u32, offset: usize) -> Self {
        Self((slot << EXTENT_BITS) | offset as u32)
    }

    pub(super) fn slot(self) -> usize {
        (self.0 >> EXTENT_BITS) as usize
    }

    pub(super) fn offset(self) -> usize {
        self.0 as usize % EXTENT_ENTRIES
    }
}

impl Extent {
    fn new() -> Self {
        Self {
            keys: zeroed_words(EXTENT_ENTRIES),
            sets: zeroed_half_words(EXTENT_ENTRIES),
            marks: zeroed_words(EXTENT_ENTRIES / 64),
        }
    }

    /// The set of an entry. Acquire: a reader that sees it sees the entry's key and the set's members.
    pub(super) fn set(&self, offset: usize) -> SetRef {
        SetRef(self.sets[offset].load(Acquire))
    }

    /// The key of an entry whose set was read before.
    pub(super) fn key(&self, offset: usize) -> u64 {
        self.keys[offset].load(Relaxed)
    }

    /// Notes that a lookup ended here; the load first keeps the line shared between readers.
    pub(super) fn mark(&self, offset: usize) {
        let bit = 1 << (offset % 64);
        let word = &self.marks[offset / 64];
        if word.load(Relaxed) & bit == 0 {
            word.fetch_or(bit, Relaxed);
        }
    }

    /// Takes the mark away and says whether there was one.
    pub(super) fn take_mark(&self, offset: usize) -> bool {
        let bit = 1 << (offset % 64);
        self.marks[offset / 64].fetch_and(!bit, Relaxed) & bit != 0
    }

    /// Changes the set of an entry. Release: pairs with [`Self::set`].
    pub(super) fn put_set(&self, offset: usize, set: SetRef) {
        self.sets[offset].store(set.0, Release);
    }
}

impl ExtentState {
    pub(super) fn starts_run(&self, offset: usize) -> bool {
        self.run_starts[offset / 64] >> (offset % 64) & 1 == 1
    }
}

impl Arena {
    pub(super) fn new() -> Self {
        Self {
            states: Vec::new(),
            sealed: std::collections::VecDeque::new(),
            tail: None,
            free_slots: Vec::new(),
            n_extents: 0,
            n_live: 0,
            n_used: 0,
        }
    }

    /// Whether the next entry needs a new extent.
    pub(super) fn tail_is_full(&self) -> bool {
        self.tail_state().is_none_or(|tail| tail.n_used == EXTENT_ENTRIES)
    }

    /// Starts a new extent; `None` if no number is left for it.
    pub(super) fn open_extent(&mut self) -> Option<()> {
        let slot = match self.free_slots.pop() {
            Some(slot) => slot,
            // The last extent is left out: the table adds a small number to an index.
            None if self.states.len() + 1 < 1 << (32 - EXTENT_BITS) => {
                self.states.push(None);
                self.states.len() as u32 - 1
            }
            None => return None,
        };
        self.states[slot as usize] = Some(ExtentState {
            extent: Arc::new(Extent::new()),
            n_used: 0,
            n_live: 0,
            run_starts: vec![0; EXTENT_ENTRIES / 64].into_boxed_slice(),
            repeated: vec![0; EXTENT_ENTRIES / 64].into_boxed_slice(),
        });
        self.sealed.extend(self.tail.replace(slot));
        self.n_extents += 1;
        Some(())
    }

    /// Ends the tail before it is full; false if there is nothing in it.
    pub(super) fn seal_tail(&mut self) -> bool {
        if self.tail_state().is_none_or(|tail| tail.n_used == 0) {
            return false;
        }
        self.sealed.extend(self.tail.take());
        true
    }

    /// Takes an extent out of the arena. Its number must wait until no reader knows it.
    pub(super) fn close_extent(&mut self, slot: u32) {
        if let Some(state) = self.states.get_mut(slot as usize).and_then(Option::take) {
            self.n_extents -= 1;
            self.n_used -= state.n_used as u64;
            self.n_live -= state.n_live as u64;
        }
        self.sealed.retain(|sealed| *sealed != slot);
        if self.tail == Some(slot) {
            self.tail = None;
        }
    }

    /// Appends an entry to the tail; `None` if [`Self::tail_is_full`].
    pub(super) fn append(&mut self, key: u64, set: SetRef, starts_run: bool) -> Option<EntryIndex> {
        let slot = self.tail?;
        let state = self.states.get_mut(slot as usize)?.as_mut()?;
        let offset = state.n_used;
        if offset == EXTENT_ENTRIES {
            return None;
        }
        state.extent.keys[offset].store(key, Relaxed);
        state.extent.put_set(offset, set);
        if starts_run {
            state.run_starts[offset / 64] |= 1 << (offset % 64);
        }
        state.n_used += 1;
        state.n_live += 1;
        self.n_used += 1;
        self.n_live += 1;
        Some(EntryIndex::new(slot, offset))
    }

    /// Appends entries without holders to the tail, as many as it has room for; gives the first and how many.
    ///
    /// They are dead until they get a set, which is the caller's to do before anything is cleaned.
    pub(super) fn append_bare(&mut self, keys: &[BlockKey], starts_run: bool) -> Option<(EntryIndex, usize)> {
        let slot = self.tail?;
        let state = self.states.get_mut(slot as usize)?.as_mut()?;
        let first = state.n_used;
        let n_appended = keys.len().min(EXTENT_ENTRIES - first);
        for (place, key) in state.extent.keys[first..].iter().zip(&keys[..n_appended]) {
            place.store(key.0, Relaxed);
        }
        if starts_run && n_appended > 0 {
            state.run_starts[first / 64] |= 1 << (first % 64);
        }
        state.n_used += n_appended;
        self.n_used += n_appended as u64;
        (n_appended > 0).then(|| (EntryIndex::new(slot, first), n_appended))
    }

    /// Gives a set to neighbors that have none, from `first` on and at most so many; says how many they were.
    pub(super) fn put_first_sets(&mut self, first: EntryIndex, n_most: usize, set: SetRef) -> usize {
        let Some(Some(state)) = self.states.get_mut(first.slot()) else { return 0 };
        let places = &state.extent.sets[first.offset()..];
        let is_bare = |place: &&AtomicU32| place.load(Relaxed) == SetRef::EMPTY.0;
        // Release: as in [`Extent::put_set`].
        let give = |place: &AtomicU32| place.store(set.0, Release);
        let n_given = places.iter().take(n_most).take_while(is_bare).map(give).count();
        state.n_live += n_given;
        self.n_live += n_given as u64;
        n_given
    }

    /// How many neighbors from `first` on, at most so many, have this set.
    pub(super) fn n_with_set(&self, first: EntryIndex, set: SetRef, n_most: usize) -> usize {
        let Some(state) = self.state(first.slot()) else { return 0 };
        let places = state.extent.sets[first.offset()..].iter().take(n_most);
        places.take_while(|place| place.load(Relaxed) == set.0).count()
    }

    /// How many neighbors from `first` on have these keys, one after the other.
    pub(super) fn n_equal(&self, first: EntryIndex, keys: &[BlockKey]) -> usize {
        let Some(state) = self.state(first.slot()) else { return 0 };
        let written = state.extent.keys[first.offset()..state.n_used].iter().zip(keys);
        written.take_while(|(key, wanted)| key.load(Relaxed) == wanted.0).count()
    }

    /// How many entries there are from `first` on to the end of its extent.
    pub(super) fn n_entries_from(&self, first: EntryIndex) -> usize {
        self.state(first.slot()).map_or(0, |state| state.n_used.saturating_sub(first.offset()))
    }

    /// Visits so many neighbors from `first` on.
    #[inline]
    pub(super) fn for_each_key(
        &self,
        first: EntryIndex,
        n_entries: usize,
        mut visit: impl FnMut(EntryIndex, u64),
    ) {
        let Some(state) = self.state(first.slot()) else { return };
        for (index, key) in (first.0..).zip(state.extent.keys[first.offset()..].iter().take(n_entries)) {
            visit(EntryIndex(index), key.load(Relaxed));
        }
    }

    /// Whether two entries have the same key, as an entry and itself do.
    #[inline]
    pub(super) fn have_one_key(&self, one: EntryIndex, other: EntryIndex) -> bool {
        let key = |index: EntryIndex| Some(self.state(index.slot())?.extent.key(index.offset()));
        one == other || key(one) == key(other)
    }

    /// Marks an entry without holders as one whose key is at another entry.
    pub(super) fn mark_moved(&self, index: EntryIndex) {
        if let Some(state) = self.state(index.slot()) {
            state.extent.put_set(index.offset(), SetRef::MOVED);
        }
    }

    #[inline]
    pub(super) fn state(&self, slot: usize) -> Option<&ExtentState> {
        self.states.get(slot)?.as_ref()
    }

    /// Whether an entry has a key; its set is not touched.
    #[inline]
    pub(super) fn has_key(&self, index: EntryIndex, key: u64) -> bool {
        self.state(index.slot()).is_some_and(|state| state.extent.key(index.offset()) == key)
    }

    /// The key and the set of an entry.
    #[inline]
    pub(super) fn entry(&self, index: EntryIndex) -> Option<(u64, SetRef)> {
        let extent = &self.state(index.slot())?.extent;
        let set = extent.set(index.offset());
        Some((extent.key(index.offset()), set))
    }

    /// The entry right behind another one and its set, if it has this key.
    #[inline]
    pub(super) fn entry_behind(&self, index: EntryIndex, key: u64) -> Option<(EntryIndex, SetRef)> {
        let state = self.state(index.slot())?;
        let offset = index.offset() + 1;
        let has_key = offset < state.n_used && state.extent.key(offset) == key;
        has_key.then(|| (EntryIndex(index.0 + 1), state.extent.set(offset)))
    }

    /// Notes that neighbors from `first` on have repetitions.
    pub(super) fn set_repeated(&mut self, first: EntryIndex, n_entries: usize) {
        let Some(Some(state)) = self.states.get_mut(first.slot()) else { return };
        let (mut offset, end) = (first.offset(), first.offset() + n_entries);
        while offset < end {
            let n_here = (64 - offset % 64).min(end - offset);
            state.repeated[offset / 64] |= u64::MAX >> (64 - n_here) << (offset % 64);
            offset += n_here;
        }
    }

    /// Whether an entry may have repetitions.
    pub(super) fn may_be_repeated(&self, index: EntryIndex) -> bool {
        let offset = index.offset();
        self.state(index.slot()).is_some_and(|state| state.repeated[offset / 64] >> (offset % 64) & 1 == 1)
    }

    /// How many neighbors from `first` on, which must have the first of these keys, have the following ones
    /// and the same set.
    pub(super) fn n_alike(&self, first: EntryIndex, set: SetRef, keys: &[BlockKey]) -> usize {
        let Some(state) = self.state(first.slot()) else { return 1 };
        let written = first.offset() + 1..state.n_used;
        let neighbors = state.extent.keys[written.clone()].iter().zip(&state.extent.sets[written]);
        let is_alike = |((key, other), wanted): &((&AtomicU64, &AtomicU32), &BlockKey)| {
            key.load(Relaxed) == wanted.0 && other.load(Relaxed) == set.0
        };
        1 + neighbors.zip(&keys[1..]).take_while(is_alike).count()
    }

    /// Whether the next entry will stand right behind this one.
    pub(super) fn is_last(&self, index: EntryIndex) -> bool {
        let is_tail = self.tail == Some(index.slot() as u32);
        is_tail && self.tail_state().is_some_and(|tail| tail.n_used == index.offset() + 1)
    }

    /// The last entry that was written, if it has this key.
    pub(super) fn last_if(&self, key: u64) -> Option<EntryIndex> {
        let offset = self.tail_state()?.n_used.checked_sub(1)?;
        let index = EntryIndex::new(self.tail?, offset);
        self.entry(index).is_some_and(|(found, set)| found == key && set.is_live()).then_some(index)
    }

    /// Changes the set of an entry and keeps the count of live ones.
    pub(super) fn put_set(&mut self, index: EntryIndex, set: SetRef) {
        let Some(Some(state)) = self.states.get_mut(index.slot()) else { return };
        let was_live = state.extent.set(index.offset()).is_live();
        state.extent.put_set(index.offset(), set);
        if was_live && !set.is_live() {
            state.n_live -= 1;
            self.n_live -= 1;
        } else if !was_live && set.is_live() {
            state.n_live += 1;
            self.n_live += 1;
        }
    }

    /// What readers are given.
    pub(super) fn published(&self) -> Extents {
        self.states.iter().map(|state| state.as_ref().map(|state| Arc::clone(&state.extent))).collect()
    }

    fn tail_state(&self) -> Option<&ExtentState> {
        self.state(self.tail? as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_the_neighbors_of_a_run_are_marked_as_repeated() {
        for (first, n_entries) in [(0, 1), (0, 64), (5, 3), (63, 2), (60, 200), (64, 64), (128, 0)] {
            let mut arena = Arena::new();
            arena.open_extent().unwrap();
            arena.set_repeated(EntryIndex::new(0, first), n_entries);
            for offset in 0..400 {
                let is_marked = arena.may_be_repeated(EntryIndex::new(0, offset));
                assert_eq!(is_marked, (first..first + n_entries).contains(&offset), "{offset} of {first}");
            }
        }
    }
}
