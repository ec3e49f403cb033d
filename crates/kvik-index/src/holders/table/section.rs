//! The pages of tags that begin with the same bits.

use super::super::arena::{Arena, EntryIndex};
use super::page::{MAX_PAGE_SLOTS, PageCopy, PageState, slot_word, slots_for, tag_of};
use super::{Absorbed, MAX_DIRECTORY_BITS, Probe, SECTION_BITS, directory_index};
use crate::kernels::prefetch;

/// Bits of the tag, behind the section's, that words are put in order by.
const BUCKET_BITS: u32 = 10;

/// The pages of tags that begin with the same bits.
#[derive(Debug)]
pub(super) struct Section {
    pub(super) pages: Vec<PageState>,
    /// The page for each value of the next `bits` bits of a tag.
    pub(super) page_of: Vec<u32>,
    pub(super) bits: u32,
    pub(super) n_slots: u64,
}

impl Section {
    pub(super) fn new(bits: u32, n_slots: usize) -> Self {
        let n_pages = 1_u32 << bits;
        let pages = (0..n_pages).map(|prefix| PageState::new(n_slots, SECTION_BITS + bits, prefix)).collect();
        Self { pages, page_of: (0..n_pages).collect(), bits, n_slots: n_slots as u64 * u64::from(n_pages) }
    }

    /// Enters entries by their slot words. An entry whose key is there already, at another entry, is left out and
    /// marked as moved.
    pub(super) fn absorb(&mut self, words: &[u64], arena: &Arena) -> Absorbed {
        // Before and not meanwhile: in the order of lines, the first lines would be full long before the page is.
        let has_grown = self.make_room(words);
        let mut n_twins = 0;
        let ordered = in_order(words);
        let mut rest = ordered.as_slice();
        while let Some(first) = rest.first() {
            let page = self.page_for(*first);
            let n_of_page = rest.iter().take_while(|word| self.page_for(**word) == page).count();
            let (of_page, others) = rest.split_at(n_of_page);
            n_twins += self.pages[page as usize].absorb(of_page, arena);
            rest = others;
        }
        Absorbed { has_grown, n_twins }
    }

    /// Builds pages larger until all of these words have room; true if there was one.
    fn make_room(&mut self, words: &[u64]) -> bool {
        let mut has_grown = false;
        loop {
            let mut n_added = vec![0; self.pages.len()];
            for word in words {
                n_added[self.page_for(*word) as usize] += 1;
            }
            let is_crowded =
                |(page, n_added): &(u32, usize)| self.pages[*page as usize].is_crowded_by(*n_added);
            let crowded: Vec<(u32, usize)> = (0..).zip(n_added).filter(is_crowded).collect();
            if crowded.is_empty() {
                return has_grown;
            }
            for (page, n_added) in crowded {
                self.rebuild(page, self.pages[page as usize].n_live + n_added);
            }
            has_grown = true;
        }
    }

    #[inline]
    pub(super) fn prefetch(&self, tag: u32) {
        let page = &self.pages[self.page_of[self.place_of(tag)] as usize].page;
        prefetch(&page.lines[page.home(tag)]);
    }

    #[inline]
    pub(super) fn probe(&self, tag: u32, accept: impl FnMut(EntryIndex) -> bool) -> Probe {
        let page = self.page_of[self.place_of(tag)];
        match self.pages[page as usize].page.search(tag, accept) {
            Ok((slot, index)) => Probe::Found { page, slot, index },
            Err(slot) => Probe::Absent { page, slot },
        }
    }

    #[inline]
    fn place_of(&self, tag: u32) -> usize {
        directory_index(tag << SECTION_BITS, self.bits)
    }

    #[inline]
    fn page_for(&self, word: u64) -> u32 {
        self.page_of[self.place_of(tag_of(word))]
    }

    /// Fills the slot that a probe found absent. True if a page was rebuilt first, so that the directory must be
    /// published.
    pub(super) fn insert(&mut self, page: u32, slot: usize, tag: u32, index: EntryIndex) -> bool {
        let word = slot_word(tag, index);
        let state = &mut self.pages[page as usize];
        if state.page.is_deleted(slot) || !state.is_crowded_by(1) {
            state.put(slot, word);
            return false;
        }
        // For as many again: with a limit of 3/4, a page is at least 3/8 full after it has grown.
        self.rebuild(page, 2 * self.pages[page as usize].n_live);
        if let Probe::Absent { page, slot } = self.probe(tag, |_| false) {
            self.pages[page as usize].put(slot, word);
        }
        true
    }

    /// Builds a page anew with room for so many keys, or as two pages if that is too large.
    pub(super) fn rebuild(&mut self, page: u32, n_keys: usize) {
        let state = &self.pages[page as usize];
        let (old, prefix) = (state.page.clone(), state.prefix);
        self.n_slots -= old.n_slots() as u64;
        let n_slots = slots_for(n_keys);
        if n_slots <= MAX_PAGE_SLOTS || old.depth == MAX_DIRECTORY_BITS {
            let mut copy = PageCopy::new(n_slots, old.depth, prefix);
            old.for_each_word(|word| copy.add(word));
            self.n_slots += n_slots as u64;
            self.pages[page as usize] = copy.finish();
            return;
        }
        if old.depth == SECTION_BITS + self.bits {
            self.page_of = self.page_of.iter().flat_map(|page| [*page, *page]).collect();
            self.bits += 1;
        }
        let depth = old.depth + 1;
        let mut halves = [0, 1].map(|half| PageCopy::new(MAX_PAGE_SLOTS, depth, prefix << 1 | half));
        old.for_each_word(|word| halves[directory_index(tag_of(word), depth) % 2].add(word));
        self.n_slots += 2 * MAX_PAGE_SLOTS as u64;
        let second = self.pages.len() as u32;
        let n_spare_bits = SECTION_BITS + self.bits - depth;
        for (half, number) in halves.into_iter().zip([page, second]) {
            let state = half.finish();
            let first = (state.prefix << n_spare_bits) as usize;
            self.page_of[first..first + (1 << n_spare_bits)].fill(number);
            if number == second {
                self.pages.push(state);
            } else {
                self.pages[number as usize] = state;
            }
        }
    }
}

/// The words of a section in the order of their lines, or nearly so: then all that stand in one piece of memory are
/// looked at one after the other. Words of one tag keep their order.
fn in_order(words: &[u64]) -> Vec<u64> {
    let bucket_of = |word: u64| directory_index(tag_of(word) << SECTION_BITS, BUCKET_BITS);
    let mut ends = [0_u32; 1 << BUCKET_BITS];
    for word in words {
        ends[bucket_of(*word)] += 1;
    }
    let mut n_before = 0;
    for end in &mut ends {
        (*end, n_before) = (n_before, n_before + *end);
    }
    let mut ordered = vec![0; words.len()];
    for word in words {
        let end = &mut ends[bucket_of(*word)];
        ordered[*end as usize] = *word;
        *end += 1;
    }
    ordered
}
