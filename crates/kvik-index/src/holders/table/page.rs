//! The pages of the table: lines of eight slots.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use super::super::arena::{Arena, EntryIndex};
use crate::kernels::{Line, halves_masks, prefetch, zeroed_lines};

/// Also what new memory is filled with.
const FREE: u64 = 0;
const DELETED: u64 = 1;
/// Added to an entry's number, so that no slot in use is one of the two above.
const INDEX_BASE: u32 = 2;
/// Slots of a line.
const LINE_SLOTS: usize = 8;
/// Words whose lines are on their way at a time: some more than a core waits for at once.
const WORDS_AHEAD: usize = 32;

pub(super) const MIN_PAGE_SLOTS: usize = 128;
/// Slots of the largest page: 1 MiB, which a rebuild moves through the second-level cache.
pub(super) const MAX_PAGE_SLOTS: usize = 1 << 17;

/// The lines of a page, and how many bits of the tag all its keys share.
///
/// Invariant: a key that belongs to a line and stands in a later one has no free slot in any line before it, so
/// a search may stop at a free slot.
#[derive(Debug, Clone)]
pub(super) struct Page {
    pub(super) lines: Arc<[Line]>,
    pub(super) depth: u32,
}

/// What the writer knows of a page.
#[derive(Debug)]
pub(super) struct PageState {
    pub(super) page: Page,
    pub(super) n_live: usize,
    /// Slots in use or deleted.
    n_taken: usize,
    /// The bits of the tag behind the section's that all keys of the page share.
    pub(super) prefix: u32,
}

/// A page that is filled from another one and that no reader knows yet.
#[derive(Debug)]
pub(super) struct PageCopy {
    page: Page,
    /// Slots in use of each line.
    n_filled: Vec<u8>,
    n_live: usize,
    prefix: u32,
}

impl Page {
    pub(super) fn new(n_slots: usize, depth: u32) -> Self {
        Self { lines: zeroed_lines(n_slots / LINE_SLOTS), depth }
    }

    pub(super) fn n_slots(&self) -> usize {
        self.lines.len() * LINE_SLOTS
    }

    pub(super) fn slot(&self, slot: usize) -> &AtomicU64 {
        &self.lines[slot / LINE_SLOTS].0[slot % LINE_SLOTS]
    }

    pub(super) fn is_deleted(&self, slot: usize) -> bool {
        self.slot(slot).load(Relaxed) == DELETED
    }

    /// The line where the search for a tag begins.
    #[inline]
    pub(super) fn home(&self, tag: u32) -> usize {
        ((u64::from(tag << self.depth) * self.lines.len() as u64) >> 32) as usize
    }

    /// The slot and entry of a tag that `accept` takes, or the slot where it would go.
    #[inline]
    pub(super) fn search(
        &self,
        tag: u32,
        mut accept: impl FnMut(EntryIndex) -> bool,
    ) -> Result<(usize, EntryIndex), usize> {
        let mut at = self.home(tag);
        let mut reusable = None;
        for _ in 0..self.lines.len() {
            let line = &self.lines[at].0;
            let (mut hits, free) = halves_masks(&line.each_ref().map(|slot| slot.load(Relaxed)), tag);
            while hits != 0 {
                let lane = hits.trailing_zeros() as usize;
                hits &= hits - 1;
                // Acquire: pairs with the release by which the slot was filled, which may be another one by now.
                let word = line[lane].load(Acquire);
                let (found_tag, index) = parts_of(word);
                if found_tag == tag && word > DELETED && accept(index) {
                    return Ok((at * LINE_SLOTS + lane, index));
                }
            }
            if free != 0 {
                return Err(reusable.unwrap_or(at * LINE_SLOTS + free.trailing_zeros() as usize));
            }
            if reusable.is_none() {
                let deleted = line.iter().position(|slot| slot.load(Relaxed) == DELETED);
                reusable = deleted.map(|lane| at * LINE_SLOTS + lane);
            }
            at = if at + 1 == self.lines.len() { 0 } else { at + 1 };
        }
        // At most three quarters of a page are taken, so there is a free slot and this is not reached.
        Err(reusable.unwrap_or(0))
    }

