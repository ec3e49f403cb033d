//! Key to entry: open addressing in pages that grow and split one at a time.
//!
//! A slot is one word: 32 bits of the key's hash (its tag) and the number of the entry, so a probe touches an
//! entry only when the tag fits. A page is found by the first bits of the tag, a line of eight slots by the
//! bits after them; a search goes on in the next line only where a line has no free slot. A page that is full is
//! built anew, a large one as two; readers keep the old page, which does not change any more, until
//! they load the directory again. Lines are in the order of tags, so a rebuild is a walk through both pages.
//!
//! The pages of tags that begin with the same five bits are a section. Sections know nothing of each other, so
//! several threads can fill them at a time.

mod page;
mod section;
mod threads;

use std::sync::atomic::Ordering::Release;

use self::page::{MAX_PAGE_SLOTS, MIN_PAGE_SLOTS, Page, PageState, slot_word, slots_for};
use self::section::Section;
use self::threads::share_out;
use super::arena::{Arena, EntryIndex};
use super::hash_key::HashKey;
use crate::kernels::prefetch;

const MAX_DIRECTORY_BITS: u32 = 18;
const SECTION_BITS: u32 = 5;
/// Sections of a table: many more than threads, so that these have about the same to do.
const N_SECTIONS: usize = 1 << SECTION_BITS;

/// What readers find pages by: the first `log2(len)` bits of the tag.
#[derive(Debug)]
pub(super) struct Directory {
    bits: u32,
    pages: Vec<Page>,
}

/// The writer's side.
#[derive(Debug)]
pub(super) struct Table {
    sections: Vec<Section>,
}

/// Where a key is, or where it would go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Probe {
    Found { page: u32, slot: usize, index: EntryIndex },
    Absent { page: u32, slot: usize },
}

/// What became of entries that a section was given.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Absorbed {
    /// Pages were rebuilt, so that the directory must be published.
    pub(super) has_grown: bool,
    /// Entries whose keys were there already.
    pub(super) n_twins: usize,
}

impl Absorbed {
    fn with(self, other: Self) -> Self {
        Self { has_grown: self.has_grown | other.has_grown, n_twins: self.n_twins + other.n_twins }
    }
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

    /// As [`Page::walk_line`].
    pub(super) fn walk_line(&self, tag: u32, take: impl FnMut(EntryIndex)) -> (u64, usize) {
        self.pages[directory_index(tag, self.bits)].walk_line(tag, take)
    }

    /// Asks the cache for the line where the search for a tag begins.
    #[inline]
    pub(super) fn prefetch(&self, tag: u32) {
        if let Some(page) = self.pages.get(directory_index(tag, self.bits)) {
            prefetch(&page.lines[page.home(tag)]);
        }
    }
}

impl Table {
    pub(super) fn new() -> Self {
        Self { sections: (0..N_SECTIONS).map(|_| Section::new(0, MIN_PAGE_SLOTS)).collect() }
    }

    /// An empty table with room for so many keys, so that a load does not rebuild.
    pub(super) fn with_room(n_keys: u64) -> Self {
        // Some less than the limit, since no page has just its part of the keys.
        let per_page = (MAX_PAGE_SLOTS / 16 * 11) as u64;
        let n_keys = n_keys.div_ceil(N_SECTIONS as u64);
        let max_bits = MAX_DIRECTORY_BITS - SECTION_BITS;
        let bits = n_keys.div_ceil(per_page).max(1).next_power_of_two().trailing_zeros().min(max_bits);
        let n_slots = slots_for((n_keys >> bits) as usize * 12 / 11);
        Self { sections: (0..N_SECTIONS).map(|_| Section::new(bits, n_slots)).collect() }
    }

    pub(super) fn bytes(&self) -> u64 {
        let per_page = (size_of::<PageState>() + 64) as u64;
        let n_pages: usize = self.sections.iter().map(|section| section.pages.len()).sum();
        let n_places: usize = self.sections.iter().map(|section| section.page_of.len()).sum();
        let published = (N_SECTIONS << self.section_bits()) * size_of::<Page>();
        let sections = n_places * size_of::<u32>() + N_SECTIONS * size_of::<Section>();
        self.size_mark() * 8 + n_pages as u64 * per_page + (published + sections) as u64
    }

    /// Changes whenever [`Self::bytes`] changes.
    pub(super) fn size_mark(&self) -> u64 {
        self.sections.iter().map(|section| section.n_slots).sum()
    }

    /// Asks the cache for the line where the search for a tag begins; several at a time overlap their misses.
    #[inline]
    pub(super) fn prefetch(&self, tag: u32) {
        self.sections[section_of(tag)].prefetch(tag);
    }

    #[inline]
    pub(super) fn probe(&self, tag: u32, accept: impl FnMut(EntryIndex) -> bool) -> Probe {
        self.sections[section_of(tag)].probe(tag, accept)
    }

    /// As [`Section::insert`].
    pub(super) fn insert(&mut self, page: u32, slot: usize, tag: u32, index: EntryIndex) -> bool {
        self.sections[section_of(tag)].insert(page, slot, tag, index)
    }

