//! Chunks on local disks.
//!
//! The tier is a log of segments, files of one length that are allocated at once. A put appends a batch to the open
//! segment: a header with the keys, and the chunks at multiples of 4 KiB, written past the page cache straight from
//! the caller's memory. `format` has the bytes. The index of all chunks is in memory and is rebuilt at start from
//! the descriptions of the segments; chunks are not read then.
//!
//! Invariants:
//!
//! * A segment is appended to, sealed, and reused as a whole under a new generation; nothing in it changes in
//!   between.
//! * The index places a chunk only when all of it is written. A reader holds the segment, and a file is reused only
//!   when its last segment has no holder.
//! * No lock is held during I/O.
//! * What is read is not verified here: headers prove places, not content. Users wrap the tier in
//!   [`Checksummed`](crate::Checksummed), whose envelopes prove each chunk.
//!
//! A chunk may be written again in other bytes that mean the same (`rewrite`): a later entry of its key counts.
//!
//! A deletion is written down with the next batch, or by `flush`, or when the tier is closed. A loss of power or of
//! the process before that can bring a deleted chunk back; content does not change under a key, so it is
//! right.

mod aligned;
mod counters;
mod device;
mod direct;
mod file;
pub mod format;
mod index;
#[expect(unsafe_code, reason = "the kernel reads and writes borrowed memory while a call waits for it")]
mod io;
mod lock;
mod log;
mod options;
mod reclaim;
mod recovery;
mod rewrite;
mod segment;
mod signature;
mod transfer;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use parking_lot::{Condvar, Mutex};
use rustix::fs::Access;

pub(crate) use aligned::AlignedBuffer;
pub use device::format_device;
pub use io::IoKind;
pub use options::{NvmeOptions, SyncMode};

use counters::Counters;
use device::Device;
use direct::held;
use format::{Content, Entry};
use index::{Index, Location};
use io::Io;
use lock::FileLock;
use log::Log;
use recovery::Recovery;
use segment::{Reservation, max_chunk_bytes};
use transfer::Gather;

use crate::chunk_file::ChunkFile;
use crate::error::{Result, TierError};
use crate::key::{ChunkKey, TokenDigest};
use crate::tier::{
    Change, FileItem, Fill, GetItem, GetOutcome, PutItem, PutOutcome, Rewritten, Tier, TierHealth, TierKind,
    TierStat,
};

/// The name of the file whose lock says that a tier uses the directory.
const LOCK_NAME: &str = "lock";

/// Chunks on local disks.
///
/// A put is [`PutOutcome::NoRoom`] when the chunks take the share of the capacity that leaves room for emptying
/// segments, when no segment can be emptied far enough for the chunk, or when the device is full.
#[derive(Debug)]
pub struct NvmeTier {
    log: Log,
    /// Why nothing is written, if so since the start.
    read_only: Option<String>,
    /// Whether segments are files, and not parts of a device.
    is_folder: bool,
    /// Held for the lock on it.
    _lock: Option<FileLock>,
}

/// A batch that is being written; dropped before it is, it has failed.
struct Writing<'a> {
    log: &'a Log,
    reservation: Reservation,
    is_written: bool,
}

impl NvmeTier {
    /// Opens the tier of a directory with all chunks that are there.
    ///
    /// The content of the directory never makes it fail: what is no segment or not whole is counted, forgotten and
    /// used again; files with other names are left alone. A directory that cannot be written is opened for reading.
    ///
    /// Where the path is a block device, or the image of one, its segments lie there; it has to be formatted.
    ///
    /// # Errors
    /// If an option is not allowed, the directory cannot be made or listed, or another tier uses it. If a device is in
    /// use, has the mark of another program, or is not formatted.
    pub fn open(options: &NvmeOptions) -> Result<Self> {
        let io = io::open(options.io, options.queue_depth)?;
        Self::open_with(options, io)
    }

    fn open_with(options: &NvmeOptions, io: Arc<dyn Io>) -> Result<Self> {
        let Some(device) = Device::open(options)? else { return Self::open_dir(options, io) };
        let (segment_bytes, capacity_bytes) = (device.segment_bytes(), device.capacity_bytes());
        let options = NvmeOptions { capacity_bytes, segment_bytes, ..options.clone() };
        options.checked_segment_bytes()?;
        let counters = Counters::default();
        let recovery = Recovery::read_device(&device, &*io, &counters);
        Ok(Self::start(&options, segment_bytes, io, recovery, counters, (Some(device.into_lock()), None)))
    }

    fn open_dir(options: &NvmeOptions, io: Arc<dyn Io>) -> Result<Self> {
        if options.capacity_bytes == NvmeOptions::WHOLE_DEVICE {
            let allowed = "a size where it is a folder";
            return Err(TierError::invalid("capacity_bytes", &"not set", allowed));
        }
        let segment_bytes = options.checked_segment_bytes()?;
        let dir = &options.dir;
        fs::create_dir_all(dir)
            .map_err(|error| TierError::io(format!("make directory {}", dir.display()), error))?;
        let (lock, read_only) = lock(options)?;
        let counters = Counters::default();
        let mut recovery = Recovery::read(dir, &*io, read_only.is_none(), &counters)
            .map_err(|error| TierError::io(format!("list directory {}", dir.display()), error))?;
        if read_only.is_none() {
            recovery.shrink_to(options.capacity_bytes);
        }
        Ok(Self::start(options, segment_bytes, io, recovery, counters, (lock, read_only)))
    }

