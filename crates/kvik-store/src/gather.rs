//! What a retrieve has, and what it still waits for.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use kvik_tier::Lease;
use parking_lot::{Condvar, Mutex};

use crate::flight::{Flight, FlightEnd, FlightWaiter};
use crate::tiers::{RAM, TierIdx};

/// The chunks of one retrieve as they arrive.
///
/// It is done when every chunk before the *horizon* is there. The horizon is the end of what was found, and
/// comes nearer when a chunk is lost: what lies behind a hole is not waited for, and reads of it that have
/// not begun are given up.
#[derive(Debug)]
pub(crate) struct Gather {
    state: Mutex<State>,
    changed: Condvar,
}

/// One chunk of a gather.
#[derive(Debug)]
pub(crate) struct Cell {
    /// What each rank holds.
    pub(crate) leases: Vec<Option<Lease>>,
    /// The slowest tier that a rank came from.
    pub(crate) tier: TierIdx,
}

/// What a gather ends with.
#[derive(Debug)]
pub(crate) struct Gathered {
    /// The chunks that are there without a gap.
    pub(crate) cells: Vec<Cell>,
    /// The flights that brought them, which others may still join.
    pub(crate) flights: Vec<Arc<Flight>>,
    /// Whether chunks were found that did not arrive.
    pub(crate) is_truncated: bool,
    /// Whether that is for want of time.
    pub(crate) is_timed_out: bool,
}

type Callback = Box<dyn FnOnce() + Send>;

struct State {
    cells: Vec<Cell>,
    flights: Vec<(usize, Arc<Flight>)>,
    /// Chunks that are there without a gap.
    n_arrived: usize,
    horizon: usize,
    /// Whether more may be found.
    is_searching: bool,
    is_truncated: bool,
    on_done: Vec<Callback>,
}

// === impl Gather ===

impl Gather {
    pub(crate) fn new() -> Self {
        let state = State {
            cells: Vec::new(),
            flights: Vec::new(),
            n_arrived: 0,
            horizon: 0,
            is_searching: true,
            is_truncated: false,
            on_done: Vec::new(),
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Adds chunks that were found; returns the place of the first.
    pub(crate) fn extend(&self, cells: Vec<Cell>) -> usize {
        let mut state = self.state.lock();
        let first = state.cells.len();
        let is_cut = state.horizon < first || !state.is_searching;
        state.cells.extend(cells);
        if !is_cut {
            state.horizon = state.cells.len();
        }
        self.advance(state);
        first
    }

    /// Keeps a flight for a chunk that was added, until the chunk is given up.
    pub(crate) fn hold(&self, cell_idx: usize, flight: Arc<Flight>) {
        let mut state = self.state.lock();
        if cell_idx < state.horizon {
            state.flights.push((cell_idx, flight));
        } else {
            drop(state);
            drop(flight);
        }
    }

    /// Tells that nothing more will be found.
    pub(crate) fn end_search(&self) {
        let mut state = self.state.lock();
        state.is_searching = false;
        self.advance(state);
    }

    /// Whether more may be found that would be waited for.
    pub(crate) fn is_searching(&self) -> bool {
        self.state.lock().is_searching
    }

    pub(crate) fn is_done(&self) -> bool {
        self.state.lock().is_done()
    }

    /// Calls `callback` when nothing more is waited for; at once if that is so.
    pub(crate) fn on_done(&self, callback: Callback) {
        let mut state = self.state.lock();
        if state.is_done() {
            drop(state);
            callback();
        } else {
            state.on_done.push(callback);
        }
    }

    /// Takes what is there, when all is or the deadline has passed.
    pub(crate) fn take(&self, deadline: Instant) -> Gathered {
        let mut state = self.state.lock();
        while !state.is_done() && !self.changed.wait_until(&mut state, deadline).timed_out() {}
        let is_timed_out = !state.is_done();
        let n_arrived = state.n_arrived;
        let is_truncated = state.is_truncated || is_timed_out;
        let mut cells = std::mem::take(&mut state.cells);
        let mut flights = std::mem::take(&mut state.flights);
        state.is_searching = false;
        state.horizon = 0;
        state.n_arrived = 0;
        let callbacks = std::mem::take(&mut state.on_done);
        drop(state);
        call(callbacks);
        cells.truncate(n_arrived);
        flights.retain(|(cell_idx, _)| *cell_idx < n_arrived);
        let flights = flights.into_iter().map(|(_, flight)| flight).collect();
        Gathered { cells, flights, is_truncated, is_timed_out }
    }

    /// Moves over the chunks that have become complete and wakes the waiters, without the lock.
    fn advance(&self, mut state: parking_lot::MutexGuard<'_, State>) {
        while state.n_arrived < state.horizon && state.cells[state.n_arrived].is_complete() {
            state.n_arrived += 1;
        }
        if !state.is_done() {
            return;
        }
        let callbacks = std::mem::take(&mut state.on_done);
        drop(state);
        self.changed.notify_all();
        call(callbacks);
    }
}

impl FlightWaiter for Gather {
    fn flight_ended(&self, cell_idx: usize, rank: u16, end: &FlightEnd) {
        let mut state = self.state.lock();
        let mut given_up = Vec::new();
        match end {
            FlightEnd::Arrived { lease, tier } => {
                if let Some(cell) = state.cells.get_mut(cell_idx)
                    && let Some(place) = cell.leases.get_mut(usize::from(rank))
                {
                    *place = Some(lease.clone());
                    cell.tier = cell.tier.max(*tier);
                }
            }
            FlightEnd::Lost => {
                state.is_truncated = true;
                state.is_searching = false;
                state.horizon = state.horizon.min(cell_idx);
                let horizon = state.horizon;
                given_up.extend(state.flights.extract_if(.., |(cell_idx, _)| *cell_idx >= horizon));
            }
        }
        self.advance(state);
    }
}

fn call(callbacks: Vec<Callback>) {
    for callback in callbacks {
        callback();
    }
}

// === impl Cell ===

impl Cell {
    pub(crate) fn new(n_ranks: u16) -> Self {
        Self { leases: vec![None; usize::from(n_ranks)], tier: RAM }
    }

    fn is_complete(&self) -> bool {
        self.leases.iter().all(Option::is_some)
    }
}

// === impl State ===

impl State {
    fn is_done(&self) -> bool {
        !self.is_searching && self.n_arrived >= self.horizon
    }
}

impl fmt::Debug for State {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("State")
            .field("n_cells", &self.cells.len())
            .field("n_arrived", &self.n_arrived)
            .field("horizon", &self.horizon)
            .field("is_searching", &self.is_searching)
            .finish_non_exhaustive()
    }
}
