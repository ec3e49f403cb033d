//! A prompt's KV of which a part lies in files that the device reads by itself.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvik_model::{BLOCK_TOKENS, BlockSource, FileBlocks, FileRead, KvFile, PrefixKv};
use kvik_store::{Chain, ChunkPlaces, ChunkRead, FileChunks, OpenChunk, Store};

use super::arriving::TakenTokens;

/// Failures to read in a row after which files are not read any more: what fails so often is not the files.
const MAX_FAILURES: usize = 3;

/// Whether files are read by the device, and how long a section may be.
#[derive(Debug)]
pub(super) struct DirectReads {
    max_section_bytes: usize,
    failures_in_a_row: AtomicUsize,
}

/// Chunks of a prompt in memory and in files; all of them are there until one cannot be read.
#[derive(Debug)]
pub(crate) struct DirectPrefix {
    chunks: FileChunks,
    chain: Chain,
    reads: Arc<DirectReads>,
    /// Behind the last chunk that is there.
    end_chunk: Arc<AtomicUsize>,
    taken: TakenTokens,
}

/// A chunk that the device reads.
#[derive(Debug)]
struct DirectFile {
    chunk: OpenChunk,
    chunk_idx: usize,
    reads: Arc<DirectReads>,
    end_chunk: Arc<AtomicUsize>,
}

impl DirectReads {
    pub(super) fn new(max_section_bytes: usize) -> Arc<Self> {
        Arc::new(Self { max_section_bytes, failures_in_a_row: AtomicUsize::new(0) })
    }

    /// The chunks that `places` has, from `first_chunk` on; `None` where they come the usual way.
    pub(super) fn begin(
        self: &Arc<Self>,
        store: &Store,
        chain: &Chain,
        first_chunk: usize,
        places: &ChunkPlaces,
    ) -> Option<DirectPrefix> {
        // Relaxed, as everywhere here: a thread that does not see it yet finds out for itself.
        if MAX_FAILURES <= self.failures_in_a_row.load(Ordering::Relaxed) {
            return None;
        }
        let chunks = store.file_chunks(chain, first_chunk, places, self.max_section_bytes)?;
        let end_chunk = Arc::new(AtomicUsize::new(chunks.chunks().end));
        let (chain, reads) = (chain.clone(), Arc::clone(self));
        Some(DirectPrefix { chunks, chain, reads, end_chunk, taken: TakenTokens::default() })
    }

    fn note(&self, read: FileRead) {
        if read != FileRead::Failed {
            self.failures_in_a_row.store(0, Ordering::Relaxed);
        } else if self.failures_in_a_row.fetch_add(1, Ordering::Relaxed) + 1 == MAX_FAILURES {
            tracing::warn!(
                "the device could not read chunks {MAX_FAILURES} times in a row; they are read by way of memory now"
            );
        }
    }
}

impl DirectPrefix {
    /// What the engine takes of it, also after it is gone.
    pub(super) fn taken(&self) -> TakenTokens {
        Arc::clone(&self.taken)
    }

    /// The chunk of a block that is there.
    fn chunk_of(&self, block_idx: usize) -> Option<usize> {
        let chunk_idx = block_idx.checked_mul(BLOCK_TOKENS)? / self.chain.space().chunk_tokens();
        let end = self.end_chunk.load(Ordering::Relaxed);
        (self.chunks.chunks().start..end).contains(&chunk_idx).then_some(chunk_idx)
    }

    fn blocks_of(&self, chunk_idx: usize) -> Range<usize> {
        let tokens = self.chain.tokens_of(chunk_idx);
        tokens.start / BLOCK_TOKENS..tokens.end / BLOCK_TOKENS
    }
}

impl BlockSource for DirectPrefix {
    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]> {
        let chunk_idx = self.chunk_of(block_idx)?;
        let blocks = self.blocks_of(chunk_idx);
        let section_bytes = self.chain.section_bytes(chunk_idx);
        let start = layer_idx.checked_mul(section_bytes)?;
        let section = self.chunks.memory(chunk_idx)?.get(start..start.checked_add(section_bytes)?)?;
        let block_bytes = section_bytes.checked_div(blocks.len())?;
        let place = block_idx.checked_sub(blocks.start)?;
        section.get(place * block_bytes..(place + 1) * block_bytes)
    }

    fn file_blocks(&self, block_idx: usize) -> Option<FileBlocks> {
        let chunk_idx = self.chunk_of(block_idx)?;
        let is_in_file = self.chunks.memory(chunk_idx).is_none();
        is_in_file.then(|| self.blocks_of(chunk_idx)).filter(|blocks| blocks.contains(&block_idx))
    }

    fn open_file(&self, block_idx: usize) -> Option<Box<dyn KvFile>> {
        let chunk_idx = self.chunk_of(block_idx)?;
        let Some(chunk) = self.chunks.open(chunk_idx) else {
            self.end_chunk.fetch_min(chunk_idx, Ordering::Relaxed);
            return None;
        };
        let (reads, end_chunk) = (Arc::clone(&self.reads), Arc::clone(&self.end_chunk));
        Some(Box::new(DirectFile { chunk, chunk_idx, reads, end_chunk }))
    }
}

impl PrefixKv for DirectPrefix {
    fn there_until(&self, token: usize) -> usize {
        let first_token = self.chain.tokens_of(self.chunks.chunks().start).start;
        let end = self.end_chunk.load(Ordering::Relaxed);
        match end.checked_sub(1).filter(|last| self.chunks.chunks().contains(last)) {
            Some(last) if first_token <= token => self.chain.tokens_of(last).end.max(token),
            _ => token,
        }
    }

    fn note_taken(&self, tokens: Range<usize>) {
        let mut taken = self.taken.lock();
        for chunk_idx in self.chunks.chunks() {
            let of_chunk = self.chain.tokens_of(chunk_idx);
            let part = of_chunk.start.max(tokens.start)..of_chunk.end.min(tokens.end);
            if let Some(kind) = self.chunks.kind(chunk_idx).filter(|_| !part.is_empty()) {
                taken.push((part, kind));
            }
        }
    }
}

impl KvFile for DirectFile {
    fn file(&self) -> BorrowedFd<'_> {
        self.chunk.file().file()
    }

    fn offset(&self) -> u64 {
        self.chunk.file().offset()
    }

    fn checksums(&self) -> &[u64] {
        self.chunk.file().checksums()
    }

    fn note_read(&self, read: FileRead) {
        let of_chunk = match read {
            FileRead::Whole => ChunkRead::Whole,
            FileRead::Corrupt => ChunkRead::Corrupt,
            FileRead::Failed => ChunkRead::Failed,
        };
        if read != FileRead::Whole {
            // Before the copy ends: the engine asks again for what is there.
            self.end_chunk.fetch_min(self.chunk_idx, Ordering::Relaxed);
        }
        self.reads.note(read);
        self.chunk.note_read(of_chunk);
    }
}
