//! The state of every page of a region: pure bookkeeping under the allocator's lock.

use std::sync::Arc;

use super::bitmap::Bitmap;
use super::runs::UnmappedRuns;
use super::{PageCounters, PageObserver, PageState, Shortage};
use crate::geometry::{Extent, PageId};

/// Which pages are unmapped, parked, used, quarantined or in transition.
///
/// A mapped extent has parked and used pages only; an extent in transition or in quarantine is so as a
/// whole. An extent lies within one word of the bitmaps, since it is aligned and at most 32 pages, so
/// every question about it is one mask.
#[derive(Debug)]
pub(super) struct PageTracker {
    capacity_pages: u32,
    limit_pages: u32,
    unmapped: UnmappedRuns,
    used: Bitmap,
    /// Parked pages whose extent has a used page too: handed out first, so that others can empty.
    parked_beside_used: Bitmap,
    /// Pages of extents that are parked as a whole and could be unmapped.
    parked_whole: Bitmap,
    /// Logarithm of the size of the extent that a mapped page belongs to.
    extent_order: Vec<u8>,
    n_quarantined: u32,
    n_mapping: u32,
    n_unmapping: u32,
    n_map_calls: u64,
    n_unmap_calls: u64,
    n_mapped_total: u64,
    n_unmapped_total: u64,
    n_changes: u64,
    observer: Option<Arc<dyn PageObserver>>,
}

/// Whether pages can be handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    /// All of them after so many more are mapped; zero if enough are parked.
    Grow(u32),
    /// Not now.
    Short(Shortage),
}

/// The word of an extent in a bitmap, and its bits there.
fn mask_of(extent: Extent) -> (u32, u64) {
    let first = extent.first_page.0;
    (first / 64, (u64::MAX >> (64 - extent.n_pages)) << (first % 64))
}

/// The pages of a word's bits.
fn push_pages(word_idx: u32, mut bits: u64, pages: &mut Vec<PageId>) {
    while bits != 0 {
        pages.push(PageId(word_idx * 64 + bits.trailing_zeros()));
        bits &= bits - 1;
    }
}

/// The lowest `n` of the bits that are set, which are all of them if there are fewer.
fn lowest_bits(bits: u64, n: u32) -> u64 {
    if bits.count_ones() <= n {
        return bits;
    }
    let mut rest = bits;
    for _ in 0..n {
        rest &= rest - 1;
    }
    bits & !rest
}

impl PageTracker {
    /// All pages unmapped.
    pub(super) fn new(capacity_pages: u32, limit_pages: u32) -> Self {
        Self {
            capacity_pages,
            limit_pages: limit_pages.min(capacity_pages),
            unmapped: UnmappedRuns::new(capacity_pages),
            used: Bitmap::new(capacity_pages),
            parked_beside_used: Bitmap::new(capacity_pages),
            parked_whole: Bitmap::new(capacity_pages),
            extent_order: vec![0; capacity_pages as usize],
            n_quarantined: 0,
            n_mapping: 0,
            n_unmapping: 0,
            n_map_calls: 0,
            n_unmap_calls: 0,
            n_mapped_total: 0,
            n_unmapped_total: 0,
            n_changes: 0,
            observer: None,
        }
    }

    /// Tells `observer` of all changes from now on.
    pub(super) fn set_observer(&mut self, observer: Arc<dyn PageObserver>) {
        self.observer = Some(observer);
    }

    /// Moves the limit, at most to the size of the reservation.
    pub(super) fn set_limit_pages(&mut self, limit_pages: u32) {
        self.limit_pages = limit_pages.min(self.capacity_pages);
    }

    pub(super) fn n_used(&self) -> u32 {
        self.used.len()
    }

    pub(super) fn n_parked(&self) -> u32 {
        self.parked_beside_used.len() + self.parked_whole.len()
    }

    pub(super) fn n_quarantined(&self) -> u32 {
        self.n_quarantined
    }

    /// Pages that the mapper works on now.
    pub(super) fn n_in_transition(&self) -> u32 {
        self.n_mapping + self.n_unmapping
    }

    /// Pages with a grant.
    pub(super) fn n_held(&self) -> u32 {
        self.n_used() + self.n_parked() + self.n_quarantined + self.n_in_transition()
    }

    /// Pages that could be mapped within limit and reservation.
    pub(super) fn n_growable(&self) -> u32 {
        self.limit_pages.saturating_sub(self.n_held())
    }

    /// Pages held beyond the limit that no unmapping in progress takes care of.
    pub(super) fn n_over_limit(&self) -> u32 {
        (self.n_held() - self.n_unmapping).saturating_sub(self.limit_pages)
    }

    /// Pages that the limit leaves for use, parked or not.
    pub(super) fn n_usable(&self) -> u32 {
        self.limit_pages.saturating_sub(self.n_used() + self.n_quarantined)
    }

