//! Waiting for what another thread or process does.

use std::time::{Duration, Instant};

/// Waits until `is_true`, and fails after half a minute.
pub(crate) fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_true() {
        assert!(Instant::now() < deadline, "it never happened: {what}");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}
