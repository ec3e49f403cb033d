//! The circuit breaker of one worker.
//!
//! Closed, it counts. It opens after a number of failures in a row, or when the share of failures
//! in a window is too large, and the worker gets no requests. After a while it is half open: the
//! worker's `/health` is asked, and no request is risked. A good answer closes it on probation, a
//! bad one opens it again for twice as long, up to a limit. On probation one failure opens it and
//! one success ends the probation.
//!
//! What is a failure is decided by the caller. A refusal (4xx) is a success: the worker lives. Back
//! pressure (429, 503 with `Retry-After`) and clients that leave are neither.
//!
//! Pure: the time is an argument.

use std::time::Duration;

use tokio::time::Instant;

use crate::config::{BreakerConfig, millis};

/// What a request says about its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The worker did its part.
    Success,
    /// The worker failed.
    Failure,
    /// Nothing.
    Neutral,
}

/// Whether a worker gets requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// It does.
    Closed,
    /// It does not; its health is being asked.
    HalfOpen,
    /// It does not.
    Open,
}

/// Counts the outcomes of one worker's requests.
#[derive(Debug, Clone)]
pub(crate) struct Breaker {
    phase: Phase,
    failures_in_a_row: u32,
    /// Openings without a success between them; above 0 in a closed breaker means probation.
    openings_in_a_row: u32,
    window_start: Instant,
    window_requests: u32,
    window_failures: u32,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Closed,
    HalfOpen,
    Open { probe_at: Instant },
}

