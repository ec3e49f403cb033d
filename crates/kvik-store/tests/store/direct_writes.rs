//! Chunks that a writer puts into files by itself, with a writer that has memory of the host in the place of a device's.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use crc_fast::{CrcAlgorithm, checksum};
use kvik_store::{Chain, ChunkFormat, Clear, FileWrite, Store, Write, WriteBack};
use kvik_tier::{Checksummed, NvmeOptions, NvmeTier, TierKind};
use kvik_types::BlockSize;

use crate::support::*;

/// A layer of a chunk: a block of a disk.
const LAYER_BYTES: usize = 4096;

fn open(dir: &Path, capacity_bytes: u64) -> Store {
    let options = NvmeOptions { segment_bytes: 64 << 10, ..NvmeOptions::new(dir, capacity_bytes) };
    Setup::new(64).local_dyn(Arc::new(Checksummed::new(NvmeTier::open(&options).unwrap()))).open()
}

fn chain(store: &Store, name: u32, n_chunks: usize) -> Chain {
    let block_tokens = BlockSize::try_new(2).unwrap();
    let token_layer_bytes = (LAYER_BYTES / CHUNK_TOKENS) as u64;
    let format = ChunkFormat { n_layers: N_LAYERS, token_layer_bytes, n_ranks: 1, block_tokens };
    let space = store.space(&namespace("direct"), format).unwrap();
    space.chain(&tokens_of(name, n_chunks * CHUNK_TOKENS))
}

/// Writes as a device does, and sums up what it wrote.
fn fill(chain: &Chain, chunk_idx: usize) -> impl FnMut(BorrowedFd<'_>, u64) -> io::Result<Vec<u64>> {
    let bytes = content(chain.key(chunk_idx, 0).unwrap(), chain.payload_bytes(chunk_idx));
    move |file, offset| {
        // Another description of the file, without direct I/O: a test's memory is not aligned.
        let mut opened = File::options().write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        opened.seek(SeekFrom::Start(offset))?;
        opened.write_all(&bytes)?;
        opened.sync_all()?;
        Ok(bytes.chunks(LAYER_BYTES).map(|layer| checksum(CrcAlgorithm::Crc64Nvme, layer)).collect())
    }
}

fn write(store: &Store, chain: &Chain, chunk_idx: usize) -> FileWrite {
    store.write_to_file(chain, chunk_idx, &mut fill(chain, chunk_idx))
}

fn on_disk(store: &Store, chain: &Chain) -> usize {
    store.lookup_local(chain).tokens_in(TierKind::Nvme) / CHUNK_TOKENS
}

#[test]
fn chunks_go_to_the_disk_and_not_into_memory_and_are_found_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), 8 << 20);
    let written = chain(&store, 1, 4);
    for chunk_idx in 0..4 {
        assert_eq!(write(&store, &written, chunk_idx), FileWrite::Stored);
        assert_eq!(write(&store, &written, chunk_idx), FileWrite::Present);
    }
    assert_eq!(store.lookup_local(&written).tokens_in(TierKind::Ram), 0);
    assert_eq!(on_disk(&store, &written), 4);
    let stats = store.stats();
    assert_eq!((stats.n_direct_writes, stats.n_failed_direct_writes, stats.n_stored), (4, 0, 4));
    assert_eq!(stats.direct_written_bytes, 4 * (LAYER_BYTES * N_LAYERS as usize) as u64);
    assert_eq!(stats.written[0], (TierKind::Nvme.into(), 4));
    assert_eq!(retrieve_all(&store, &written), 4);
    drop(store);
    let store = open(dir.path(), 8 << 20);
    assert_eq!(retrieve_all(&store, &chain(&store, 1, 4)), 4);
}

#[test]
fn a_chunk_behind_one_that_is_in_memory_alone_goes_to_memory() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), 8 << 20);
    let written = chain(&store, 1, 3);
    assert_eq!(write(&store, &written, 1), FileWrite::Elsewhere, "there is nothing before it");
    assert!(store_chunk(&store, &written, 0));
    flush(&store);
    assert_eq!(write(&store, &written, 1), FileWrite::Stored, "the first was written down");
    assert!(matches!(store.begin_write(&written, 2, 0), Write::NoParent), "the second is not in memory");
    assert_eq!(write(&store, &written, 2), FileWrite::Stored);
    let mut never = |_: BorrowedFd<'_>, _: u64| panic!("there is no such chunk");
    assert_eq!(store.write_to_file(&written, 3, &mut never), FileWrite::Elsewhere);
    assert_eq!(retrieve_all(&store, &written), 3);
}

