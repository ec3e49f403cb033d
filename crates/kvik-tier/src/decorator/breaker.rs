//! A rest for tiers that fail.
//!
//! Closed, the breaker counts failures in a row and opens at a number of them. Open, the tier is not asked,
//! until a pause is over; then one call goes through as a probe while all others are still kept away. A probe
//! that succeeds closes the breaker, one that fails opens it for twice as long, up to a limit.
//!
//! Every item is counted, in the order of its batch. An item that failed is a failure unless its caller was
//! wrong. Hits, misses, corrupt chunks and full tiers are successes: the tier answers. What was skipped
//! further inside says nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Clock, SystemClock, get_error, not_asked, put_error, skip_gets, skip_puts};
use crate::chunk_file::ChunkFile;
use crate::error::{Result, TierError};
use crate::key::{ChunkKey, TokenDigest};
use crate::tier::{
    Change, FileItem, Fill, GetItem, GetOutcome, PutItem, PutOutcome, Rewritten, Tier, TierHealth, TierKind,
    TierStat,
};

/// When a breaker opens, and for how long.
#[derive(Debug, Clone)]
pub struct BreakerOptions {
    /// Failures in a row that open it; at least 1. Default: 5.
    pub n_failures_to_open: u32,
    /// How long the tier is not asked at first. Default: 1 s.
    pub first_pause: Duration,
    /// The most that this grows to, by doubling; a day at most. Default: 60 s.
    pub max_pause: Duration,
}

/// Stops asking a tier that fails, and tries it again later.
///
/// While it is open, items are `Skipped` and calls that have no such outcome fail with a transient error. Keys
/// that the tier knows without I/O can still be visited.
#[derive(Debug)]
pub struct Breaker<T> {
    inner: T,
    gate: Gate,
}

/// The state machine, apart from the tier.
#[derive(Debug)]
pub(crate) struct Gate {
    options: BreakerOptions,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    failures_in_a_row: u32,
    /// Openings without a success between them.
    openings_in_a_row: u32,
    n_openings: u64,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Closed,
    Open { probe_at: Instant },
    HalfOpen,
}

/// The right to one call. A probe that never settles, because its thread panics, is a failure.
#[derive(Debug)]
pub(crate) struct Permit<'a> {
    gate: &'a Gate,
    is_probe: bool,
    is_settled: bool,
}

/// What an item says about the tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Success,
    Failure,
    Nothing,
}

/// So that the end of a pause can always be told.
const LONGEST_PAUSE: Duration = Duration::from_hours(24);

// === impl BreakerOptions ===

impl Default for BreakerOptions {
    fn default() -> Self {
        Self { n_failures_to_open: 5, first_pause: Duration::from_secs(1), max_pause: Duration::from_mins(1) }
    }
}

// === impl Breaker ===

impl<T: Tier> Breaker<T> {
    /// Watches `inner`.
    pub fn new(inner: T, options: BreakerOptions) -> Self {
        Self::with_clock(inner, options, Arc::new(SystemClock))
    }

    /// Watches `inner` by a clock of the caller.
    pub fn with_clock(inner: T, options: BreakerOptions, clock: Arc<dyn Clock>) -> Self {
        Self { inner, gate: Gate::new(options, clock) }
    }

    /// The tier inside.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// Whether the tier is asked; one that is due for a probe is not yet.
    pub fn is_closed(&self) -> bool {
        self.gate.is_closed()
    }

    /// Makes a call whose failure is an error.
    fn call<R>(&self, call: impl FnOnce(&T) -> Result<R>) -> Result<R> {
        let Some(permit) = self.gate.enter() else {
            return Err(not_asked(self.inner.kind(), "its breaker is open"));
        };
        let result = call(&self.inner);
        permit.settle([verdict_of_error(result.as_ref().err())].into_iter());
        result
    }
}

impl<T: Tier> Tier for Breaker<T> {
    fn kind(&self) -> TierKind {
        self.inner.kind()
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        if batch.is_empty() {
            return;
        }
        let Some(permit) = self.gate.enter() else {
            return skip_puts(batch);
        };
        self.inner.put(batch);
        permit.settle(batch.iter().map(|item| verdict_of_put(&item.outcome)));
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        if batch.is_empty() {
            return;
        }
        let Some(permit) = self.gate.enter() else {
            return skip_gets(batch);
        };
        self.inner.get(batch);
        permit.settle(batch.iter().map(|item| match &item.outcome {
            GetOutcome::Pending | GetOutcome::Skipped => Verdict::Nothing,
            outcome => verdict_of_error(get_error(outcome)),
        }));
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        self.call(|inner| inner.contains(keys, present))
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        if keys.is_empty() {
            return Ok(0);
        }
        self.call(|inner| inner.delete(keys))
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        self.inner.visit_keys(visit);
    }

    fn flush(&self) -> Result<()> {
        self.call(Tier::flush)
    }

    fn has_files(&self) -> bool {
        self.inner.has_files()
    }

    fn open_chunk(&self, key: ChunkKey, digest: TokenDigest) -> std::result::Result<ChunkFile, GetOutcome> {
        let permit = self.gate.enter().ok_or(GetOutcome::Skipped)?;
        let opened = self.inner.open_chunk(key, digest);
        permit.settle(std::iter::once(match &opened {
            Err(GetOutcome::Pending | GetOutcome::Skipped) => Verdict::Nothing,
            Err(outcome) => verdict_of_error(get_error(outcome)),
            Ok(_) => Verdict::Success,
        }));
        opened
    }

