//! What is behind the extents of a region: pure bookkeeping.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::geometry::{Extent, MAX_EXTENT_PAGES};
use crate::vmm::PhysicalHandle;

/// The memory of one extent.
#[derive(Debug)]
pub(super) struct Backing {
    pub(super) extent: Extent,
    /// One a buffer; fewer while they are being created.
    pub(super) slots: Vec<Slot>,
    /// Whether it could not be taken apart: never touched again before the region goes.
    pub(super) is_stuck: bool,
}

/// The memory of an extent in one buffer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Slot {
    Empty,
    Created(PhysicalHandle),
    Mapped(PhysicalHandle),
}

impl Backing {
    pub(super) fn new(extent: Extent) -> Self {
        Self { extent, slots: Vec::new(), is_stuck: false }
    }
}

/// The backings that have a page in `pages`.
pub(super) fn overlapping(
    backings: &BTreeMap<u32, Backing>,
    pages: Range<u32>,
) -> impl Iterator<Item = &Backing> {
    // An extent that starts earlier than this ends before the range.
    let earliest = pages.start.saturating_sub(MAX_EXTENT_PAGES - 1);
    backings
        .range(earliest..pages.end)
        .map(|(_, backing)| backing)
        .filter(move |backing| backing.extent.end_page() > pages.start)
}

/// Whether anything is mapped at `pages` of this buffer.
pub(super) fn is_mapped(backings: &BTreeMap<u32, Backing>, buffer: u32, pages: Range<u32>) -> bool {
    overlapping(backings, pages)
        .any(|backing| matches!(backing.slots.get(buffer as usize), Some(Slot::Mapped(_))))
}

/// The memory of an extent in one buffer; nothing before it was created.
pub(super) fn slot_of(
    backings: &mut BTreeMap<u32, Backing>,
    extent: Extent,
    buffer: u32,
) -> Option<&mut Slot> {
    backings.get_mut(&extent.first_page.0).and_then(|backing| backing.slots.get_mut(buffer as usize))
}

/// Sorted extents as runs of adjacent ones.
pub(super) fn runs_of(extents: &[Extent]) -> impl Iterator<Item = &[Extent]> {
    extents.chunk_by(|extent, next| extent.end_page() == next.first_page.0)
}
