//! The page allocator: the tracker of pages, the grants behind it and the mapper below it.
//!
//! Here are pages of which any will do; `chosen` has those that the caller names.

mod chosen;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::tracker::{Admission, PageTracker};
use super::{
    Claim, Grants, MapOutcome, PageCounters, PageMapper, PageObserver, PageSettings, PagesOutcome, Shortage,
    Usage,
};
use crate::geometry::{Extent, MAX_EXTENT_PAGES, PageId};
use crate::{MemoryError, Result};

/// A pool grows by about this part of what it holds, in extents of that size.
const GROWTH_SHARE: u32 = 8;

/// Hands out the pages of a region and keeps a store of mapped ones.
///
/// Shared between threads; served from parked pages an operation is a short critical section. A thread
/// that finds too little while another one maps or unmaps waits for that one before it answers, so a
/// shortage is never only a matter of timing.
///
/// Dropping it unmaps everything and gives the grants back.
#[derive(Debug)]
pub struct PageAllocator {
    mapper: Arc<dyn PageMapper>,
    grants: Arc<dyn Grants>,
    page_cost_bytes: u64,
    low_watermark_pages: u32,
    high_watermark_pages: u32,
    tracker: Mutex<PageTracker>,
    /// Notified whenever a transition ends.
    transition_ended: Condvar,
    /// Copy of the number of parked pages for callers that only need a hint.
    n_parked_hint: AtomicU32,
}

/// What came of mapping extents with their grants.
enum Growth {
    Mapped,
    Short(Shortage),
    Failed { error: MemoryError, stuck: Vec<Extent> },
}

impl PageAllocator {
    /// An allocator over all pages of the mapper's region, none of which is mapped.
    ///
    /// Fails where the low watermark is above the high one.
    pub fn try_new(
        mapper: Arc<dyn PageMapper>,
        grants: Arc<dyn Grants>,
        settings: PageSettings,
    ) -> Result<Self> {
        if settings.low_watermark_pages > settings.high_watermark_pages {
            return Err(MemoryError::Invalid {
                field: "low_watermark_pages",
                value: settings.low_watermark_pages.to_string(),
                allowed: format!("at most high_watermark_pages, which is {}", settings.high_watermark_pages),
            });
        }
        let capacity_pages = mapper.geometry().capacity_pages();
        Ok(Self {
            page_cost_bytes: mapper.geometry().page_cost_bytes(),
            low_watermark_pages: settings.low_watermark_pages,
            high_watermark_pages: settings.high_watermark_pages,
            tracker: Mutex::new(PageTracker::new(
                capacity_pages,
                settings.limit_pages.unwrap_or(capacity_pages),
            )),
            transition_ended: Condvar::new(),
            n_parked_hint: AtomicU32::new(0),
            mapper,
            grants,
        })
    }

    /// Reports changes of the state of pages to `observer`, from now on.
    pub fn set_observer(&self, observer: Arc<dyn PageObserver>) {
        self.tracker.lock().set_observer(observer);
    }

    /// Physical bytes behind one page id.
    pub fn page_cost_bytes(&self) -> u64 {
        self.page_cost_bytes
    }

    /// Pages of the reservation.
    pub fn capacity_pages(&self) -> u32 {
        self.mapper.geometry().capacity_pages()
    }

    /// Parked pages below this number are to be prepared.
    pub fn low_watermark_pages(&self) -> u32 {
        self.low_watermark_pages
    }

    /// Parked pages above this number are to be trimmed.
    pub fn high_watermark_pages(&self) -> u32 {
        self.high_watermark_pages
    }

