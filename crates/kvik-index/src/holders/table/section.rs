//! The pages of tags that begin with the same bits.

use super::super::arena::{Arena, EntryIndex};
use super::page::{MAX_PAGE_SLOTS, PageCopy, PageState, slot_word, slots_for, tag_of};
use super::{Absorbed, MAX_DIRECTORY_BITS, Probe, SECTION_BITS, directory_index};
use crate::kernels::prefetch;

/// Bits of the tag, behind the section's, that words are put in order by.
const BUCKET_BITS: u32 = 9;

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

    /// Enters entries by their slot words, which come in parts. An entry whose key is there already, at another entry, is left out and
    /// marked as moved.
    pub(super) fn absorb<'a>(
        &mut self,
        parts: impl Iterator<Item = &'a [u64]> + Clone,
        arena: &Arena,
    ) -> Absorbed {
        let ordered = Ordered::new(parts);
        let mut absorbed = Absorbed::default();
        let mut at = 0;
        while let Some(first) = ordered.words.get(at) {
            let page = self.page_for(*first);
            let state = &mut self.pages[page as usize];
            let end = ordered.end_of_page(at, state.page.depth - SECTION_BITS, state.prefix);
            // Before and not meanwhile: in the order of lines, the first lines would be full long before the page is.
            if state.is_crowded_by(end - at) {
                let n_keys = state.n_live + end - at;
                self.rebuild(page, n_keys);
                absorbed.has_grown = true;
                continue;
            }
            absorbed.n_twins += state.absorb(&ordered.words[at..end], arena);
            at = end;
        }
        absorbed
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
#[derive(Debug)]
struct Ordered {
    words: Vec<u64>,
    /// Where the words of a bucket end, for each value of the bits that they are put in order by.
    ends: Vec<u32>,
}

impl Ordered {
    fn new<'a>(parts: impl Iterator<Item = &'a [u64]> + Clone) -> Self {
        let bucket_of = |word: u64| directory_index(tag_of(word) << SECTION_BITS, BUCKET_BITS);
        let mut ends = vec![0_u32; 1 << BUCKET_BITS];
        for part in parts.clone() {
            for word in part {
                ends[bucket_of(*word)] += 1;
            }
        }
        let mut n_before = 0;
        for end in &mut ends {
            (*end, n_before) = (n_before, n_before + *end);
        }
        let mut words = vec![0; n_before as usize];
        for part in parts {
            for word in part {
                let end = &mut ends[bucket_of(*word)];
                words[*end as usize] = *word;
                *end += 1;
            }
        }
        Self { words, ends }
    }

    /// The end of the words, from `at` on, whose tags begin with `prefix` in so many bits behind the section's.
    fn end_of_page(&self, at: usize, n_bits: u32, prefix: u32) -> usize {
        if let Some(n_more_bits) = BUCKET_BITS.checked_sub(n_bits) {
            return self.ends[(((prefix + 1) << n_more_bits) - 1) as usize] as usize;
        }
        // A bucket is of several pages, whose words are mixed.
        let is_of_page =
            |word: &&u64| directory_index(tag_of(**word) << SECTION_BITS, n_bits) == prefix as usize;
        at + self.words[at..].iter().take_while(is_of_page).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_a_page_end_where_another_page_begins() {
        let word = |tag: u32, index| slot_word(tag >> SECTION_BITS, EntryIndex(index));
        let words: Vec<u64> =
            (0..4000_u32).map(|index| word(index.wrapping_mul(0x9e37_79b9), index)).collect();
        let (first, second) = words.split_at(1000);
        let ordered = Ordered::new([first, second].into_iter());
        for n_bits in [0, 1, 5, BUCKET_BITS, BUCKET_BITS + 3] {
            let page_of = |word: u64| directory_index(tag_of(word) << SECTION_BITS, n_bits);
            let mut at = 0;
            while at < words.len() {
                let page = page_of(ordered.words[at]);
                let end = ordered.end_of_page(at, n_bits, page as u32);
                assert!(end > at && ordered.words[at..end].iter().all(|word| page_of(*word) == page));
                let is_mixed = n_bits > BUCKET_BITS;
                assert!(is_mixed || ordered.words[end..].iter().all(|word| page_of(*word) > page));
                at = end;
            }
        }
        let mut sorted = ordered.words;
        sorted.sort_unstable();
        let mut expected = words;
        expected.sort_unstable();
        assert_eq!(sorted, expected);
    }
}
