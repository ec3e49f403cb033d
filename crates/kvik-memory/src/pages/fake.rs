//! A region for tests: it remembers what is mapped, refuses misuse, and fails on command.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::{FixedGrants, MapOutcome, PageAllocator, PageMapper, PageSettings};
use crate::geometry::{Extent, Geometry, PageId, UNIT_BYTES};
use crate::{MemoryError, Result};

/// What a call is to do; a call without an order succeeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    NoMemory,
    /// The call fails, and one extent of it is stuck if there is any.
    Fail {
        has_stuck: bool,
    },
}

#[derive(Debug)]
pub(crate) struct FakeMapper {
    geometry: Geometry,
    state: Mutex<State>,
    gate_moved: Condvar,
}

#[derive(Debug, Default)]
struct State {
    mapped: BTreeMap<u32, u32>,
    stuck: Vec<Extent>,
    faults: VecDeque<Fault>,
    is_gate_closed: bool,
    n_at_gate: u32,
}

impl FakeMapper {
    pub(crate) fn new(capacity_pages: u32) -> Arc<Self> {
        let geometry = Geometry::try_new(1, UNIT_BYTES, capacity_pages).expect("one buffer of small pages");
        Arc::new(Self { geometry, state: Mutex::default(), gate_moved: Condvar::new() })
    }

    /// What the next calls are to do.
    pub(crate) fn order(&self, faults: &[Fault]) {
        let mut state = self.state.lock();
        state.faults.clear();
        state.faults.extend(faults);
    }

    pub(crate) fn is_mapped(&self, page: PageId) -> bool {
        let state = self.state.lock();
        state.mapped.range(..=page.0).next_back().is_some_and(|(&first, &n_pages)| page.0 < first + n_pages)
    }

    /// Pages that are mapped or in an unknown state.
    pub(crate) fn n_pages(&self) -> u32 {
        let state = self.state.lock();
        state.mapped.values().sum::<u32>() + state.stuck.iter().map(|extent| extent.n_pages).sum::<u32>()
    }

    pub(crate) fn n_extents(&self) -> usize {
        self.state.lock().mapped.len()
    }

    /// Lets calls wait until the gate is opened.
    pub(crate) fn close_gate(&self) {
        self.state.lock().is_gate_closed = true;
    }

    pub(crate) fn open_gate(&self) {
        self.state.lock().is_gate_closed = false;
        self.gate_moved.notify_all();
    }

    /// Waits until a call stands at the gate.
    pub(crate) fn wait_at_gate(&self) {
        let mut state = self.state.lock();
        while state.n_at_gate == 0 {
            self.gate_moved.wait(&mut state);
        }
    }

    fn enter(&self) -> (parking_lot::MutexGuard<'_, State>, Fault) {
        let mut state = self.state.lock();
        state.n_at_gate += 1;
        self.gate_moved.notify_all();
        while state.is_gate_closed {
            self.gate_moved.wait(&mut state);
        }
        state.n_at_gate -= 1;
        let fault = state.faults.pop_front().unwrap_or(Fault::None);
        (state, fault)
    }
}

impl PageMapper for FakeMapper {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn map(&self, extents: &[Extent]) -> MapOutcome {
        let (mut state, fault) = self.enter();
        assert!(!extents.is_empty(), "a call for nothing");
        for extent in extents {
            let (first, n_pages) = (extent.first_page.0, extent.n_pages);
            assert!(n_pages.is_power_of_two() && first.is_multiple_of(n_pages), "{extent:?} is not aligned");
            assert!(first + n_pages <= self.geometry.capacity_pages(), "{extent:?} is out of range");
            let others = state.mapped.iter().map(|(&first, &n_pages)| (first, n_pages));
            let stuck = state.stuck.iter().map(|stuck| (stuck.first_page.0, stuck.n_pages));
            for (other_first, n_other) in others.chain(stuck) {
                assert!(
                    first + n_pages <= other_first || other_first + n_other <= first,
                    "{extent:?} overlaps"
                );
            }
            state.mapped.insert(first, n_pages);
        }
        if fault == Fault::None {
            return MapOutcome::Mapped;
        }
        for extent in extents {
            state.mapped.remove(&extent.first_page.0);
        }
        let Fault::Fail { has_stuck } = fault else { return MapOutcome::NoMemory };
        let stuck: Vec<Extent> = extents.iter().take(usize::from(has_stuck)).copied().collect();
        state.stuck.extend(&stuck);
        let error = MemoryError::Device { call: "map", reason: "ordered by the test".to_owned() };
        MapOutcome::Failed { error, stuck }
    }

    fn unmap(&self, extents: &[Extent]) -> Vec<Extent> {
        let (mut state, fault) = self.enter();
        for extent in extents {
            let n_pages = state.mapped.remove(&extent.first_page.0);
            assert_eq!(n_pages, Some(extent.n_pages), "{extent:?} is not mapped so");
        }
        let has_stuck = fault == Fault::Fail { has_stuck: true };
        let stuck: Vec<Extent> = extents.iter().take(usize::from(has_stuck)).copied().collect();
        state.stuck.extend(&stuck);
        stuck
    }
}

/// A page allocator on a fake region with a budget of all its pages.
pub(crate) fn fake_pages(
    capacity_pages: u32,
    settings: PageSettings,
) -> Result<(PageAllocator, Arc<FakeMapper>, Arc<FixedGrants>)> {
    let mapper = FakeMapper::new(capacity_pages);
    let grants = Arc::new(FixedGrants::new(u64::from(capacity_pages) * UNIT_BYTES));
    Ok((PageAllocator::try_new(mapper.clone(), grants.clone(), settings)?, mapper, grants))
}
