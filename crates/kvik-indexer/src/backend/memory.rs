//! A book in the memory of this process.

mod queue;

use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use futures_util::future::{BoxFuture, FutureExt as _};
use kvik_index::holders::{
    Batch, BlockKey, HolderIndex, HolderReader, IndexConfig, LookupOptions, Matches, N_TIERS, ReplacementId,
    SourceId, SourceName, SourceStatus, Tier, Verdict, Walk,
};
use parking_lot::Mutex;

use self::queue::Queue;
use super::{Backend, KeyedBatch, KeyedHolding, Row, SourceBlocks, SourceState};
use crate::durable::replace_file;
use crate::error::{IndexerError, Result};

/// Entries that are cleaned up after a change, so that memory comes back without a task of its own.
const MAINTAINED_ENTRIES: usize = 256;
/// Blocks of a replacement that are stored under one lock: some ten milliseconds.
const REPLACE_STEP_BLOCKS: usize = 1 << 17;
/// Times that a replacement begins anew before it is done in one step: a snapshot is rarely written twice meanwhile.
const MAX_ABANDONED_REPLACEMENTS: usize = 3;

thread_local! {
    /// The memory of the last lookup, used again by the next one on this thread, of whatever book.
    static MATCHES: RefCell<Matches> = RefCell::default();
}

/// A book in memory.
///
/// Changes wait for each other, and batches that have waited are applied together; lookups never wait.
#[derive(Debug)]
pub struct MemoryBackend {
    index: Mutex<HolderIndex>,
    queue: Queue,
    reader: HolderReader,
}

impl MemoryBackend {
    /// An empty book.
    pub fn new(config: IndexConfig) -> Self {
        Self::of(HolderIndex::new(config))
    }

    /// The book of a file that [`Self::save`] wrote; `None` if there is no such file.
    ///
    /// # Errors
    /// [`IndexerError::Unavailable`] if the file cannot be read, [`IndexerError::Index`] if it is damaged, of
    /// other keys or larger than the budget. The caller then starts with an empty book.
    pub fn load(config: IndexConfig, path: &Path) -> Result<Option<Self>> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(file_error("read a snapshot", path, &error)),
        };
        Ok(Some(Self::of(HolderIndex::from_snapshot(config, &bytes)?)))
    }

    /// Writes the book to a file, which is there as a whole or as it was before, even if the power fails.
    ///
    /// It blocks. Changes wait while the book is copied, at 12 bytes a block, and not while it is written.
    ///
    /// # Errors
    /// [`IndexerError::Unavailable`] if the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut bytes = Vec::new();
        self.index.lock().write_snapshot(&mut bytes)?;
        replace_file(path, &bytes).map_err(|error| file_error("write a snapshot", path, &error))
    }

    /// Cleans up about so many entries; true while more is to be done. For a caller with spare time.
    pub fn maintain(&self, n_entries: usize) -> bool {
        self.index.lock().maintain(n_entries)
    }

    fn of(index: HolderIndex) -> Self {
        Self { reader: index.reader(), index: Mutex::new(index), queue: Queue::default() }
    }

    /// Replaces all that a source holds. Other changes go on between the steps, and so do other tasks of this thread.
    async fn replace_in_steps(&self, source: &SourceName, holding: KeyedHolding<'_>) -> Result<bool> {
        for _ in 0..MAX_ABANDONED_REPLACEMENTS {
            let Some(mut replacement) = Replacing::begin(self, source, &holding)? else { return Ok(false) };
            for step in steps(holding.runs, REPLACE_STEP_BLOCKS) {
                if !replacement.add(step) {
                    break;
                }
                tokio::task::yield_now().await;
            }
            if let Some(is_taken) = replacement.finish() {
                return Ok(is_taken);
            }
            // A snapshot was written, or the source was removed: once more.
        }
        let mut index = self.index.lock();
        let id = source_id(&mut index, source)?;
        let runs = holding.runs.iter().map(|(tier, keys)| (*tier, keys.as_slice()));
        Ok(index.replace(id, holding.epoch, holding.next_sequence, runs))
    }

    /// Applies a batch, together with others if it has to wait for the book.
    fn apply_batch(&self, source: &SourceName, batch: &KeyedBatch<'_>) -> Result<Verdict> {
        if let Some(mut index) = self.index.try_lock() {
            let KeyedBatch { epoch, sequence, replayed, events, .. } = *batch;
            let source = source_id(&mut index, source)?;
            let verdict = index.apply(&Batch { source, epoch, sequence, replayed, events });
            index.maintain(MAINTAINED_ENTRIES);
            return Ok(verdict);
        }
        let ticket = self.queue.add(source, batch);
        self.queue.apply_all(&mut self.index.lock());
        let operation = "apply a batch";
        let lost = || IndexerError::Unavailable {
            operation,
            reason: "the thread that applied it failed".to_owned(),
        };
        ticket.take().unwrap_or_else(|| Err(lost()))
    }

    /// Does something with a source that is there.
    fn with<T>(&self, source: &SourceName, act: impl FnOnce(&mut HolderIndex, SourceId) -> T) -> Option<T> {
        let mut index = self.index.lock();
        let id = index.source(&source.worker, source.rank)?;
        Some(act(&mut index, id))
    }

    fn rows(&self, keys: &[BlockKey], walk: Walk) -> Vec<Row> {
        MATCHES.with_borrow_mut(|matches| {
            let names_before = self.reader.names();
            self.reader.lookup(keys, LookupOptions { walk, ..LookupOptions::default() }, matches);
            let names = self.reader.names();
            let rows = matches.rows().iter().filter_map(|row| {
                let name = names.get(row.source())?;
                // Otherwise the source left meanwhile and another one may have its number.
                let is_same = names_before.get(row.source()).is_some_and(|before| Arc::ptr_eq(before, name));
                is_same.then(|| Row {
                    source: SourceName::clone(name),
                    is_unsure: row.is_unsure(),
                    prefix_in: by_tier(|tier| row.prefix_in(tier)),
                    covered_in: by_tier(|tier| row.covered_in(tier)),
                    highest_block: row.highest_block(),
                })
            });
            let mut found = Vec::with_capacity(matches.rows().len());
            found.extend(rows);
            found
        })
    }
}

