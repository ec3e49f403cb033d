//! Page ids of one region: which are mapped, which are in use, and the seams to what backs them.
//!
//! A [`PageAllocator`] owns the ids of a reservation. It claims of [`Grants`] before it maps and gives
//! back after it unmapped; [`PageMapper`] does the mapping. Both are traits so that the logic runs
//! against models, and so that a pool works with the ledger of a device or with a budget of its own
//! ([`FixedGrants`]).
//!
//! # Invariants
//!
//! * Each id is in exactly one state: unmapped, parked, used, quarantined, or in transition while the
//!   mapper works on it. The states are bitmaps over the reservation, so no id exists twice.
//! * The grants held equal the pages that are not unmapped.
//! * The mapper is never called with the lock held: a slow driver call does not delay callers that are served
//!   from parked pages.

use std::fmt;
use std::time::Duration;

use crate::geometry::{Extent, Geometry, PageId};
use crate::{MemoryError, Result};

pub(crate) mod bitmap;

mod allocator;
mod fixed;
mod runs;
mod tracker;

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;

pub use allocator::PageAllocator;
pub use fixed::FixedGrants;

/// Maps and unmaps extents of a region.
pub trait PageMapper: Send + Sync + fmt::Debug {
    /// The shape of the region.
    fn geometry(&self) -> &Geometry;

    /// Maps all of `extents` or none.
    ///
    /// The caller passes extents that are not mapped and do not overlap, and holds their grants.
    fn map(&self, extents: &[Extent]) -> MapOutcome;

    /// Unmaps each of `extents`, and returns those that could not be unmapped.
    ///
    /// The caller passes extents exactly as they were mapped, and uses none of their pages. Those
    /// returned stay mapped and are to be quarantined.
    fn unmap(&self, extents: &[Extent]) -> Vec<Extent>;
}

/// What came of [`PageMapper::map`].
#[derive(Debug)]
pub enum MapOutcome {
    /// All extents are mapped.
    Mapped,
    /// The device has no memory; nothing is mapped.
    NoMemory,
    /// A call failed; all is undone but `stuck`.
    Failed {
        /// What failed.
        error: MemoryError,
        /// Extents in an unknown state, which must never be used.
        stuck: Vec<Extent>,
    },
}

/// What a page is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PageState {
    /// Nothing is behind it.
    Unmapped = 0,
    /// It is mapped and free.
    Parked = 1,
    /// It is in use.
    Used = 2,
    /// It could not be unmapped and is never used again.
    Quarantined = 3,
}

/// Takes and returns grants of physical memory, in bytes that are multiples of
/// [`UNIT_BYTES`](crate::geometry::UNIT_BYTES).
pub trait Grants: Send + Sync + fmt::Debug {
    /// Takes `n_bytes` or nothing.
    fn claim(&self, n_bytes: u64) -> Result<Claim>;

    /// Returns `n_bytes` that were granted; the caller has released their memory.
    fn give_back(&self, n_bytes: u64);

    /// How many bytes may be held in all now: limit of the group less what its other members hold,
    /// and no more than what the device has left beside other groups.
    ///
    /// Less than what is held means that the limit fell below it. An answer may be out of date when
    /// it arrives; only [`claim`](Self::claim) decides.
    fn claimable_bytes(&self) -> u64;

    /// How many bytes may be held if all others gave back what they can: the limit of the group, and no
    /// more than what the device has.
    fn limit_bytes(&self) -> u64;

    /// Publishes counts for tools; must be cheap, since it is called on every allocation.
    fn publish(&self, usage: Usage);

    /// Tells that nothing can be done until the claim that was denied is served; holds until its wait ends. Of members that
    /// wait for each other one then gets what the others hold. Does nothing by default.
    fn note_starved(&self) {}

    /// Ends the wait for a claim that was denied; does nothing by default.
    fn stop_waiting(&self) {}
}

/// Sees every change of a page's state, for tools that show them.
///
/// It is called under the allocator's lock, so it must be short and must not call back.
pub trait PageObserver: Send + Sync + fmt::Debug {
    /// The `n_pages` pages from `first_page` on are in `state` now.
    fn pages_became(&self, first_page: PageId, n_pages: u32, state: PageState);
}

/// The answer to a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// All of it is held now.
    Granted,
    /// Nothing is held.
    Denied(Shortage),
}

/// Why there is not enough memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shortage {
    /// The device has no more, or the reservation is used up.
    DeviceFull,
    /// The limit of the group is reached.
    GroupLimit,
    /// Another group waits that is below its share, and this one is above its own.
    OverShare,
}

/// What a member publishes of its memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of pages that are in use.
    pub used_bytes: u64,
    /// Bytes of pages that are mapped and free.
    pub parked_bytes: u64,
}

/// Reports what others want of a member's memory; its only listener is the pool's agent.
pub trait GrantEvents: Send + Sync + fmt::Debug {
    /// Waits for the next event, at most `timeout`.
    ///
    /// An event that came before the call is returned at once, so none is lost between two calls.
    /// Several of one kind may be returned as one.
    fn wait(&self, timeout: Duration) -> Event;

    /// Makes a running [`wait`](Self::wait), or else the next one, return [`Event::Timeout`] at once.
    fn interrupt(&self);
}

/// What happened to a member's grants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The limit moved, up or down.
    LimitChanged,
    /// Others wait for memory that this member holds above its share.
    ReclaimRequested {
        /// How much it is asked to give back.
        n_bytes: u64,
    },
    /// Memory was returned, so a claim that was denied may be granted now.
    CapacityReturned,
    /// Nothing happened in time.
    Timeout,
}

/// What came of asking for pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum PagesOutcome {
    /// All of them.
    Allocated,
    /// None of them.
    NoMemory(Shortage),
}

/// How a [`PageAllocator`] keeps its pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageSettings {
    /// The most pages to hold; by default all of the reservation.
    pub limit_pages: Option<u32>,
    /// So many parked pages are kept ready; 0 by default, which prepares none.
    pub low_watermark_pages: u32,
    /// More parked pages than this are trimmed after a while; 0 by default.
    pub high_watermark_pages: u32,
}

/// Counts of a [`PageAllocator`] at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageCounters {
    /// Pages without memory.
    pub n_unmapped: u32,
    /// Pages that are mapped and free.
    pub n_parked: u32,
    /// Pages that are handed out.
    pub n_used: u32,
    /// Pages that could not be unmapped, or whose state is unknown.
    pub n_quarantined: u32,
    /// Pages that are being mapped or unmapped.
    pub n_in_transition: u32,
    /// The most pages that may be held.
    pub limit_pages: u32,
    /// Calls to map.
    pub n_map_calls: u64,
    /// Calls to unmap.
    pub n_unmap_calls: u64,
    /// Pages mapped so far.
    pub n_mapped_total: u64,
    /// Pages unmapped so far.
    pub n_unmapped_total: u64,
    /// Allocations and parkings so far: the same number twice means that nothing happened.
    pub n_changes: u64,
}
