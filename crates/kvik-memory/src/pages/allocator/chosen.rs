//! Pages that the caller names, for blocks whose place is given: all of them or none.
//!
//! A page is taken from the parked ones or mapped; whatever is in the way of that leaves every page as it was. Parked pages
//! count as used before the lock is released for the mapping, so no other thread takes or unmaps them meanwhile.

use super::PageAllocator;
use crate::geometry::{Extent, MAX_EXTENT_PAGES, PageId};
use crate::pages::tracker::PageTracker;
use crate::pages::{PagesOutcome, Shortage};
use crate::{MemoryError, Result};

impl PageAllocator {
    /// Takes `page` itself.
    ///
    /// Fails where it is in use or in quarantine, or where a grant or a mapping is broken.
    pub fn alloc_page(&self, page: PageId) -> Result<PagesOutcome> {
        let mut tracker = self.tracker.lock();
        while tracker.n_in_transition() > 0 {
            self.transition_ended.wait(&mut tracker);
        }
        if tracker.n_usable() == 0 {
            return Ok(PagesOutcome::NoMemory(Shortage::GroupLimit));
        }
        if !tracker.is_parked(page) {
            let Some(extent) = tracker.begin_map_page(page) else {
                return Err(MemoryError::Invalid {
                    field: "page",
                    value: page.to_string(),
                    allowed: "a page that is not in use".to_owned(),
                });
            };
            let growth = self.grow(&mut tracker, &[extent]);
            if !matches!(growth, Ok(PagesOutcome::Allocated)) {
                return growth;
            }
        }
        tracker.unpark(page);
        self.publish(&tracker);
        Ok(PagesOutcome::Allocated)
    }

    /// Takes `pages` themselves, all of them or none; each that is not parked is mapped as an extent of its own.
    ///
    /// Other pages that are parked are unmapped first where they are in the way of a limit. Fails where a page is in use, in
    /// quarantine or listed twice, or where a grant or a mapping is broken.
    pub fn alloc_these(&self, pages: &[PageId]) -> Result<PagesOutcome> {
        self.alloc_in_extents(pages, 1)
    }

    /// Takes `pages` as [`alloc_these`](Self::alloc_these) does, but maps neighbors of the list by extents of up to
    /// `max_extent_pages` where they can be one.
    ///
    /// For pages that come back together: an extent stays mapped while one of its pages is used.
    pub fn alloc_in_extents(&self, pages: &[PageId], max_extent_pages: u32) -> Result<PagesOutcome> {
        loop {
            let outcome = self.try_these(pages, max_extent_pages)?;
            let PagesOutcome::NoMemory(_) = outcome else { return Ok(outcome) };
            // The caller wants none of the pages that are left parked, so they go for those that it wants.
            if self.trim(pages.len() as u32) == 0 {
                return Ok(outcome);
            }
        }
    }

    /// [`alloc_in_extents`](Self::alloc_in_extents) with what is free as it is.
    fn try_these(&self, pages: &[PageId], max_extent_pages: u32) -> Result<PagesOutcome> {
        let mut tracker = self.tracker.lock();
        while tracker.n_in_transition() > 0 {
            self.transition_ended.wait(&mut tracker);
        }
        let n_usable = tracker.n_usable();
        let mut was_parked = Vec::new();
        let mut extents = Vec::new();
        let mut rest = pages;
        while let Some(&page) = rest.first() {
            let is_page = page.0 < self.capacity_pages();
            if is_page && tracker.is_parked(page) {
                tracker.unpark(page);
                was_parked.push(page);
                rest = &rest[1..];
            } else if is_page && let Some(extent) = begin_map_first(&mut tracker, rest, max_extent_pages) {
                extents.push(extent);
                rest = &rest[extent.n_pages as usize..];
            } else {
                self.leave_these(&mut tracker, &was_parked, &extents);
                return Err(MemoryError::Invalid {
                    field: "page",
                    value: page.to_string(),
                    allowed: format!("a page below {} that is not in use, once", self.capacity_pages()),
                });
            }
        }
        let n_held = tracker.n_held();
        if pages.len() as u32 > n_usable || n_held > tracker.counters().limit_pages {
            self.leave_these(&mut tracker, &was_parked, &extents);
            return Ok(PagesOutcome::NoMemory(Shortage::GroupLimit));
        }
        // The claim is judged by what is used: parked pages that are about to be count already.
        self.publish(&tracker);
        if extents.is_empty() {
            return Ok(PagesOutcome::Allocated);
        }
        let growth = self.grow(&mut tracker, &extents);
        if let Ok(PagesOutcome::Allocated) = growth {
            for page in extents.iter().flat_map(Extent::pages) {
                tracker.unpark(page);
            }
        } else {
            for &page in &was_parked {
                tracker.park(page);
            }
        }
        self.publish(&tracker);
        growth
    }

    /// Undoes what [`try_these`](Self::try_these) began.
    fn leave_these(&self, tracker: &mut PageTracker, was_parked: &[PageId], extents: &[Extent]) {
        for &page in was_parked {
            tracker.park(page);
        }
        tracker.abort_map(extents, &[]);
        self.end_transition(tracker);
    }
}

/// Puts the largest extent in transition that begins `pages`, is part of the list and is not mapped.
fn begin_map_first(tracker: &mut PageTracker, pages: &[PageId], max_extent_pages: u32) -> Option<Extent> {
    let first_page = *pages.first()?;
    let mut n_pages = max_extent_pages.clamp(1, MAX_EXTENT_PAGES);
    n_pages = 1 << n_pages.ilog2();
    loop {
        let extent = Extent { first_page, n_pages };
        let is_listed =
            pages.get(..n_pages as usize).is_some_and(|listed| extent.pages().eq(listed.iter().copied()));
        if extent.is_well_formed()
            && is_listed
            && let Some(extent) = tracker.begin_map_extent(extent)
        {
            return Some(extent);
        }
        if n_pages == 1 {
            return None;
        }
        n_pages /= 2;
    }
}