    /// Whether `n_pages` more may be used.
    pub(super) fn admit(&self, n_pages: u32) -> Admission {
        let n_missing = n_pages.saturating_sub(self.n_parked());
        if n_pages <= self.n_usable() && n_missing <= self.n_growable() {
            return Admission::Grow(n_missing);
        }
        let is_reservation_full = self.limit_pages == self.capacity_pages;
        Admission::Short(if is_reservation_full { Shortage::DeviceFull } else { Shortage::GroupLimit })
    }

    /// Puts `n_pages` parked pages in use; the caller has seen that there are so many.
    pub(super) fn take_parked(&mut self, n_pages: u32, pages: &mut Vec<PageId>) {
        self.n_changes += 1;
        let mut n_left = n_pages;
        while n_left > 0 {
            let (word_idx, bits) = if let Some(page) = self.parked_beside_used.first() {
                let word_idx = page / 64;
                let bits = lowest_bits(self.parked_beside_used.word(word_idx), n_left);
                self.parked_beside_used.remove_mask(word_idx, bits);
                (word_idx, bits)
            } else if let Some(page) = self.parked_whole.first() {
                let (word_idx, extent_bits) = mask_of(self.extent_of(PageId(page)));
                let bits = lowest_bits(extent_bits, n_left);
                self.parked_whole.remove_mask(word_idx, extent_bits);
                self.parked_beside_used.insert_mask(word_idx, extent_bits & !bits);
                (word_idx, bits)
            } else {
                debug_assert!(false, "fewer pages are parked than were promised");
                return;
            };
            self.used.insert_mask(word_idx, bits);
            self.tell_bits(word_idx, bits, PageState::Used);
            push_pages(word_idx, bits, pages);
            n_left -= bits.count_ones();
        }
    }

    /// Parks a used page; false, and no change, if it is not in use.
    pub(super) fn park(&mut self, page: PageId) -> bool {
        if !self.used.contains(page.0) {
            return false;
        }
        self.n_changes += 1;
        self.used.remove(page.0);
        let (word_idx, extent_bits) = mask_of(self.extent_of(page));
        if self.used.word(word_idx) & extent_bits == 0 {
            self.parked_beside_used.remove_mask(word_idx, extent_bits);
            self.parked_whole.insert_mask(word_idx, extent_bits);
        } else {
            self.parked_beside_used.insert(page.0);
        }
        self.tell(page, 1, PageState::Parked);
        true
    }

    /// Takes a [`park`](Self::park) back.
    pub(super) fn unpark(&mut self, page: PageId) {
        let (word_idx, extent_bits) = mask_of(self.extent_of(page));
        let page_bit = 1 << (page.0 % 64);
        if self.parked_whole.contains(page.0) {
            self.parked_whole.remove_mask(word_idx, extent_bits);
            self.parked_beside_used.insert_mask(word_idx, extent_bits & !page_bit);
        } else {
            self.parked_beside_used.remove(page.0);
        }
        self.used.insert(page.0);
        self.tell(page, 1, PageState::Used);
    }

    /// Chooses extents of `n_pages` unmapped pages in all, and puts them in transition.
    pub(super) fn begin_map(&mut self, n_pages: u32) -> Vec<Extent> {
        let mut extents = Vec::new();
        let mut n_left = n_pages;
        while let Some(extent) = self.unmapped.take(n_left) {
            n_left -= extent.n_pages;
            extents.push(extent);
        }
        self.n_mapping += n_pages - n_left;
        self.n_map_calls += 1;
        extents
    }

    /// Puts one page in transition if it is unmapped.
    pub(super) fn begin_map_page(&mut self, page: PageId) -> Option<Extent> {
        self.begin_map_extent(Extent { first_page: page, n_pages: 1 })
    }

    /// Puts this extent in transition if all of its pages are unmapped.
    pub(super) fn begin_map_extent(&mut self, extent: Extent) -> Option<Extent> {
        let extent = self.unmapped.take_extent(extent)?;
        self.n_mapping += extent.n_pages;
        self.n_map_calls += 1;
        Some(extent)
    }

    /// Whether a page is mapped and free.
    pub(super) fn is_parked(&self, page: PageId) -> bool {
        self.parked_whole.contains(page.0) || self.parked_beside_used.contains(page.0)
    }

    /// Parks the pages of extents that are mapped now.
    pub(super) fn finish_map(&mut self, extents: &[Extent]) {
        for &extent in extents {
            let first = extent.first_page.0 as usize;
            self.extent_order[first..first + extent.n_pages as usize]
                .fill(extent.n_pages.trailing_zeros() as u8);
            let (word_idx, extent_bits) = mask_of(extent);
            self.parked_whole.insert_mask(word_idx, extent_bits);
            self.tell(extent.first_page, extent.n_pages, PageState::Parked);
            self.n_mapping -= extent.n_pages;
            self.n_mapped_total += u64::from(extent.n_pages);
        }
    }

