//! Blocks that are stored in groups: what is slow about them, the way into the table, is done for many at a time.
//!
//! A new block needs a line of the table, which is anywhere in memory. Within a group, blocks that look new get entries
//! without holders, side by side and in the order of their prompts. At the end of the group the sections of the table
//! take them up, several threads at a time; only then it turns out which of them were there already. The others get
//! their holders, and those are added to the entries that there are.
//!
//! Invariants:
//!
//! * What is appended while a group has entries belongs to it. Such an entry has no holders until the group ends: to
//!   readers it is not there.
//! * Whatever takes away holders or blocks of the group, moves entries or drops extents ends the group first. Other blocks
//!   may be taken away meanwhile: a filter says which ones those are.
//! * A group that has ended leaves what its events would have left one after the other: adding holders commutes, and
//!   the bound of a source is not reached within a group.

use std::collections::HashMap;

use super::arena::EntryIndex;
use super::salt::Salt;
use super::sets::SetRef;
use super::{Batch, BlockKey, Event, HolderIndex, Verdict};

/// New entries of a group at which it ends: the table takes them up in some ten milliseconds.
const MAX_GROUP_BLOCKS: usize = 1 << 19;
/// Blocks that are worth a thread: it takes up a thousand while it starts.
const BLOCKS_PER_THREAD: usize = 1 << 14;
/// New entries of a group that are worth putting in order.
const MIN_MANY_BLOCKS: usize = 1 << 10;
/// Blocks of one batch from which it is a group by itself.
const MIN_GROUP_BLOCKS: usize = 1 << 12;
/// Bits of the filter for each key, at least: one in eight others is taken for one of the group.
const FILTER_BITS_PER_KEY: usize = 8;
/// Items of each list of a group whose memory is kept for the next one: some ten kilobytes.
const MAX_KEPT_ITEMS: usize = 1 << 10;
/// Batches whose first table lines are asked for ahead.
const BATCHES_AHEAD: usize = 8;

/// Blocks that a holder gets at the end of a group, side by side in one extent.
#[derive(Debug, Clone, Copy)]
struct PutOff {
    holder: u16,
    first: EntryIndex,
    n_entries: usize,
}

/// Keys that a group may have: all that it has, and some others.
#[derive(Debug, Default)]
struct Filter {
    /// A power of two of them; none if nobody has asked yet.
    bits: Vec<u64>,
}

/// What waits for the end of a group.
#[derive(Debug)]
pub(super) struct Group {
    /// Whether blocks may be put off at all.
    is_open: bool,
    /// Who gets what, in the order of events.
    put_off: Vec<PutOff>,
    /// Where runs of new entries begin, by their first keys: another holder may get the same blocks.
    starts: HashMap<u64, EntryIndex, Salt>,
    /// Where the entries of the group are: from each of these on to the end of its extent.
    places: Vec<EntryIndex>,
    filter: Filter,
    /// The last entry that the last event got.
    cursor: Option<EntryIndex>,
    /// New entries.
    n_bare: usize,
    /// Blocks that holders get.
    n_blocks: usize,
}

impl PutOff {
    fn last(&self) -> EntryIndex {
        EntryIndex(self.first.0 + self.n_entries as u32 - 1)
    }
}

impl Filter {
    /// Begins anew with room for so many keys and as many again.
    fn begin(&mut self, n_keys: usize) {
        self.bits.clear();
        self.bits.resize((n_keys * 2 * FILTER_BITS_PER_KEY / 64).next_power_of_two().max(64), 0);
    }

    fn is_full(&self, n_keys: usize) -> bool {
        n_keys * FILTER_BITS_PER_KEY > self.bits.len() * 64
    }

    fn place_of(&self, tag: u32) -> (usize, u64) {
        let bit = tag as usize % (self.bits.len() * 64);
        (bit / 64, 1 << (bit % 64))
    }

