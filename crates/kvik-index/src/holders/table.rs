//! Key to entry: open addressing in pages that grow and split one at a time.
//!
//! A slot is one word: 32 bits of the key's hash (its tag) and the number of the entry, so a probe touches an
//! entry only when the tag fits. A page is found by the first bits of the tag. A page that is full is
//! built anew, a large one as two; readers keep the old page, which does not change any more, until
//! they load the directory again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use super::arena::EntryIndex;

const FREE: u64 = 0;
const DELETED: u64 = 1;
/// Added to an entry's number, so that no slot in use is one of the two above.
const INDEX_BASE: u32 = 2;

const MIN_PAGE_SLOTS: usize = 1024;
/// Slots of the largest page: 1 MiB, which a rebuild moves through the second-level cache.
const MAX_PAGE_SLOTS: usize = 1 << 17;
const MAX_DIRECTORY_BITS: u32 = 18;
/// Slots that a search for an absent key mostly stays within.
const TYPICAL_SEARCH: usize = 6;

/// The slots of a page.
pub(super) type Page = Arc<[AtomicU64]>;

/// What readers find pages by: the first `log2(len)` bits of the tag.
#[derive(Debug)]
pub(super) struct Directory {
    bits: u32,
    pages: Vec<Page>,
}

/// What the writer knows of a page.
#[derive(Debug)]
struct PageState {
    slots: Page,
    n_live: usize,
    /// Slots in use or deleted.
    n_taken: usize,
    /// How many bits of the tag all keys of the page share, and which.
    depth: u32,
    prefix: u32,
}

/// The writer's side.
#[derive(Debug)]
pub(super) struct Table {
    pages: Vec<PageState>,
    page_of: Vec<u32>,
    bits: u32,
    n_slots: u64,
}

/// Where a key is, or where it would go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Probe {
    Found { page: u32, slot: usize, index: EntryIndex },
    Absent { page: u32, slot: usize },
}

impl Directory {
    /// Searches for a tag and asks `accept` about each entry under it.
    #[inline]
    pub(super) fn find(&self, tag: u32, accept: impl FnMut(EntryIndex) -> bool) -> Option<EntryIndex> {
        let page = self.pages.get(directory_index(tag, self.bits))?;
        match search(page, tag, accept) {
            Ok((_, index)) => Some(index),
            Err(_) => None,
        }
    }

    /// Asks for the line where the search for a tag begins.
    #[inline]
    pub(super) fn touch(&self, tag: u32) -> u64 {
        let page = &self.pages[directory_index(tag, self.bits)];
        page[home(tag, page.len())].load(Relaxed)
    }
}

impl Table {
    pub(super) fn new() -> Self {
        let slots = new_page(MIN_PAGE_SLOTS);
        let first = PageState { slots, n_live: 0, n_taken: 0, depth: 0, prefix: 0 };
        Self { pages: vec![first], page_of: vec![0], bits: 0, n_slots: MIN_PAGE_SLOTS as u64 }
    }

    /// An empty table with room for so many keys, so that a load does not rebuild.
    pub(super) fn with_room(n_keys: u64) -> Self {
        let per_page = (MAX_PAGE_SLOTS / 2) as u64;
        let bits =
            n_keys.div_ceil(per_page).max(1).next_power_of_two().trailing_zeros().min(MAX_DIRECTORY_BITS);
        let n_pages = 1_u64 << bits;
        let n_slots = page_slots((n_keys / n_pages + n_keys / n_pages / 32) as usize);
        let pages = (0..n_pages as u32).map(|prefix| PageState {
            slots: new_page(n_slots),
            n_live: 0,
            n_taken: 0,
            depth: bits,
            prefix,
        });
        let (pages, page_of) = (pages.collect(), (0..n_pages as u32).collect());
        Self { pages, page_of, bits, n_slots: n_slots as u64 * n_pages }
    }

    pub(super) fn bytes(&self) -> u64 {
        let per_page = (size_of::<PageState>() + 2 * size_of::<usize>()) as u64;
        let per_place = (size_of::<u32>() + size_of::<Page>()) as u64;
        self.n_slots * 8 + self.pages.len() as u64 * per_page + self.page_of.len() as u64 * per_place
    }

    /// Changes whenever [`Self::bytes`] changes.
    pub(super) fn size_mark(&self) -> u64 {
        self.n_slots
    }

