//! Key to entry: open addressing in pages that grow and split one at a time.
//!
//! A slot is one word: 32 bits of the key's hash (its tag) and the number of the entry, so a probe touches an
//! entry only when the tag fits. A page is found by the first bits of the tag, a line of eight slots by the
//! bits after them; a search goes on in the next line only where a line has no free slot. A page that is full is
//! built anew, a large one as two; readers keep the old page, which does not change any more, until
//! they load the directory again. Lines are in the order of tags, so a rebuild is a walk through both pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use super::arena::EntryIndex;
use crate::kernels::prefetch;

const FREE: u64 = 0;
const DELETED: u64 = 1;
/// Added to an entry's number, so that no slot in use is one of the two above.
const INDEX_BASE: u32 = 2;

const MIN_PAGE_SLOTS: usize = 1024;
/// Slots of the largest page: 1 MiB, which a rebuild moves through the second-level cache.
const MAX_PAGE_SLOTS: usize = 1 << 17;
const MAX_DIRECTORY_BITS: u32 = 18;
/// Slots of a line.
const LINE_SLOTS: usize = 8;

/// The slots that one miss of the cache brings.
///
/// Invariant: a key that belongs to a line and stands in a later one has no free slot in any line before it, so
/// a search may stop at a free slot.
#[derive(Debug)]
#[repr(align(64))]
struct Line([AtomicU64; LINE_SLOTS]);

/// The lines of a page, and how many bits of the tag all its keys share.
#[derive(Debug, Clone)]
struct Page {
    lines: Arc<[Line]>,
    depth: u32,
}

/// What readers find pages by: the first `log2(len)` bits of the tag.
#[derive(Debug)]
pub(super) struct Directory {
    bits: u32,
    pages: Vec<Page>,
}

/// What the writer knows of a page.
#[derive(Debug)]
struct PageState {
    page: Page,
    n_live: usize,
    /// Slots in use or deleted.
    n_taken: usize,
    /// The bits of the tag that all keys of the page share.
    prefix: u32,
}

/// A page that is filled from another one and that no reader knows yet.
#[derive(Debug)]
struct PageCopy {
    page: Page,
    /// Slots in use of each line.
    n_filled: Vec<u8>,
    n_live: usize,
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
        match page.search(tag, accept) {
            Ok((_, index)) => Some(index),
            Err(_) => None,
        }
    }

    /// Asks the cache for the line where the search for a tag begins.
    #[inline]
    pub(super) fn prefetch(&self, tag: u32) {
        if let Some(page) = self.pages.get(directory_index(tag, self.bits)) {
            prefetch(&page.lines[page.home(tag)]);
        }
    }
}

impl Page {
    fn new(n_slots: usize, depth: u32) -> Self {
        let line = |_| Line([const { AtomicU64::new(FREE) }; LINE_SLOTS]);
        Self { lines: (0..n_slots / LINE_SLOTS).map(line).collect(), depth }
    }

    fn n_slots(&self) -> usize {
        self.lines.len() * LINE_SLOTS
    }

    fn slot(&self, slot: usize) -> &AtomicU64 {
        &self.lines[slot / LINE_SLOTS].0[slot % LINE_SLOTS]
    }

    /// The line where the search for a tag begins.
    #[inline]
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag << self.depth) * self.lines.len() as u64) >> 32) as usize
    }

    /// The slot and entry of a tag that `accept` takes, or the slot where it would go.
    #[inline]
    fn search(
        &self,
        tag: u32,
        mut accept: impl FnMut(EntryIndex) -> bool,
    ) -> Result<(usize, EntryIndex), usize> {
        let mut at = self.home(tag);
        let mut reusable = None;
        for _ in 0..self.lines.len() {
            // Acquire: pairs with the release of whoever filled the slot.
            let words = self.lines[at].0.each_ref().map(|slot| slot.load(Acquire));
            let mut hits = mask(&words, |word| (word >> 32) as u32 == tag);
            while hits != 0 {
                let lane = hits.trailing_zeros() as usize;
                hits &= hits - 1;
                if words[lane] > DELETED {
                    let index = EntryIndex(words[lane] as u32 - INDEX_BASE);
                    if accept(index) {
                        return Ok((at * LINE_SLOTS + lane, index));
                    }
                }
            }
            let free = mask(&words, |word| word == FREE);
            if free != 0 {
                return Err(reusable.unwrap_or(at * LINE_SLOTS + free.trailing_zeros() as usize));
            }
            if reusable.is_none() {
                let deleted = mask(&words, |word| word == DELETED);
                reusable = (deleted != 0).then(|| at * LINE_SLOTS + deleted.trailing_zeros() as usize);
            }
            at = if at + 1 == self.lines.len() { 0 } else { at + 1 };
        }
        // At most three quarters of a page are taken, so there is a free slot and this is not reached.
        Err(reusable.unwrap_or(0))
    }

    /// Hands the words of all slots in use to `take`, in the order of their lines.
    fn for_each_word(&self, mut take: impl FnMut(u64)) {
        for line in self.lines.iter() {
            for slot in &line.0 {
                let word = slot.load(Relaxed);
                if word > DELETED {
                    take(word);
                }
            }
        }
    }
}

