//! Between callers' memory and blocks: what is aligned goes straight, the rest through a buffer.

use std::io::IoSliceMut;
use std::sync::Arc;

use super::aligned::{AlignedBuffer, is_aligned};
use super::format::{BLOCK_BYTES, padded};
use super::index::Location;
use super::io::{Io, ReadRun};
use super::segment::Segment;
use crate::error::TierError;
use crate::key::ChunkKey;
use crate::tier::{GetItem, GetOutcome};

/// The chunks of a batch as whole blocks.
#[derive(Debug, Default)]
pub(crate) struct Gather<'a> {
    pieces: Vec<Piece<'a>>,
    n_staged_bytes: usize,
}

#[derive(Debug)]
enum Piece<'a> {
    /// Whole blocks in memory that direct I/O takes.
    Direct(&'a [u8]),
    /// Bytes that are copied behind each other.
    Staged(&'a [u8]),
    /// Zeros up to the next whole block.
    Padding(usize),
}

/// A range of a chunk that is read into one piece of memory, and how.
struct Reading {
    /// First block to read.
    first: u64,
    /// Behind the last block to read.
    end: u64,
    /// Bytes of the memory that are read in place.
    n_direct_bytes: usize,
    /// The blocks that are not.
    staging: AlignedBuffer,
    /// Where the range begins in `staging`.
    staged_start: usize,
    /// None where the memory has no bytes.
    run_idx: Option<usize>,
}

impl<'a> Gather<'a> {
    /// Adds a chunk, padded to whole blocks.
    pub(crate) fn add_chunk(&mut self, parts: &[&'a [u8]]) {
        let mut position = 0_usize;
        for part in parts {
            let can_be_direct = position.is_multiple_of(BLOCK_BYTES as usize) && is_aligned(part);
            let n_direct_bytes = if can_be_direct { whole_blocks(part.len()) } else { 0 };
            let (direct, staged) = part.split_at(n_direct_bytes);
            if !direct.is_empty() {
                self.pieces.push(Piece::Direct(direct));
            }
            self.stage(Piece::Staged(staged), staged.len());
            position += part.len();
        }
        let n_padding_bytes = padded(position as u64) as usize - position;
        self.stage(Piece::Padding(n_padding_bytes), n_padding_bytes);
    }

    fn stage(&mut self, piece: Piece<'a>, n_bytes: usize) {
        if n_bytes > 0 {
            self.pieces.push(piece);
            self.n_staged_bytes += n_bytes;
        }
    }

    /// Copies what is staged into one buffer.
    pub(crate) fn staging(&self) -> AlignedBuffer {
        let mut staging = AlignedBuffer::new(self.n_staged_bytes);
        let mut rest = &mut *staging;
        for piece in &self.pieces {
            let n_bytes = match piece {
                Piece::Direct(_) => continue,
                Piece::Staged(bytes) => {
                    rest[..bytes.len()].copy_from_slice(bytes);
                    bytes.len()
                }
                Piece::Padding(n_bytes) => *n_bytes,
            };
            rest = &mut rest[n_bytes..];
        }
        staging
    }

    /// All blocks in their order; what is staged comes from `staging`.
    pub(crate) fn slices(&self, staging: &'a [u8]) -> Vec<&'a [u8]> {
        let mut slices = Vec::with_capacity(self.pieces.len());
        let (mut start, mut end) = (0, 0);
        for piece in &self.pieces {
            match piece {
                Piece::Direct(bytes) => {
                    if start < end {
                        slices.push(&staging[start..end]);
                        start = end;
                    }
                    slices.push(*bytes);
                }
                Piece::Staged(bytes) => end += bytes.len(),
                Piece::Padding(n_bytes) => end += n_bytes,
            }
        }
        if start < end {
            slices.push(&staging[start..end]);
        }
        slices
    }
}

/// Reads the items that `locate` finds; sets the outcome of all.
///
/// Ranges of one chunk that follow each other, in the batch and on the disk, are one run: so are a head and the
/// range behind it.
pub(crate) fn read_batch(
    io: &dyn Io,
    batch: &mut [GetItem<'_>],
    locate: impl Fn(&ChunkKey) -> Option<Location>,
) {
    let locations: Vec<Option<Location>> = batch.iter().map(|item| locate(&item.key)).collect();
    let mut readings: Vec<Option<[Reading; 2]>> = batch
        .iter_mut()
        .zip(&locations)
        .map(|(item, location)| {
            let readings = location.as_ref().ok_or(GetOutcome::Miss).and_then(|it| plan(item, it));
            readings.map_err(|outcome| item.outcome = outcome).ok()
        })
        .collect();

    let mut runs: Vec<ReadRun<'_>> = Vec::new();
    let mut last: Option<(ChunkKey, &Arc<Segment>, u64)> = None;
    for ((item, readings), location) in batch.iter_mut().zip(&mut readings).zip(&locations) {
        let (Some(readings), Some(Location { segment, .. })) = (readings, location) else {
            continue;
        };
        for (memory, reading) in [&mut *item.head, &mut *item.buffer].into_iter().zip(readings) {
            if memory.is_empty() {
                continue;
            }
            let continues_run = last.is_some_and(|(key, last_segment, end)| {
                key == item.key && Arc::ptr_eq(last_segment, segment) && end == reading.first
            });
            if !continues_run {
                let offset = reading.first;
                runs.push(ReadRun { file: &segment.file, offset, slices: Vec::new(), outcome: Ok(()) });
            }
            last = Some((item.key, segment, reading.end));
            reading.run_idx = runs.len().checked_sub(1);
            let slices = [&mut memory[..reading.n_direct_bytes], &mut reading.staging];
            if let Some(run) = runs.last_mut() {
                run.slices.extend(slices.into_iter().filter(|slice| !slice.is_empty()).map(IoSliceMut::new));
            }
        }
    }
    io.read(&mut runs);
    let outcomes: Vec<Result<(), TierError>> = runs
        .into_iter()
        .map(|run| run.outcome.map_err(|error| TierError::io("read a segment", error)))
        .collect();

    for (item, readings) in batch.iter_mut().zip(&readings) {
        let Some(readings) = readings else {
            continue;
        };
        item.outcome = GetOutcome::Hit;
        for (memory, reading) in [&mut *item.head, &mut *item.buffer].into_iter().zip(readings) {
            match reading.run_idx.map(|run_idx| &outcomes[run_idx]) {
                None => {}
                Some(Ok(())) => reading.copy_staged(memory),
                Some(Err(error)) => item.outcome = GetOutcome::Failed(error.clone()),
            }
        }
    }
}

/// Plans how the head and the buffer of an item are read.
///
/// # Errors
/// The item's outcome, if it asks for what the chunk does not have.
fn plan(item: &GetItem<'_>, location: &Location) -> Result<[Reading; 2], GetOutcome> {
    let is_length_right = !item.is_whole || item.n_bytes() as u64 == location.n_bytes;
    let head = Reading::new(0, item.head, location);
    let range = Reading::new(item.offset, item.buffer, location);
    head.zip(range).filter(|_| is_length_right).map(Into::into).ok_or(GetOutcome::Corrupt("length"))
}

impl Reading {
    /// Plans how `memory` is filled from `offset` on; none if the chunk has not so many bytes.
    fn new(offset: u64, memory: &[u8], location: &Location) -> Option<Self> {
        let end = offset.checked_add(memory.len() as u64).filter(|end| *end <= location.n_bytes)?;
        let n_bytes_before = (offset % BLOCK_BYTES) as usize;
        let can_be_direct = n_bytes_before == 0 && is_aligned(memory);
        let n_direct_bytes = if can_be_direct { whole_blocks(memory.len()) } else { 0 };
        let n_staged_bytes = n_bytes_before + memory.len() - n_direct_bytes;
        Some(Self {
            first: location.offset + offset - n_bytes_before as u64,
            end: location.offset + padded(end),
            n_direct_bytes,
            staging: AlignedBuffer::new(padded(n_staged_bytes as u64) as usize),
            staged_start: n_bytes_before,
            run_idx: None,
        })
    }

    /// Copies what was not read in place to where it belongs.
    fn copy_staged(&self, memory: &mut [u8]) {
        let staged = &mut memory[self.n_direct_bytes..];
        staged.copy_from_slice(&self.staging[self.staged_start..][..staged.len()]);
    }
}

/// Rounds down to whole blocks.
fn whole_blocks(n_bytes: usize) -> usize {
    n_bytes - n_bytes % BLOCK_BYTES as usize
}