    /// Appends `n_pages` pages to `pages`, or none.
    ///
    /// Parked pages come first; what is missing is granted and mapped. Fails where a grant or a mapping
    /// is broken, not where there is too little; either way nothing is taken.
    pub fn alloc(&self, n_pages: u32, pages: &mut Vec<PageId>) -> Result<PagesOutcome> {
        let mut tracker = self.tracker.lock();
        loop {
            let n_missing = match tracker.admit(n_pages) {
                Admission::Grow(0) => {
                    tracker.take_parked(n_pages, pages);
                    self.publish(&tracker);
                    return Ok(PagesOutcome::Allocated);
                }
                Admission::Grow(n_missing) => n_missing,
                Admission::Short(shortage) if tracker.n_in_transition() == 0 => {
                    return Ok(PagesOutcome::NoMemory(shortage));
                }
                Admission::Short(_) => {
                    self.transition_ended.wait(&mut tracker);
                    continue;
                }
            };
            let n_before = pages.len();
            tracker.take_parked(n_pages - n_missing, pages);
            // The claim is judged by what is used: parked pages that are about to be count already.
            self.publish(&tracker);
            let n_to_map = self.n_to_map(&tracker, n_missing);
            let extents = tracker.begin_map(n_to_map);
            let mut growth = self.grow(&mut tracker, &extents);
            if let Ok(PagesOutcome::NoMemory(_)) = growth
                && n_missing < n_to_map
            {
                let extents = tracker.begin_map(n_missing);
                growth = self.grow(&mut tracker, &extents);
            }
            if let Ok(PagesOutcome::Allocated) = growth {
                // They were parked under this lock.
                tracker.take_parked(n_missing, pages);
                self.publish(&tracker);
                return growth;
            }
            for page in pages.drain(n_before..) {
                tracker.park(page);
            }
            self.publish(&tracker);
            match growth {
                // What others freed, unmapped or gave up in the meantime may do.
                Ok(_) if tracker.admit(n_pages) == Admission::Grow(0) => {}
                Ok(_) if tracker.n_in_transition() > 0 => self.transition_ended.wait(&mut tracker),
                _ => return growth,
            }
        }
    }

    /// Parks `pages`, and unmaps what is beyond the limit.
    ///
    /// Fails where a page is not in use or is listed twice; nothing is freed then.
    pub fn free(&self, pages: &[PageId]) -> Result<()> {
        self.park(pages)?;
        self.settle();
        Ok(())
    }

    /// Parks `pages` without a call to the mapper, for callers that hold a lock; the caller calls
    /// [`settle`](Self::settle) after it.
    pub(crate) fn park(&self, pages: &[PageId]) -> Result<()> {
        let mut tracker = self.tracker.lock();
        for (n_parked, &page) in pages.iter().enumerate() {
            if tracker.park(page) {
                continue;
            }
            for &page in &pages[..n_parked] {
                tracker.unpark(page);
            }
            return Err(MemoryError::Invalid {
                field: "page",
                value: page.to_string(),
                allowed: "a page that is in use, once".to_owned(),
            });
        }
        self.publish(&tracker);
        Ok(())
    }

    /// Unmaps what is held beyond the limit and parked; returns how many pages.
    pub fn settle(&self) -> u32 {
        let mut n_unmapped = 0;
        loop {
            let n_over = self.tracker.lock().n_over_limit();
            if n_over == 0 {
                return n_unmapped;
            }
            let Some(n_trimmed) = self.trim_extents(n_over) else { return n_unmapped };
            n_unmapped += n_trimmed;
        }
    }

    /// Unmaps extents that are parked as a whole, of at least `n_pages` pages or all there are; returns
    /// how many pages are unmapped and given back.
    ///
    /// Pages that cannot be unmapped are quarantined, and others are unmapped in their place.
    pub fn trim(&self, n_pages: u32) -> u32 {
        let mut n_unmapped = 0;
        while n_unmapped < n_pages {
            let Some(n_trimmed) = self.trim_extents(n_pages - n_unmapped) else { break };
            n_unmapped += n_trimmed;
        }
        n_unmapped
    }

    /// Unmaps every extent that is parked as a whole.
    pub fn trim_all(&self) -> u32 {
        self.trim(self.capacity_pages())
    }

