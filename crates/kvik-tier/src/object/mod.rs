//! A bucket of an object store, or a folder, as a tier.
//!
//! The stores are those of the `object_store` crate. Its futures run on two threads of the tier's own
//! (`runtime.rs`); callers block and do the copying. `location.rs` goes from a URL to a store, `transfer.rs`
//! has the single operations.
//!
//! A chunk is an object named `<prefix>/<namespace>/<first byte of chunk>/<chunk>-<rank>`.

mod location;
mod runtime;
#[cfg(test)]
mod tests;
mod transfer;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;
use object_store::PutPayload;

pub use location::ObjectUrl;

use self::location::Location;
use self::runtime::Runtime;
use self::transfer::{Read, ReadMessage};
use crate::error::{Result, TierError};
use crate::key::ChunkKey;
use crate::tally::Tally;
use crate::tier::{Arrived, GetItem, GetOutcome, PutItem, PutOutcome, Tier, TierKind, TierStat};

/// How an [`ObjectTier`] works. Its printed form has no values of settings: some are secrets.
#[derive(Clone)]
pub struct ObjectOptions {
    /// Settings of the store by name, such as `endpoint`, `region`, `access_key_id`, `secret_access_key`,
    /// `allow_http`. An unknown name is an error. Default: none.
    pub settings: BTreeMap<String, String>,
    /// Variables of the environment; those whose names the store knows (`AWS_*`, `GOOGLE_*`, `AZURE_*`) are
    /// settings that come before the others. Default: none; this crate reads no environment itself.
    pub environment: BTreeMap<String, String>,
    /// Time to connect. Default: 2 s.
    pub connect_timeout: Duration,
    /// Time of one operation, all its tries together, beside that of its bytes. Default: 10 s.
    pub timeout: Duration,
    /// Speed below which a store counts as failed: an operation takes no longer than its timeout and its
    /// bytes at this speed. Default: 16 MiB a second.
    pub min_bytes_per_s: u64,
    /// How often a request that failed is sent again. Default: 2.
    pub n_retries: usize,
    /// Operations of one call at a time. Default: 16.
    pub n_operations: usize,
    /// Authorities that sign the store's certificate, PEM. Default: those of this system.
    pub ca_file: Option<PathBuf>,
}

/// A bucket of S3, Google Cloud Storage, Azure or a compatible store, or a folder.
///
/// Storing copies each chunk once, because a request in flight owns its bytes; reading copies once, from what
/// the network gave to the caller's buffer. The store's answers are not verified; for a store that cannot be
/// trusted, wrap it in a decorator that verifies.
#[derive(Debug)]
pub struct ObjectTier {
    location: Location,
    runtime: Runtime,
    options: ObjectOptions,
    /// Whether the store can be told not to replace an object.
    creates: Arc<AtomicBool>,
    tally: Tally,
}

impl ObjectTier {
    /// A tier at `url`. A bucket must be there and is not asked before the first call; a folder is made.
    ///
    /// # Errors
    /// [`TierError::Invalid`] if an option is, [`TierError::Io`] if the folder, the authorities or threads
    /// cannot be had.
    pub fn open(url: &ObjectUrl, options: &ObjectOptions) -> Result<Self> {
        options.check()?;
        Ok(Self {
            location: url.locate(options)?,
            runtime: Runtime::new()?,
            options: options.clone(),
            creates: Arc::new(AtomicBool::new(true)),
            tally: Tally::default(),
        })
    }

    /// Longest time of an operation for so many bytes.
    fn budget(&self, n_bytes: usize) -> Duration {
        let transfer_s = n_bytes as f64 / self.options.min_bytes_per_s as f64;
        self.options.timeout + Duration::from_secs_f64(transfer_s)
    }