#[test]
fn stores_with_other_tiers_or_without_files_take_chunks_by_way_of_memory() {
    let dirs = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let disk = |idx: usize| {
        let options = NvmeOptions::new(dirs[idx].path(), 32 << 20);
        Arc::new(Checksummed::new(NvmeTier::open(&options).unwrap()))
    };
    let remote = TestTier::new(TierKind::Redis);
    let map = TestTier::new(TierKind::Nvme);
    for setup in [
        Setup::new(16),
        Setup::new(16).local(&map),
        Setup::new(16).local_dyn(disk(0)).remote(&remote),
        Setup::new(16).local_dyn(disk(1)).local(&map).named(&["a", "b"]),
    ] {
        let store = setup.open();
        assert_eq!(write(&store, &chain(&store, 1, 1), 0), FileWrite::Elsewhere);
    }
    // Layers that are no whole blocks.
    let store = Setup::new(16).local_dyn(disk(2)).open();
    assert_eq!(write(&store, &chain_of(&store, 1, 1), 0), FileWrite::Elsewhere);
    assert_eq!(write(&store, &chain(&store, 1, 1), 0), FileWrite::Stored);
}

#[test]
fn a_writer_that_fails_costs_its_chunk_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), 8 << 20);
    let written = chain(&store, 1, 2);
    assert_eq!(write(&store, &written, 0), FileWrite::Stored);
    let mut failing = |_: BorrowedFd<'_>, _: u64| Err(io::Error::other("the device is gone"));
    assert_eq!(store.write_to_file(&written, 1, &mut failing), FileWrite::Failed);
    assert_eq!(store.stats().n_failed_direct_writes, 1);
    assert_eq!(retrieve_all(&store, &written), 1);
    assert_eq!(write(&store, &written, 1), FileWrite::Stored);
    assert_eq!(retrieve_all(&store, &written), 2);
}

#[test]
fn a_full_disk_makes_room_and_never_for_less_than_a_whole_prefix() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), 1 << 20);
    let mut n_stored = 0;
    for name in 1..100 {
        let written = chain(&store, name, 3);
        store.note_request(&written, None);
        n_stored += (0..3).take_while(|idx| write(&store, &written, *idx) == FileWrite::Stored).count();
        assert_eq!(on_disk(&store, &written), 3, "chain {name}: the newest is worth most");
        assert_eq!(retrieve_all(&store, &written), 3);
        forget_memory(&store);
    }
    let found: usize = (1..100).map(|name| retrieve_all(&store, &chain(&store, name, 3))).sum();
    assert_eq!(n_stored, 297);
    let n_evicted = store.stats().evicted_chunks[1].1 as usize;
    assert!(n_evicted > 0 && found + n_evicted == n_stored, "{found} found, {n_evicted} evicted");
}

#[test]
fn a_namespace_that_is_cleared_while_a_chunk_is_written_does_not_get_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), 8 << 20);
    let written = chain(&store, 1, 1);
    let mut fill = fill(&written, 0);
    let outcome = store.write_to_file(&written, 0, &mut |file, offset| {
        store.clear(&Clear::default());
        fill(file, offset)
    });
    assert_eq!(outcome, FileWrite::Refused);
    assert_eq!(retrieve_all(&store, &written), 0);
    assert_eq!(store.health()[1].1.n_chunks, Some(0), "nothing is left behind");
}

#[test]
fn chunks_that_are_written_when_they_are_used_again_go_by_way_of_memory() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Checksummed::new(NvmeTier::open(&NvmeOptions::new(dir.path(), 32 << 20)).unwrap());
    let setup =
        Setup::new(16).with(|options| options.write_back = WriteBack::OnReuse).local_dyn(Arc::new(disk));
    let store = setup.open();
    assert_eq!(write(&store, &chain(&store, 1, 1), 0), FileWrite::Elsewhere);
}

#[test]
fn what_is_known_of_the_disk_is_there_beside_writes_by_both_ways_clears_and_a_full_disk() {
    const N_CHAINS: u32 = 40;
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), 1 << 20);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let store = &store;
            scope.spawn(move || {
                for turn in 0..400 {
                    let written = chain(store, (turn * 7 + seed) % N_CHAINS, 2);
                    store.note_request(&written, None);
                    (0..2).take_while(|idx| write(store, &written, *idx) != FileWrite::Refused).count();
                }
            });
        }
        scope.spawn(|| {
            for turn in 0..400 {
                store_chain(&store, &chain(&store, (turn * 11) % N_CHAINS, 2));
            }
        });
        scope.spawn(|| {
            for turn in 0..100 {
                let cleared = chain(&store, (turn * 13) % N_CHAINS, 2);
                store.clear(&Clear { chain: Some(cleared), ..Clear::default() });
            }
        });
    });
    flush(&store);
    forget_memory(&store);
    let mut n_found = 0;
    for name in 0..N_CHAINS {
        let written = chain(&store, name, 2);
        let n_known = on_disk(&store, &written);
        assert_eq!(retrieve_all(&store, &written), n_known, "chain {name}");
        n_found += n_known;
    }
    assert!(n_found > 0);
}