impl Backend for MemoryBackend {
    fn kind(&self) -> &'static str {
        "memory"
    }

    fn apply<'a>(&'a self, source: &'a SourceName, batch: KeyedBatch<'a>) -> BoxFuture<'a, Result<Verdict>> {
        async move { self.apply_batch(source, &batch) }.boxed()
    }

    fn replace<'a>(
        &'a self,
        source: &'a SourceName,
        holding: KeyedHolding<'a>,
    ) -> BoxFuture<'a, Result<bool>> {
        self.replace_in_steps(source, holding).boxed()
    }

    fn skip_gap<'a>(&'a self, source: &'a SourceName, next: u64) -> BoxFuture<'a, Result<()>> {
        let skip = async move {
            // Without a source or a gap there is nothing to give up.
            self.with(source, |index, source| index.skip_gap(source, next));
            Ok(())
        };
        skip.boxed()
    }

    fn state<'a>(&'a self, source: &'a SourceName) -> BoxFuture<'a, Result<Option<SourceState>>> {
        async move { Ok(self.with(source, |index, source| index.status(source)).flatten().map(as_state)) }
            .boxed()
    }

    fn states(&self) -> BoxFuture<'_, Result<Vec<SourceState>>> {
        async move { Ok(self.index.lock().statuses().map(as_state).collect()) }.boxed()
    }

    fn remove_source<'a>(&'a self, source: &'a SourceName) -> BoxFuture<'a, Result<bool>> {
        async move { Ok(self.with(source, HolderIndex::remove_source).unwrap_or(false)) }.boxed()
    }

    fn forget<'a>(&'a self, source: &'a SourceName, keys: &'a [BlockKey]) -> BoxFuture<'a, Result<()>> {
        let forget = async move {
            self.with(source, |index, source| index.forget(source, keys));
            Ok(())
        };
        forget.boxed()
    }

    fn lookup<'a>(&'a self, keys: &'a [BlockKey], walk: Walk) -> BoxFuture<'a, Result<Vec<Row>>> {
        async move { Ok(self.rows(keys, walk)) }.boxed()
    }

    fn blocks_of<'a>(
        &'a self,
        source: &'a SourceName,
        from: Option<u64>,
        limit: usize,
    ) -> BoxFuture<'a, Result<SourceBlocks>> {
        let list = async move {
            let (reader, source) = (self.reader.clone(), source.clone());
            // A page takes some milliseconds, which other tasks of this thread should not wait for.
            let page = tokio::task::spawn_blocking(move || list_blocks(&reader, &source, from, limit));
            let lost = |error: tokio::task::JoinError| IndexerError::Unavailable {
                operation: "list the blocks of a source",
                reason: error.to_string(),
            };
            page.await.map_err(lost)
        };
        list.boxed()
    }
}

/// A replacement in progress; dropped before its end, it is abandoned.
struct Replacing<'a> {
    backend: &'a MemoryBackend,
    id: Option<ReplacementId>,
}

impl<'a> Replacing<'a> {
    fn begin(
        backend: &'a MemoryBackend,
        source: &SourceName,
        holding: &KeyedHolding<'_>,
    ) -> Result<Option<Self>> {
        let mut index = backend.index.lock();
        let source = source_id(&mut index, source)?;
        let id = index.begin_replace(source, holding.epoch, holding.next_sequence);
        Ok(id.map(|id| Self { backend, id: Some(id) }))
    }

    /// Adds a step; false if the replacement was abandoned.
    fn add(&self, step: Step<'_>) -> bool {
        let Some(id) = self.id else { return false };
        let mut index = self.backend.index.lock();
        let is_known = index.replace_some(id, step);
        index.maintain(MAINTAINED_ENTRIES);
        is_known
    }

    /// Makes the new blocks visible; `None` if the replacement was abandoned.
    fn finish(&mut self) -> Option<bool> {
        let mut index = self.backend.index.lock();
        let is_taken = index.finish_replace(self.id.take()?);
        index.maintain(MAINTAINED_ENTRIES);
        is_taken
    }
}

