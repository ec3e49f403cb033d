//! Bounds on what a tier is asked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::bandwidth::{Bandwidth, BandwidthShare};
use super::{Clock, SystemClock, not_asked, skip_gets, skip_puts};
use crate::chunk_file::ChunkFile;
use crate::error::Result;
use crate::key::{ChunkKey, TokenDigest};
use crate::tier::{
    Change, FileItem, Fill, GetItem, GetOutcome, PutItem, PutOutcome, Rewritten, Tier, TierKind, TierStat,
};

/// The bounds of a throttled tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThrottledOptions {
    /// Bytes a second, read and written together; none: as many as there are. Default: none.
    pub bytes_per_s: Option<u64>,
    /// Bytes that may move at once after a rest. Default: 64 MiB.
    pub burst_bytes: u64,
    /// Whether what is over `bytes_per_s` waits, as on a slow link, instead of being skipped. Default: false.
    pub waits: bool,
    /// Calls at a time. Default: no bound.
    pub max_calls: usize,
    /// Bytes at a time, of all calls together; one chunk is always let through. Default: no bound.
    pub max_bytes_in_flight: u64,
}

/// Skips what is over a bound, and does not block the caller unless its options say that it waits for bytes.
///
/// Bytes come from a bucket that fills with time, or from a share of one that several tiers have. A chunk is let
/// through while there is any byte in the bucket, and may leave it in debt: so one that is larger than the bucket
/// gets through, and is paid for by those after it. From the first item that finds none on, the rest of the batch is
/// `Skipped`. Reads that miss cost nothing.
///
/// Deletes and flushes are let through always: a tier must not be kept from becoming emptier.
#[derive(Debug)]
pub struct Throttled<T> {
    inner: T,
    options: ThrottledOptions,
    /// `None`: no bound on bytes a second.
    share: Option<BandwidthShare>,
    n_calls: AtomicUsize,
    bytes_in_flight: AtomicU64,
    n_skipped: AtomicU64,
}

/// One of the calls at a time.
struct CallGuard<'a>(&'a AtomicUsize);

/// Bytes that are moving.
struct InFlight<'a> {
    of_all: &'a AtomicU64,
    n_bytes: u64,
    n_items: usize,
}

// === impl ThrottledOptions ===

impl Default for ThrottledOptions {
    fn default() -> Self {
        Self {
            bytes_per_s: None,
            burst_bytes: 64 << 20,
            waits: false,
            max_calls: usize::MAX,
            max_bytes_in_flight: u64::MAX,
        }
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
        let bandwidth = |bytes_per_s| Bandwidth::with_clock(bytes_per_s, options.burst_bytes, clock);
        let share = options.bytes_per_s.map(|bytes_per_s| bandwidth(bytes_per_s).join(1));
        Self::with_share(inner, options, share)
    }

