//! Another try for what may go well the next time.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Clock, SystemClock, get_error, put_error};
use crate::error::{Result, TierError};
use crate::key::ChunkKey;
use crate::random::SplitMix64;
use crate::tier::{Change, GetItem, GetOutcome, PutItem, Rewritten, Tier, TierKind, TierStat};

/// How often something is tried, and how long that may take.
#[derive(Debug, Clone)]
pub struct RetryOptions {
    /// Tries of one item, with the first. Default: 3.
    pub max_attempts: u32,
    /// The longest pause before the second try. Default: 10 ms.
    pub first_pause: Duration,
    /// The most that this grows to, by doubling. Default: 200 ms.
    pub max_pause: Duration,
    /// No try begins later than this after the first. Default: 500 ms.
    pub budget: Duration,
}

/// Tries transient failures again, with growing pauses of which up to a half is left to chance.
///
/// Only the items that failed are tried again. A put that failed but got there is `Present` at the next try. A
/// delete that is tried again counts what the last try removed.
#[derive(Debug)]
pub struct Retry<T> {
    inner: T,
    options: RetryOptions,
    clock: Arc<dyn Clock>,
    random: Mutex<SplitMix64>,
    n_retries: AtomicU64,
}

/// The tries of one call.
struct Attempts<'a, T> {
    retry: &'a Retry<T>,
    begin: Instant,
    n_made: u32,
    next_pause: Duration,
}

// === impl RetryOptions ===

impl Default for RetryOptions {
    fn default() -> Self {
        Self {
            max_attempts: 3,
            first_pause: Duration::from_millis(10),
            max_pause: Duration::from_millis(200),
            budget: Duration::from_millis(500),
        }
    }
}

// === impl Retry ===

impl<T: Tier> Retry<T> {
    /// Tries again what fails in `inner`.
    pub fn new(inner: T, options: RetryOptions) -> Self {
        Self::with_clock(inner, options, Arc::new(SystemClock))
    }

    /// Tries again what fails in `inner`, by a clock of the caller.
    pub fn with_clock(inner: T, options: RetryOptions, clock: Arc<dyn Clock>) -> Self {
        // Instances must not pause in step; a hasher of the standard library is seeded by the system.
        let seed = RandomState::new().build_hasher().finish();
        let random = Mutex::new(SplitMix64::new(seed));
        Self { inner, options, clock, random, n_retries: AtomicU64::new(0) }
    }

    /// The tier inside.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    fn attempts(&self) -> Attempts<'_, T> {
        let next_pause = self.options.first_pause.min(self.options.max_pause);
        Attempts { retry: self, begin: self.clock.now(), n_made: 1, next_pause }
    }

    /// Makes a call whose failure is an error.
    fn call<R>(&self, mut call: impl FnMut(&T) -> Result<R>) -> Result<R> {
        let mut attempts = self.attempts();
        loop {
            let result = call(&self.inner);
            let is_transient = result.as_ref().is_err_and(TierError::is_transient);
            if !is_transient || !attempts.pause_before_next() {
                return result;
            }
        }
    }
}

impl<T: Tier> Tier for Retry<T> {
    fn kind(&self) -> TierKind {
        self.inner.kind()
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        let mut attempts = self.attempts();
        self.inner.put(batch);
        loop {
            let mut failed: Vec<&mut PutItem<'_>> = batch
                .iter_mut()
                .filter(|item| put_error(&item.outcome).is_some_and(TierError::is_transient))
                .collect();
            if failed.is_empty() || !attempts.pause_before_next() {
                return;
            }
            let mut again: Vec<PutItem<'_>> = failed.iter().map(|item| item.with_parts(item.parts)).collect();
            self.inner.put(&mut again);
            for (item, tried) in failed.iter_mut().zip(again) {
                item.outcome = tried.outcome;
            }
        }
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        let mut attempts = self.attempts();
        self.inner.get(batch);
        loop {
            let mut failed: Vec<&mut GetItem<'_>> = batch
                .iter_mut()
                .filter(|item| get_error(&item.outcome).is_some_and(TierError::is_transient))
                .collect();
            if failed.is_empty() || !attempts.pause_before_next() {
                return;
            }
            let mut again: Vec<GetItem<'_>> = failed
                .iter_mut()
                .map(|item| GetItem {
                    head: item.head,
                    buffer: item.buffer,
                    outcome: GetOutcome::Pending,
                    ..**item
                })
                .collect();
            self.inner.get(&mut again);
            let outcomes: Vec<GetOutcome> = again.into_iter().map(|item| item.outcome).collect();
            for (item, outcome) in failed.into_iter().zip(outcomes) {
                item.outcome = outcome;
            }
        }
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        self.call(|inner| inner.contains(keys, present))
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        self.call(|inner| inner.delete(keys))
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        self.inner.visit_keys(visit);
    }

    fn flush(&self) -> Result<()> {
        self.call(Tier::flush)
    }

    fn codec(&self) -> Option<&str> {
        self.inner.codec()
    }

    fn rewrite(&self, key: ChunkKey, change: Change<'_>) -> Result<Rewritten> {
        self.inner.rewrite(key, change)
    }

    fn recode(&self, key: ChunkKey, codec: &str) -> Result<Rewritten> {
        self.inner.recode(key, codec)
    }

    fn stat(&self) -> TierStat {
        let mut stat = self.inner.stat();
        stat.details.push(("retries", self.n_retries.load(Ordering::Relaxed)));
        stat
    }
}

// === impl Attempts ===

impl<T> Attempts<'_, T> {
    /// Pauses, or says that there is no next try.
    fn pause_before_next(&mut self) -> bool {
        let Retry { options, clock, random, n_retries, .. } = self.retry;
        if self.n_made >= options.max_attempts {
            return false;
        }
        let half = self.next_pause / 2;
        let pause = half + Duration::from_nanos(random.lock().below(half.as_nanos() as u64 + 1));
        let elapsed = clock.now().saturating_duration_since(self.begin);
        if elapsed + pause > options.budget {
            return false;
        }
        clock.pause(pause);
        self.n_made += 1;
        self.next_pause = self.next_pause.saturating_mul(2).min(options.max_pause);
        // Relaxed: a count for people.
        n_retries.fetch_add(1, Ordering::Relaxed);
        true
    }
}