impl Table {
    pub(super) fn new() -> Self {
        let first = PageState { page: Page::new(MIN_PAGE_SLOTS, 0), n_live: 0, n_taken: 0, prefix: 0 };
        Self { pages: vec![first], page_of: vec![0], bits: 0, n_slots: MIN_PAGE_SLOTS as u64 }
    }

    /// An empty table with room for so many keys, so that a load does not rebuild.
    pub(super) fn with_room(n_keys: u64) -> Self {
        // Some less than the limit, since no page has just its part of the keys.
        let per_page = (MAX_PAGE_SLOTS / 16 * 11) as u64;
        let bits =
            n_keys.div_ceil(per_page).max(1).next_power_of_two().trailing_zeros().min(MAX_DIRECTORY_BITS);
        let n_pages = 1_u64 << bits;
        let n_slots = grown_slots((n_keys / n_pages) as usize * 6 / 11);
        let pages = (0..n_pages as u32).map(|prefix| PageState {
            page: Page::new(n_slots, bits),
            n_live: 0,
            n_taken: 0,
            prefix,
        });
        let (pages, page_of) = (pages.collect(), (0..n_pages as u32).collect());
        Self { pages, page_of, bits, n_slots: n_slots as u64 * n_pages }
    }

    pub(super) fn bytes(&self) -> u64 {
        let per_page = (size_of::<PageState>() + 64) as u64;
        let per_place = (size_of::<u32>() + size_of::<Page>()) as u64;
        self.n_slots * 8 + self.pages.len() as u64 * per_page + self.page_of.len() as u64 * per_place
    }

    /// Changes whenever [`Self::bytes`] changes.
    pub(super) fn size_mark(&self) -> u64 {
        self.n_slots
    }

    /// Asks the cache for the line where the search for a tag begins; several at a time overlap their misses.
    #[inline]
    pub(super) fn prefetch(&self, tag: u32) {
        let page = &self.pages[self.page_of[directory_index(tag, self.bits)] as usize].page;
        prefetch(&page.lines[page.home(tag)]);
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
        match self.pages[page as usize].page.search(tag, accept) {
            Ok((slot, index)) => Probe::Found { page, slot, index },
            Err(slot) => Probe::Absent { page, slot },
        }
    }

    /// Fills the slot that a probe found absent. True if a page was rebuilt first, so that the
    /// directory must be published.
    pub(super) fn insert(&mut self, page: u32, slot: usize, tag: u32, index: EntryIndex) -> bool {
        let word = slot_word(tag, index);
        let state = &mut self.pages[page as usize];
        let reuses = state.page.slot(slot).load(Relaxed) == DELETED;
        if reuses || (state.n_taken + 1) * 4 <= state.page.n_slots() * 3 {
            // Release: whoever finds the entry through this slot sees its key and set.
            state.page.slot(slot).store(word, Release);
            state.n_live += 1;
            state.n_taken += usize::from(!reuses);
            return false;
        }
        self.rebuild(page);
        if let Probe::Absent { page, slot } = self.probe(tag, |_| false) {
            let state = &mut self.pages[page as usize];
            state.page.slot(slot).store(word, Release);
            state.n_live += 1;
            state.n_taken += 1;
        }
        true
    }

    /// Lets a slot point to another entry with the same key.
    pub(super) fn redirect(&self, page: u32, slot: usize, tag: u32, index: EntryIndex) {
        self.pages[page as usize].page.slot(slot).store(slot_word(tag, index), Release);
    }

