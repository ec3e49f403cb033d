//! How fast an engine was lately, in tokens a second.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How much the newest measurement counts.
const NEWEST_SHARE: f64 = 0.2;
/// Fewest tokens of a measurement: fewer say more about what each request costs than about speed.
const MIN_TOKENS: u64 = 256;

/// A mean over measurements in which older ones count less and less.
#[derive(Debug, Default)]
pub(crate) struct Speed {
    /// The bits of a number of tokens a second; 0 before the first measurement.
    bits: AtomicU64,
}

impl Speed {
    /// Takes a measurement; one that says nothing about speed is left out.
    pub(crate) fn measure(&self, n_tokens: u64, time: Duration) {
        if n_tokens < MIN_TOKENS || time.is_zero() {
            return;
        }
        let newest = n_tokens as f64 / time.as_secs_f64();
        let join = |bits: u64| {
            let mean = f64::from_bits(bits);
            let mean = if bits == 0 { newest } else { mean + NEWEST_SHARE * (newest - mean) };
            Some(mean.to_bits())
        };
        // Relaxed: a number on its own.
        let _ = self.bits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, join);
    }

    /// Tokens a second; `None` before the first measurement.
    pub(crate) fn tokens_per_s(&self) -> Option<f64> {
        let bits = self.bits.load(Ordering::Relaxed);
        (bits != 0).then(|| f64::from_bits(bits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_follows_its_measurements_and_leaves_out_what_says_nothing() {
        let speed = Speed::default();
        speed.measure(255, Duration::from_secs(1));
        speed.measure(1000, Duration::ZERO);
        assert_eq!(speed.tokens_per_s(), None);
        speed.measure(1000, Duration::from_secs(1));
        assert_eq!(speed.tokens_per_s(), Some(1000.0));
        speed.measure(2000, Duration::from_secs(1));
        assert_eq!(speed.tokens_per_s(), Some(1200.0));
        for _ in 0..100 {
            speed.measure(500, Duration::from_secs(1));
        }
        assert!((speed.tokens_per_s().unwrap() - 500.0).abs() < 1.0);
    }
}
