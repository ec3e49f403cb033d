//! What a bulk store has put off until its end.

use std::collections::HashMap;

use super::arena::EntryIndex;
use super::hash_key::HashKey;

/// Bits of the filter for each key, at least: one in eight others is taken for one of the bulk store.
const FILTER_BITS_PER_KEY: usize = 8;
/// Items of each list of a bulk store whose memory is kept for the next one: some ten kilobytes.
const MAX_KEPT_ITEMS: usize = 1 << 10;

/// Blocks that a holder gets at the end of a bulk store, side by side in one extent.
#[derive(Debug, Clone, Copy)]
pub(super) struct PutOff {
    pub(super) holder: u16,
    pub(super) first: EntryIndex,
    pub(super) n_entries: usize,
}

/// Keys that a bulk store may have: all that it has, and some others.
#[derive(Debug, Default)]
pub(super) struct Filter {
    /// A power of two of them; empty before the first query.
    pub(super) bits: Vec<u64>,
}

/// What waits for the end of a bulk store.
#[derive(Debug)]
pub(super) struct Bulk {
    /// Whether blocks may be put off at all.
    pub(super) is_open: bool,
    /// Which holder gets which blocks, in the order of events.
    pub(super) put_off: Vec<PutOff>,
    /// Where runs of new entries begin, by their first keys: another holder may get the same blocks.
    pub(super) starts: HashMap<u64, EntryIndex, HashKey>,
    /// Where the entries of the bulk store are: from each of these on to the end of its extent.
    pub(super) places: Vec<EntryIndex>,
    pub(super) filter: Filter,
    /// The last entry that the last event got.
    pub(super) cursor: Option<EntryIndex>,
    /// New entries.
    pub(super) n_bare: usize,
    /// Blocks that holders get.
    pub(super) n_blocks: usize,
}

impl PutOff {
    pub(super) fn last(&self) -> EntryIndex {
        EntryIndex(self.first.0 + self.n_entries as u32 - 1)
    }
}

impl Filter {
    /// Begins anew with room for so many keys and as many again.
    pub(super) fn begin(&mut self, n_keys: usize) {
        self.bits.clear();
        self.bits.resize((n_keys * 2 * FILTER_BITS_PER_KEY / 64).next_power_of_two().max(64), 0);
    }

    pub(super) fn is_full(&self, n_keys: usize) -> bool {
        n_keys * FILTER_BITS_PER_KEY > self.bits.len() * 64
    }

    fn place_of(&self, tag: u32) -> (usize, u64) {
        let bit = tag as usize % (self.bits.len() * 64);
        (bit / 64, 1 << (bit % 64))
    }

    pub(super) fn add(&mut self, tag: u32) {
        let (word, bit) = self.place_of(tag);
        self.bits[word] |= bit;
    }

    pub(super) fn may_have(&self, tag: u32) -> bool {
        let (word, bit) = self.place_of(tag);
        self.bits[word] & bit != 0
    }
}

impl Bulk {
    pub(super) fn new(hash_key: HashKey) -> Self {
        Self {
            is_open: false,
            put_off: Vec::new(),
            starts: HashMap::with_hasher(hash_key),
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

    /// Notes that a holder gets neighbors when the bulk store ends.
    pub(super) fn add(&mut self, holder: u16, first: EntryIndex, n_entries: usize) {
        self.n_blocks += n_entries;
        match self.put_off.last_mut() {
            Some(run) if run.holder == holder && run.last().0 + 1 == first.0 && first.offset() > 0 => {
                run.n_entries += n_entries;
            }
            _ => self.put_off.push(PutOff { holder, first, n_entries }),
        }
        self.cursor = self.put_off.last().map(PutOff::last);
    }

    pub(super) fn contains(&self, index: EntryIndex) -> bool {
        self.places.iter().any(|first| first.slot() == index.slot() && first.offset() <= index.offset())
    }

    pub(super) fn clear(&mut self) {
        self.put_off.clear();
        self.starts.clear();
        self.places.clear();
        self.filter.bits.clear();
        self.cursor = None;
        self.n_bare = 0;
        self.n_blocks = 0;
    }

    /// Keeps no more memory than a small bulk store needs: what it takes is missing from the budget of entries.
    pub(super) fn give_back(&mut self) {
        self.put_off.shrink_to(MAX_KEPT_ITEMS);
        self.starts.shrink_to(MAX_KEPT_ITEMS);
        self.places.shrink_to(MAX_KEPT_ITEMS);
        self.filter.bits.shrink_to(MAX_KEPT_ITEMS);
    }
}