impl Breaker {
    /// A closed breaker.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            phase: Phase::Closed,
            failures_in_a_row: 0,
            openings_in_a_row: 0,
            window_start: now,
            window_requests: 0,
            window_failures: 0,
        }
    }

    /// The state now.
    pub(crate) fn state(&self) -> State {
        match self.phase {
            Phase::Closed => State::Closed,
            Phase::HalfOpen => State::HalfOpen,
            Phase::Open { .. } => State::Open,
        }
    }

    /// Takes the outcome of a request. Requests that end while the breaker is not closed began
    /// before it opened and change nothing.
    pub(crate) fn record(&mut self, outcome: Outcome, config: &BreakerConfig, now: Instant) {
        if !matches!(self.phase, Phase::Closed) || outcome == Outcome::Neutral {
            return;
        }
        if millis(config.window_ms) <= now.saturating_duration_since(self.window_start) {
            self.window_start = now;
            self.window_requests = 0;
            self.window_failures = 0;
        }
        self.window_requests += 1;
        if outcome == Outcome::Success {
            self.failures_in_a_row = 0;
            self.openings_in_a_row = 0;
            return;
        }
        self.window_failures += 1;
        self.failures_in_a_row += 1;
        let ratio = f64::from(self.window_failures) / f64::from(self.window_requests);
        let is_ratio_too_large = config.min_requests <= self.window_requests && config.error_ratio <= ratio;
        let is_on_probation = 0 < self.openings_in_a_row;
        if is_on_probation || is_ratio_too_large || config.consecutive_failures <= self.failures_in_a_row {
            self.open(config, now);
        }
    }

    /// Opens a closed breaker whatever it has counted: the worker does not answer at all.
    pub(crate) fn trip(&mut self, config: &BreakerConfig, now: Instant) {
        if matches!(self.phase, Phase::Closed) {
            self.open(config, now);
        }
    }

    /// Makes an open breaker half open if it is time; the caller then asks the worker's health and
    /// MUST call [`Breaker::end_probe`].
    pub(crate) fn start_probe(&mut self, now: Instant) -> bool {
        let is_due = matches!(self.phase, Phase::Open { probe_at } if probe_at <= now);
        if is_due {
            self.phase = Phase::HalfOpen;
        }
        is_due
    }

    /// Closes a half-open breaker, or opens it again.
    pub(crate) fn end_probe(&mut self, is_healthy: bool, config: &BreakerConfig, now: Instant) {
        if !matches!(self.phase, Phase::HalfOpen) {
            return;
        }
        if is_healthy {
            let openings_in_a_row = self.openings_in_a_row;
            *self = Self { openings_in_a_row, ..Self::new(now) };
        } else {
            self.open(config, now);
        }
    }

    /// Time until the worker may get requests again; none if it gets them now.
    pub(crate) fn time_to_probe(&self, now: Instant) -> Duration {
        match self.phase {
            Phase::Closed | Phase::HalfOpen => Duration::ZERO,
            Phase::Open { probe_at } => probe_at.saturating_duration_since(now),
        }
    }

    fn open(&mut self, config: &BreakerConfig, now: Instant) {
        let doublings = self.openings_in_a_row.min(20);
        let pause = millis(config.open_ms.saturating_mul(1 << doublings).min(config.max_open_ms));
        self.openings_in_a_row = self.openings_in_a_row.saturating_add(1);
        self.failures_in_a_row = 0;
        self.phase = Phase::Open { probe_at: now + pause };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone, Copy)]
    enum Event {
        Request(Outcome),
        Trip,
        Probe { is_healthy: bool },
        Wait(u64),
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            Just(Event::Request(Outcome::Success)),
            Just(Event::Request(Outcome::Failure)),
            Just(Event::Request(Outcome::Neutral)),
            Just(Event::Trip),
            any::<bool>().prop_map(|is_healthy| Event::Probe { is_healthy }),
            (0_u64..20_000).prop_map(Event::Wait),
        ]
    }

    proptest! {
        #[test]
        fn a_breaker_keeps_its_rules_in_any_history(events in prop::collection::vec(event(), 0..200)) {
            let config = BreakerConfig::default();
            let mut now = Instant::now();
            let mut breaker = Breaker::new(now);
            let mut failures_in_a_row = 0;
            for event in events {
                let before = breaker.state();
                match event {
                    Event::Request(outcome) => {
                        breaker.record(outcome, &config, now);
                        match (before, outcome) {
                            (State::Closed, Outcome::Failure) => failures_in_a_row += 1,
                            (State::Closed, Outcome::Success) => {
                                failures_in_a_row = 0;
                                // One success ends any probation.
                                prop_assert_eq!(breaker.openings_in_a_row, 0);
                            }
                            _ => {}
                        }
                        if outcome != Outcome::Failure || before != State::Closed {
                            prop_assert_eq!(breaker.state(), before, "only a failure opens");
                        }
                        if failures_in_a_row >= config.consecutive_failures {
                            prop_assert_ne!(breaker.state(), State::Closed);
                        }
                    }
                    Event::Trip => {
                        breaker.trip(&config, now);
                        prop_assert_ne!(breaker.state(), State::Closed);
                    }
                    Event::Probe { is_healthy } => {
                        if breaker.start_probe(now) {
                            prop_assert_eq!(before, State::Open);
                            breaker.end_probe(is_healthy, &config, now);
                            let expected = if is_healthy { State::Closed } else { State::Open };
                            prop_assert_eq!(breaker.state(), expected);
                        } else {
                            prop_assert!(before == State::Closed || breaker.time_to_probe(now) > Duration::ZERO);
                        }
                    }
                    Event::Wait(time_ms) => now += millis(time_ms),
                }
                if breaker.state() != State::Closed {
                    failures_in_a_row = 0;
                }
                prop_assert!(breaker.time_to_probe(now) <= millis(config.max_open_ms));
            }
            // However it got there, a healthy worker comes back.
            now += millis(config.max_open_ms);
            if breaker.start_probe(now) {
                breaker.end_probe(true, &config, now);
            }
            prop_assert_eq!(breaker.state(), State::Closed);
        }
    }

    #[test]
    fn half_of_the_requests_failing_opens_it() {
        let config = BreakerConfig::default();
        let now = Instant::now();
        let mut breaker = Breaker::new(now);
        for _ in 0..9 {
            breaker.record(Outcome::Success, &config, now);
            breaker.record(Outcome::Failure, &config, now);
        }
        breaker.record(Outcome::Success, &config, now);
        assert_eq!(breaker.state(), State::Closed);
        breaker.record(Outcome::Failure, &config, now);
        assert_eq!(breaker.state(), State::Open);
    }

    #[test]
    fn openings_in_a_row_take_longer_each_time() {
        let config = BreakerConfig::default();
        let mut now = Instant::now();
        let mut breaker = Breaker::new(now);
        breaker.trip(&config, now);
        for expected_ms in [1000, 2000, 4000, 8000, 10_000, 10_000] {
            assert_eq!(breaker.time_to_probe(now), millis(expected_ms));
            now += millis(expected_ms);
            assert!(breaker.start_probe(now));
            breaker.end_probe(false, &config, now);
        }
    }
}
