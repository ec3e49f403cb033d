//! Waking a thread that sleeps until it is wanted.

use parking_lot::{Condvar, Mutex};

/// Wakes one thread, and ends its waiting.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_wanted: bool,
    is_closed: bool,
}

impl Wake {
    pub(crate) fn wake(&self) {
        self.state.lock().is_wanted = true;
        self.changed.notify_one();
    }

    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Waits until it is wanted; false at the end.
    pub(crate) fn wait(&self) -> bool {
        let mut state = self.state.lock();
        while !state.is_wanted && !state.is_closed {
            self.changed.wait(&mut state);
        }
        state.is_wanted = false;
        !state.is_closed
    }
}