    /// Bounds what `inner` is asked for, with bytes a second from `share` in the place of those of `options`.
    pub fn with_share(inner: T, options: ThrottledOptions, share: Option<BandwidthShare>) -> Self {
        Self {
            inner,
            options,
            share,
            n_calls: AtomicUsize::new(0),
            bytes_in_flight: AtomicU64::new(0),
            n_skipped: AtomicU64::new(0),
        }
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

    /// Lets items through, from the first on, as far as the bounds on bytes allow.
    fn admit(&self, lengths: &[usize]) -> InFlight<'_> {
        let mut in_flight = InFlight { of_all: &self.bytes_in_flight, n_bytes: 0, n_items: 0 };
        for n_bytes in lengths.iter().map(|n_bytes| *n_bytes as u64) {
            // Relaxed: the number alone is the bound, and nothing else is read by it.
            let entered = self.bytes_in_flight.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |moving| {
                let fits = n_bytes <= self.options.max_bytes_in_flight.saturating_sub(moving);
                (moving == 0 || fits).then(|| moving.saturating_add(n_bytes))
            });
            if entered.is_err() {
                break;
            }
            in_flight.n_bytes += n_bytes;
            in_flight.n_items += 1;
        }
        if let Some(share) = self.share.as_ref().filter(|_| !self.options.waits) {
            in_flight.n_items = share.take(lengths[..in_flight.n_items].iter().copied());
        }
        in_flight
    }

    /// Waits until bytes that have moved are paid for, where that is wanted.
    fn wait_for(&self, n_bytes: usize) {
        if let Some(share) = self.share.as_ref().filter(|_| self.options.waits && n_bytes > 0) {
            share.take_and_wait(n_bytes);
        }
    }

    /// Gives back the bytes of items that did not move.
    fn give_back(&self, n_bytes: usize) {
        if let Some(share) = self.share.as_ref().filter(|_| n_bytes > 0) {
            share.give_back(n_bytes);
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
        let lengths: Vec<usize> = batch.iter().map(PutItem::n_bytes).collect();
        let in_flight = call.as_ref().map(|_| self.admit(&lengths));
        let n_passed = in_flight.as_ref().map_or(0, |in_flight| in_flight.n_items);
        let (passed, skipped) = batch.split_at_mut(n_passed);
        skip_puts(skipped);
        self.count_skipped(skipped.len());
        if passed.is_empty() {
            return;
        }
        self.inner.put(passed);
        let is_unmoved =
            |item: &&PutItem<'_>| matches!(item.outcome, PutOutcome::NoRoom | PutOutcome::Skipped);
        if self.options.waits {
            self.wait_for(passed.iter().filter(|item| !is_unmoved(item)).map(PutItem::n_bytes).sum());
        } else {
            self.give_back(passed.iter().filter(is_unmoved).map(PutItem::n_bytes).sum());
        }
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        let call = self.enter();
        let lengths: Vec<usize> = batch.iter().map(GetItem::n_bytes).collect();
        let in_flight = call.as_ref().map(|_| self.admit(&lengths));
        let n_passed = in_flight.as_ref().map_or(0, |in_flight| in_flight.n_items);
        let (passed, skipped) = batch.split_at_mut(n_passed);
        skip_gets(skipped);
        self.count_skipped(skipped.len());
        if passed.is_empty() {
            return;
        }
        self.inner.get(passed);
        let is_unmoved = |item: &&GetItem<'_>| matches!(item.outcome, GetOutcome::Miss | GetOutcome::Skipped);
        if self.options.waits {
            self.wait_for(passed.iter().filter(|item| !is_unmoved(item)).map(GetItem::n_bytes).sum());
        } else {
            self.give_back(passed.iter().filter(is_unmoved).map(GetItem::n_bytes).sum());
        }
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

    fn has_files(&self) -> bool {
        // What is read from files is not counted against the bounds.
        self.share.is_none()
            && self.options.max_calls == usize::MAX
            && self.options.max_bytes_in_flight == u64::MAX
            && self.inner.has_files()
    }

    fn open_chunk(&self, key: ChunkKey, digest: TokenDigest) -> std::result::Result<ChunkFile, GetOutcome> {
        self.inner.open_chunk(key, digest)
    }

    fn put_file(&self, item: &FileItem, fill: Fill<'_>) -> PutOutcome {
        if self.has_files() { self.inner.put_file(item, fill) } else { PutOutcome::Skipped }
    }

    fn codec(&self) -> Option<&str> {
        self.inner.codec()
    }

    /// Not bounded: what changes chunks bounds itself.
    fn rewrite(&self, key: ChunkKey, change: Change<'_>) -> Result<Rewritten> {
        self.inner.rewrite(key, change)
    }

    fn recode(&self, key: ChunkKey, codec: &str) -> Result<Rewritten> {
        self.inner.recode(key, codec)
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

// === impl InFlight ===

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.of_all.fetch_sub(self.n_bytes, Ordering::Relaxed);
    }
}
