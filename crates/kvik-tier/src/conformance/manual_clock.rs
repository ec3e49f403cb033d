//! Time that a test lets pass.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::decorator::Clock;

/// A clock that stands still until [`ManualClock::advance`] or a pause moves it.
#[derive(Debug)]
pub struct ManualClock {
    now: Mutex<Instant>,
    pauses: Mutex<Vec<Duration>>,
}

impl ManualClock {
    /// A clock that stands at some time.
    pub fn new() -> Self {
        Self { now: Mutex::new(Instant::now()), pauses: Mutex::default() }
    }

    /// Lets time pass.
    pub fn advance(&self, duration: Duration) {
        *self.now.lock() += duration;
    }

    /// The pauses since they were last taken.
    pub fn take_pauses(&self) -> Vec<Duration> {
        std::mem::take(&mut self.pauses.lock())
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Instant {
        *self.now.lock()
    }

    fn pause(&self, duration: Duration) {
        self.pauses.lock().push(duration);
        self.advance(duration);
    }
}
