//! Appending to segments: room is reserved, written and sealed.

use std::io::{self, IoSlice};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};

use super::SyncMode;
use super::aligned::AlignedBuffer;
use super::counters::Counters;
use super::file::{self, FreeFiles, SegmentFile};
use super::format::{BatchHeader, Entry, Footer, MAX_BATCH_ENTRIES, footer_bytes, padded};
use super::index::Index;
use super::io::{Io, WriteRun};
use super::segment::{OpenSegment, Reservation, SealedSegment};
use crate::error::{Result, TierError};
use crate::key::ChunkKey;

/// The most deletions that one batch writes down beside its chunks.
const MAX_GONE_OF_A_BATCH: usize = MAX_BATCH_ENTRIES / 2;

/// All segments of a tier, and how they are written.
///
/// Locks: `state` is taken before those of the index and of the free files, and none is held during I/O.
#[derive(Debug)]
pub(crate) struct Log {
    pub(crate) dir: PathBuf,
    pub(crate) capacity_bytes: u64,
    pub(crate) segment_bytes: u64,
    pub(crate) sync: SyncMode,
    pub(crate) io: Arc<dyn Io>,
    pub(crate) index: Index,
    pub(crate) free: Arc<FreeFiles>,
    pub(crate) state: Mutex<LogState>,
    /// Woken when a turn ends and when a segment is sealed.
    pub(crate) changed: Condvar,
    pub(crate) next_sequence: AtomicU64,
    pub(crate) counters: Counters,
    /// Why the last write failed, if that was for lack of room or permission.
    pub(crate) trouble: Mutex<Option<String>>,
}

/// Which segment is in which state.
#[derive(Debug, Default)]
pub(crate) struct LogState {
    /// Every file, whatever it is used for.
    pub(crate) files: Vec<Arc<SegmentFile>>,
    /// The number of the next file; no file of the directory has it or a higher one.
    pub(crate) next_number: u32,
    /// Where batches are appended.
    pub(crate) open: Option<OpenSegment>,
    /// Segments that get no further batch; the last writer of each seals it.
    pub(crate) sealing: Vec<OpenSegment>,
    /// Segments that can be reclaimed.
    pub(crate) sealed: Vec<SealedSegment>,
    /// Deletions that no batch has written down.
    pub(crate) gone: Vec<Entry>,
    /// Whether a thread is about to open the next segment; the others wait for it.
    is_turning: bool,
}

/// Ends a turn, also when it panics.
struct Turn<'a>(&'a Log);

impl Log {
    /// Takes room for as many of the chunks as go into one batch, at least for the first; none if the
    /// tier has no room. With no chunks it takes room for deletions that wait.
    ///
    /// Opens the next segment, and empties another for it, if need be. The caller writes the batch and then
    /// calls [`Log::finish`], and reserves nothing in between.
    pub(crate) fn reserve(&self, chunks: &[(ChunkKey, u64)]) -> Result<Option<Reservation>> {
        self.reserve_with(chunks, MAX_GONE_OF_A_BATCH)
    }

    /// Takes room for one chunk whose batch waits for its writer: deletions do not go along, so that a flush meanwhile writes them.
    pub(crate) fn reserve_alone(&self, chunk: (ChunkKey, u64)) -> Result<Option<Reservation>> {
        let has_many_gone = MAX_GONE_OF_A_BATCH <= self.state.lock().gone.len();
        if has_many_gone {
            // No other batch has taken them along for long. What fails is noted, and tried again with the next chunk.
            let _ = self.write_gone();
        }
        self.reserve_with(&[chunk], 0)
    }

    fn reserve_with(&self, chunks: &[(ChunkKey, u64)], max_gone: usize) -> Result<Option<Reservation>> {
        let mut state = self.state.lock();
        loop {
            if let Some(reservation) = state.reserve(chunks, max_gone, || self.next_sequence()) {
                return Ok(Some(reservation));
            }
            if state.is_turning {
                self.changed.wait(&mut state);
                continue;
            }
            state.is_turning = true;
            drop(state);
            let turn = Turn(self);
            let is_turned = self.turn(chunks.first().map_or(0, |(_, n_bytes)| *n_bytes));
            drop(turn);
            match is_turned {
                Ok(true) => state = self.state.lock(),
                Ok(false) => return Ok(None),
                Err(error) => return Err(self.note("open a segment", error)),
            }
        }
    }

