//! Counts and times of everything a tier is asked.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Clock, SystemClock};
use crate::chunk_file::ChunkFile;
use crate::error::Result;
use crate::histogram::Histogram;
use crate::key::{ChunkKey, TokenDigest};
use crate::operations::OperationMetrics;
use crate::tier::{
    Change, FileItem, Fill, GetItem, GetOutcome, PutItem, PutOutcome, Rewritten, Tier, TierKind, TierStat,
};

/// Counts every operation by outcome, its bytes, and the time of its calls.
#[derive(Debug)]
pub struct Metered<T> {
    inner: T,
    clock: Arc<dyn Clock>,
    operations: [Counters; OPERATIONS.len()],
}

/// What a tier was asked so far.
#[derive(Debug, Clone)]
pub struct TierMetrics {
    /// One for each operation, in the order of [`Tier`]: put, get, contains, delete, flush.
    pub operations: Vec<OperationMetrics>,
}

/// Operations and the names of their outcomes.
const OPERATIONS: [(&str, &[&str]); 5] = [
    ("put", &["stored", "present", "no_room", "skipped", "failed"]),
    ("get", &["hit", "miss", "corrupt", "skipped", "failed", "token_mismatch"]),
    ("contains", &["done", "failed"]),
    ("delete", &["done", "failed"]),
    ("flush", &["done", "failed"]),
];

/// Indices of [`OPERATIONS`].
const PUT: usize = 0;
const GET: usize = 1;
const CONTAINS: usize = 2;
const DELETE: usize = 3;
const FLUSH: usize = 4;

/// All orderings on these are relaxed: counts are read for people, each by itself.
#[derive(Debug)]
struct Counters {
    outcomes: [AtomicU64; 6],
    n_bytes: AtomicU64,
    latencies: Histogram,
}

// === impl Metered ===

impl<T: Tier> Metered<T> {
    /// Counts what `inner` is asked.
    pub fn new(inner: T) -> Self {
        Self::with_clock(inner, Arc::new(SystemClock))
    }

    /// Counts what `inner` is asked, and times it by a clock of the caller.
    pub fn with_clock(inner: T, clock: Arc<dyn Clock>) -> Self {
        Self { inner, clock, operations: OPERATIONS.map(|_| Counters::new()) }
    }

    /// The tier inside.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// The counts so far. Those of a call that is under way may be there in part.
    pub fn snapshot(&self) -> TierMetrics {
        let operations = OPERATIONS
            .iter()
            .zip(&self.operations)
            .map(|((operation, outcomes), counters)| OperationMetrics {
                operation,
                outcomes: outcomes.iter().copied().zip(counters.outcomes.each_ref().map(load)).collect(),
                n_bytes: load(&counters.n_bytes),
                latencies: counters.latencies.snapshot(),
            })
            .collect();
        TierMetrics { operations }
    }

    fn time<R>(&self, operation: usize, call: impl FnOnce(&T) -> R) -> R {
        let begin = self.clock.now();
        let result = call(&self.inner);
        let elapsed = self.clock.now().saturating_duration_since(begin);
        self.operations[operation].latencies.record(elapsed);
        result
    }

    fn count_put(&self, outcome: &PutOutcome, n_bytes: usize) {
        match outcome {
            PutOutcome::Stored => self.operations[PUT].count(0, n_bytes),
            PutOutcome::Present => self.operations[PUT].count(1, 0),
            PutOutcome::NoRoom => self.operations[PUT].count(2, 0),
            PutOutcome::Skipped => self.operations[PUT].count(3, 0),
            PutOutcome::Pending | PutOutcome::Failed(_) => self.operations[PUT].count(4, 0),
        }
    }

    /// Makes a call whose failure is an error.
    fn call<R>(&self, operation: usize, call: impl FnOnce(&T) -> Result<R>) -> Result<R> {
        let result = self.time(operation, call);
        self.operations[operation].count(usize::from(result.is_err()), 0);
        result
    }
}

impl<T: Tier> Tier for Metered<T> {
    fn kind(&self) -> TierKind {
        self.inner.kind()
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        self.time(PUT, |inner| inner.put(batch));
        for item in batch {
            self.count_put(&item.outcome, item.n_bytes());
        }
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        self.time(GET, |inner| inner.get(batch));
        for item in batch {
            match &item.outcome {
                GetOutcome::Hit => self.operations[GET].count(0, item.n_bytes()),
                GetOutcome::Miss => self.operations[GET].count(1, 0),
                GetOutcome::Corrupt(_) => self.operations[GET].count(2, 0),
                GetOutcome::Skipped => self.operations[GET].count(3, 0),
                GetOutcome::Pending | GetOutcome::Failed(_) => self.operations[GET].count(4, 0),
                GetOutcome::TokenMismatch => self.operations[GET].count(5, 0),
            }
        }
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        self.call(CONTAINS, |inner| inner.contains(keys, present))
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        self.call(DELETE, |inner| inner.delete(keys))
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        self.inner.visit_keys(visit);
    }

    fn flush(&self) -> Result<()> {
        self.call(FLUSH, Tier::flush)
    }

    fn has_files(&self) -> bool {
        self.inner.has_files()
    }

    fn open_chunk(&self, key: ChunkKey, digest: TokenDigest) -> std::result::Result<ChunkFile, GetOutcome> {
        self.inner.open_chunk(key, digest)
    }

    fn put_file(&self, item: &FileItem, fill: Fill<'_>) -> PutOutcome {
        let outcome = self.time(PUT, |inner| inner.put_file(item, fill));
        self.count_put(&outcome, item.n_bytes as usize);
        outcome
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
        TierStat { operations: self.snapshot().operations, ..self.inner.stat() }
    }
}

// === impl TierMetrics ===

impl TierMetrics {
    /// The counts of an operation by its name; none if there is no such operation.
    pub fn operation(&self, name: &str) -> Option<&OperationMetrics> {
        self.operations.iter().find(|metrics| metrics.operation == name)
    }
}

// === impl Counters ===

impl Counters {
    fn new() -> Self {
        Self { outcomes: Default::default(), n_bytes: AtomicU64::new(0), latencies: Histogram::new() }
    }

    fn count(&self, outcome_idx: usize, n_bytes: usize) {
        self.outcomes[outcome_idx].fetch_add(1, Ordering::Relaxed);
        self.n_bytes.fetch_add(n_bytes as u64, Ordering::Relaxed);
    }
}

fn load(count: &AtomicU64) -> u64 {
    count.load(Ordering::Relaxed)
}