    /// Asks for the line where the search for a tag begins; many at a time overlap their misses.
    pub(super) fn touch(&self, tag: u32) -> u64 {
        let slots = &self.pages[self.page_of[directory_index(tag, self.bits)] as usize].slots;
        let first = home(tag, slots.len());
        // A search that begins near the end of a line mostly goes on in the next one.
        let last = (first + TYPICAL_SEARCH).min(slots.len() - 1);
        slots[first].load(Relaxed) ^ slots[last].load(Relaxed)
    }

    /// Tags and entries in the order of the pages that they belong to.
    pub(super) fn by_place(&self, tagged: &[(u32, EntryIndex)]) -> Vec<(u32, EntryIndex)> {
        let mut ends = vec![0_usize; self.page_of.len()];
        for (tag, _) in tagged {
            ends[directory_index(*tag, self.bits)] += 1;
        }
        let mut n_before = 0;
        for end in &mut ends {
            (*end, n_before) = (n_before, n_before + *end);
        }
        let mut placed = vec![(0, EntryIndex(0)); tagged.len()];
        for pair in tagged {
            let end = &mut ends[directory_index(pair.0, self.bits)];
            placed[*end] = *pair;
            *end += 1;
        }
        placed
    }

    #[inline]
    pub(super) fn probe(&self, tag: u32, accept: impl FnMut(EntryIndex) -> bool) -> Probe {
        let page = self.page_of[directory_index(tag, self.bits)];
        match search(&self.pages[page as usize].slots, tag, accept) {
            Ok((slot, index)) => Probe::Found { page, slot, index },
            Err(slot) => Probe::Absent { page, slot },
        }
    }

    /// Fills the slot that a probe found absent. True if a page was rebuilt first, so that the
    /// directory must be published.
    pub(super) fn insert(&mut self, page: u32, slot: usize, tag: u32, index: EntryIndex) -> bool {
        let word = slot_word(tag, index);
        let state = &mut self.pages[page as usize];
        let reuses = state.slots[slot].load(Relaxed) == DELETED;
        if reuses || (state.n_taken + 1) * 4 <= state.slots.len() * 3 {
            // Release: whoever finds the entry through this slot sees its key and set.
            state.slots[slot].store(word, Release);
            state.n_live += 1;
            state.n_taken += usize::from(!reuses);
            return false;
        }
        self.rebuild(page);
        if let Probe::Absent { page, slot } = self.probe(tag, |_| false) {
            let state = &mut self.pages[page as usize];
            state.slots[slot].store(word, Release);
            state.n_live += 1;
            state.n_taken += 1;
        }
        true
    }

    /// Lets a slot point to another entry with the same key.
    pub(super) fn redirect(&self, page: u32, slot: usize, tag: u32, index: EntryIndex) {
        self.pages[page as usize].slots[slot].store(slot_word(tag, index), Release);
    }

    /// Empties a slot.
    pub(super) fn delete(&mut self, page: u32, slot: usize) {
        let state = &mut self.pages[page as usize];
        let n_slots = state.slots.len();
        state.n_live -= 1;
        // At the end of a cluster nobody searches past the slot, nor past deleted ones before it.
        if state.slots[(slot + 1) % n_slots].load(Relaxed) != FREE {
            state.slots[slot].store(DELETED, Release);
            return;
        }
        let mut at = slot;
        loop {
            state.slots[at].store(FREE, Release);
            state.n_taken -= 1;
            at = (at + n_slots - 1) % n_slots;
            if state.slots[at].load(Relaxed) != DELETED {
                return;
            }
        }
    }

    /// Builds one page smaller that has become too large for what is in it; true if there was one
    /// and the directory must be published.
    pub(super) fn shrink_page(&mut self, place: usize) -> bool {
        let page = self.page_of[place % self.page_of.len()];
        let state = &self.pages[page as usize];
        if state.slots.len() == MIN_PAGE_SLOTS || state.n_live * 4 >= state.slots.len() {
            return false;
        }
        self.rebuild(page);
        true
    }

    pub(super) fn n_places(&self) -> usize {
        self.page_of.len()
    }

    /// What readers are given.
    pub(super) fn published(&self) -> Directory {
        let slots = |page: &u32| Arc::clone(&self.pages[*page as usize].slots);
        Directory { bits: self.bits, pages: self.page_of.iter().map(slots).collect() }
    }

