//! One engine's virtual memory: a reservation into which extents are mapped.
//!
//! A [`Region`] is the only user of its reservation. An extent is one physical handle per buffer. A call
//! that fails half way is undone; what cannot be undone is kept as stuck and never touched again before
//! the region goes. Where nothing is mapped lies the [`Guard`].
//!
//! # Invariants
//!
//! * A page is mapped by one extent at most, and by the same one in every buffer.
//! * Physical memory is held only by extents that are mapped or were reported as stuck, and by the guard.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::warn;

use self::backing::{Backing, Slot, runs_of, slot_of};
use self::guard::GuardBook;
use crate::geometry::{Extent, Geometry, PageId};
use crate::pages::{MapOutcome, PageMapper};
use crate::vmm::{Access, Backdrop, Created, VirtualRange, Vmm};
use crate::{MemoryError, Result};

mod backing;
mod guard;

/// What lies behind the unmapped parts of a region.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Guard {
    /// Zeros that can be read; a write faults. The default.
    #[default]
    Zero,
    /// Nothing: a stray access faults.
    None,
}

/// One engine's reservation with what is mapped into it.
///
/// Calls are done one after the other. Unmapping does not wait for the device: the caller passes pages
/// that no kernel uses.
#[derive(Debug)]
pub struct Region {
    vmm: Arc<dyn Vmm>,
    geometry: Geometry,
    range: VirtualRange,
    guard: Guard,
    state: Mutex<State>,
}

/// Counts of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionUsage {
    /// Extents that are mapped and usable.
    pub n_extents: usize,
    /// Extents that could not be undone.
    pub n_stuck: usize,
    /// Pieces of the guard over all buffers; 0 where the backend lays it.
    pub n_guard_pieces: usize,
    /// Parts that have no guard because a call failed; tried again with the next call.
    pub n_guard_holes: usize,
    /// Physical bytes of the guard.
    pub guard_bytes: u64,
}

#[derive(Debug)]
struct State {
    /// By first page; those in the making and those that are stuck as well.
    backings: BTreeMap<u32, Backing>,
    /// Only where the guard is made of pieces.
    guard: Option<GuardBook>,
}

/// How far the memory of a transaction came, if nothing failed.
enum Backed {
    All,
    NoMemory,
}

impl Region {
    /// Reserves the addresses of `geometry` and lays the guard.
    ///
    /// Where the backend has no zeros to lie behind the reservation, the guard is made of device memory:
    /// up to [`max_guard_bytes`](Self::max_guard_bytes). If the device has not even that left, or refuses
    /// memory that can only be read, the region has no guard, which [`guard`](Self::guard) tells.
    ///
    /// Fails where the page is no multiple of the device's granularity, or a call fails.
    pub fn try_new(vmm: Arc<dyn Vmm>, geometry: Geometry, guard: Guard) -> Result<Self> {
        let granularity_bytes = vmm.granularity_bytes();
        if !geometry.page_bytes().is_multiple_of(granularity_bytes) {
            return Err(MemoryError::Invalid {
                field: "page_bytes",
                value: geometry.page_bytes().to_string(),
                allowed: format!("a multiple of the device's {granularity_bytes} bytes"),
            });
        }
        let backdrop = match guard {
            Guard::Zero if vmm.has_zeros_backdrop() => Backdrop::Zeros,
            Guard::Zero | Guard::None => Backdrop::Nothing,
        };
        let range = vmm.reserve(geometry.region_bytes(), backdrop)?;
        let state = Mutex::new(State { backings: BTreeMap::new(), guard: None });
        // From here on a failure gives the reservation back, by drop.
        let mut region = Self { vmm, geometry, range, guard, state };
        if guard == Guard::Zero && backdrop == Backdrop::Nothing {
            let pieces = GuardBook::try_new(Arc::clone(&region.vmm), geometry, range.address)?;
            if pieces.is_none() {
                region.guard = Guard::None;
            }
            region.state.get_mut().guard = pieces;
        }
        Ok(region)
    }

    /// The most device memory that the guard of such a region takes: the caller has it granted before.
    pub fn max_guard_bytes(vmm: &dyn Vmm, geometry: &Geometry, guard: Guard) -> u64 {
        match guard {
            Guard::Zero if !vmm.has_zeros_backdrop() => guard::max_bytes(geometry),
            Guard::Zero | Guard::None => 0,
        }
    }

    /// The addresses of the region.
    pub fn range(&self) -> VirtualRange {
        self.range
    }