    /// Moves the limit, at any time and in any direction; what is parked beyond it is unmapped at once,
    /// what is used beyond it as it is freed.
    ///
    /// Ids are bits of the reservation, so a limit above it is the reservation itself.
    pub fn resize(&self, limit_pages: u32) {
        self.tracker.lock().set_limit_pages(limit_pages);
        self.settle();
    }

    /// Maps pages until `low_watermark_pages` are parked, as far as limit and grants allow.
    ///
    /// Nothing is prepared where nothing is missing, or where another thread maps at the moment.
    pub fn prepare(&self) -> Result<PagesOutcome> {
        let mut tracker = self.tracker.lock();
        let n_wanted = self.low_watermark_pages.saturating_sub(tracker.n_parked());
        if n_wanted == 0 || tracker.n_in_transition() > 0 {
            return Ok(PagesOutcome::Allocated);
        }
        let n_growable = self.n_growable(&tracker);
        if n_growable == 0 {
            return Ok(PagesOutcome::NoMemory(Shortage::GroupLimit));
        }
        let extents = tracker.begin_map(n_wanted.min(n_growable));
        self.grow(&mut tracker, &extents)
    }

    /// How many pages [`alloc`](Self::alloc) would give now; asks the grants, never the device.
    ///
    /// Pages that are being mapped or unmapped count: `alloc` waits for them before it reports a shortage.
    pub fn available_pages(&self) -> u32 {
        let tracker = self.tracker.lock();
        let n_at_hand = tracker.n_parked() + tracker.n_in_transition();
        (n_at_hand + self.n_growable(&tracker)).min(tracker.n_usable())
    }

    /// Parked pages, read without the lock: a hint that may be out of date.
    pub fn n_parked_hint(&self) -> u32 {
        // Only a number to compare with watermarks; nothing is read on the strength of it.
        self.n_parked_hint.load(Ordering::Relaxed)
    }

    /// A consistent snapshot of the counts.
    pub fn counters(&self) -> PageCounters {
        self.tracker.lock().counters()
    }

    /// Bytes with a grant.
    pub fn held_bytes(&self) -> u64 {
        u64::from(self.tracker.lock().n_held()) * self.page_cost_bytes
    }

    /// One transaction of unmapping; `None` if no extent is parked as a whole.
    fn trim_extents(&self, n_pages: u32) -> Option<u32> {
        let mut tracker = self.tracker.lock();
        let extents = tracker.begin_unmap(n_pages);
        if extents.is_empty() {
            return None;
        }
        self.publish(&tracker);
        let stuck = MutexGuard::unlocked(&mut tracker, || self.unmap(&extents));
        tracker.finish_unmap(&extents, &stuck);
        self.end_transition(&tracker);
        Some(n_pages_of(&extents) - n_pages_of(&stuck))
    }

    /// How many pages to map where `n_missing` are needed.
    ///
    /// A large pool grows in large extents: the driver maps and unmaps them at the price of small ones.
    /// What is not needed at once is parked, within the high watermark and what no other member holds.
    fn n_to_map(&self, tracker: &PageTracker, n_missing: u32) -> u32 {
        let n_spare = self.high_watermark_pages.saturating_sub(tracker.n_parked());
        let n_most = n_missing.saturating_add(n_spare).min(self.n_growable(tracker));
        let mut n_extent_pages = (tracker.n_held() / GROWTH_SHARE).clamp(1, MAX_EXTENT_PAGES);
        n_extent_pages = 1 << n_extent_pages.ilog2();
        while 1 < n_extent_pages {
            let n_rounded = n_missing.next_multiple_of(n_extent_pages);
            if n_rounded <= n_most {
                return n_rounded;
            }
            n_extent_pages /= 2;
        }
        n_missing
    }

    fn n_growable(&self, tracker: &PageTracker) -> u32 {
        let held_bytes = u64::from(tracker.n_held()) * self.page_cost_bytes;
        let n_claimable = self.grants.claimable_bytes().saturating_sub(held_bytes) / self.page_cost_bytes;
        tracker.n_growable().min(u32::try_from(n_claimable).unwrap_or(u32::MAX))
    }