    fn add(&mut self, tag: u32) {
        let (word, bit) = self.place_of(tag);
        self.bits[word] |= bit;
    }

    fn may_have(&self, tag: u32) -> bool {
        let (word, bit) = self.place_of(tag);
        self.bits[word] & bit != 0
    }
}

impl Group {
    pub(super) fn new(salt: Salt) -> Self {
        Self {
            is_open: false,
            put_off: Vec::new(),
            starts: HashMap::with_hasher(salt),
            places: Vec::new(),
            filter: Filter::default(),
            cursor: None,
            n_bare: 0,
            n_blocks: 0,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        let starts = self.starts.capacity() * (size_of::<(u64, EntryIndex)>() + 1);
        let filter = self.filter.bits.capacity() * size_of::<u64>();
        let places = self.places.capacity() * size_of::<EntryIndex>();
        (self.put_off.capacity() * size_of::<PutOff>() + starts + places + filter) as u64
    }

    /// Whether so many blocks more may be put off, of a source that may get `n_allowed`.
    pub(super) fn has_room(&self, n_blocks: usize, n_allowed: u64) -> bool {
        self.is_open && (self.n_blocks + n_blocks) as u64 <= n_allowed
    }

    /// Notes that a holder gets neighbors when the group ends.
    fn add(&mut self, holder: u16, first: EntryIndex, n_entries: usize) {
        self.n_blocks += n_entries;
        match self.put_off.last_mut() {
            Some(run) if run.holder == holder && run.last().0 + 1 == first.0 && first.offset() > 0 => {
                run.n_entries += n_entries;
            }
            _ => self.put_off.push(PutOff { holder, first, n_entries }),
        }
        self.cursor = self.put_off.last().map(PutOff::last);
    }

    fn contains(&self, index: EntryIndex) -> bool {
        self.places.iter().any(|first| first.slot() == index.slot() && first.offset() <= index.offset())
    }

    fn clear(&mut self) {
        self.put_off.clear();
        self.starts.clear();
        self.places.clear();
        self.filter.bits.clear();
        self.cursor = None;
        self.n_bare = 0;
        self.n_blocks = 0;
    }

    /// Keeps no more memory than a small group needs: what it takes is missing from the budget of entries.
    fn give_back(&mut self) {
        self.put_off.shrink_to(MAX_KEPT_ITEMS);
        self.starts.shrink_to(MAX_KEPT_ITEMS);
        self.places.shrink_to(MAX_KEPT_ITEMS);
        self.filter.bits.shrink_to(MAX_KEPT_ITEMS);
    }
}

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
        self.in_group(|index| {
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

    /// Whether a batch is worth a group of its own.
    pub(super) fn is_group(events: &[Event<'_>]) -> bool {
        let n_blocks = |event: &Event<'_>| match event {
            Event::Stored { keys, .. } => keys.len(),
            _ => 0,
        };
        events.iter().map(n_blocks).sum::<usize>() >= MIN_GROUP_BLOCKS
    }

    /// Lets `store` put blocks off, and ends the group after it.
    pub(super) fn in_group<T>(&mut self, store: impl FnOnce(&mut Self) -> T) -> T {
        self.group.is_open = true;
        let stored = store(self);
        self.end_group();
        self.group.is_open = false;
        self.group.give_back();
        stored
    }

    /// The entry that the last event of the group ended with, if it has this key.
    pub(super) fn end_of_last_event(&self, key: BlockKey) -> Option<EntryIndex> {
        self.group.cursor.filter(|index| self.arena.has_key(*index, key.0))
    }

    /// Whether an entry is the last one of all and waits for the end of the group: what comes behind it is new.
    pub(super) fn is_last_of_group(&self, index: EntryIndex) -> bool {
        self.arena.is_last(index) && self.group.contains(index)
    }

    /// Whether an entry is one of the group's.
    pub(super) fn is_in_group(&self, index: EntryIndex) -> bool {
        self.group.contains(index)
    }

    /// Puts off blocks that are entries of the group already, from `index` on, which has the first key; gives how many.
    pub(super) fn share_run(&mut self, holder: u16, index: EntryIndex, keys: &[BlockKey]) -> usize {
        let n_equal = self.arena.n_equal(index, keys);
        self.group.add(holder, index, n_equal);
        n_equal
    }

    /// The entry of the group at which a run begins with this block.
    pub(super) fn start_in_group(&self, key: BlockKey) -> Option<EntryIndex> {
        self.group.starts.get(&key.0).copied()
    }

    /// Puts off blocks that look new.
    pub(super) fn put_off(&mut self, holder: u16, mut keys: &[BlockKey], mut starts_run: bool) {
        while !keys.is_empty() {
            if self.arena.tail_is_full() {
                self.extend_group();
            }
            let Some((first, n_entries)) = self.arena.append_bare(keys, starts_run) else {
                self.counters.blocks_refused += keys.len() as u64;
                return;
            };
            let (appended, rest) = keys.split_at(n_entries);
            if starts_run {
                self.group.starts.insert(appended[0].0, first);
            }
            if self.group.places.last().is_none_or(|place| place.slot() != first.slot()) {
                self.group.places.push(first);
            }
            self.group.n_bare += n_entries;
            self.group.add(holder, first, n_entries);
            if !self.group.filter.bits.is_empty() {
                self.filter_from(first);
            }
            keys = rest;
            starts_run = true;
        }
    }

    /// Ends the group if a block may wait for that, so that it can be taken away; true if it was ended.
    pub(super) fn end_group_of(&mut self, key: BlockKey) -> bool {
        if self.group.n_bare == 0 {
            return false;
        }
        if self.group.filter.bits.is_empty() {
            self.filter_all();
        }
        let may_wait = self.group.filter.may_have(self.salt.tag(key.0));
        if may_wait {
            self.end_group();
        }
        may_wait
    }

    /// Enters the last entries, from `first` on, in the filter.
    fn filter_from(&mut self, first: EntryIndex) {
        if self.group.filter.is_full(self.group.n_bare) {
            return self.filter_all();
        }
        let (filter, salt) = (&mut self.group.filter, self.salt);
        self.arena.for_each_key(first, self.arena.n_entries_from(first), |_, key| filter.add(salt.tag(key)));
    }

    fn filter_all(&mut self) {
        let Group { filter, places, n_bare, .. } = &mut self.group;
        filter.begin(*n_bare);
        let salt = self.salt;
        for place in places {
            let n_entries = self.arena.n_entries_from(*place);
            self.arena.for_each_key(*place, n_entries, |_, key| filter.add(salt.tag(key)));
        }
    }

    /// Gives the tail room, and ends the group where it is large or something is to be cleaned up first.
    pub(super) fn extend_group(&mut self) {
        let is_over = self.group.n_bare == 0 || self.group.n_bare >= MAX_GROUP_BLOCKS;
        if is_over || self.wants_upkeep(self.group.n_bare as u64) {
            self.end_group();
            self.make_room();
        } else {
            self.open_extent_if_full();
        }
    }

    /// Lets the table take up all new entries, and gives their holders to all blocks that were put off.
    pub(super) fn end_group(&mut self) {
        if self.group.n_blocks == 0 {
            return;
        }
        let places = &self.group.places;
        let absorbed = if self.group.n_bare < MIN_MANY_BLOCKS {
            self.table.absorb_few(&self.arena, places, self.salt)
        } else {
            let n_threads = self.config.n_threads.min(self.group.n_bare / BLOCKS_PER_THREAD).max(1);
            self.table.absorb_many(&self.arena, places, self.salt, n_threads)
        };
        if absorbed.has_grown {
            self.publish_directory();
        }
        let put_off = std::mem::take(&mut self.group.put_off);
        for run in &put_off {
            self.give_holder(run);
        }
        self.group.put_off = put_off;
        self.group.clear();
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
