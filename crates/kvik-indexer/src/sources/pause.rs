//! How long to wait before something is tried again.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::Duration;

/// Pauses that double up to a bound, each shortened at random by up to a half, so that many clients that lost one
/// server do not come back together.
#[derive(Debug, Clone)]
pub struct Pauses {
    min: Duration,
    max: Duration,
    n_failures: u32,
}

impl Pauses {
    /// None has failed yet.
    pub fn new(min: Duration, max: Duration) -> Self {
        Self { min, max, n_failures: 0 }
    }

    /// The next attempt is the first one again.
    pub fn reset(&mut self) {
        self.n_failures = 0;
    }

    /// Whether nothing has failed since the last success.
    pub fn is_first(&self) -> bool {
        self.n_failures == 0
    }

    /// How long to wait after a failure.
    pub fn after_failure(&mut self) -> Duration {
        let longest = self.min.saturating_mul(1 << self.n_failures.min(20)).min(self.max);
        self.n_failures = self.n_failures.saturating_add(1);
        // Every state of this hasher has random keys.
        let random = RandomState::new().build_hasher().finish();
        longest / 2 + (longest / 2).mul_f64(random as f64 / u64::MAX as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_their_bound_and_begin_anew() {
        let (min, max) = (Duration::from_millis(100), Duration::from_secs(1));
        let mut pauses = Pauses::new(min, max);
        assert!(pauses.is_first());
        for longest_ms in [100, 200, 400, 800, 1000, 1000] {
            let longest = Duration::from_millis(longest_ms);
            let pause = pauses.after_failure();
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?} of {longest:?}");
        }
        for _ in 0..100 {
            assert!(pauses.after_failure() <= max);
        }
        assert!(!pauses.is_first());
        pauses.reset();
        assert!(pauses.is_first());
        assert!(pauses.after_failure() <= min);
    }
}