impl Drop for Replacing<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.backend.index.lock().abandon_replace(id);
        }
    }
}

/// Runs of blocks, each with its tier and the block before it.
type Step<'a> = Vec<(Tier, Option<BlockKey>, &'a [BlockKey])>;

/// Runs in steps of at most so many blocks.
fn steps(runs: &[(Tier, Vec<BlockKey>)], max_blocks: usize) -> impl Iterator<Item = Step<'_>> {
    let mut pieces = runs.iter().flat_map(move |(tier, keys)| {
        let starts = (0..keys.len()).step_by(max_blocks);
        starts.map(move |start| {
            let end = keys.len().min(start + max_blocks);
            let parent = start.checked_sub(1).map(|before| keys[before]);
            (*tier, parent, &keys[start..end])
        })
    });
    let mut left_over = None;
    std::iter::from_fn(move || {
        let mut step = Vec::new();
        let mut n_blocks = 0;
        while let Some(piece) = left_over.take().or_else(|| pieces.next()) {
            n_blocks += piece.2.len();
            if n_blocks > max_blocks && !step.is_empty() {
                left_over = Some(piece);
                break;
            }
            step.push(piece);
        }
        (!step.is_empty()).then_some(step)
    })
}

/// A page of the blocks of a source; empty and the last one if there is no such source.
fn list_blocks(reader: &HolderReader, source: &SourceName, from: Option<u64>, limit: usize) -> SourceBlocks {
    let names = reader.names();
    let Some(id) = names.find(source) else { return SourceBlocks::default() };
    let page = reader.blocks_of(id, from, limit);
    // Otherwise the source left meanwhile and another one may have its number.
    let is_same = match (names.get(id), reader.names().get(id)) {
        (Some(before), Some(after)) => Arc::ptr_eq(before, after),
        _ => false,
    };
    if is_same { SourceBlocks { blocks: page.blocks, next: page.next } } else { SourceBlocks::default() }
}

/// The number of a source, which is added if it is new.
fn source_id(index: &mut HolderIndex, source: &SourceName) -> Result<SourceId> {
    match index.source(&source.worker, source.rank) {
        Some(id) => Ok(id),
        None => Ok(index.add_source(&source.worker, source.rank)?),
    }
}

fn by_tier(count: impl Fn(Tier) -> u32) -> [u32; N_TIERS] {
    Tier::ALL.map(count)
}

fn as_state(status: SourceStatus) -> SourceState {
    let SourceStatus { name, epoch, due, is_unsure, n_blocks, .. } = status;
    SourceState {
        source: Arc::unwrap_or_clone(name),
        epoch,
        due_sequence: due,
        is_unsure,
        n_blocks: Some(n_blocks),
    }
}

fn file_error(operation: &'static str, path: &Path, error: &std::io::Error) -> IndexerError {
    IndexerError::Unavailable { operation, reason: format!("{}: {error}", path.display()) }
}

#[cfg(test)]
mod tests {
    use kvik_index::holders::Event;

    use super::*;

    #[test]
    fn batches_that_wait_for_the_book_are_applied_together_and_each_gets_its_verdict() {
        const N_SOURCES: u32 = 4;
        let backend = MemoryBackend::new(IndexConfig { max_sources: 3, ..IndexConfig::default() });
        let keys: Vec<BlockKey> = (0..100).map(BlockKey).collect();
        let verdicts: Vec<Result<Verdict>> = std::thread::scope(|scope| {
            let index = backend.index.lock();
            let apply = |rank: u32| {
                let (backend, keys) = (&backend, &keys);
                move || {
                    let source = SourceName { worker: "w".into(), rank };
                    let events =
                        [Event::Stored { tier: Tier::Gpu, parent: None, keys: &keys[rank as usize..] }];
                    let (sequence, published_s) = (u64::from(rank / 2), 0.0);
                    let batch =
                        KeyedBatch { epoch: None, sequence, replayed: false, published_s, events: &events };
                    backend.apply_batch(&source, &batch)
                }
            };
            let threads: Vec<_> = (0..N_SOURCES).map(|rank| scope.spawn(apply(rank))).collect();
            while backend.queue.len() < N_SOURCES as usize {
                std::thread::yield_now();
            }
            drop(index);
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        // Two of them begin with number 1, and there is room for three sources.
        let n_applied = verdicts.iter().filter(|it| matches!(it, Ok(Verdict::Applied))).count();
        let n_early =
            verdicts.iter().filter(|it| matches!(it, Ok(Verdict::Gap { expected: 0, got: 1 }))).count();
        let n_refused = verdicts.iter().filter(|it| matches!(it, Err(IndexerError::Index(_)))).count();
        assert_eq!((n_applied + n_early, n_refused), (3, 1), "{verdicts:?}");
        let rows = backend.rows(&keys[3..], Walk::Prefix);
        assert_eq!(rows.iter().filter(|row| row.prefix_in[0] == 97).count(), n_applied);
        assert_eq!(backend.queue.len(), 0);
    }
}