    /// Builds a page anew with room to grow, as two pages if it is large.
    fn rebuild(&mut self, page: u32) {
        let state = &self.pages[page as usize];
        let (old, n_live, depth, prefix) =
            (Arc::clone(&state.slots), state.n_live, state.depth, state.prefix);
        self.n_slots -= old.len() as u64;
        let n_slots = page_slots(n_live);
        if n_slots <= MAX_PAGE_SLOTS || depth == MAX_DIRECTORY_BITS {
            let slots = copy_page(&old, n_slots, |_| true);
            self.n_slots += n_slots as u64;
            self.pages[page as usize] = PageState { slots, n_live, n_taken: n_live, depth, prefix };
            return;
        }
        if depth == self.bits {
            self.page_of = self.page_of.iter().flat_map(|page| [*page, *page]).collect();
            self.bits += 1;
        }
        let depth = depth + 1;
        let in_half = |tag: u32, half: u32| directory_index(tag, depth) == (prefix << 1 | half) as usize;
        let n_first = old.iter().map(|slot| slot.load(Relaxed));
        let n_first = n_first.filter(|word| *word > DELETED && in_half((*word >> 32) as u32, 0)).count();
        for half in 0..2 {
            let n_live = if half == 0 { n_first } else { n_live - n_first };
            let slots = copy_page(&old, page_slots(n_live), |tag| in_half(tag, half));
            let prefix = prefix << 1 | half;
            self.n_slots += slots.len() as u64;
            let state = PageState { slots, n_live, n_taken: n_live, depth, prefix };
            let number = if half == 0 { page } else { self.pages.len() as u32 };
            if half == 0 {
                self.pages[page as usize] = state;
            } else {
                self.pages.push(state);
            }
            let first = (prefix << (self.bits - depth)) as usize;
            self.page_of[first..first + (1 << (self.bits - depth))].fill(number);
        }
    }
}

fn new_page(n_slots: usize) -> Page {
    (0..n_slots).map(|_| AtomicU64::new(FREE)).collect()
}

/// Slots for so many keys and some more: 2^k or 1.5 * 2^k, at most 9/16 full. With a limit of 3/4 a page
/// is between half and three quarters full while it grows.
fn page_slots(n_live: usize) -> usize {
    let needed = (n_live * 16 / 9 + 1).max(MIN_PAGE_SLOTS);
    let power = needed.next_power_of_two();
    if power / 4 * 3 >= needed { power / 4 * 3 } else { power }
}

/// Copies the slots whose tags `select` takes, for which the new page has room.
fn copy_page(old: &Page, n_slots: usize, select: impl Fn(u32) -> bool) -> Page {
    let page = new_page(n_slots);
    for word in old.iter().map(|slot| slot.load(Relaxed)) {
        if word <= DELETED || !select((word >> 32) as u32) {
            continue;
        }
        let mut at = home((word >> 32) as u32, page.len());
        while page[at].load(Relaxed) != FREE {
            at = if at + 1 == page.len() { 0 } else { at + 1 };
        }
        page[at].store(word, Relaxed);
    }
    page
}

fn directory_index(tag: u32, bits: u32) -> usize {
    ((u64::from(tag) << bits) >> 32) as usize
}

/// The slot where the search for a tag begins. The multiplication spreads tags that share their first bits.
fn home(tag: u32, n_slots: usize) -> usize {
    ((u64::from(tag.wrapping_mul(0x9e37_79b1)) * n_slots as u64) >> 32) as usize
}

fn slot_word(tag: u32, index: EntryIndex) -> u64 {
    u64::from(tag) << 32 | u64::from(index.0 + INDEX_BASE)
}

/// The slot and entry of a tag that `accept` takes, or the slot where it would go.
#[inline]
fn search(
    page: &[AtomicU64],
    tag: u32,
    mut accept: impl FnMut(EntryIndex) -> bool,
) -> Result<(usize, EntryIndex), usize> {
    let mut at = home(tag, page.len());
    let mut reusable = None;
    for _ in 0..page.len() {
        // Acquire: pairs with the release of whoever filled the slot.
        let word = page[at].load(Acquire);
        if word == FREE {
            return Err(reusable.unwrap_or(at));
        }
        if word == DELETED {
            reusable = reusable.or(Some(at));
        } else if (word >> 32) as u32 == tag {
            let index = EntryIndex(word as u32 - INDEX_BASE);
            if accept(index) {
                return Ok((at, index));
            }
        }
        at = if at + 1 == page.len() { 0 } else { at + 1 };
    }
    // At most three quarters of a page are taken, so there is a free slot and this is not reached.
    Err(reusable.unwrap_or(at))
}