    fn put_file(&self, item: &FileItem, fill: Fill<'_>) -> PutOutcome {
        let Some(permit) = self.gate.enter() else { return PutOutcome::Skipped };
        // A writer that fails says nothing of the tier, which keeps what comes by way of memory.
        let mut has_writer_failed = false;
        let outcome = self
            .inner
            .put_file(item, &mut |file, offset| fill(file, offset).inspect_err(|_| has_writer_failed = true));
        let verdict = if has_writer_failed { Verdict::Nothing } else { verdict_of_put(&outcome) };
        permit.settle(std::iter::once(verdict));
        outcome
    }

    fn codec(&self) -> Option<&str> {
        self.inner.codec()
    }

    fn rewrite(&self, key: ChunkKey, change: Change<'_>) -> Result<Rewritten> {
        self.call(|inner| inner.rewrite(key, change))
    }

    fn recode(&self, key: ChunkKey, codec: &str) -> Result<Rewritten> {
        self.call(|inner| inner.recode(key, codec))
    }

    fn stat(&self) -> TierStat {
        let mut stat = self.inner.stat();
        let state = self.gate.state.lock();
        if !matches!(state.phase, Phase::Closed) {
            stat.health = TierHealth::Down("its breaker is open after failures".to_owned());
        }
        stat.details.push(("breaker_openings", state.n_openings));
        stat
    }
}

// === impl Gate ===

impl Gate {
    pub(crate) fn new(options: BreakerOptions, clock: Arc<dyn Clock>) -> Self {
        let state = State { phase: Phase::Closed, failures_in_a_row: 0, openings_in_a_row: 0, n_openings: 0 };
        Self { options, clock, state: Mutex::new(state) }
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.state.lock().phase, Phase::Closed)
    }

    /// Whether a call would be let through now.
    pub(crate) fn is_passable(&self) -> bool {
        match self.state.lock().phase {
            Phase::Closed => true,
            Phase::Open { probe_at } => probe_at <= self.clock.now(),
            Phase::HalfOpen => false,
        }
    }

    /// The right to a call; none while the tier is not to be asked.
    pub(crate) fn enter(&self) -> Option<Permit<'_>> {
        let mut state = self.state.lock();
        let is_probe = match state.phase {
            Phase::Closed => false,
            Phase::Open { probe_at } if probe_at <= self.clock.now() => true,
            Phase::Open { .. } | Phase::HalfOpen => return None,
        };
        if is_probe {
            state.phase = Phase::HalfOpen;
        }
        Some(Permit { gate: self, is_probe, is_settled: false })
    }

    fn open(&self, state: &mut State) {
        let growth = 1_u32.checked_shl(state.openings_in_a_row).unwrap_or(u32::MAX);
        let pause =
            self.options.first_pause.saturating_mul(growth).min(self.options.max_pause).min(LONGEST_PAUSE);
        state.phase = Phase::Open { probe_at: self.clock.now() + pause };
        state.failures_in_a_row = 0;
        state.openings_in_a_row = state.openings_in_a_row.saturating_add(1);
        state.n_openings += 1;
    }

    /// Counts a call that began while the breaker was closed.
    fn count(&self, state: &mut State, verdicts: impl Iterator<Item = Verdict>) {
        for verdict in verdicts {
            match verdict {
                Verdict::Nothing => {}
                Verdict::Success => state.failures_in_a_row = 0,
                Verdict::Failure => state.failures_in_a_row += 1,
            }
            if state.failures_in_a_row >= self.options.n_failures_to_open.max(1) {
                return self.open(state);
            }
        }
    }

    /// Ends a probe. One that says nothing leaves the next call to be a probe.
    fn end_probe(&self, state: &mut State, mut verdicts: impl Iterator<Item = Verdict>) {
        let verdict = verdicts.try_fold(Verdict::Nothing, |so_far, verdict| match verdict {
            Verdict::Failure => Err(Verdict::Failure),
            Verdict::Success => Ok(Verdict::Success),
            Verdict::Nothing => Ok(so_far),
        });
        match verdict {
            Ok(Verdict::Success) => {
                state.phase = Phase::Closed;
                state.openings_in_a_row = 0;
            }
            Ok(_) => state.phase = Phase::Open { probe_at: self.clock.now() },
            Err(_) => self.open(state),
        }
    }
}

// === impl Permit ===

impl Permit<'_> {
    /// Counts what the call's items say. Calls that end while the breaker is open began before, and say nothing new.
    pub(crate) fn settle(mut self, verdicts: impl Iterator<Item = Verdict>) {
        self.is_settled = true;
        let state = &mut *self.gate.state.lock();
        if self.is_probe {
            self.gate.end_probe(state, verdicts);
        } else if matches!(state.phase, Phase::Closed) {
            self.gate.count(state, verdicts);
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if self.is_probe && !self.is_settled {
            self.gate.open(&mut self.gate.state.lock());
        }
    }
}

fn verdict_of_put(outcome: &PutOutcome) -> Verdict {
    match outcome {
        PutOutcome::Pending | PutOutcome::Skipped => Verdict::Nothing,
        outcome => verdict_of_error(put_error(outcome)),
    }
}

fn verdict_of_error(error: Option<&TierError>) -> Verdict {
    match error {
        None => Verdict::Success,
        Some(TierError::Invalid { .. }) => Verdict::Nothing,
        Some(_) => Verdict::Failure,
    }
}