    /// Hands the entries of all tags from `tag` on that belong to its line to `take`. Gives the first tag of the next
    /// line, which may be one past the last of all tags, and how many lines were read.
    ///
    /// An entry that stays in the table throughout is found: no line between its own and the one where it stands has a
    /// free slot meanwhile.
    pub(super) fn walk_line(&self, tag: u32, mut take: impl FnMut(EntryIndex)) -> (u64, usize) {
        let home = self.home(tag);
        // The number of lines is a power of two, so lines begin at whole tags or have none.
        let line_end = ((home as u64 + 1) << 32) / self.lines.len() as u64;
        let page_start = u64::from(tag & !(u32::MAX >> self.depth));
        let end = page_start + line_end.div_ceil(1 << self.depth);
        let tags = u64::from(tag)..end;
        let mut at = home;
        for n_lines in 1..=self.lines.len() {
            let mut has_free = false;
            for slot in &self.lines[at].0 {
                // Acquire: pairs with the release by which the slot was filled.
                let word = slot.load(Acquire);
                has_free |= word == FREE;
                let (found_tag, index) = parts_of(word);
                if word > DELETED && tags.contains(&u64::from(found_tag)) {
                    take(index);
                }
            }
            if has_free {
                return (end, n_lines);
            }
            at = if at + 1 == self.lines.len() { 0 } else { at + 1 };
        }
        (end, self.lines.len())
    }

    /// Hands the words of all slots in use to `take`, in the order of their lines.
    pub(super) fn for_each_word(&self, mut take: impl FnMut(u64)) {
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

impl PageState {
    pub(super) fn new(n_slots: usize, depth: u32, prefix: u32) -> Self {
        Self { page: Page::new(n_slots, depth), n_live: 0, n_taken: 0, prefix }
    }

    /// Enters words that there is room for; gives how many were left out because their keys are there already.
    pub(super) fn absorb(&mut self, words: &[u64], arena: &Arena) -> usize {
        let mut n_twins = 0;
        for (at, word) in words.iter().enumerate() {
            if let Some(ahead) = words.get(at + WORDS_AHEAD) {
                prefetch(&self.page.lines[self.page.home(tag_of(*ahead))]);
            }
            let (tag, index) = parts_of(*word);
            match self.page.search(tag, |other| arena.have_one_key(other, index)) {
                Err(slot) => self.put(slot, *word),
                Ok((_, other)) if other != index => {
                    arena.mark_moved(index);
                    n_twins += 1;
                }
                Ok(_) => {}
            }
        }
        n_twins
    }

    /// Fills a slot that was found free or deleted.
    #[inline]
    pub(super) fn put(&mut self, slot: usize, word: u64) {
        let slot = self.page.slot(slot);
        self.n_live += 1;
        self.n_taken += usize::from(slot.load(Relaxed) != DELETED);
        // Release: a reader that finds the entry through this slot sees its key and set.
        slot.store(word, Release);
    }

    /// Empties a slot in use.
    pub(super) fn clear(&mut self, slot: usize) {
        self.n_live -= 1;
        let line = &self.page.lines[slot / LINE_SLOTS].0;
        // No key has passed a line that has a free slot, so another one changes no search.
        let is_passed = line.iter().all(|slot| slot.load(Relaxed) != FREE);
        line[slot % LINE_SLOTS].store(if is_passed { DELETED } else { FREE }, Release);
        self.n_taken -= usize::from(!is_passed);
    }

    /// Whether so many words more would be too many.
    pub(super) fn is_crowded_by(&self, n_words: usize) -> bool {
        (self.n_taken + n_words) * 4 > self.page.n_slots() * 3
    }
}

impl PageCopy {
    pub(super) fn new(n_slots: usize, depth: u32, prefix: u32) -> Self {
        let page = Page::new(n_slots, depth);
        Self { n_filled: vec![0; page.lines.len()], page, prefix, n_live: 0 }
    }

    pub(super) fn add(&mut self, word: u64) {
        let mut at = self.page.home(tag_of(word));
        while usize::from(self.n_filled[at]) == LINE_SLOTS {
            at = if at + 1 == self.n_filled.len() { 0 } else { at + 1 };
        }
        self.page.lines[at].0[usize::from(self.n_filled[at])].store(word, Relaxed);
        self.n_filled[at] += 1;
        self.n_live += 1;
    }

    pub(super) fn finish(self) -> PageState {
        PageState { page: self.page, n_live: self.n_live, n_taken: self.n_live, prefix: self.prefix }
    }
}

/// Slots of a page for so many keys, of which three quarters may be taken.
pub(super) fn slots_for(n_keys: usize) -> usize {
    (n_keys * 4).div_ceil(3).next_power_of_two().max(MIN_PAGE_SLOTS)
}

/// A tag and the number of an entry, as they stand in a slot.
#[inline]
pub(super) fn slot_word(tag: u32, index: EntryIndex) -> u64 {
    u64::from(tag) << 32 | u64::from(index.0 + INDEX_BASE)
}

/// The tag and the entry of a slot word.
#[inline]
fn parts_of(word: u64) -> (u32, EntryIndex) {
    (tag_of(word), EntryIndex((word as u32).wrapping_sub(INDEX_BASE)))
}

/// The tag of a slot word.
#[inline]
pub(super) fn tag_of(word: u64) -> u32 {
    (word >> 32) as u32
}