    fn ask(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        let mut failure = None;
        self.runtime.run(
            &vec![0; keys.len()],
            self.options.n_operations,
            |key_idx, reporter| {
                let store = Arc::clone(&self.location.store);
                let asked = transfer::contains(store, self.location.path(keys[key_idx]), self.budget(0));
                async move { reporter.report(asked.await) }
            },
            |key_idx, answer| match answer {
                Ok(is_present) => present[key_idx] = is_present,
                Err(error) => failure = Some(error),
            },
        );
        failure.map_or(Ok(()), Err)
    }

    fn delete_present(&self, keys: &BTreeSet<ChunkKey>) -> Result<usize> {
        let keys: Vec<ChunkKey> = keys.iter().copied().collect();
        let mut present = vec![false; keys.len()];
        // Stores do not say whether what they deleted was there.
        self.ask(&keys, &mut present)?;
        let found = keys.iter().zip(&present).filter(|(_, is_present)| **is_present);
        let mut paths: Vec<_> = found.map(|(key, _)| self.location.path(*key)).collect();
        let n_deleted = paths.len();
        let mut result = Ok(());
        self.runtime.run(
            &[0],
            1,
            |_, reporter| {
                let store = Arc::clone(&self.location.store);
                let deleted = transfer::delete(store, std::mem::take(&mut paths), self.budget(0));
                async move { reporter.report(deleted.await) }
            },
            |_, answer| result = answer,
        );
        result.map(|()| n_deleted)
    }
}

impl Tier for ObjectTier {
    fn kind(&self) -> TierKind {
        TierKind::Object
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        let task_bytes: Vec<usize> = batch.iter().map(PutItem::n_bytes).collect();
        let chunks: Vec<(ChunkKey, &[&[u8]])> = batch.iter().map(|item| (item.key, item.parts)).collect();
        let mut ends = Vec::new();
        ends.resize_with(batch.len(), || (PutOutcome::Failed(lost_task()), None));
        self.runtime.run(
            &task_bytes,
            self.options.n_operations,
            |item_idx, reporter| {
                let (key, parts) = chunks[item_idx];
                let payload: PutPayload = parts.iter().map(|part| Bytes::copy_from_slice(part)).collect();
                let put = transfer::put(
                    Arc::clone(&self.location.store),
                    self.location.path(key),
                    payload,
                    Arc::clone(&self.creates),
                    self.budget(task_bytes[item_idx]),
                );
                async move { reporter.report(put.await) }
            },
            |item_idx, end| ends[item_idx] = end,
        );
        let mut read_only = None;
        for (item, (outcome, reason)) in batch.iter_mut().zip(ends) {
            item.outcome = outcome;
            read_only = read_only.or(reason);
        }
        self.tally.note_put(batch, read_only);
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        self.get_each(batch, &|_, _| {});
    }

