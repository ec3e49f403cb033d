//! What the accepting thread and the thread of a session say to each other.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Tells a session's thread that it is over, or that another daemon takes over.
#[derive(Default)]
pub(super) struct SessionControl {
    is_ended: AtomicBool,
    is_moving: AtomicBool,
    /// Handles that keep memory.
    n_held: AtomicUsize,
    /// Wakes the thread, once it has a place to sleep at.
    wake: Mutex<Option<Arc<dyn Fn() + Send + Sync>>>,
}

impl SessionControl {
    /// Ends the session.
    pub(super) fn end(&self) {
        self.is_ended.store(true, Ordering::Release);
        self.wake();
    }

    /// Says whether another daemon takes over: then the session begins nothing, and ends when it holds no memory.
    pub(super) fn set_moving(&self, is_moving: bool) {
        self.is_moving.store(is_moving, Ordering::Release);
        self.wake();
    }

    /// Says how the thread is woken. Both flags are set before it is woken, so a thread that sleeps only after it has
    /// looked at them misses neither.
    pub(super) fn woken_by(&self, wake: impl Fn() + Send + Sync + 'static) {
        *self.wake.lock() = Some(Arc::new(wake));
    }

    pub(super) fn is_ended(&self) -> bool {
        self.is_ended.load(Ordering::Acquire)
    }

    pub(super) fn is_moving(&self) -> bool {
        self.is_moving.load(Ordering::Acquire)
    }

    // Relaxed: a count for people.

    pub(super) fn set_n_held(&self, n_held: usize) {
        self.n_held.store(n_held, Ordering::Relaxed);
    }

    pub(super) fn n_held(&self) -> usize {
        self.n_held.load(Ordering::Relaxed)
    }

    fn wake(&self) {
        let wake = self.wake.lock().clone();
        if let Some(wake) = wake {
            wake();
        }
    }
}

impl fmt::Debug for SessionControl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("SessionControl")
            .field("is_ended", &self.is_ended)
            .field("is_moving", &self.is_moving)
            .field("n_held", &self.n_held)
            .finish_non_exhaustive()
    }
}
