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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;
    use std::path::Path;

    use kvik_store::{ChunkFormat, Clear, Commit, StoreOptions, Write};
    use kvik_tier::{Arena, ArenaOptions, Checksummed, NvmeOptions, NvmeTier, RamTier, TierKind};
    use kvik_types::{BlockSize, Dtype, Namespace};

    use super::*;

    const N_LAYERS: usize = 2;
    const CHUNK_TOKENS: usize = 32;
    const BLOCK_BYTES: usize = 16 * 64;

    /// The bytes of a block, which tell its place.
    fn content(layer_idx: usize, block_idx: usize) -> Vec<u8> {
        vec![(layer_idx * 16 + block_idx) as u8; BLOCK_BYTES]
    }

    /// A store whose disk has three chunks, of which memory has the first `n_in_memory`.
    fn store_in(dir: &Path, n_in_memory: usize) -> (Store, Chain) {
        let disk = Checksummed::new(NvmeTier::open(&NvmeOptions::new(dir, 32 << 20)).unwrap());
        let ram = RamTier::new(Arena::new(ArenaOptions::new(1 << 20)).unwrap());
        let chunk_tokens = BlockSize::try_new(CHUNK_TOKENS).unwrap();
        let options = StoreOptions { chunk_tokens, ..StoreOptions::default() };
        let store = Store::builder(options, ram).local(Arc::new(disk)).open().unwrap();
        let namespace =
            Namespace { model: "m".into(), dtype: Dtype::F32, layout: "l".into(), tenant: String::new() };
        let block_tokens = BlockSize::try_new(BLOCK_TOKENS).unwrap();
        let format =
            ChunkFormat { n_layers: N_LAYERS as u32, token_layer_bytes: 64, n_ranks: 1, block_tokens };
        let space = store.space(&namespace, format).unwrap();
        let chain = space.chain(&(0..3 * CHUNK_TOKENS as u32).collect::<Vec<_>>());
        for chunk_idx in 0..3 {
            let Write::Slot(mut writer) = store.begin_write(&chain, chunk_idx, 0) else { panic!("no room") };
            let blocks = 2 * chunk_idx..2 * chunk_idx + 2;
            let layers =
                (0..N_LAYERS).flat_map(|layer| blocks.clone().flat_map(move |block| content(layer, block)));
            writer.payload_mut().copy_from_slice(&layers.collect::<Vec<u8>>());
            assert!(matches!(writer.commit(), Commit::Stored));
        }
        assert!(store.flush(std::time::Duration::from_secs(30)));
        store.clear(&Clear { tiers: Some(vec![TierKind::Ram.into()]), ..Clear::default() });
        let front = space.chain(&(0..(n_in_memory * CHUNK_TOKENS) as u32).collect::<Vec<_>>());
        assert_eq!(store.retrieve(&front, 0).chunks().len(), n_in_memory);
        (store, chain)
    }

    fn begin(reads: &Arc<DirectReads>, store: &Store, chain: &Chain) -> Option<DirectPrefix> {
        reads.begin(store, chain, 0, &store.inquire(chain, 0).places())
    }

    /// Reads a block as a device does, but for the checksums.
    fn fetch(prefix: &DirectPrefix, layer_idx: usize, block_idx: usize) -> Vec<u8> {
        let blocks = prefix.file_blocks(block_idx).unwrap();
        let file = prefix.open_file(block_idx).unwrap();
        assert_eq!(file.checksums().len(), N_LAYERS);
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file.file()));
        let place = layer_idx * blocks.len() + block_idx - blocks.start;
        let mut bytes = vec![0; BLOCK_BYTES];
        let opened = std::fs::File::open(path).unwrap();
        opened.read_exact_at(&mut bytes, file.offset() + (place * BLOCK_BYTES) as u64).unwrap();
        file.note_read(FileRead::Whole);
        bytes
    }

    #[test]
    fn blocks_lie_in_memory_or_in_files_and_the_engine_gets_both() {
        let dir = tempfile::tempdir().unwrap();
        let (store, chain) = store_in(dir.path(), 1);
        let reads = DirectReads::new(2 * BLOCK_BYTES);
        let prefix = begin(&reads, &store, &chain).unwrap();
        assert_eq!(prefix.there_until(0), 3 * CHUNK_TOKENS);
        for (layer_idx, block_idx) in [(0, 0), (1, 0), (1, 1)] {
            assert_eq!(prefix.block(layer_idx, block_idx), Some(content(layer_idx, block_idx).as_slice()));
            assert_eq!(prefix.file_blocks(block_idx), None);
        }
        for (layer_idx, block_idx) in [(0, 2), (1, 3), (0, 5), (1, 4)] {
            assert_eq!(prefix.block(layer_idx, block_idx), None);
            assert_eq!(fetch(&prefix, layer_idx, block_idx), content(layer_idx, block_idx));
        }
        assert_eq!(
            (prefix.block(0, 6), prefix.file_blocks(6), prefix.block(N_LAYERS, 0)),
            (None, None, None)
        );
        prefix.note_taken(16..70);
        let taken = [(16..32, TierKind::Ram), (32..64, TierKind::Nvme), (64..70, TierKind::Nvme)];
        assert_eq!(*prefix.taken().lock(), taken);
        assert!(begin(&DirectReads::new(2 * BLOCK_BYTES - 1), &store, &chain).is_none(), "too long a layer");
    }

    #[test]
    fn a_chunk_that_cannot_be_read_or_is_wrong_ends_the_prefix_before_it() {
        for read in [FileRead::Corrupt, FileRead::Failed] {
            let dir = tempfile::tempdir().unwrap();
            let (store, chain) = store_in(dir.path(), 0);
            let reads = DirectReads::new(2 * BLOCK_BYTES);
            let prefix = begin(&reads, &store, &chain).unwrap();
            prefix.open_file(2).unwrap().note_read(read);
            assert_eq!(prefix.there_until(0), CHUNK_TOKENS);
            assert_eq!((prefix.there_until(CHUNK_TOKENS), prefix.file_blocks(2)), (CHUNK_TOKENS, None));
            assert!(prefix.open_file(2).is_none() && prefix.open_file(4).is_none());
            assert_eq!(fetch(&prefix, 1, 1), content(1, 1));
            let n_left = if read == FileRead::Corrupt { 1 } else { 3 };
            assert_eq!(store.lookup_local(&chain).n_chunks, n_left, "only what is wrong leaves the disk");
        }
    }

    #[test]
    fn a_chunk_that_left_its_disk_before_it_was_read_ends_the_prefix() {
        let dir = tempfile::tempdir().unwrap();
        let (store, chain) = store_in(dir.path(), 0);
        let prefix = begin(&DirectReads::new(2 * BLOCK_BYTES), &store, &chain).unwrap();
        store.clear(&Clear::default());
        assert!(prefix.open_file(0).is_none());
        assert_eq!((prefix.there_until(0), prefix.file_blocks(0)), (0, None));
    }

    #[test]
    fn a_device_that_keeps_failing_is_not_asked_any_more() {
        let dir = tempfile::tempdir().unwrap();
        let (store, chain) = store_in(dir.path(), 0);
        let reads = DirectReads::new(2 * BLOCK_BYTES);
        let fail =
            || begin(&reads, &store, &chain).unwrap().open_file(0).unwrap().note_read(FileRead::Failed);
        for _ in 1..MAX_FAILURES {
            fail();
        }
        fetch(&begin(&reads, &store, &chain).unwrap(), 0, 0);
        for _ in 0..MAX_FAILURES {
            fail();
        }
        assert!(begin(&reads, &store, &chain).is_none());
    }
}
