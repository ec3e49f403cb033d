//! Chunks that a reader fetches from files by itself, with a reader that has memory of the host in the place of a device's.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;

use crc_fast::{CrcAlgorithm, checksum};
use kvik_store::{Chain, ChunkRead, Clear, FileChunks, OpenChunk, Store};
use kvik_tier::{Checksummed, NvmeOptions, NvmeTier, TierKind};

use crate::support::*;

const MIB: u64 = 1 << 20;

fn open(dir: &Path) -> Store {
    let disk = NvmeTier::open(&NvmeOptions::new(dir, 32 * MIB)).unwrap();
    Setup::new(16).local_dyn(Arc::new(Checksummed::new(disk))).open()
}

/// A store that has a chain on its disk alone.
fn store_on_disk(dir: &Path, n_chunks: usize) -> (Store, Chain) {
    let store = open(dir);
    let chain = chain_of(&store, 1, n_chunks);
    assert_eq!(store_chain(&store, &chain), n_chunks);
    flush(&store);
    forget_memory(&store);
    (store, chain)
}

fn file_chunks(store: &Store, chain: &Chain, first_chunk: usize) -> Option<FileChunks> {
    store.file_chunks(chain, first_chunk, &store.inquire(chain, first_chunk).places(), SECTION_BYTES)
}

/// Reads and judges a chunk as a device does: the blocks around it, section by section.
fn fetch(chunk: &OpenChunk) -> Option<Vec<u8>> {
    let file = chunk.file();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file.file()));
    // Another description of the file, without direct I/O: a test's memory is not aligned.
    let mut opened = File::options().read(true).custom_flags(0).open(path).unwrap();
    opened.seek(SeekFrom::Start(file.offset())).unwrap();
    let mut bytes = vec![0; file.n_bytes() as usize];
    opened.read_exact(&mut bytes).unwrap();
    let sections = bytes.chunks(file.section_bytes() as usize);
    let is_right = sections
        .map(|section| checksum(CrcAlgorithm::Crc64Nvme, section))
        .eq(file.checksums().iter().copied());
    chunk.note_read(if is_right { ChunkRead::Whole } else { ChunkRead::Corrupt });
    is_right.then_some(bytes)
}

fn expected(chain: &Chain, chunk_idx: usize) -> Vec<u8> {
    content(chain.key(chunk_idx, 0).unwrap(), chain.payload_bytes(chunk_idx))
}

/// Changes a byte of a chunk on the disk.
fn damage(dir: &Path, chunk: &OpenChunk, at: u64) {
    let place = chunk.file().offset() + at;
    let path = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.to_str().unwrap().contains("segment-00000000"))
        .unwrap();
    let mut file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.seek(SeekFrom::Start(place)).unwrap();
    file.read_exact(&mut byte).unwrap();
    file.seek(SeekFrom::Start(place)).unwrap();
    file.write_all(&[byte[0] ^ 1]).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn chunks_on_disk_are_fetched_from_their_files_and_those_in_memory_are_leased() {
    let dir = tempfile::tempdir().unwrap();
    let (store, chain) = store_on_disk(dir.path(), 4);
    // The first two come to memory.
    let front = chain_of(&store, 1, 2);
    assert_eq!(retrieve_all(&store, &front), 2);
    let chunks = file_chunks(&store, &chain, 0).unwrap();
    assert_eq!(chunks.chunks(), 0..4);
    for chunk_idx in 0..4 {
        let is_in_memory = chunk_idx < 2;
        let kind = if is_in_memory { TierKind::Ram } else { TierKind::Nvme };
        assert_eq!(chunks.kind(chunk_idx), Some(kind));
        assert_eq!(chunks.open(chunk_idx).is_none(), is_in_memory);
        let bytes = match chunks.memory(chunk_idx) {
            Some(bytes) => bytes.to_vec(),
            None => fetch(&chunks.open(chunk_idx).unwrap()).unwrap(),
        };
        assert!(bytes == expected(&chain, chunk_idx), "chunk {chunk_idx}");
    }
    let stats = store.stats();
    assert_eq!((stats.n_direct, stats.n_failed_direct), (2, 0));
    assert_eq!(stats.direct_bytes, 2 * PAYLOAD_BYTES as u64);
    assert_eq!(stats.loaded[0], (TierKind::Nvme.into(), 4));
    assert_eq!(store.lookup_local(&chain).tokens_in(TierKind::Ram), 2 * CHUNK_TOKENS, "memory has no more");
}