    /// Goes on with what was found.
    fn start(
        options: &NvmeOptions,
        segment_bytes: u64,
        io: Arc<dyn Io>,
        recovery: Recovery,
        counters: Counters,
        (lock, read_only): (Option<FileLock>, Option<String>),
    ) -> Self {
        let index = Index::new(options.max_live_bytes(segment_bytes));
        recovery.fill(&index);
        let log = Log {
            dir: options.dir.clone(),
            capacity_bytes: options.capacity_bytes,
            segment_bytes,
            sync: options.sync,
            io,
            index,
            free: recovery.free,
            state: Mutex::new(recovery.state),
            changed: Condvar::new(),
            next_sequence: AtomicU64::new(recovery.next_sequence),
            counters,
            trouble: Mutex::new(None),
        };
        for walked in recovery.walked.iter().filter(|_| read_only.is_none()) {
            log.seal_walked(walked);
        }
        Self { log, read_only, is_folder: options.dir.is_dir(), _lock: lock }
    }

    /// Stores the items of one batch of the log, from the front of `waiting` on; returns how many have an outcome.
    fn put_some(&self, batch: &mut [PutItem<'_>], waiting: &[usize]) -> usize {
        let lengths: Vec<(ChunkKey, u64)> = waiting
            .iter()
            .map(|item_idx| (batch[*item_idx].key, batch[*item_idx].n_bytes() as u64))
            .collect();
        let reservation = match self.log.reserve(&lengths) {
            Ok(Some(reservation)) => reservation,
            Ok(None) => {
                self.give_up(batch, &waiting[..1], &PutOutcome::NoRoom);
                return 1;
            }
            Err(error) => {
                self.give_up(batch, waiting, &PutOutcome::Failed(error));
                return waiting.len();
            }
        };
        let mut writing = Writing { log: &self.log, reservation, is_written: false };
        let chunks = writing.reservation.chunks();
        let written = &waiting[..chunks.len()];
        let mut gather = Gather::default();
        for item_idx in written {
            gather.add_chunk(batch[*item_idx].parts);
        }
        let staging = gather.staging();
        if let Err(error) = self.log.write(&writing.reservation, &gather.slices(&staging)) {
            let is_no_room = file::is_no_space(&error);
            let error = self.log.note("write chunks", error);
            let outcome = if is_no_room { PutOutcome::NoRoom } else { PutOutcome::Failed(error) };
            self.give_up(batch, written, &outcome);
            return written.len();
        }
        self.log.trouble.lock().take();
        for (item_idx, entry) in written.iter().zip(chunks) {
            let segment = Arc::clone(&writing.reservation.segment);
            let location = Location { segment, offset: entry.offset(), n_bytes: entry.n_bytes() };
            let is_first = self.log.index.insert(entry.key, location);
            batch[*item_idx].outcome = if is_first { PutOutcome::Stored } else { PutOutcome::Present };
            self.log.counters.put_bytes.add(entry.n_bytes());
        }
        let n_written = written.len();
        writing.is_written = true;
        n_written
    }

    /// Gives back the room that was claimed for items that are not stored.
    fn give_up(&self, batch: &mut [PutItem<'_>], item_idxs: &[usize], outcome: &PutOutcome) {
        for item_idx in item_idxs {
            self.log.index.unclaim(batch[*item_idx].n_bytes() as u64);
            batch[*item_idx].outcome = outcome.clone();
        }
    }

    /// The outcome of an item that needs no writing; none if it does, and its room is claimed.
    fn outcome_without_writing(&self, key: ChunkKey, n_bytes: u64) -> Option<PutOutcome> {
        let max_bytes = max_chunk_bytes(self.log.segment_bytes);
        if self.log.index.contains(&key) {
            Some(PutOutcome::Present)
        } else if let Some(reason) = &self.read_only {
            let error = std::io::Error::new(std::io::ErrorKind::ReadOnlyFilesystem, reason.as_str());
            Some(PutOutcome::Failed(TierError::io("write chunks", error)))
        } else if n_bytes > max_bytes {
            let allowed = format!("{max_bytes} bytes or less, by the length of a segment");
            Some(PutOutcome::Failed(TierError::invalid("chunk length", &n_bytes, allowed)))
        } else if self.log.index.claim(n_bytes) {
            None
        } else {
            Some(PutOutcome::NoRoom)
        }
    }
}

impl Tier for NvmeTier {
    fn kind(&self) -> TierKind {
        TierKind::Nvme
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        let mut waiting: Vec<usize> = Vec::with_capacity(batch.len());
        let mut first_of_key: HashMap<ChunkKey, usize> = HashMap::with_capacity(batch.len());
        let mut repeated: Vec<(usize, usize)> = Vec::new();
        for (item_idx, item) in batch.iter_mut().enumerate() {
            let first_idx = *first_of_key.entry(item.key).or_insert(item_idx);
            if first_idx != item_idx {
                repeated.push((item_idx, first_idx));
                continue;
            }
            match self.outcome_without_writing(item.key, item.n_bytes() as u64) {
                Some(outcome) => item.outcome = outcome,
                None => waiting.push(item_idx),
            }
        }
        let mut waiting = waiting.as_slice();
        while !waiting.is_empty() {
            let n_done = self.put_some(batch, waiting);
            waiting = &waiting[n_done..];
        }
        for (item_idx, first_idx) in repeated {
            batch[item_idx].outcome = match &batch[first_idx].outcome {
                PutOutcome::Stored => PutOutcome::Present,
                outcome => outcome.clone(),
            };
        }
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        transfer::read_batch(&*self.log.io, batch, |key| self.log.index.get(key));
        let hits = batch.iter().filter(|item| item.outcome.is_hit());
        self.log.counters.get_bytes.add(hits.map(|item| item.n_bytes() as u64).sum());
    }

    fn has_files(&self) -> bool {
        self.is_folder
    }

    fn open_chunk(&self, key: ChunkKey, _: TokenDigest) -> std::result::Result<ChunkFile, GetOutcome> {
        let location = self.log.index.get(&key).filter(|_| self.is_folder).ok_or(GetOutcome::Miss)?;
        Ok(held(location, &self.log.io))
    }

    fn put_file(&self, item: &FileItem, fill: Fill<'_>) -> PutOutcome {
        if !self.is_folder {
            return PutOutcome::Skipped;
        }
        match self.outcome_without_writing(item.key, item.n_bytes) {
            Some(outcome) => outcome,
            None => self.put_claimed(item, fill),
        }
    }

    fn rewrite(&self, key: ChunkKey, change: Change<'_>) -> Result<Rewritten> {
        self.rewrite_chunk(key, change)
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        for (key, is_present) in keys.iter().zip(present) {
            *is_present = self.log.index.contains(key);
        }
        Ok(())
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        let gone: Vec<Entry> = keys
            .iter()
            .filter_map(|key| {
                let sequence = self.log.index.remove(key, || self.log.next_sequence())?;
                Some(Entry { key: *key, sequence, content: Content::Gone })
            })
            .collect();
        let n_deleted = gone.len();
        if self.read_only.is_none() {
            self.log.add_gone(gone);
        }
        Ok(n_deleted)
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        self.log.index.visit(visit);
    }

    fn flush(&self) -> Result<()> {
        if self.read_only.is_some() { Ok(()) } else { self.log.flush() }
    }

    fn stat(&self) -> TierStat {
        let trouble = self.read_only.clone().or_else(|| self.log.trouble.lock().clone());
        let mut details = self.log.counters.details();
        details.push(("segments", self.log.state.lock().files.len() as u64));
        TierStat {
            n_chunks: Some(self.log.index.n_chunks()),
            used_bytes: Some(self.log.index.live_bytes()),
            capacity_bytes: Some(self.log.index.max_live_bytes()),
            health: trouble.map_or(TierHealth::Up, TierHealth::ReadOnly),
            details,
            operations: Vec::new(),
        }
    }
}

impl Drop for NvmeTier {
    /// Writes down what is only in memory; what fails costs the next start a walk.
    fn drop(&mut self) {
        if self.read_only.is_none()
            && let Err(error) = self.log.close()
        {
            tracing::warn!(%error, "tier is not closed cleanly");
        }
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.log.finish(&self.reservation, self.is_written);
    }
}

/// Takes the lock of a directory; says why nothing can be written there, if so.
fn lock(options: &NvmeOptions) -> Result<(Option<FileLock>, Option<String>)> {
    let dir = &options.dir;
    let path = dir.join(LOCK_NAME);
    let failed = |error| TierError::io(format!("lock {}", path.display()), error);
    let access = rustix::fs::access(dir, Access::WRITE_OK | Access::EXEC_OK).map_err(std::io::Error::from);
    let opened = access
        .and_then(|()| OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path));
    let (file, read_only) = match opened {
        Ok(file) => (Some(file), None),
        Err(error) if file::is_read_only(&error) => {
            // A process that can write keeps a lock on the file, if there is one.
            (File::open(&path).ok(), Some(format!("{} cannot be written: {error}", dir.display())))
        }
        // A full device may have no room for an empty file, and has none for segments either.
        Err(error) if file::is_no_space(&error) => (None, Some(format!("{}: {error}", dir.display()))),
        Err(error) => return Err(failed(error)),
    };
    let Some(file) = file else { return Ok((None, read_only)) };
    match FileLock::take(file).map_err(failed)? {
        Some(lock) => Ok((Some(lock), read_only)),
        None => Err(TierError::invalid("dir", &dir.display(), "a directory that no other tier has open")),
    }
}
