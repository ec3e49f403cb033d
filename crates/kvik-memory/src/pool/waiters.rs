//! Threads of one pool that sleep until memory may be there.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// Threads that sleep until there is capacity.
///
/// Waking costs a load where no thread waits. A waiter joins before it tries, and a thread that frees does so
/// under a lock that the try takes too, so either the try sees what was freed or the thread that freed sees
/// the waiter.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    n_waiting: AtomicU32,
    n_notices: Mutex<u64>,
    noticed: Condvar,
}

/// One waiting thread.
#[derive(Debug)]
pub(super) struct Waiter<'a> {
    waiters: &'a Waiters,
    n_seen: u64,
}

impl Waiters {
    /// Waits from now on: every notice that comes after this call ends the next wait.
    pub(super) fn join(&self) -> Waiter<'_> {
        self.n_waiting.fetch_add(1, Ordering::SeqCst);
        Waiter { waiters: self, n_seen: *self.n_notices.lock() }
    }

    #[cfg(test)]
    pub(super) fn n_waiting(&self) -> u32 {
        self.n_waiting.load(Ordering::SeqCst)
    }

    /// Tells that a try may succeed now.
    pub(super) fn notify(&self) {
        if self.n_waiting.load(Ordering::SeqCst) > 0 {
            *self.n_notices.lock() += 1;
            self.noticed.notify_all();
        }
    }
}

impl Waiter<'_> {
    /// Sleeps until there is a notice since the last wait, or until `deadline`.
    pub(super) fn wait(&mut self, deadline: Instant) {
        let mut n_notices = self.waiters.n_notices.lock();
        while *n_notices == self.n_seen {
            if self.waiters.noticed.wait_until(&mut n_notices, deadline).timed_out() {
                break;
            }
        }
        self.n_seen = *n_notices;
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.waiters.n_waiting.fetch_sub(1, Ordering::SeqCst);
    }
}
