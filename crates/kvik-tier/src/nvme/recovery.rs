//! What a directory holds when a tier is opened.
//!
//! A sealed segment is known by its footer. One without, because the process died or the footer is damaged, is
//! walked: each header leads to the next, and where one does not hold, the blocks behind it are searched for the
//! next that does. A recovered segment is never appended to, so nothing that the walk did not find can be
//! found by a later one.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::aligned::AlignedBuffer;
use super::counters::Counters;
use super::device::Device;
use super::file::{self, FreeFiles, SegmentFile};
use super::format::{BLOCK_BYTES, BatchHeader, Content, Entry, Footer, SegmentHeader};
use super::index::{Index, Location};
use super::io::Io;
use super::log::LogState;
use super::segment::{SealedSegment, Segment};
use crate::key::ChunkKey;

/// Blocks are searched in windows of so many bytes.
const WINDOW_BYTES: u64 = 1 << 20;

/// What a directory holds.
#[derive(Debug)]
pub(crate) struct Recovery {
    pub(crate) state: LogState,
    pub(crate) free: Arc<FreeFiles>,
    /// Higher than all numbers that were found.
    pub(crate) next_sequence: u64,
    /// Segments that have no footer yet.
    pub(crate) walked: Vec<SealedSegment>,
}

/// What one file holds.
struct Found {
    header: SegmentHeader,
    entries: Vec<Entry>,
    has_footer: bool,
}

impl Recovery {
    /// Reads what describes the segments of a directory; no chunk is read but where a header is damaged.
    ///
    /// # Errors
    /// If the directory cannot be listed. Files that cannot be read or are no segments are counted and
    /// passed over.
    pub(crate) fn read(dir: &Path, io: &dyn Io, is_writable: bool, counters: &Counters) -> io::Result<Self> {
        let mut recovery = Self::empty();
        for number in file::list(dir)? {
            recovery.state.next_number = number.saturating_add(1);
            match SegmentFile::open(dir, number, is_writable) {
                Ok(file) => recovery.add(Arc::new(file), io, counters),
                Err(error) => {
                    tracing::warn!(segment = number, %error, "segment cannot be opened");
                    counters.n_bad_segments.add(1);
                }
            }
        }
        Ok(recovery.sorted())
    }

    /// Reads what describes the segments of a device. Those that cannot be read or are none are free.
    pub(crate) fn read_device(device: &Device, io: &dyn Io, counters: &Counters) -> Self {
        let mut recovery = Self::empty();
        for segment in device.segments() {
            recovery.state.next_number = segment.number().saturating_add(1);
            recovery.add(Arc::new(segment), io, counters);
        }
        recovery.sorted()
    }

    fn empty() -> Self {
        Self {
            state: LogState::default(),
            free: Arc::new(FreeFiles::default()),
            next_sequence: 1,
            walked: Vec::new(),
        }
    }

    fn sorted(mut self) -> Self {
        // Where two segments say the same of a chunk, one was being moved: the older has it for sure.
        self.state.sealed.sort_by_key(|sealed| sealed.segment.first_sequence);
        self
    }

    /// Removes files, the empty and then the oldest first, until the rest is within the capacity.
    pub(crate) fn shrink_to(&mut self, capacity_bytes: u64) {
        let total_bytes = |files: &[Arc<SegmentFile>]| files.iter().map(|file| file.n_bytes()).sum::<u64>();
        while total_bytes(&self.state.files) > capacity_bytes {
            if self.free.len() == 0 && !self.state.sealed.is_empty() {
                let oldest = self.state.sealed.remove(0);
                self.walked.retain(|walked| !Arc::ptr_eq(&walked.segment, &oldest.segment));
            }
            let Some(file) = self.free.take() else {
                return;
            };
            if let Err(error) = file.remove() {
                tracing::warn!(segment = file.number(), %error, "segment cannot be removed");
            }
            self.state.files.retain(|kept| kept.number() != file.number());
        }
    }

    /// Places every chunk that was stored after it was last deleted.
    pub(crate) fn fill(&self, index: &Index) {
        let mut last_gone: HashMap<ChunkKey, u64> = HashMap::new();
        for entry in self.entries().map(|(_, entry)| entry).filter(|entry| !entry.is_chunk()) {
            let last = last_gone.entry(entry.key).or_default();
            *last = entry.sequence.max(*last);
        }
        let mut placed: HashMap<ChunkKey, (u64, Location)> = HashMap::new();
        for (segment, entry) in self.entries() {
            let Content::Chunk { offset, n_bytes } = entry.content else {
                continue;
            };
            let is_gone = last_gone.get(&entry.key).is_some_and(|last| *last > entry.sequence);
            let is_older = placed.get(&entry.key).is_some_and(|(sequence, _)| *sequence >= entry.sequence);
            if !is_gone && !is_older {
                let location = Location { segment: Arc::clone(segment), offset, n_bytes };
                placed.insert(entry.key, (entry.sequence, location));
            }
        }
        for (key, (_, location)) in placed {
            index.claim_found(location.n_bytes);
            index.insert(key, location);
        }
    }

    fn entries(&self) -> impl Iterator<Item = (&Arc<Segment>, &Entry)> {
        self.state
            .sealed
            .iter()
            .flat_map(|sealed| sealed.entries.iter().map(move |entry| (&sealed.segment, entry)))
    }

