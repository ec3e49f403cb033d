//! The controller's metrics.
//!
//! | name | labels | meaning |
//! |---|---|---|
//! | `kvik_engines_state` | `engine`, `state` | 1 for the state that the engine is in, 0 for the others |
//! | `kvik_engines_wakes_total` | `engine` | times that it started or woke |
//! | `kvik_engines_wake_seconds` | `engine` | from the request for it to its being ready |
//! | `kvik_engines_failures_total` | `engine` | times that it did not start, or broke |

use std::time::Duration;

use crate::engine::machine::Phase;

const STATE: &str = "kvik_engines_state";
const WAKES: &str = "kvik_engines_wakes_total";
const WAKE_SECONDS: &str = "kvik_engines_wake_seconds";
const FAILURES: &str = "kvik_engines_failures_total";

const PHASES: [Phase; 8] = [
    Phase::Asleep,
    Phase::Queued,
    Phase::Starting,
    Phase::Ready,
    Phase::GivingWay,
    Phase::FallingAsleep,
    Phase::Stopping,
    Phase::Failed,
];

/// Shows where an engine is; `None`: it is gone.
pub(crate) fn phase(engine: &str, phase: Option<Phase>) {
    for known in PHASES {
        let is_in = f64::from(u8::from(phase == Some(known)));
        metrics::gauge!(STATE, "engine" => engine.to_owned(), "state" => known.as_str()).set(is_in);
    }
}

/// Counts a wake, with the time that it took if a request or an operator asked for it.
pub(crate) fn woke(engine: &str, time: Option<Duration>) {
    metrics::counter!(WAKES, "engine" => engine.to_owned()).increment(1);
    if let Some(time) = time {
        metrics::histogram!(WAKE_SECONDS, "engine" => engine.to_owned()).record(time.as_secs_f64());
    }
}

/// Counts a failure.
pub(crate) fn failed(engine: &str) {
    metrics::counter!(FAILURES, "engine" => engine.to_owned()).increment(1);
}
