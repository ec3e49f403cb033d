//! The wall clock, read here only.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Unix time in seconds, for answers that tell when they were made.
pub(crate) fn unix_seconds() -> u64 {
    since_epoch().as_secs()
}

/// Unix time in nanoseconds, at least 1: the epoch of a worker that starts now.
///
/// A later life of a worker has a larger one unless its clock was set back between the two.
pub(crate) fn unix_nanoseconds() -> u64 {
    u64::try_from(since_epoch().as_nanos()).unwrap_or(u64::MAX).max(1)
}

fn since_epoch() -> Duration {
    // A clock before 1970 is set wrongly; nothing here depends on it being right.
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