    /// The guard that is in effect.
    pub fn guard(&self) -> Guard {
        self.guard
    }

    /// The device's memory.
    pub fn vmm(&self) -> &Arc<dyn Vmm> {
        &self.vmm
    }

    /// Where `page` of `buffer` lies, mapped or not; nothing where either is out of range.
    pub fn address_of(&self, buffer: u32, page: PageId) -> Option<u64> {
        self.geometry.offset_bytes(buffer, page).map(|offset_bytes| self.range.address + offset_bytes)
    }

    /// What the region holds now.
    pub fn usage(&self) -> RegionUsage {
        let state = self.state.lock();
        let n_stuck = state.backings.values().filter(|backing| backing.is_stuck).count();
        let guard = state.guard.as_ref();
        RegionUsage {
            n_extents: state.backings.len() - n_stuck,
            n_stuck,
            n_guard_pieces: guard.map_or(0, GuardBook::n_pieces),
            n_guard_holes: guard.map_or(0, GuardBook::n_holes),
            guard_bytes: guard.map_or(0, GuardBook::n_bytes),
        }
    }

    fn check_unmapped(&self, state: &State, extents: &[Extent]) -> Result<()> {
        for (idx, extent) in extents.iter().enumerate() {
            self.geometry.check_extent(*extent)?;
            // They are sorted, and those before were checked.
            let is_listed_before = idx > 0 && extents[idx - 1].overlaps(extent);
            let pages = extent.first_page.0..extent.end_page();
            if is_listed_before || backing::overlapping(&state.backings, pages).next().is_some() {
                return Err(MemoryError::Invalid {
                    field: "extent",
                    value: extent.to_string(),
                    allowed: "pages that are not mapped".to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Creates all memory first, so that a lack of it is found before anything is mapped.
    fn back(&self, state: &mut State, extents: &[Extent]) -> Result<Backed> {
        let State { backings, guard } = state;
        for extent in extents {
            let n_bytes = u64::from(extent.n_pages) * self.geometry.page_bytes();
            let backing = backings.entry(extent.first_page.0).or_insert_with(|| Backing::new(*extent));
            for _ in 0..self.geometry.n_buffers() {
                match self.vmm.create(n_bytes)? {
                    Created::Memory(handle) => backing.slots.push(Slot::Created(handle)),
                    Created::NoMemory => return Ok(Backed::NoMemory),
                }
            }
        }
        for buffer in 0..self.geometry.n_buffers() {
            for run in runs_of(extents) {
                let run_pages = pages_of(run);
                if let Some(guard) = guard {
                    guard.open(buffer, run_pages.clone())?;
                }
                for extent in run {
                    if let Some(slot) = slot_of(backings, *extent, buffer)
                        && let Slot::Created(handle) = *slot
                    {
                        self.vmm.map(self.range_of(buffer, pages_of(&[*extent])), handle)?;
                        *slot = Slot::Mapped(handle);
                    }
                }
                self.vmm.set_access(self.range_of(buffer, run_pages), Access::ReadWrite)?;
            }
        }
        Ok(Backed::All)
    }

    /// Takes apart whatever there is of `extents`, which are sorted; returns those that are stuck.
    fn tear_down(&self, state: &mut State, extents: &[Extent]) -> Vec<Extent> {
        let State { backings, guard } = state;
        for buffer in 0..self.geometry.n_buffers() {
            for run in runs_of(extents) {
                self.unmap_run(backings, buffer, run);
            }
            // Only now: a piece spans runs that lie close together.
            if let Some(guard) = guard {
                for run in runs_of(extents) {
                    guard.close(buffer, pages_of(run), &|pages| backing::is_mapped(backings, buffer, pages));
                }
            }
        }
        let mut stuck = Vec::new();
        for extent in extents {
            let Some(backing) = backings.get_mut(&extent.first_page.0) else { continue };
            for slot in &mut backing.slots {
                if let Slot::Created(handle) = *slot {
                    match self.vmm.release(handle) {
                        Ok(()) => *slot = Slot::Empty,
                        Err(error) => warn!(%extent, %error, "could not release memory"),
                    }
                }
            }
            if backing.slots.iter().all(|slot| matches!(slot, Slot::Empty)) {
                backings.remove(&extent.first_page.0);
            } else {
                backing.is_stuck = true;
                stuck.push(*extent);
            }
        }
        stuck
    }

    /// Unmaps those extents of a run that are mapped in this buffer, as few calls as possible.
    fn unmap_run(&self, backings: &mut BTreeMap<u32, Backing>, buffer: u32, run: &[Extent]) {
        let mapped: Vec<Extent> = run
            .iter()
            .copied()
            .filter(|extent| backing::is_mapped(backings, buffer, pages_of(&[*extent])))
            .collect();
        let mut unmapped = |extents: &[Extent]| {
            for extent in extents {
                if let Some(slot) = slot_of(backings, *extent, buffer)
                    && let Slot::Mapped(handle) = *slot
                {
                    *slot = Slot::Created(handle);
                }
            }
        };
        for run in runs_of(&mapped) {
            match self.vmm.unmap(self.range_of(buffer, pages_of(run))) {
                Ok(()) => unmapped(run),
                // One bad extent must not take the others with it.
                Err(_) => {
                    for extent in run {
                        match self.vmm.unmap(self.range_of(buffer, pages_of(&[*extent]))) {
                            Ok(()) => unmapped(&[*extent]),
                            Err(error) => warn!(%extent, buffer, %error, "could not unmap"),
                        }
                    }
                }
            }
        }
    }

    /// The addresses of pages that are in range.
    fn range_of(&self, buffer: u32, pages: Range<u32>) -> VirtualRange {
        range_of(&self.geometry, self.range.address, buffer, pages)
    }
}

impl State {
    fn mend_guard(&mut self) {
        let Self { backings, guard } = self;
        if let Some(guard) = guard {
            guard.mend(&|buffer, pages| backing::is_mapped(backings, buffer, pages));
        }
    }
}

impl PageMapper for Region {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn map(&self, extents: &[Extent]) -> MapOutcome {
        let state = &mut *self.state.lock();
        state.mend_guard();
        let mut extents = extents.to_vec();
        extents.sort_unstable_by_key(|extent| extent.first_page);
        if let Err(error) = self.check_unmapped(state, &extents) {
            return MapOutcome::Failed { error, stuck: Vec::new() };
        }
        let failure = match self.back(state, &extents) {
            Ok(Backed::All) => return MapOutcome::Mapped,
            Ok(Backed::NoMemory) => None,
            Err(error) => Some(error),
        };
        let stuck = self.tear_down(state, &extents);
        match failure {
            None if stuck.is_empty() => MapOutcome::NoMemory,
            None => {
                let reason = "memory of an undone transaction is still held".to_owned();
                MapOutcome::Failed { error: MemoryError::Device { call: "release", reason }, stuck }
            }
            Some(error) => MapOutcome::Failed { error, stuck },
        }
    }

    fn unmap(&self, extents: &[Extent]) -> Vec<Extent> {
        let state = &mut *self.state.lock();
        state.mend_guard();
        let is_ours = |extent: &Extent| {
            let backing = state.backings.get(&extent.first_page.0);
            backing.is_some_and(|backing| backing.extent == *extent && !backing.is_stuck)
        };
        let (mut ours, mut refused): (Vec<Extent>, Vec<Extent>) =
            extents.iter().partition(|&extent| is_ours(extent));
        ours.sort_unstable_by_key(|extent| extent.first_page);
        ours.dedup();
        if !refused.is_empty() {
            warn!(extents = ?refused, "asked to unmap what was not mapped so");
        }
        refused.extend(self.tear_down(state, &ours));
        refused
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let mut state = State { backings: BTreeMap::new(), guard: None };
        std::mem::swap(&mut state, self.state.get_mut());
        // Taken out first: what is unmapped now needs no guard.
        if let Some(guard) = state.guard.take() {
            guard.tear_down();
        }
        let extents: Vec<Extent> = state.backings.values().map(|backing| backing.extent).collect();
        let n_stuck = self.tear_down(&mut state, &extents).len();
        if let Err(error) = self.vmm.free_reservation(self.range) {
            warn!(range = %self.range, n_stuck, %error, "could not free the region's addresses");
        }
    }
}

fn range_of(geometry: &Geometry, base_address: u64, buffer: u32, pages: Range<u32>) -> VirtualRange {
    let offset_bytes =
        u64::from(buffer) * geometry.buffer_stride_bytes() + u64::from(pages.start) * geometry.page_bytes();
    VirtualRange {
        address: base_address + offset_bytes,
        n_bytes: u64::from(pages.end - pages.start) * geometry.page_bytes(),
    }
}

/// The pages of a run of adjacent extents.
fn pages_of(run: &[Extent]) -> Range<u32> {
    match run {
        [] => 0..0,
        [first, .., last] => first.first_page.0..last.end_page(),
        [only] => only.first_page.0..only.end_page(),
    }
}
