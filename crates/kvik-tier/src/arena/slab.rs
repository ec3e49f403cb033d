//! Slots of equal size.

use std::collections::BTreeSet;

use parking_lot::Mutex;

use super::buddy::Buddy;
use super::run::Run;

/// The most slots of an extent: the bits of a word.
const MAX_SLOTS: u32 = u64::BITS;

/// The extents of one chunk size: runs that are carved into slots of that size.
///
/// A slot is taken from the lowest extent that has room, so that the highest ones become empty and go back to
/// the buddy allocator. One empty extent stays while no other has room, or a size that comes and goes one by
/// one would make and unmake it each time.
///
/// An extent can be *dissolved*: its free slots go back to the buddy allocator, and each of the others when
/// it is given back.
#[derive(Debug)]
pub(super) struct Slab {
    n_slot_units: u32,
    n_slots: u32,
    state: Mutex<SlabState>,
}

/// Which slot of which extent a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotId {
    extent_idx: u32,
    slot_idx: u32,
}

/// Counts of a slab.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SlabStat {
    /// Extents that are not dissolved.
    pub(super) n_extents: usize,
    /// Units of their free slots.
    pub(super) n_idle_units: u32,
}

#[derive(Debug, Default)]
struct SlabState {
    extents: Vec<Extent>,
    /// Places in `extents` that can be used again.
    vacant: Vec<u32>,
    /// First unit and place of the extents that have room.
    with_room: BTreeSet<(u32, u32)>,
    /// Those of `extents` that are not dissolved.
    n_extents: usize,
    n_idle_slots: u32,
}

#[derive(Debug)]
struct Extent {
    run: Run,
    n_slots: u32,
    /// One bit for each free slot; none once it is dissolved.
    free: u64,
    /// Slots that are not free.
    n_taken: u32,
    is_dissolved: bool,
}

impl Slab {
    /// A slab of slots of `n_slot_units` with extents of up to `max_extent_units`; `None` where not even two
    /// slots fit, which is not worth an extent.
    pub(super) fn new(n_slot_units: u32, max_extent_units: u32) -> Option<Self> {
        let n_slots = max_extent_units.checked_div(n_slot_units)?.min(MAX_SLOTS);
        (n_slots >= 2).then(|| Self { n_slot_units, n_slots, state: Mutex::default() })
    }

    pub(super) fn n_slot_units(&self) -> u32 {
        self.n_slot_units
    }

    /// Takes a slot; `None` if no extent has room and `buddy` has none at hand.
    pub(super) fn take(&self, buddy: &Mutex<Buddy>) -> Option<(Run, SlotId)> {
        let mut state = self.state.lock();
        if state.with_room.is_empty() {
            let run = buddy.lock().take(self.n_slots * self.n_slot_units)?;
            state.add(run, self.n_slots);
        }
        state.take(self.n_slot_units)
    }

    /// Makes an extent of `run`, which is as long as a number of slots, and takes its first slot.
    pub(super) fn take_of_new_extent(&self, run: Run) -> (Run, SlotId) {
        let n_slots = run.n_units / self.n_slot_units;
        debug_assert!(run.n_units.is_multiple_of(self.n_slot_units) && (1..=MAX_SLOTS).contains(&n_slots));
        let mut state = self.state.lock();
        let extent_idx = state.add(run, n_slots);
        state.take_of(extent_idx, self.n_slot_units)
    }

    /// Gives a slot back; an extent that becomes empty may go back to `buddy`.
    pub(super) fn give(&self, slot: SlotId, run: Run, buddy: &Mutex<Buddy>) {
        let freed = {
            let mut state = self.state.lock();
            if state.leave_dissolved(slot.extent_idx) { Some(run) } else { state.give(slot) }
        };
        if let Some(freed) = freed {
            buddy.lock().give(freed);
        }
    }

    /// Makes a slot of a dissolved extent a run like any other; `false`, and nothing, if its extent is not.
    pub(super) fn detach(&self, slot: SlotId) -> bool {
        self.state.lock().leave_dissolved(slot.extent_idx)
    }

    /// Dissolves the extents that have units of `span`.
    pub(super) fn dissolve(&self, span: Run, buddy: &Mutex<Buddy>) {
        let mut state = self.state.lock();
        for extent_idx in 0..state.extents.len() as u32 {
            let extent = &state.extents[extent_idx as usize];
            if !extent.is_dissolved && extent.run.intersection(span).n_units > 0 {
                let freed = state.dissolve(extent_idx, self.n_slot_units);
                let mut buddy = buddy.lock();
                for run in freed {
                    buddy.give(run);
                }
            }
        }
    }

