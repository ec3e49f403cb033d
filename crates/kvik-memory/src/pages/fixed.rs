//! A budget of one engine alone, without a ledger.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::{Claim, Event, GrantEvents, Grants, Shortage, Usage};
use crate::Result;

/// Grants out of a budget that belongs to one pool, and that the process may change.
#[derive(Debug)]
pub struct FixedGrants {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    limit_bytes: u64,
    held_bytes: u64,
    usage: Usage,
    has_limit_changed: bool,
    has_capacity_returned: bool,
    /// Zero when nothing is asked for.
    reclaim_bytes: u64,
    is_interrupted: bool,
}

impl FixedGrants {
    /// A budget of `limit_bytes`.
    pub fn new(limit_bytes: u64) -> Self {
        Self { state: Mutex::new(State { limit_bytes, ..State::default() }), changed: Condvar::new() }
    }

    /// Moves the budget; the agent of the pool learns of it at once.
    pub fn set_limit_bytes(&self, limit_bytes: u64) {
        let mut state = self.state.lock();
        state.limit_bytes = limit_bytes;
        state.has_limit_changed = true;
        self.changed.notify_all();
    }

    /// Asks the pool to give back `n_bytes` of what it holds, whatever the budget says.
    pub fn request_reclaim(&self, n_bytes: u64) {
        self.state.lock().reclaim_bytes = n_bytes;
        self.changed.notify_all();
    }

    /// Bytes that are held.
    pub fn held_bytes(&self) -> u64 {
        self.state.lock().held_bytes
    }

    /// What was published last.
    pub fn usage(&self) -> Usage {
        self.state.lock().usage
    }
}

impl Grants for FixedGrants {
    fn claim(&self, n_bytes: u64) -> Result<Claim> {
        let mut state = self.state.lock();
        match state.held_bytes.checked_add(n_bytes) {
            Some(held_bytes) if held_bytes <= state.limit_bytes => {
                state.held_bytes = held_bytes;
                Ok(Claim::Granted)
            }
            _ => Ok(Claim::Denied(Shortage::GroupLimit)),
        }
    }

    fn give_back(&self, n_bytes: u64) {
        let mut state = self.state.lock();
        state.held_bytes = state.held_bytes.saturating_sub(n_bytes);
        state.has_capacity_returned = true;
        self.changed.notify_all();
    }

    fn claimable_bytes(&self) -> u64 {
        self.state.lock().limit_bytes
    }

    fn limit_bytes(&self) -> u64 {
        self.claimable_bytes()
    }

    fn publish(&self, usage: Usage) {
        self.state.lock().usage = usage;
    }
}

impl GrantEvents for FixedGrants {
    fn wait(&self, timeout: Duration) -> Event {
        let deadline = Instant::now() + timeout;
        let mut state = self.state.lock();
        loop {
            if std::mem::take(&mut state.has_limit_changed) {
                return Event::LimitChanged;
            }
            if let n_bytes @ 1.. = std::mem::take(&mut state.reclaim_bytes) {
                return Event::ReclaimRequested { n_bytes };
            }
            if std::mem::take(&mut state.has_capacity_returned) {
                return Event::CapacityReturned;
            }
            if std::mem::take(&mut state.is_interrupted)
                || self.changed.wait_until(&mut state, deadline).timed_out()
            {
                return Event::Timeout;
            }
        }
    }

    fn interrupt(&self) {
        self.state.lock().is_interrupted = true;
        self.changed.notify_all();
    }
}