    /// Empties the slot of an entry.
    pub(super) fn delete(&mut self, tag: u32, index: EntryIndex) {
        let Probe::Found { page, slot, .. } = self.probe(tag, |other| other == index) else { return };
        let state = &mut self.pages[page as usize];
        state.n_live -= 1;
        let line = &state.page.lines[slot / LINE_SLOTS].0;
        // No key has passed a line that has a free slot, so another one changes no search.
        let is_passed = line.iter().all(|slot| slot.load(Relaxed) != FREE);
        line[slot % LINE_SLOTS].store(if is_passed { DELETED } else { FREE }, Release);
        state.n_taken -= usize::from(!is_passed);
    }

    /// Builds one page smaller that has become too large for what is in it; true if there was one
    /// and the directory must be published.
    pub(super) fn shrink_page(&mut self, place: usize) -> bool {
        let page = self.page_of[place % self.page_of.len()];
        let state = &self.pages[page as usize];
        let n_slots = state.page.n_slots();
        if n_slots == MIN_PAGE_SLOTS || state.n_live * 4 >= n_slots {
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
        let page = |page: &u32| self.pages[*page as usize].page.clone();
        Directory { bits: self.bits, pages: self.page_of.iter().map(page).collect() }
    }

    /// Builds a page anew with room to grow, as two pages if it is large.
    fn rebuild(&mut self, page: u32) {
        let state = &self.pages[page as usize];
        let (old, n_live, prefix) = (state.page.clone(), state.n_live, state.prefix);
        self.n_slots -= old.n_slots() as u64;
        let n_slots = grown_slots(n_live);
        if n_slots <= MAX_PAGE_SLOTS || old.depth == MAX_DIRECTORY_BITS {
            let mut copy = PageCopy::new(n_slots, old.depth, prefix);
            old.for_each_word(|word| copy.add(word));
            self.n_slots += n_slots as u64;
            self.pages[page as usize] = copy.finish();
            return;
        }
        if old.depth == self.bits {
            self.page_of = self.page_of.iter().flat_map(|page| [*page, *page]).collect();
            self.bits += 1;
        }
        let depth = old.depth + 1;
        let mut halves = [0, 1].map(|half| PageCopy::new(MAX_PAGE_SLOTS, depth, prefix << 1 | half));
        old.for_each_word(|word| halves[directory_index((word >> 32) as u32, depth) % 2].add(word));
        self.n_slots += 2 * MAX_PAGE_SLOTS as u64;
        let second = self.pages.len() as u32;
        let n_places = 1 << (self.bits - depth);
        for (half, number) in halves.into_iter().zip([page, second]) {
            let state = half.finish();
            let first = (state.prefix << (self.bits - depth)) as usize;
            self.page_of[first..first + n_places].fill(number);
            if number == second {
                self.pages.push(state);
            } else {
                self.pages[number as usize] = state;
            }
        }
    }
}

impl PageCopy {
    fn new(n_slots: usize, depth: u32, prefix: u32) -> Self {
        let page = Page::new(n_slots, depth);
        Self { n_filled: vec![0; page.lines.len()], page, prefix, n_live: 0 }
    }

    fn add(&mut self, word: u64) {
        let mut at = self.page.home((word >> 32) as u32);
        while usize::from(self.n_filled[at]) == LINE_SLOTS {
            at = if at + 1 == self.n_filled.len() { 0 } else { at + 1 };
        }
        self.page.lines[at].0[usize::from(self.n_filled[at])].store(word, Relaxed);
        self.n_filled[at] += 1;
        self.n_live += 1;
    }

    fn finish(self) -> PageState {
        PageState { page: self.page, n_live: self.n_live, n_taken: self.n_live, prefix: self.prefix }
    }
}

/// Slots for so many keys and as many again: with a limit of 3/4, a page is at least 3/8 full after it has grown.
fn grown_slots(n_live: usize) -> usize {
    (n_live * 8 / 3).next_power_of_two().max(MIN_PAGE_SLOTS)
}

fn directory_index(tag: u32, bits: u32) -> usize {
    ((u64::from(tag) << bits) >> 32) as usize
}

fn slot_word(tag: u32, index: EntryIndex) -> u64 {
    u64::from(tag) << 32 | u64::from(index.0 + INDEX_BASE)
}

/// The words of a line that `select` takes, a bit each.
#[inline]
fn mask(words: &[u64; LINE_SLOTS], select: impl Fn(u64) -> bool) -> u32 {
    words.iter().enumerate().fold(0, |mask, (lane, word)| mask | u32::from(select(*word)) << lane)
}