    fn add(&mut self, file: Arc<SegmentFile>, io: &dyn Io, counters: &Counters) {
        self.state.files.push(Arc::clone(&file));
        let found = match Found::read(&file, io) {
            Ok(found) => found,
            Err(reason) => {
                if let Some(reason) = reason {
                    tracing::warn!(segment = file.number(), reason, "file is no segment");
                    counters.n_bad_segments.add(1);
                }
                self.free.put_back(file);
                return;
            }
        };
        let SegmentHeader { generation, first_sequence, .. } = found.header;
        let last_sequence = found.entries.iter().map(|entry| entry.sequence).max();
        let above = last_sequence.unwrap_or(0).saturating_add(1).max(first_sequence);
        self.next_sequence = self.next_sequence.max(above);
        let segment = Arc::new(Segment::new(file, generation, first_sequence, Arc::clone(&self.free)));
        if found.entries.is_empty() {
            // It goes back to the free files as it is dropped.
            return;
        }
        let sealed = SealedSegment { segment, entries: found.entries.into() };
        if !found.has_footer {
            counters.n_walked_segments.add(1);
            self.walked.push(sealed.clone());
        }
        self.state.sealed.push(sealed);
    }
}

impl Found {
    /// Reads what describes a segment.
    ///
    /// # Errors
    /// Why it is none; nothing if its first block was blanked.
    fn read(file: &SegmentFile, io: &dyn Io) -> Result<Self, Option<&'static str>> {
        let mut block = AlignedBuffer::new(BLOCK_BYTES as usize);
        io.read_one(file, 0, &mut block).map_err(|_| Some("its header cannot be read"))?;
        if block.iter().all(|byte| *byte == 0) {
            return Err(None);
        }
        let header = SegmentHeader::decode(&block)?;
        if header.segment_bytes != file.n_bytes() || header.segment_bytes < 2 * BLOCK_BYTES {
            return Err(Some("its length is another one"));
        }
        let (entries, has_footer) = match read_footer(file, io, &header, &mut block) {
            Some(footer) => (footer.entries, true),
            None => (walk(file, io, &header), false),
        };
        Ok(Self { header, entries, has_footer })
    }
}

fn read_footer(file: &SegmentFile, io: &dyn Io, header: &SegmentHeader, block: &mut [u8]) -> Option<Footer> {
    let SegmentHeader { generation, segment_bytes, .. } = *header;
    io.read_one(file, segment_bytes - BLOCK_BYTES, block).ok()?;
    let n_bytes = Footer::peek_bytes(block, generation, segment_bytes).ok()?;
    let mut blocks = AlignedBuffer::new(n_bytes as usize);
    io.read_one(file, segment_bytes - n_bytes, &mut blocks).ok()?;
    Footer::decode(&blocks, generation, segment_bytes).ok()
}

/// Finds the batches of a segment without a footer.
fn walk(file: &SegmentFile, io: &dyn Io, header: &SegmentHeader) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut offset = BLOCK_BYTES;
    let mut block = AlignedBuffer::new(BLOCK_BYTES as usize);
    while offset < header.segment_bytes {
        let batch = match io.read_one(file, offset, &mut block) {
            Ok(()) => read_batch(file, io, header, offset, &block),
            Err(_) => None,
        };
        if let Some(batch) = batch {
            offset = batch.end;
            entries.extend(batch.entries);
        } else {
            match search(file, io, header, offset + BLOCK_BYTES) {
                Some(next_offset) => offset = next_offset,
                None => break,
            }
        }
    }
    entries
}

/// The offset of the next batch header that holds, from `offset` on.
fn search(file: &SegmentFile, io: &dyn Io, header: &SegmentHeader, offset: u64) -> Option<u64> {
    let mut window = AlignedBuffer::new(WINDOW_BYTES as usize);
    let mut window_offset = offset;
    while window_offset < header.segment_bytes {
        let n_bytes = (header.segment_bytes - window_offset).min(WINDOW_BYTES);
        let window = &mut window[..n_bytes as usize];
        // What cannot be read holds no header that could be used.
        if io.read_one(file, window_offset, window).is_ok() {
            let blocks = window.chunks_exact(BLOCK_BYTES as usize);
            let mut offsets = (window_offset..).step_by(BLOCK_BYTES as usize);
            for (block, block_offset) in blocks.zip(&mut offsets) {
                if read_batch(file, io, header, block_offset, block).is_some() {
                    return Some(block_offset);
                }
            }
        }
        window_offset += n_bytes;
    }
    None
}

/// Reads the batch header whose first block is given; none if it does not hold.
fn read_batch(
    file: &SegmentFile,
    io: &dyn Io,
    header: &SegmentHeader,
    offset: u64,
    first_block: &[u8],
) -> Option<BatchHeader> {
    let SegmentHeader { generation, segment_bytes, .. } = *header;
    let n_bytes = BatchHeader::peek_bytes(first_block, generation, offset).ok()?;
    if n_bytes == BLOCK_BYTES {
        return BatchHeader::decode(first_block, generation, offset, segment_bytes).ok();
    }
    if n_bytes > segment_bytes - offset {
        return None;
    }
    let mut blocks = AlignedBuffer::new(n_bytes as usize);
    io.read_one(file, offset, &mut blocks).ok()?;
    BatchHeader::decode(&blocks, generation, offset, segment_bytes).ok()
}
