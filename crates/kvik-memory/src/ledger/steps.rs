//! Places where a test can end the process, to show that any instruction may be the last.
//!
//! Each step of the protocols passes here. Nothing happens unless [`kill_at`] was called, and then the
//! process kills itself as the kernel would: no destructor runs and no lock is given back by hand.

use std::sync::atomic::{AtomicU64, Ordering};

/// Steps left until the end; zero means never.
static STEPS_LEFT: AtomicU64 = AtomicU64::new(0);

/// Kills this process with SIGKILL at the `n_steps`-th step from now; zero means never.
pub fn kill_at(n_steps: u64) {
    STEPS_LEFT.store(n_steps, Ordering::Relaxed);
}

/// Marks a step of a protocol.
pub(super) fn step() {
    // A counter for tests orders nothing.
    if STEPS_LEFT.load(Ordering::Relaxed) != 0 && STEPS_LEFT.fetch_sub(1, Ordering::Relaxed) == 1 {
        // A process can always kill itself; should that fail, the test sees that it lives.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}
