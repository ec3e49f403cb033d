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

/// An item that is read, and how.
struct Reading {
    /// First block to read.
    first: u64,
    /// Behind the last block to read.
    end: u64,
    /// Bytes of the item's buffer that are read in place.
    n_direct_bytes: usize,
    /// The blocks that are not.
    staging: AlignedBuffer,
    /// Where the item's bytes begin in `staging`.
    staged_start: usize,
    run_idx: usize,
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
/// Ranges of one chunk that follow each other, in the batch and on the disk, are one run.
pub(crate) fn read_batch(
    io: &dyn Io,
    batch: &mut [GetItem<'_>],
    locate: impl Fn(&ChunkKey) -> Option<Location>,
) {
    let locations = locate_all(batch, locate);
    let mut readings: Vec<Option<Reading>> = batch
        .iter_mut()
        .zip(&locations)
        .map(|(item, location)| {
            let reading = location.as_ref().ok_or(GetOutcome::Miss).and_then(|it| Reading::new(item, it));
            reading.map_err(|outcome| item.outcome = outcome).ok()
        })
        .collect();

    let mut runs: Vec<ReadRun<'_>> = Vec::new();
    let mut last: Option<(ChunkKey, &Arc<Segment>, u64)> = None;
    for ((item, reading), location) in batch.iter_mut().zip(&mut readings).zip(&locations) {
        let (Some(reading), Some(Location { segment, .. })) = (reading, location) else {
            continue;
        };
        let continues_run = last.is_some_and(|(key, last_segment, end)| {
            key == item.key && Arc::ptr_eq(last_segment, segment) && end == reading.first
        });
        if !continues_run {
            let offset = reading.first;
            runs.push(ReadRun { file: &segment.file, offset, slices: Vec::new(), outcome: Ok(()) });
        }
        last = Some((item.key, segment, reading.end));
        reading.run_idx = runs.len() - 1;
        let slices = [&mut item.buffer[..reading.n_direct_bytes], &mut reading.staging];
        if let Some(run) = runs.last_mut() {
            run.slices.extend(slices.into_iter().filter(|slice| !slice.is_empty()).map(IoSliceMut::new));
        }
    }
    io.read(&mut runs);
    let outcomes: Vec<Result<(), TierError>> = runs
        .into_iter()
        .map(|run| run.outcome.map_err(|error| TierError::io("read a segment", error)))
        .collect();

    for (item, reading) in batch.iter_mut().zip(&readings) {
        let Some(reading) = reading else {
            continue;
        };
        item.outcome = match &outcomes[reading.run_idx] {
            Ok(()) => {
                let staged = &mut item.buffer[reading.n_direct_bytes..];
                staged.copy_from_slice(&reading.staging[reading.staged_start..][..staged.len()]);
                GetOutcome::Hit
            }
            Err(error) => GetOutcome::Failed(error.clone()),
        };
    }
}

/// Where the items are. A decorator asks for its part of a chunk and for the caller's one after the other: both
/// are looked for once.
fn locate_all(
    batch: &[GetItem<'_>],
    locate: impl Fn(&ChunkKey) -> Option<Location>,
) -> Vec<Option<Location>> {
    let mut locations: Vec<Option<Location>> = Vec::with_capacity(batch.len());
    for (item_idx, item) in batch.iter().enumerate() {
        let location = match item_idx.checked_sub(1) {
            Some(before_idx) if batch[before_idx].key == item.key => locations[before_idx].clone(),
            _ => locate(&item.key),
        };
        locations.push(location);
    }
    locations
}

impl Reading {
    /// Plans how an item is read.
    ///
    /// # Errors
    /// The item's outcome, if it asks for what the chunk does not have.
    fn new(item: &GetItem<'_>, location: &Location) -> Result<Self, GetOutcome> {
        let n_bytes = item.buffer.len() as u64;
        let end = item.offset.checked_add(n_bytes).filter(|end| *end <= location.n_bytes);
        let Some(end) = end.filter(|_| !item.is_whole || n_bytes == location.n_bytes) else {
            return Err(GetOutcome::Corrupt("length"));
        };
        let n_bytes_before = (item.offset % BLOCK_BYTES) as usize;
        let can_be_direct = n_bytes_before == 0 && is_aligned(item.buffer);
        let n_direct_bytes = if can_be_direct { whole_blocks(item.buffer.len()) } else { 0 };
        let n_staged_bytes = n_bytes_before + item.buffer.len() - n_direct_bytes;
        Ok(Self {
            first: location.offset + item.offset - n_bytes_before as u64,
            end: location.offset + padded(end),
            n_direct_bytes,
            staging: AlignedBuffer::new(padded(n_staged_bytes as u64) as usize),
            staged_start: n_bytes_before,
            run_idx: 0,
        })
    }
}

/// Rounds down to whole blocks.
fn whole_blocks(n_bytes: usize) -> usize {
    n_bytes - n_bytes % BLOCK_BYTES as usize
}