    /// Adds the runs of all free slots to `runs`.
    pub(super) fn free_runs(&self, runs: &mut Vec<Run>) {
        let state = self.state.lock();
        for (_, extent_idx) in &state.with_room {
            runs.extend(state.extents[*extent_idx as usize].free_runs(self.n_slot_units));
        }
    }

    pub(super) fn stat(&self) -> SlabStat {
        let state = self.state.lock();
        SlabStat { n_extents: state.n_extents, n_idle_units: state.n_idle_slots * self.n_slot_units }
    }
}

// === impl SlabState ===

impl SlabState {
    fn add(&mut self, run: Run, n_slots: u32) -> u32 {
        let free = u64::MAX >> (MAX_SLOTS - n_slots);
        let extent = Extent { run, n_slots, free, n_taken: 0, is_dissolved: false };
        let extent_idx = if let Some(extent_idx) = self.vacant.pop() {
            self.extents[extent_idx as usize] = extent;
            extent_idx
        } else {
            self.extents.push(extent);
            self.extents.len() as u32 - 1
        };
        self.with_room.insert((run.start, extent_idx));
        self.n_extents += 1;
        self.n_idle_slots += n_slots;
        extent_idx
    }

    fn take(&mut self, n_slot_units: u32) -> Option<(Run, SlotId)> {
        let (_, extent_idx) = *self.with_room.first()?;
        Some(self.take_of(extent_idx, n_slot_units))
    }

    /// Takes the first free slot of an extent that has room.
    fn take_of(&mut self, extent_idx: u32, n_slot_units: u32) -> (Run, SlotId) {
        let extent = &mut self.extents[extent_idx as usize];
        let slot_idx = extent.free.trailing_zeros();
        extent.free &= extent.free - 1;
        extent.n_taken += 1;
        self.n_idle_slots -= 1;
        if extent.free == 0 {
            self.with_room.remove(&(extent.run.start, extent_idx));
        }
        let run = Run::new(extent.run.start + slot_idx * n_slot_units, n_slot_units);
        (run, SlotId { extent_idx, slot_idx })
    }

    /// Gives a slot back; returns the run of its extent if that goes as well.
    fn give(&mut self, slot: SlotId) -> Option<Run> {
        let extent = &mut self.extents[slot.extent_idx as usize];
        let was_full = extent.free == 0;
        extent.free |= 1 << slot.slot_idx;
        extent.n_taken -= 1;
        let (run, is_empty) = (extent.run, extent.n_taken == 0);
        self.n_idle_slots += 1;
        if was_full {
            self.with_room.insert((run.start, slot.extent_idx));
        }
        (is_empty && self.with_room.len() > 1).then(|| self.remove_empty(slot.extent_idx))
    }

    fn remove_empty(&mut self, extent_idx: u32) -> Run {
        let extent = &mut self.extents[extent_idx as usize];
        // A vacant place is a dissolved extent of which nothing is left.
        extent.is_dissolved = true;
        extent.free = 0;
        let (run, n_slots) = (extent.run, extent.n_slots);
        self.n_extents -= 1;
        self.n_idle_slots -= n_slots;
        self.with_room.remove(&(run.start, extent_idx));
        self.vacant.push(extent_idx);
        run
    }

    /// Dissolves an extent; returns the runs of its free slots.
    fn dissolve(&mut self, extent_idx: u32, n_slot_units: u32) -> Vec<Run> {
        let extent = &mut self.extents[extent_idx as usize];
        if extent.n_taken == 0 {
            return vec![self.remove_empty(extent_idx)];
        }
        let freed: Vec<Run> = extent.free_runs(n_slot_units).collect();
        extent.is_dissolved = true;
        extent.free = 0;
        self.n_extents -= 1;
        self.n_idle_slots -= freed.len() as u32;
        self.with_room.remove(&(extent.run.start, extent_idx));
        freed
    }

    /// Counts one slot less of a dissolved extent; `false`, and nothing, if it is not dissolved.
    fn leave_dissolved(&mut self, extent_idx: u32) -> bool {
        let extent = &mut self.extents[extent_idx as usize];
        if !extent.is_dissolved {
            return false;
        }
        extent.n_taken -= 1;
        if extent.n_taken == 0 {
            self.vacant.push(extent_idx);
        }
        true
    }
}

// === impl Extent ===

impl Extent {
    fn free_runs(&self, n_slot_units: u32) -> impl Iterator<Item = Run> + use<> {
        let (start, free, n_slots) = (self.run.start, self.free, self.n_slots);
        (0..n_slots)
            .filter(move |slot_idx| free >> slot_idx & 1 == 1)
            .map(move |slot_idx| Run::new(start + slot_idx * n_slot_units, n_slot_units))
    }
}
