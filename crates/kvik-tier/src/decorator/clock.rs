//! Time, for decorators that wait or measure.

use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

/// Tells the time and lets it pass; tests have one that does both at once.
pub trait Clock: fmt::Debug + Send + Sync {
    /// The time now; it never goes back.
    fn now(&self) -> Instant;

    /// Returns after so much time.
    fn pause(&self, duration: Duration);
}

/// The time of the operating system.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn pause(&self, duration: Duration) {
        thread::sleep(duration);
    }
}