    /// Enters all entries from each of `places` on to the end of its extent, one after the other. An entry whose key is
    /// there already, at another entry, is left out and marked as moved.
    pub(super) fn absorb_few(&mut self, arena: &Arena, places: &[EntryIndex], hash_key: HashKey) -> Absorbed {
        let mut absorbed = Absorbed::default();
        for place in places {
            arena.for_each_key(*place, arena.n_entries_from(*place), |index, key| {
                let tag = hash_key.tag(key);
                match self.probe(tag, |other| arena.have_one_key(other, index)) {
                    Probe::Absent { page, slot } => absorbed.has_grown |= self.insert(page, slot, tag, index),
                    Probe::Found { index: other, .. } if other != index => {
                        arena.mark_moved(index);
                        absorbed.n_twins += 1;
                    }
                    Probe::Found { .. } => {}
                }
            });
        }
        absorbed
    }

    /// As [`Self::absorb_few`], in the order of their places in the table and on several threads.
    pub(super) fn absorb_many(
        &mut self,
        arena: &Arena,
        places: &[EntryIndex],
        hash_key: HashKey,
        n_threads: usize,
    ) -> Absorbed {
        let parts = share_out(pieces(arena, places, n_threads), n_threads, |pieces| {
            let n_entries: usize = pieces.iter().map(|(_, n_entries)| n_entries).sum();
            // Some more than the mean, so that hardly one has to grow.
            let per_section = n_entries / N_SECTIONS * 17 / 16 + 64;
            let mut words: Vec<Vec<u64>> = (0..N_SECTIONS).map(|_| Vec::with_capacity(per_section)).collect();
            for (first, n_entries) in pieces {
                arena.for_each_key(first, n_entries, |index, key| {
                    let tag = hash_key.tag(key);
                    words[section_of(tag)].push(slot_word(tag, index));
                });
            }
            words
        });
        let sections = self.sections.iter_mut().enumerate().collect();
        let absorbed = share_out(sections, n_threads, |(number, section): (usize, &mut Section)| {
            section.absorb(parts.iter().map(|part| part[number].as_slice()), arena)
        });
        absorbed.into_iter().fold(Absorbed::default(), Absorbed::with)
    }

    /// Lets a slot point to another entry with the same key.
    pub(super) fn redirect(&self, page: u32, slot: usize, tag: u32, index: EntryIndex) {
        let state = &self.sections[section_of(tag)].pages[page as usize];
        state.page.slot(slot).store(slot_word(tag, index), Release);
    }

    /// Empties the slot of an entry.
    pub(super) fn delete(&mut self, tag: u32, index: EntryIndex) {
        let section = &mut self.sections[section_of(tag)];
        let Probe::Found { page, slot, .. } = section.probe(tag, |other| other == index) else { return };
        section.pages[page as usize].clear(slot);
    }

    /// Builds one page smaller that has become too large for what is in it; true if there was one
    /// and the directory must be published.
    pub(super) fn shrink_page(&mut self, place: usize) -> bool {
        let section = &mut self.sections[place % N_SECTIONS];
        let page = section.page_of[place / N_SECTIONS % section.page_of.len()];
        let state = &section.pages[page as usize];
        let n_slots = state.page.n_slots();
        if n_slots == MIN_PAGE_SLOTS || state.n_live * 4 >= n_slots {
            return false;
        }
        let n_keys = 2 * state.n_live;
        section.rebuild(page, n_keys);
        true
    }

    /// How many places [`Self::shrink_page`] has to look at to see every page.
    pub(super) fn n_places(&self) -> usize {
        N_SECTIONS << self.section_bits()
    }

    /// What readers are given.
    pub(super) fn published(&self) -> Directory {
        let bits = self.section_bits();
        let mut pages = Vec::with_capacity(N_SECTIONS << bits);
        for section in &self.sections {
            for page in &section.page_of {
                let page = &section.pages[*page as usize].page;
                pages.extend(std::iter::repeat_n(page, 1 << (bits - section.bits)).cloned());
            }
        }
        Directory { bits: SECTION_BITS + bits, pages }
    }

    /// The most bits that a section finds its pages by.
    fn section_bits(&self) -> u32 {
        self.sections.iter().map(|section| section.bits).max().unwrap_or(0)
    }
}

/// The entries from each of `places` on, in so many lists of about the same size; each piece is in one extent.
fn pieces(arena: &Arena, places: &[EntryIndex], n_lists: usize) -> Vec<Vec<(EntryIndex, usize)>> {
    let n_entries: usize = places.iter().map(|place| arena.n_entries_from(*place)).sum();
    let per_list = n_entries.div_ceil(n_lists.max(1)).max(1);
    let mut lists = vec![Vec::new()];
    let mut n_missing = per_list;
    for place in places {
        let (mut first, mut n_left) = (*place, arena.n_entries_from(*place));
        while n_left > 0 {
            if n_missing == 0 {
                lists.push(Vec::new());
                n_missing = per_list;
            }
            let n_taken = n_left.min(n_missing);
            if let Some(list) = lists.last_mut() {
                list.push((first, n_taken));
            }
            first.0 += n_taken as u32;
            n_left -= n_taken;
            n_missing -= n_taken;
        }
    }
    lists
}

fn directory_index(tag: u32, bits: u32) -> usize {
    ((u64::from(tag) << bits) >> 32) as usize
}

/// The section of a tag.
#[inline]
fn section_of(tag: u32) -> usize {
    (tag >> (32 - SECTION_BITS)) as usize
}
