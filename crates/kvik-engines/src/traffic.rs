//! The requests of one model: how many, how fast, how long ago.

use std::time::Duration;

use tokio::time::Instant;

/// Seconds that rates can look back.
pub(crate) const MAX_WINDOW_S: u64 = 600;

/// Counts of one model's requests.
#[derive(Debug)]
pub(crate) struct Traffic {
    start: Instant,
    n_total: u64,
    n_succeeded: u64,
    n_failed: u64,
    /// Of those that ended.
    total_time: Duration,
    /// Requests that began, by the second since `start` modulo the window: the second and its count.
    begun: Box<[(u64, u32)]>,
}

/// What the counts say.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub(crate) struct TrafficReport {
    pub(crate) total_requests: u64,
    pub(crate) successful_requests: u64,
    pub(crate) failed_requests: u64,
    pub(crate) window_requests: u64,
    pub(crate) requests_per_second: f64,
    pub(crate) average_seconds: f64,
}

impl Traffic {
    pub(crate) fn new(start: Instant) -> Self {
        let begun = vec![(u64::MAX, 0); MAX_WINDOW_S as usize].into_boxed_slice();
        Self { start, n_total: 0, n_succeeded: 0, n_failed: 0, total_time: Duration::ZERO, begun }
    }

    /// Counts a request that came.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.n_total += 1;
        let second = self.second(now);
        let slot = &mut self.begun[(second % MAX_WINDOW_S) as usize];
        if slot.0 != second {
            *slot = (second, 0);
        }
        slot.1 = slot.1.saturating_add(1);
    }

    /// Counts the end of a request that took `time`.
    pub(crate) fn end(&mut self, is_success: bool, time: Duration) {
        if is_success {
            self.n_succeeded += 1;
        } else {
            self.n_failed += 1;
        }
        self.total_time += time;
    }

    /// The counts, with the rate over the last `window_s` seconds.
    pub(crate) fn report(&self, window_s: u64, now: Instant) -> TrafficReport {
        let window_s = window_s.clamp(1, MAX_WINDOW_S);
        let second = self.second(now);
        let is_recent = |&&(at, _): &&(u64, u32)| at <= second && second - at < window_s;
        let window_requests = self.begun.iter().filter(is_recent).map(|&(_, count)| u64::from(count)).sum();
        let n_ended = self.n_succeeded + self.n_failed;
        // A controller that has just begun has seen less than the window.
        let observed_s = (second + 1).min(window_s);
        TrafficReport {
            total_requests: self.n_total,
            successful_requests: self.n_succeeded,
            failed_requests: self.n_failed,
            window_requests,
            requests_per_second: window_requests as f64 / observed_s as f64,
            average_seconds: if n_ended == 0 { 0.0 } else { self.total_time.as_secs_f64() / n_ended as f64 },
        }
    }

    fn second(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.start).as_secs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_window() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut traffic = Traffic::new(start);
        assert_eq!(traffic.report(60, start).window_requests, 0);
        for second in 0..100 {
            traffic.begin(at(second));
            traffic.begin(at(second));
            traffic.end(second % 2 == 0, Duration::from_millis(500));
        }
        let report = traffic.report(10, at(99));
        assert_eq!(report.window_requests, 20);
        assert!((report.requests_per_second - 2.0).abs() < 1e-9, "{report:?}");
        assert_eq!(
            (report.total_requests, report.successful_requests, report.failed_requests),
            (200, 50, 50)
        );
        assert!((report.average_seconds - 0.5).abs() < 1e-9, "{report:?}");
        assert_eq!(traffic.report(10, at(150)).window_requests, 0);
        assert_eq!(traffic.report(u64::MAX, at(99)).window_requests, 200);
        assert_eq!(traffic.report(10, at(99 + MAX_WINDOW_S)).window_requests, 0);
    }
}