    /// Writes a batch: its header, and behind it the slices, which are whole blocks in all.
    ///
    /// Header and chunks are under way at the same time. Either may survive without the other: chunks
    /// without a header are never looked for, and a header without its chunks is found by a verifying reader.
    pub(crate) fn write<'a>(&self, reservation: &'a Reservation, slices: &[&'a [u8]]) -> io::Result<()> {
        let file = &reservation.segment.file;
        let header = BatchHeader {
            generation: reservation.segment.generation,
            offset: reservation.offset,
            end: reservation.end,
            entries: reservation.entries.clone(),
        };
        let header = AlignedBuffer::copy_of(&header.encode());
        let slices = std::iter::once(&*header).chain(slices.iter().copied()).map(IoSlice::new).collect();
        let mut runs = [WriteRun { file, offset: reservation.offset, slices, outcome: Ok(()) }];
        file.begin_write();
        self.io.write(&mut runs);
        let [run] = runs;
        run.outcome?;
        self.counters.written_bytes.add(reservation.end - reservation.offset);
        if self.sync == SyncMode::EveryBatch {
            self.io.sync_writes(file)?;
        }
        Ok(())
    }

    /// Ends a reservation. Chunks that were written are in the index before this is called.
    ///
    /// A segment with a batch that failed gets no further one.
    pub(crate) fn finish(&self, reservation: &Reservation, is_written: bool) {
        let mut state = self.state.lock();
        let LogState { open, sealing, gone, .. } = &mut *state;
        let is_open = open.as_ref().is_some_and(|open| Arc::ptr_eq(&open.segment, &reservation.segment));
        if !is_written {
            gone.extend_from_slice(&reservation.entries[..reservation.n_gone]);
            if is_open {
                sealing.extend(open.take());
            }
        }
        let mut unsealed = open.iter_mut().chain(sealing);
        if let Some(unsealed) = unsealed.find(|open| Arc::ptr_eq(&open.segment, &reservation.segment)) {
            unsealed.finish(reservation, is_written);
        }
        drop(state);
        self.seal_idle();
    }

    /// Ends a reservation of which no header was written, so that nothing names its room.
    pub(crate) fn give_back(&self, reservation: &Reservation) {
        let mut state = self.state.lock();
        let LogState { open, sealing, gone, .. } = &mut *state;
        gone.extend_from_slice(&reservation.entries[..reservation.n_gone]);
        let mut unsealed = open.iter_mut().chain(sealing);
        if let Some(unsealed) = unsealed.find(|open| Arc::ptr_eq(&open.segment, &reservation.segment)) {
            unsealed.finish(reservation, false);
        }
        drop(state);
        self.seal_idle();
    }

    /// Notes deletions, to be written down with a later batch.
    pub(crate) fn add_gone(&self, gone: Vec<Entry>) {
        self.state.lock().gone.extend(gone);
    }

    /// Writes down all deletions and makes what was written survive a loss of power.
    pub(crate) fn flush(&self) -> Result<()> {
        self.write_gone()?;
        let files = self.state.lock().files.clone();
        files
            .iter()
            .try_for_each(|file| self.io.sync_writes(file))
            .map_err(|error| self.note("sync a segment", error))
    }

    /// Writes down what is only in memory and seals the open segment.
    pub(crate) fn close(&self) -> Result<()> {
        let written = self.write_gone();
        let mut state = self.state.lock();
        let open = state.open.take();
        state.sealing.extend(open);
        drop(state);
        self.seal_idle();
        written?;
        if self.sync == SyncMode::Never { Ok(()) } else { self.flush() }
    }

    /// A number that is higher than all before.
    ///
    /// Relaxed: the order of numbers for one key follows from the lock of its shard of the index.
    pub(crate) fn next_sequence(&self) -> u64 {
        self.next_sequence.fetch_add(1, Ordering::Relaxed)
    }