    fn get_each(&self, batch: &mut [GetItem<'_>], arrived: Arrived<'_>) {
        let task_bytes: Vec<usize> = batch.iter().map(GetItem::n_bytes).collect();
        let reads: Vec<Read> =
            batch.iter().map(|item| Read::new(item, self.location.path(item.key))).collect();
        let mut is_over = vec![false; batch.len()];
        for item in &mut *batch {
            item.outcome = GetOutcome::Failed(lost_task());
        }
        self.runtime.run(
            &task_bytes,
            self.options.n_operations,
            |item_idx, reporter| {
                let store = Arc::clone(&self.location.store);
                let budget = self.budget(task_bytes[item_idx]);
                transfer::get(store, reads[item_idx].clone(), budget, reporter)
            },
            |item_idx, message| match message {
                ReadMessage::Piece(start, piece) => copy_piece(&mut batch[item_idx], start, &piece),
                ReadMessage::End(outcome) => {
                    batch[item_idx].outcome = outcome;
                    is_over[item_idx] = true;
                    arrived(item_idx, &batch[item_idx]);
                }
            },
        );
        for (item_idx, item) in batch.iter().enumerate().filter(|(item_idx, _)| !is_over[*item_idx]) {
            arrived(item_idx, item);
        }
        self.tally.note_get(batch);
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        let result = self.ask(keys, present);
        if !keys.is_empty() {
            self.tally.note_answer(result.as_ref().err());
        }
        result
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        let keys: BTreeSet<ChunkKey> = keys.iter().copied().collect();
        if keys.is_empty() {
            return Ok(0);
        }
        let result = self.delete_present(&keys);
        self.tally.note_answer(result.as_ref().err());
        result
    }

    fn visit_keys(&self, _visit: &mut dyn FnMut(ChunkKey, u64)) {}

    /// Waits until a folder is on its disk. An object store answers when what it took is safe.
    fn flush(&self) -> Result<()> {
        let Some(folder) = &self.location.folder else { return Ok(()) };
        let action = || format!("flush folder {}", folder.display());
        let opened = std::fs::File::open(folder).map_err(|error| TierError::io(action(), error))?;
        rustix::fs::syncfs(opened).map_err(|error| TierError::io(action(), error.into()))
    }

    fn stat(&self) -> TierStat {
        TierStat { health: self.tally.health(), details: self.tally.counts(), ..TierStat::default() }
    }
}

impl ObjectOptions {
    /// Variables whose names begin with `prefix`, in lower case.
    fn environment_of(&self, prefix: &str) -> impl Iterator<Item = (String, &String)> {
        let variables = self.environment.iter().map(|(name, value)| (name.to_ascii_lowercase(), value));
        variables.filter(move |(name, _)| name.starts_with(prefix))
    }

    fn check(&self) -> Result<()> {
        if self.n_operations == 0 {
            return Err(TierError::invalid("n_operations", &0, "1 or more"));
        }
        if self.min_bytes_per_s == 0 {
            return Err(TierError::invalid("min_bytes_per_s", &0, "1 or more"));
        }
        for (field, timeout) in [("connect_timeout", self.connect_timeout), ("timeout", self.timeout)] {
            if timeout < Duration::from_millis(1) || timeout > MAX_TIMEOUT {
                return Err(TierError::invalid(field, &format!("{timeout:?}"), "1 ms to 1 hour"));
            }
        }
        Ok(())
    }
}

const MAX_TIMEOUT: Duration = Duration::from_hours(1);

impl Default for ObjectOptions {
    fn default() -> Self {
        Self {
            settings: BTreeMap::new(),
            environment: BTreeMap::new(),
            connect_timeout: Duration::from_secs(2),
            timeout: Duration::from_secs(10),
            min_bytes_per_s: 16 << 20,
            n_retries: 2,
            n_operations: 16,
            ca_file: None,
        }
    }
}

impl fmt::Debug for ObjectOptions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ObjectOptions")
            .field("settings", &self.settings.keys())
            .field("connect_timeout", &self.connect_timeout)
            .field("timeout", &self.timeout)
            .field("min_bytes_per_s", &self.min_bytes_per_s)
            .field("n_retries", &self.n_retries)
            .field("n_operations", &self.n_operations)
            .field("ca_file", &self.ca_file)
            .finish_non_exhaustive()
    }
}

/// Copies a piece of what is read to its place in the item's head, its buffer, or both.
fn copy_piece(item: &mut GetItem<'_>, start: usize, piece: &[u8]) {
    let n_head_bytes = item.head.len();
    let (in_head, in_buffer) = piece.split_at(piece.len().min(n_head_bytes.saturating_sub(start)));
    let buffer_start = (start + in_head.len()).saturating_sub(n_head_bytes);
    // The task counts what it sends; a piece that would not fit never leaves it.
    if let Some(target) = item.head.get_mut(start..start + in_head.len()) {
        target.copy_from_slice(in_head);
    }
    if let Some(target) = item.buffer.get_mut(buffer_start..buffer_start + in_buffer.len()) {
        target.copy_from_slice(in_buffer);
    }
}

/// The outcome of an item whose task went away without one, which only a defect does.
fn lost_task() -> TierError {
    TierError::remote("ask the object store", &"the operation ended without an outcome", false)
}