    /// Gives up mapping: all pages are unmapped again but those of `stuck`, which are quarantined.
    pub(super) fn abort_map(&mut self, extents: &[Extent], stuck: &[Extent]) {
        for extent in extents {
            self.n_mapping -= extent.n_pages;
            if stuck.contains(extent) {
                self.quarantine(*extent);
            } else {
                self.unmapped.put_back(*extent);
            }
        }
    }

    /// Chooses wholly parked extents of at least `n_pages` pages, or all there are, and puts them in
    /// transition.
    ///
    /// The largest that fit come first and of those the highest; only the last may pass `n_pages`, and
    /// it is the smallest that is left.
    pub(super) fn begin_unmap(&mut self, n_pages: u32) -> Vec<Extent> {
        let mut candidates = Vec::new();
        let mut next = self.parked_whole.first();
        while let Some(page) = next {
            let extent = self.extent_of(PageId(page));
            candidates.push(extent);
            next = self.parked_whole.first_from(page + extent.n_pages);
        }
        candidates.sort_unstable_by_key(|extent| std::cmp::Reverse((extent.n_pages, extent.first_page)));
        let mut n_left = n_pages;
        let mut extents = Vec::new();
        candidates.retain(|extent| {
            let is_taken = extent.n_pages <= n_left;
            if is_taken {
                n_left -= extent.n_pages;
                extents.push(*extent);
            }
            !is_taken
        });
        if n_left > 0 {
            let smallest = candidates.iter().min_by_key(|extent| extent.n_pages);
            extents.extend(smallest);
        }
        self.start_unmap(&extents);
        extents
    }

    /// Puts all mapped extents in transition, with what is used and parked on them.
    pub(super) fn begin_unmap_everything(&mut self) -> Vec<Extent> {
        let mut pages: Vec<u32> = self.used.iter().collect();
        for page in pages.drain(..) {
            self.park(PageId(page));
        }
        self.begin_unmap(self.capacity_pages)
    }

    /// The pages of `extents` are unmapped now, but those of `stuck`, which are quarantined.
    pub(super) fn finish_unmap(&mut self, extents: &[Extent], stuck: &[Extent]) {
        for extent in extents {
            self.n_unmapping -= extent.n_pages;
            if stuck.contains(extent) {
                self.quarantine(*extent);
            } else {
                self.n_unmapped_total += u64::from(extent.n_pages);
                self.unmapped.put_back(*extent);
                self.tell(extent.first_page, extent.n_pages, PageState::Unmapped);
            }
        }
    }

    pub(super) fn counters(&self) -> PageCounters {
        PageCounters {
            n_unmapped: self.capacity_pages - self.n_held(),
            n_parked: self.n_parked(),
            n_used: self.n_used(),
            n_quarantined: self.n_quarantined,
            n_in_transition: self.n_in_transition(),
            limit_pages: self.limit_pages,
            n_map_calls: self.n_map_calls,
            n_unmap_calls: self.n_unmap_calls,
            n_mapped_total: self.n_mapped_total,
            n_unmapped_total: self.n_unmapped_total,
            n_changes: self.n_changes,
        }
    }

    fn quarantine(&mut self, extent: Extent) {
        self.n_quarantined += extent.n_pages;
        self.tell(extent.first_page, extent.n_pages, PageState::Quarantined);
    }

    fn tell(&self, first_page: PageId, n_pages: u32, state: PageState) {
        if let Some(observer) = &self.observer {
            observer.pages_became(first_page, n_pages, state);
        }
    }

    fn tell_bits(&self, word_idx: u32, mut bits: u64, state: PageState) {
        if self.observer.is_none() {
            return;
        }
        while bits != 0 {
            let first = bits.trailing_zeros();
            let n_pages = (bits >> first).trailing_ones();
            self.tell(PageId(word_idx * 64 + first), n_pages, state);
            bits &= !((u64::MAX >> (64 - n_pages)) << first);
        }
    }

    fn start_unmap(&mut self, extents: &[Extent]) {
        for &extent in extents {
            let (word_idx, extent_bits) = mask_of(extent);
            self.parked_whole.remove_mask(word_idx, extent_bits);
            self.n_unmapping += extent.n_pages;
        }
        self.n_unmap_calls += u64::from(!extents.is_empty());
    }

    fn extent_of(&self, page: PageId) -> Extent {
        let n_pages = 1 << self.extent_order[page.0 as usize];
        Extent { first_page: PageId(page.0 & !(n_pages - 1)), n_pages }
    }
}
