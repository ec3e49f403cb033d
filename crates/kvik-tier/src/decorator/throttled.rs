//! Bounds on what a tier is asked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::{Clock, SystemClock, not_asked, skip_gets, skip_puts};
use crate::error::Result;
use crate::key::ChunkKey;
use crate::tier::{GetItem, GetOutcome, PutItem, PutOutcome, Tier, TierKind, TierStat};

/// The bounds of a throttled tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThrottledOptions {
    /// Bytes a second, read and written together; none: as many as there are. Default: none.
    pub bytes_per_s: Option<u64>,
    /// Bytes that may move at once after a rest. Default: 64 MiB.
    pub burst_bytes: u64,
    /// Calls at a time. Default: no bound.
    pub max_calls: usize,
}

/// Skips what is over a bound, and never blocks the caller.
///
/// Bytes come from a bucket that fills with time. A chunk is let through while there is any byte in the bucket, and
/// may leave it in debt: so one that is larger than the bucket gets through, and is paid for by those after it.
/// From the first item that finds none on, the rest of the batch is `Skipped`. Reads that miss cost nothing.
///
/// Deletes and flushes are let through always: a tier must not be kept from becoming emptier.
#[derive(Debug)]
pub struct Throttled<T> {
    inner: T,
    options: ThrottledOptions,
    clock: Arc<dyn Clock>,
    bucket: Mutex<Bucket>,
    n_calls: AtomicUsize,
    n_skipped: AtomicU64,
}

#[derive(Debug)]
struct Bucket {
    /// Below 0 is debt.
    level_bytes: f64,
    filled_at: Instant,
}

/// One of the calls at a time.
struct CallGuard<'a>(&'a AtomicUsize);

// === impl ThrottledOptions ===

impl Default for ThrottledOptions {
    fn default() -> Self {
        Self { bytes_per_s: None, burst_bytes: 64 << 20, max_calls: usize::MAX }
    }
}

// === impl Throttled ===

impl<T: Tier> Throttled<T> {
    /// Bounds what `inner` is asked for.
    pub fn new(inner: T, options: ThrottledOptions) -> Self {
        Self::with_clock(inner, options, Arc::new(SystemClock))
    }

    /// Bounds what `inner` is asked for, by a clock of the caller.
    pub fn with_clock(inner: T, options: ThrottledOptions, clock: Arc<dyn Clock>) -> Self {
        let bucket = Mutex::new(Bucket { level_bytes: options.burst_bytes as f64, filled_at: clock.now() });
        Self { inner, options, clock, bucket, n_calls: AtomicUsize::new(0), n_skipped: AtomicU64::new(0) }
    }

    /// The tier inside.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    fn enter(&self) -> Option<CallGuard<'_>> {
        // Relaxed: the number alone is the bound, and nothing else is read by it.
        let entered = self.n_calls.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n_calls| {
            (n_calls < self.options.max_calls).then_some(n_calls + 1)
        });
        entered.ok().map(|_| CallGuard(&self.n_calls))
    }

    /// Takes the bytes of items from the bucket; returns how many items, from the first on, found some.
    fn take(&self, lengths: impl ExactSizeIterator<Item = usize>) -> usize {
        let Some(bytes_per_s) = self.options.bytes_per_s else {
            return lengths.len();
        };
        let mut bucket = self.bucket.lock();
        let now = self.clock.now();
        let elapsed = now.saturating_duration_since(bucket.filled_at);
        let filled_bytes = bucket.level_bytes + elapsed.as_secs_f64() * bytes_per_s as f64;
        bucket.level_bytes = filled_bytes.min(self.options.burst_bytes as f64);
        bucket.filled_at = now;
        let mut n_items = 0;
        for n_bytes in lengths {
            if bucket.level_bytes <= 0.0 {
                break;
            }
            bucket.level_bytes -= n_bytes as f64;
            n_items += 1;
        }
        n_items
    }

    /// Gives back the bytes of items that did not move.
    fn give_back(&self, n_bytes: usize) {
        if n_bytes > 0 && self.options.bytes_per_s.is_some() {
            let mut bucket = self.bucket.lock();
            bucket.level_bytes = (bucket.level_bytes + n_bytes as f64).min(self.options.burst_bytes as f64);
        }
    }

    fn count_skipped(&self, n_items: usize) {
        // Relaxed: a count for people.
        self.n_skipped.fetch_add(n_items as u64, Ordering::Relaxed);
    }
}

impl<T: Tier> Tier for Throttled<T> {
    fn kind(&self) -> TierKind {
        self.inner.kind()
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        let call = self.enter();
        let n_passed = call.as_ref().map_or(0, |_| self.take(batch.iter().map(PutItem::n_bytes)));
        let (passed, skipped) = batch.split_at_mut(n_passed);
        skip_puts(skipped);
        self.count_skipped(skipped.len());
        if passed.is_empty() {
            return;
        }
        self.inner.put(passed);
        let unmoved =
            passed.iter().filter(|item| matches!(item.outcome, PutOutcome::NoRoom | PutOutcome::Skipped));
        self.give_back(unmoved.map(PutItem::n_bytes).sum());
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        let call = self.enter();
        let n_passed = call.as_ref().map_or(0, |_| self.take(batch.iter().map(GetItem::n_bytes)));
        let (passed, skipped) = batch.split_at_mut(n_passed);
        skip_gets(skipped);
        self.count_skipped(skipped.len());
        if passed.is_empty() {
            return;
        }
        self.inner.get(passed);
        let unmoved =
            passed.iter().filter(|item| matches!(item.outcome, GetOutcome::Miss | GetOutcome::Skipped));
        self.give_back(unmoved.map(GetItem::n_bytes).sum());
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        let Some(_call) = self.enter() else {
            self.count_skipped(keys.len());
            return Err(not_asked(self.inner.kind(), "too many calls at a time"));
        };
        self.inner.contains(keys, present)
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        self.inner.delete(keys)
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        self.inner.visit_keys(visit);
    }

    fn flush(&self) -> Result<()> {
        self.inner.flush()
    }

    fn stat(&self) -> TierStat {
        let mut stat = self.inner.stat();
        stat.details.push(("throttled_items", self.n_skipped.load(Ordering::Relaxed)));
        stat
    }
}

// === impl CallGuard ===

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