    /// Seals the segments that get no further batch and have no writer.
    pub(crate) fn seal_idle(&self) {
        loop {
            let mut state = self.state.lock();
            let Some(idle) = state.sealing.iter_mut().find(|open| open.n_writers == 0) else {
                return;
            };
            // The next search sees a segment with a writer: this thread.
            idle.n_writers = 1;
            let segment = Arc::clone(&idle.segment);
            let entries: Arc<[Entry]> = std::mem::take(&mut idle.entries).into();
            let sealed = SealedSegment { segment: Arc::clone(&segment), entries };
            // From here on its entries are found among the sealed; it becomes a victim only when it has left `sealing`.
            state.sealed.push(sealed.clone());
            drop(state);
            if let Err(error) = self.write_footer(&sealed) {
                // The next start walks its batches instead.
                tracing::warn!(segment = segment.file.number(), %error, "segment has no footer");
                self.note("seal a segment", error);
            }
            let mut state = self.state.lock();
            state.sealing.retain(|open| !Arc::ptr_eq(&open.segment, &segment));
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Turns an error into that of the tier, and remembers what it says about the state of the disk.
    pub(crate) fn note(&self, action: &str, error: io::Error) -> TierError {
        if file::is_no_space(&error) || file::is_read_only(&error) {
            *self.trouble.lock() = Some(format!("{action}: {error}"));
        }
        self.counters.n_failed_writes.add(1);
        TierError::io(format!("{action} in {}", self.dir.display()), error)
    }

    /// Puts an empty segment in the place of the open one; false if there is no room for one that takes a
    /// chunk of so many bytes.
    fn turn(&self, first_chunk_bytes: u64) -> io::Result<bool> {
        let Some(next) = self.next_segment(first_chunk_bytes)? else {
            return Ok(false);
        };
        let mut state = self.state.lock();
        let full = state.open.replace(next);
        state.sealing.extend(full);
        drop(state);
        self.seal_idle();
        Ok(true)
    }

    fn write_gone(&self) -> Result<()> {
        while !self.state.lock().gone.is_empty() {
            let Some(reservation) = self.reserve(&[])? else {
                return Err(self.note("write down deletions", io::ErrorKind::StorageFull.into()));
            };
            let outcome = self.write(&reservation, &[]);
            self.finish(&reservation, outcome.is_ok());
            outcome.map_err(|error| self.note("write down deletions", error))?;
        }
        Ok(())
    }

    /// Seals a segment that was found without a footer.
    pub(crate) fn seal_walked(&self, walked: &SealedSegment) {
        let footer_at = walked.segment.file.n_bytes().saturating_sub(footer_bytes(walked.entries.len()));
        // Batches leave room for the footer; a header that says otherwise gets none.
        let fits = walked.entries.iter().all(|entry| entry.offset() + padded(entry.n_bytes()) <= footer_at);
        if let Err(error) = if fits { self.write_footer(walked) } else { Ok(()) } {
            tracing::warn!(segment = walked.segment.file.number(), %error, "segment has no footer");
            self.note("seal a segment", error);
        }
    }

    fn write_footer(&self, sealed: &SealedSegment) -> io::Result<()> {
        let SealedSegment { segment, entries } = sealed;
        let footer = Footer { generation: segment.generation, entries: entries.to_vec() };
        let footer = AlignedBuffer::copy_of(&footer.encode());
        segment.file.begin_write();
        self.io.write_one(&segment.file, segment.file.n_bytes() - footer.len() as u64, &footer)?;
        self.counters.written_bytes.add(footer.len() as u64);
        self.sync_unless_never(&segment.file)
    }

    pub(crate) fn sync_unless_never(&self, file: &SegmentFile) -> io::Result<()> {
        if self.sync == SyncMode::Never { Ok(()) } else { self.io.sync_writes(file) }
    }
}

impl LogState {
    /// Takes room in the open segment, with as many deletions as go along.
    fn reserve(
        &mut self,
        chunks: &[(ChunkKey, u64)],
        max_gone: usize,
        mut next_sequence: impl FnMut() -> u64,
    ) -> Option<Reservation> {
        let open = self.open.as_mut()?;
        let mut n_gone = self.gone.len().min(max_gone);
        // Without chunks, as many as fit: a small segment has no room for all of a batch.
        while n_gone > 0 {
            let with_gone = open.reserve(chunks, &self.gone[..n_gone], &mut next_sequence);
            if with_gone.is_some() {
                self.gone.drain(..n_gone);
                return with_gone;
            }
            n_gone = if chunks.is_empty() { n_gone / 2 } else { 0 };
        }
        if chunks.is_empty() && !self.gone.is_empty() {
            return None;
        }
        open.reserve(chunks, &[], next_sequence)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.state.lock().is_turning = false;
        self.0.changed.notify_all();
    }
}