    /// Maps extents that are in transition, without the lock; their pages are parked then, or unmapped
    /// again but for what is stuck.
    fn grow(&self, tracker: &mut MutexGuard<'_, PageTracker>, extents: &[Extent]) -> Result<PagesOutcome> {
        let growth = MutexGuard::unlocked(tracker, || self.claim_and_map(extents));
        let answer = match growth {
            Growth::Mapped => {
                tracker.finish_map(extents);
                Ok(PagesOutcome::Allocated)
            }
            Growth::Short(shortage) => {
                tracker.abort_map(extents, &[]);
                Ok(PagesOutcome::NoMemory(shortage))
            }
            Growth::Failed { error, stuck } => {
                tracker.abort_map(extents, &stuck);
                Err(error)
            }
        };
        self.end_transition(tracker);
        answer
    }

    /// Takes the grants of `extents` and maps them, or returns the grants of what is not mapped.
    fn claim_and_map(&self, extents: &[Extent]) -> Growth {
        let n_pages = n_pages_of(extents);
        match self.grants.claim(u64::from(n_pages) * self.page_cost_bytes) {
            Ok(Claim::Granted) => {}
            Ok(Claim::Denied(shortage)) => return Growth::Short(shortage),
            Err(error) => return Growth::Failed { error, stuck: Vec::new() },
        }
        let (n_held, growth) = match self.mapper.map(extents) {
            MapOutcome::Mapped => (n_pages, Growth::Mapped),
            MapOutcome::NoMemory => (0, Growth::Short(Shortage::DeviceFull)),
            MapOutcome::Failed { error, stuck } => {
                let stuck = touched_by(extents, &stuck);
                tracing::warn!(%error, n_stuck_extents = stuck.len(), "mapping pages failed");
                (n_pages_of(&stuck), Growth::Failed { error, stuck })
            }
        };
        self.give_back(n_pages - n_held);
        growth
    }

    /// Unmaps `extents` and returns the grants of all but those that are stuck.
    fn unmap(&self, extents: &[Extent]) -> Vec<Extent> {
        let stuck = touched_by(extents, &self.mapper.unmap(extents));
        if !stuck.is_empty() {
            tracing::warn!(n_pages = n_pages_of(&stuck), "unmapping failed, pages are quarantined");
        }
        self.give_back(n_pages_of(extents) - n_pages_of(&stuck));
        stuck
    }

    fn give_back(&self, n_pages: u32) {
        if n_pages > 0 {
            self.grants.give_back(u64::from(n_pages) * self.page_cost_bytes);
        }
    }

    fn end_transition(&self, tracker: &PageTracker) {
        self.publish(tracker);
        self.transition_ended.notify_all();
    }

    fn publish(&self, tracker: &PageTracker) {
        self.n_parked_hint.store(tracker.n_parked(), Ordering::Relaxed);
        self.grants.publish(Usage {
            used_bytes: u64::from(tracker.n_used() + tracker.n_quarantined()) * self.page_cost_bytes,
            parked_bytes: u64::from(tracker.n_parked()) * self.page_cost_bytes,
        });
    }
}

impl Drop for PageAllocator {
    fn drop(&mut self) {
        let extents = self.tracker.get_mut().begin_unmap_everything();
        if !extents.is_empty() {
            self.unmap(&extents);
        }
        self.grants.publish(Usage::default());
    }
}

fn n_pages_of(extents: &[Extent]) -> u32 {
    extents.iter().map(|extent| extent.n_pages).sum()
}

/// Those of `extents` that share a page with one of `stuck`: an extent is good or bad as a whole.
fn touched_by(extents: &[Extent], stuck: &[Extent]) -> Vec<Extent> {
    let overlap = |one: &Extent, other: &Extent| {
        one.first_page.0 < other.first_page.0 + other.n_pages
            && other.first_page.0 < one.first_page.0 + one.n_pages
    };
    extents.iter().filter(|extent| stuck.iter().any(|stuck| overlap(extent, stuck))).copied().collect()
}