#[test]
fn only_chains_that_lie_in_memory_and_files_with_short_layers_are_fetched() {
    let dir = tempfile::tempdir().unwrap();
    let (store, chain) = store_on_disk(dir.path(), 3);
    let places = store.inquire(&chain, 0).places();
    assert!(store.file_chunks(&chain, 0, &places, SECTION_BYTES - 1).is_none(), "a layer that is too long");
    assert!(file_chunks(&store, &chain, 3).is_none(), "no chunk");
    assert!(file_chunks(&store, &chain_of(&store, 7, 2), 0).is_none(), "chunks that are nowhere");
    assert_eq!(retrieve_all(&store, &chain), 3);
    assert!(file_chunks(&store, &chain, 0).is_none(), "all of it is in memory");
    // A tier without files.
    let map = TestTier::new(TierKind::Nvme);
    let other = Setup::new(16).local(&map).open();
    let chain = chain_of(&other, 1, 2);
    assert_eq!(store_chain(&other, &chain), 2);
    flush(&other);
    forget_memory(&other);
    assert!(file_chunks(&other, &chain, 0).is_none());
}

#[test]
fn a_byte_that_is_wrong_is_a_miss_and_the_chunk_leaves_its_tier() {
    let dir = tempfile::tempdir().unwrap();
    for at in [0, SECTION_BYTES as u64 - 1, PAYLOAD_BYTES as u64 - 1] {
        let (store, chain) = store_on_disk(dir.path(), 3);
        let chunks = file_chunks(&store, &chain, 0).unwrap();
        let chunk = chunks.open(1).unwrap();
        damage(dir.path(), &chunk, at);
        assert!(fetch(&chunk).is_none(), "byte {at}");
        // Told once, whatever is said afterwards.
        chunk.note_read(ChunkRead::Whole);
        assert!(chunks.open(1).is_none(), "it is not there any more");
        assert_eq!(store.lookup_local(&chain).n_chunks, 1);
        let stats = store.stats();
        assert_eq!((stats.n_direct, stats.n_failed_direct), (0, 2));
        let (_, stat) = &store.health()[1];
        assert!(stat.details.contains(&("corrupt_reads", 1)), "{:?}", stat.details);
        store.clear(&Clear::default());
        drop((chunk, chunks, store));
        for entry in std::fs::read_dir(dir.path()).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
    }
}

#[test]
fn a_wrong_envelope_and_a_chunk_that_is_gone_are_misses() {
    let dir = tempfile::tempdir().unwrap();
    let (store, chain) = store_on_disk(dir.path(), 3);
    let chunks = file_chunks(&store, &chain, 0).unwrap();
    let chunk = chunks.open(2).unwrap();
    let path = dir.path().join("segment-00000000.kvik");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[chunk.file().offset() as usize - 4096 + 40] ^= 1;
    let mut file = File::options().write(true).open(&path).unwrap();
    file.write_all(&bytes).unwrap();
    file.sync_all().unwrap();
    drop(chunk);
    assert!(chunks.open(2).is_none());
    assert_eq!(store.lookup_local(&chain).n_chunks, 2);
    // One that was evicted in between, and a namespace that was cleared.
    let held = chunks.open(0).unwrap();
    store.clear(&Clear::default());
    assert!(chunks.open(1).is_none());
    assert!(fetch(&held).unwrap() == expected(&chain, 0), "what is held stays");
}

#[test]
fn a_device_that_fails_costs_no_chunk() {
    let dir = tempfile::tempdir().unwrap();
    let (store, chain) = store_on_disk(dir.path(), 2);
    let chunks = file_chunks(&store, &chain, 0).unwrap();
    chunks.open(0).unwrap().note_read(ChunkRead::Failed);
    assert_eq!(store.stats().n_failed_direct, 1);
    assert!(fetch(&chunks.open(0).unwrap()).unwrap() == expected(&chain, 0));
    drop(chunks);
    assert_eq!(retrieve_all(&store, &chain), 2);
}

#[test]
fn a_store_that_was_opened_again_fetches_what_an_earlier_one_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = store_on_disk(dir.path(), 3);
    drop(store);
    let store = open(dir.path());
    let chain = chain_of(&store, 1, 3);
    let chunks = file_chunks(&store, &chain, 1).unwrap();
    assert_eq!(chunks.chunks(), 1..3);
    for chunk_idx in 1..3 {
        assert!(fetch(&chunks.open(chunk_idx).unwrap()).unwrap() == expected(&chain, chunk_idx));
    }
    assert!(chunks.open(0).is_none() && chunks.memory(0).is_none() && chunks.open(3).is_none());
}
