//! What a connection does now, and since when.
//!
//! The connection's own task writes, the accept loop reads when it needs room. All of it is relaxed: a value that
//! is a moment old is as good, and nothing else is published through it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::limits::{AnswerLimits, ListenLimits};

/// No limit of its own.
const NONE: u64 = u64::MAX;
/// Bits of a phase in [`Monitor::phase`].
const PHASE_BITS: u32 = 3;

/// What a connection does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Has sent nothing.
    New,
    /// Has had a request and sends nothing.
    Waiting,
    /// Sends the head of a request.
    Head,
    /// Sends the body of a request.
    Body,
    /// Its request is complete and being answered.
    Running,
}

/// The state of one connection.
#[derive(Debug)]
pub(super) struct Monitor {
    start: Instant,
    /// The phase in the low bits, above it the nanoseconds since `start` at which it began.
    phase: AtomicU64,
    /// Whether the client does not take what is written.
    is_stalled: AtomicBool,
    /// Limits of the answer that is written, in nanoseconds, the first since `start`.
    deadline_ns: AtomicU64,
    max_stall_ns: AtomicU64,
}

/// How long the times of a connection hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// To be closed now; why.
    Close(&'static str),
    /// To be asked again then.
    Until(Instant),
}

impl Monitor {
    pub(super) fn new(start: Instant) -> Self {
        Self {
            start,
            phase: AtomicU64::new(Phase::New as u64),
            is_stalled: AtomicBool::new(false),
            deadline_ns: AtomicU64::new(NONE),
            max_stall_ns: AtomicU64::new(NONE),
        }
    }

    /// The phase, and when it began.
    pub(super) fn phase(&self) -> (Phase, Instant) {
        let word = self.phase.load(Ordering::Relaxed);
        let phase = match word & ((1 << PHASE_BITS) - 1) {
            0 => Phase::New,
            1 => Phase::Waiting,
            2 => Phase::Head,
            3 => Phase::Body,
            _ => Phase::Running,
        };
        (phase, self.start + Duration::from_nanos(word >> PHASE_BITS))
    }

    pub(super) fn enter(&self, phase: Phase, now: Instant) {
        let word = (self.nanos_to(now) << PHASE_BITS) | phase as u64;
        self.phase.store(word, Ordering::Relaxed);
    }

    /// Notes that the client has sent something.
    pub(super) fn hear(&self) {
        if matches!(self.phase().0, Phase::New | Phase::Waiting) {
            self.enter(Phase::Head, Instant::now());
        }
    }

    /// Notes that the client has taken something: an answer whose body has ended may be long on its way.
    pub(super) fn wrote(&self) {
        if self.phase().0 == Phase::Waiting {
            self.enter(Phase::Waiting, Instant::now());
        }
    }

    /// Notes that the body of the request has ended, or is not read any more.
    pub(super) fn end_body(&self) {
        if self.phase().0 == Phase::Body {
            self.enter(Phase::Running, Instant::now());
        }
    }

    /// Puts the limits of an answer into force.
    pub(super) fn begin_answer(&self, limits: AnswerLimits) {
        self.deadline_ns.store(self.nanos_to(limits.deadline), Ordering::Relaxed);
        let max_stall = u64::try_from(limits.max_stall.as_nanos()).unwrap_or(NONE);
        self.max_stall_ns.store(max_stall, Ordering::Relaxed);
    }

    pub(super) fn end_answer(&self) {
        self.deadline_ns.store(NONE, Ordering::Relaxed);
        self.max_stall_ns.store(NONE, Ordering::Relaxed);
        self.enter(Phase::Waiting, Instant::now());
    }

    pub(super) fn set_stalled(&self, is_stalled: bool) {
        self.is_stalled.store(is_stalled, Ordering::Relaxed);
    }

    /// When a write that has been blocked `since` must have moved.
    pub(super) fn stall_ends(&self, since: Instant, max_stall: Duration) -> Instant {
        let own = Duration::from_nanos(self.max_stall_ns.load(Ordering::Relaxed));
        let end = since + max_stall.min(own);
        match self.deadline_ns.load(Ordering::Relaxed) {
            NONE => end,
            deadline_ns => end.min(self.start + Duration::from_nanos(deadline_ns)),
        }
    }

    /// Whether there is no request, so that nothing is lost if the connection is closed.
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.phase().0, Phase::New | Phase::Waiting | Phase::Head)
            && !self.is_stalled.load(Ordering::Relaxed)
    }

    /// Judges the connection by the times for heads and between requests; bodies and blocked writes have clocks of
    /// their own.
    pub(super) fn judge(&self, limits: &ListenLimits, now: Instant) -> Verdict {
        let (phase, since) = self.phase();
        let (end, reason) = match phase {
            Phase::New | Phase::Head => (since + limits.header(), "header"),
            Phase::Waiting if self.is_idle() => (since + limits.idle(), "idle"),
            // Whatever comes next begins now or later.
            Phase::Waiting | Phase::Body | Phase::Running => {
                return Verdict::Until(now + limits.header().min(limits.idle()));
            }
        };
        if end <= now { Verdict::Close(reason) } else { Verdict::Until(end) }
    }

    fn nanos_to(&self, instant: Instant) -> u64 {
        let time = instant.saturating_duration_since(self.start);
        u64::try_from(time.as_nanos()).unwrap_or(NONE).min(NONE >> PHASE_BITS)
    }
}
