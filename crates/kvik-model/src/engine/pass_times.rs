//! What forward passes take.

use std::time::Duration;

use crate::config::{Activation, ModelConfig};

/// A new measurement counts this much, what was known before the rest: a few passes follow a change of the device's speed.
const NEWEST_SHARE: f64 = 0.25;

/// A pass with this many times the work of a row or more is bound by its arithmetic; below, by reading the weights.
const LONG_ROWS: f64 = 128.0;

/// Predicts the time of a pass from those before it.
#[derive(Debug)]
pub(super) struct PassTimes {
    /// Multiplications of one row, without attention.
    row_work: f64,
    /// Multiplications of attention for one token that a row looks at.
    attended_work: f64,
    /// Seconds of one multiplication in long passes.
    work_s: Option<f64>,
    /// Seconds of a short pass.
    short_s: Option<f64>,
}

impl PassTimes {
    pub(super) fn new(config: &ModelConfig) -> Self {
        let query_width = config.n_query_heads * config.head_dim;
        let kv_width = config.n_kv_heads * config.head_dim;
        let n_matrices = match config.activation {
            Activation::SiluGated => 3,
            Activation::GeluTanh => 2,
        };
        let attention = config.hidden_size * (2 * query_width + 2 * kv_width);
        let mlp = n_matrices * config.hidden_size * config.intermediate_size;
        Self {
            row_work: (config.n_layers * (attention + mlp)).max(1) as f64,
            attended_work: (config.n_layers * 2 * query_width) as f64,
            work_s: None,
            short_s: None,
        }
    }

    /// Notes what a pass of so many rows took, which looked at so many tokens.
    pub(super) fn note(&mut self, n_rows: usize, n_attended: u64, time: Duration) {
        let (work, time_s) = (self.work(n_rows, n_attended), time.as_secs_f64());
        let (known, new_s) = if LONG_ROWS * self.row_work <= work {
            (&mut self.work_s, time_s / work)
        } else {
            (&mut self.short_s, time_s)
        };
        *known = Some(known.map_or(new_s, |known_s| known_s + NEWEST_SHARE * (new_s - known_s)));
    }

    /// Seconds that a pass should take; 0 as long as nothing is known.
    pub(super) fn expected_s(&self, n_rows: usize, n_attended: u64) -> f64 {
        let long_s = self.work_s.map_or(0.0, |work_s| work_s * self.work(n_rows, n_attended));
        long_s.max(self.short_s.unwrap_or(0.0))
    }

    fn work(&self, n_rows: usize, n_attended: u64) -> f64 {
        n_rows as f64 * self.row_work + n_attended as f64 * self.attended_work
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;

    #[test]
    fn a_pass_takes_as_long_as_those_before_it_with_as_much_work() {
        let model = Model::bundled().unwrap();
        let mut times = PassTimes::new(model.config());
        assert!(times.expected_s(1, 1) <= 0.0);
        let attended = |n_rows: u64, first: u64| n_rows * first + n_rows * (n_rows + 1) / 2;
        times.note(512, attended(512, 0), Duration::from_millis(40));
        times.note(1, attended(1, 30), Duration::from_millis(2));
        let near = |seconds: f64, expected_s: f64| (seconds / expected_s - 1.0).abs() < 1e-6;
        assert!(near(times.expected_s(512, attended(512, 0)), 0.04));
        assert!(near(times.expected_s(1, attended(1, 50)), 0.002));
        assert!(times.expected_s(256, attended(256, 0)) < 0.021);
        assert!(0.04 < times.expected_s(512, attended(512, 4096)));
    }

    #[test]
    fn a_few_passes_follow_a_device_that_becomes_slower() {
        let model = Model::bundled().unwrap();
        let mut times = PassTimes::new(model.config());
        times.note(512, 512, Duration::from_millis(10));
        for _ in 0..16 {
            times.note(512, 512, Duration::from_millis(50));
        }
        let expected_s = times.expected_s(512, 512);
        assert!((0.049..=0.05).contains(&expected_s), "{expected_s}");
    }
}
