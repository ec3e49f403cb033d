//! The last hour, in steps of ten seconds.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::figures::{Counts, GatewayFigures};

/// Time between two points.
pub(super) const INTERVAL: Duration = Duration::from_secs(10);
/// Points that are kept: an hour.
const MAX_POINTS: usize = 360;
/// Points that first tokens are judged over where one figure is wanted for now: a minute.
const RECENT_POINTS: usize = 6;

/// What happened in the interval that ended at a time.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Point {
    /// Unix time, in seconds.
    pub(super) time_s: u64,
    /// The interval's length; longer than usual where the task was late.
    pub(super) seconds: f64,
    pub(super) ok_requests: f64,
    pub(super) failed_requests: f64,
    /// Streams whose first token came, and how long half and 95 of 100 took at most; none without a stream.
    pub(super) first_tokens: f64,
    pub(super) ttft_p50_s: Option<f64>,
    pub(super) ttft_p95_s: Option<f64>,
    /// Requests that waited at the gateway when the interval ended.
    pub(super) queue_length: f64,
    /// Sequences that ran, and that waited, at all workers when it ended.
    pub(super) running: f64,
    pub(super) waiting: f64,
    /// Workers that answered.
    pub(super) workers: usize,
    /// What all workers did.
    #[serde(flatten)]
    pub(super) counts: Counts,
}

/// Points as JSON, each with its number; shared by all pages.
pub(super) type Points = Arc<[(u64, Arc<str>)]>;

/// The points of the last hour, and what the next one is counted from.
#[derive(Debug, Default)]
pub(super) struct Series {
    points: VecDeque<(u64, Arc<str>)>,
    next_number: u64,
    /// The gateway's figures at the end of the last points; the latest is the last.
    ends: VecDeque<GatewayFigures>,
    /// What the workers did since the last point.
    open: Counts,
}

/// How the fleet is when an interval ends.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct End {
    pub(super) time_s: u64,
    pub(super) seconds: f64,
    pub(super) running: f64,
    pub(super) waiting: f64,
    pub(super) workers: usize,
}

impl Series {
    /// Adds what a worker did.
    pub(super) fn add(&mut self, counts: &Counts) {
        self.open = self.open.plus(counts);
    }

    /// Ends an interval.
    pub(super) fn end(&mut self, end: End, gateway: &GatewayFigures) {
        let counts = std::mem::take(&mut self.open);
        // The first look only says from where to count.
        if let Some(before) = self.ends.back() {
            let first_tokens = gateway.first_tokens.since(&before.first_tokens);
            let point = Point {
                time_s: end.time_s,
                seconds: end.seconds,
                ok_requests: (gateway.ok_requests - before.ok_requests).max(0.0),
                failed_requests: (gateway.failed_requests - before.failed_requests).max(0.0),
                first_tokens: first_tokens.count(),
                ttft_p50_s: first_tokens.quantile(0.5),
                ttft_p95_s: first_tokens.quantile(0.95),
                queue_length: gateway.queue_length,
                running: end.running,
                waiting: end.waiting,
                workers: end.workers,
                counts,
            };
            if let Ok(json) = serde_json::to_string(&point) {
                self.points.push_back((self.next_number, json.into()));
                self.next_number += 1;
            }
            if MAX_POINTS < self.points.len() {
                self.points.pop_front();
            }
        }
        self.ends.push_back(gateway.clone());
        if RECENT_POINTS + 1 < self.ends.len() {
            self.ends.pop_front();
        }
    }

    /// The gateway's figures about a minute ago; none right after the start.
    pub(super) fn recent(&self) -> Option<&GatewayFigures> {
        self.ends.front()
    }

    /// All points.
    pub(super) fn points(&self) -> Points {
        self.points.iter().cloned().collect()
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "counts are whole numbers")]
mod tests {
    use super::*;

    #[test]
    fn an_hour_is_kept_and_each_point_has_what_happened_in_its_time() {
        let mut series = Series::default();
        let mut gateway = GatewayFigures::default();
        for number in 0..MAX_POINTS as u64 + 10 {
            let counts = Counts { prompt_tokens: 5.0, ..Counts::default() };
            series.add(&counts);
            series.add(&counts);
            gateway.ok_requests += 3.0;
            series.end(End { time_s: number, seconds: 10.0, ..End::default() }, &gateway);
        }
        let points = series.points();
        assert_eq!(points.len(), MAX_POINTS);
        let (number, last) = &points[MAX_POINTS - 1];
        assert_eq!(*number, MAX_POINTS as u64 + 8);
        let last: serde_json::Value = serde_json::from_str(last).unwrap();
        assert_eq!((&last["ok_requests"], &last["prompt_tokens"]), (&3.0.into(), &10.0.into()));
        assert!(last["ttft_p50_s"].is_null());
        assert_eq!(series.recent().unwrap().ok_requests, gateway.ok_requests - 3.0 * RECENT_POINTS as f64);
    }
}
