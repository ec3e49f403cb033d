//! Devices whose reads, writes and syncs fail.

use std::fs::OpenOptions;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{get, open, options, put, segment_path, temporary_directory};
use crate::conformance::content_key;
use crate::decorator::Checksummed;
use crate::nvme::file::SegmentFile;
use crate::nvme::io::{Io, IoKind, Positional, ReadRun, WriteRun};
use crate::nvme::{NvmeOptions, NvmeTier, SyncMode};
use crate::random::SplitMix64;
use crate::tier::{GetOutcome, PutOutcome, Tier, TierExt, TierHealth};

/// Fails one of so many calls of a kind, at random; 0 is never.
#[derive(Debug, Default)]
struct Failing {
    every_write: AtomicU64,
    every_read: AtomicU64,
    every_sync: AtomicU64,
    no_space: bool,
    n_calls: AtomicU64,
}

impl Failing {
    fn fails(&self, every: &AtomicU64) -> bool {
        let call_idx = self.n_calls.fetch_add(1, Ordering::Relaxed);
        let every = every.load(Ordering::Relaxed);
        every > 0 && SplitMix64::new(call_idx).below(every) == 0
    }

    fn error(&self) -> io::Error {
        io::Error::from_raw_os_error(if self.no_space { libc::ENOSPC } else { libc::EIO })
    }
}

impl Io for Failing {
    fn read(&self, runs: &mut [ReadRun<'_>]) {
        Positional.read(runs);
        for run in runs {
            if self.fails(&self.every_read) {
                run.slices.iter_mut().for_each(|slice| slice.fill(0xdd));
                run.outcome = Err(self.error());
            }
        }
    }

    /// A write that fails has written its first half.
    fn write(&self, runs: &mut [WriteRun<'_>]) {
        for run in runs.iter_mut() {
            if self.fails(&self.every_write) {
                run.slices.truncate(run.slices.len() / 2);
                Positional.write(std::slice::from_mut(run));
                run.outcome = Err(self.error());
            } else {
                Positional.write(std::slice::from_mut(run));
            }
        }
    }

    fn sync(&self, file: &SegmentFile) -> io::Result<()> {
        if self.fails(&self.every_sync) { Err(self.error()) } else { Positional.sync(file) }
    }
}

/// Stores and deletes for several lives of all segments; then a start finds exactly what was there.
fn run_with_failures(io: Failing, sync: SyncMode) {
    let dir = temporary_directory();
    let context = format!("{io:?}");
    let io = Arc::new(io);
    let options = NvmeOptions { sync, ..options(dir.path()) };
    let tier = Checksummed::new(NvmeTier::open_with(&options, Arc::clone(&io) as _).unwrap());
    let (mut present, mut n_failed) = (Vec::new(), 0);
    for chunk_idx in 0..500 {
        match put(&tier, chunk_idx) {
            PutOutcome::Stored => present.push(chunk_idx),
            _ => n_failed += 1,
        }
        if present.len() > 12 {
            let oldest = present.remove(0);
            assert_eq!(tier.delete(&[content_key(oldest)]).unwrap(), 1, "{context}: chunk {oldest}");
        }
        for present_idx in &present {
            assert!(get(&tier, *present_idx, &context).is_hit(), "{context}: chunk {present_idx}");
        }
        assert_eq!(tier.stat().n_chunks, Some(present.len() as u64));
    }
    assert!(n_failed > 5, "{context}: only {n_failed} puts failed");
    assert!(n_failed < 400, "{context}: {n_failed} puts failed");
    for every in [&io.every_write, &io.every_sync] {
        every.store(0, Ordering::Relaxed);
    }
    assert!(put(&tier, 1000).is_present(), "{context}: nothing is stored when all is well again");
    present.push(1000);
    tier.flush().unwrap();
    drop(tier);
    let tier = open(dir.path());
    for present_idx in &present {
        assert!(get(&tier, *present_idx, &context).is_hit(), "{context}: chunk {present_idx} after a start");
    }
    // What failed may be there, and is right then; what was deleted is not.
    let deleted = present.iter().min().copied().unwrap_or_default();
    let n_back = (0..deleted).filter(|chunk_idx| get(&tier, *chunk_idx, &context).is_hit()).count();
    assert!(n_back <= n_failed, "{context}: {n_back} chunks are back, {n_failed} failed");
}

#[test]
fn writes_that_fail_store_nothing_and_hide_nothing() {
    for every in [3, 8, 30] {
        run_with_failures(Failing { every_write: every.into(), ..Failing::default() }, SyncMode::Never);
    }
    run_with_failures(Failing { every_write: 5.into(), ..Failing::default() }, SyncMode::AtSeal);
}

#[test]
fn writes_without_room_are_no_room() {
    let dir = temporary_directory();
    let io = Arc::new(Failing { no_space: true, ..Failing::default() });
    let tier = NvmeTier::open_with(&options(dir.path()), Arc::clone(&io) as _).unwrap();
    assert!(put(&tier, 0).is_present());
    io.every_write.store(1, Ordering::Relaxed);
    assert!(matches!(put(&tier, 1), PutOutcome::NoRoom));
    assert!(matches!(tier.stat().health, TierHealth::ReadOnly(_)));
    assert!(get(&tier, 0, "full").is_hit());
    io.every_write.store(0, Ordering::Relaxed);
    assert!(put(&tier, 1).is_present());
    assert_eq!(tier.stat().health, TierHealth::Up);
}

#[test]
fn a_batch_that_is_not_synced_is_not_stored() {
    run_with_failures(Failing { every_sync: 9.into(), ..Failing::default() }, SyncMode::EveryBatch);
    let dir = temporary_directory();
    let io = Arc::new(Failing::default());
    let tier = NvmeTier::open_with(&options(dir.path()), Arc::clone(&io) as _).unwrap();
    assert!(put(&tier, 0).is_present());
    io.every_sync.store(1, Ordering::Relaxed);
    assert!(tier.flush().is_err());
    assert!(tier.flush().is_err(), "a sync that failed is tried again");
    io.every_sync.store(0, Ordering::Relaxed);
    tier.flush().unwrap();
}

#[test]
fn a_read_that_fails_is_the_failure_of_its_item_alone() {
    let dir = temporary_directory();
    let io = Arc::new(Failing::default());
    let tier = NvmeTier::open_with(&options(dir.path()), Arc::clone(&io) as _).unwrap();
    let parts = [[[7; 5000].as_slice()]; 4];
    let keys = [0, 1, 2, 3].map(content_key);
    for (key, parts) in keys.iter().zip(&parts) {
        assert!(tier.put_one(*key, parts[0]).is_present());
    }
    let mut buffers = vec![[0; 5000]; 4];
    let mut batch: Vec<_> = keys
        .iter()
        .zip(&mut buffers)
        .map(|(key, buffer)| crate::tier::GetItem::whole(*key, buffer))
        .collect();
    io.every_read.store(2, Ordering::Relaxed);
    let mut n_of_outcome = [0, 0];
    for _ in 0..20 {
        tier.get(&mut batch);
        for item in &batch {
            match &item.outcome {
                GetOutcome::Hit => n_of_outcome[0] += usize::from(item.buffer[..] == [7; 5000]),
                GetOutcome::Failed(_) => n_of_outcome[1] += 1,
                outcome => panic!("{outcome:?}"),
            }
        }
    }
    assert!(n_of_outcome.iter().all(|n_items| *n_items > 20), "{n_of_outcome:?}");
    assert_eq!(n_of_outcome.iter().sum::<usize>(), 80, "hits have the right bytes");
}

#[test]
fn chunks_that_cannot_be_moved_are_forgotten_and_the_rest_moves() {
    let dir = temporary_directory();
    let io = Arc::new(Failing { every_read: 5.into(), ..Failing::default() });
    let tier = Checksummed::new(NvmeTier::open_with(&options(dir.path()), Arc::clone(&io) as _).unwrap());
    let mut n_stored = 0;
    for chunk_idx in 0..400 {
        let outcome = put(&tier, chunk_idx);
        assert!(!matches!(outcome, PutOutcome::Failed(_)), "chunk {chunk_idx}: {outcome:?}");
        n_stored += usize::from(outcome.is_present());
        // One of four stays for long.
        for (age, stays) in [(8, false), (50, true)] {
            if chunk_idx >= age && (chunk_idx - age).is_multiple_of(4) == stays {
                tier.delete(&[content_key(chunk_idx - age)]).unwrap();
            }
        }
    }
    assert!(n_stored > 350, "only {n_stored} of 400 stored");
    let details = tier.stat().details;
    let detail = |wanted: &str| details.iter().find(|(name, _)| *name == wanted).unwrap().1;
    assert!(detail("lost_chunks") > 0 && detail("copied_bytes") > 0, "{details:?}");
    io.every_read.store(0, Ordering::Relaxed);
    let mut n_known = 0;
    tier.visit_keys(&mut |key, _| {
        n_known += 1;
        let chunk_idx = u64::from_le_bytes(*key.chunk.0.first_chunk().unwrap());
        assert!(get(&tier, chunk_idx, "moved").is_hit(), "chunk {chunk_idx}");
    });
    assert!(n_known > 5, "only {n_known} chunks");
}

#[test]
fn a_file_that_became_shorter_fails_its_reads() {
    for io in [IoKind::Uring, IoKind::Positional] {
        let dir = temporary_directory();
        let tier = NvmeTier::open(&NvmeOptions { io, ..options(dir.path()) }).unwrap();
        assert!(put(&tier, 2).is_present());
        OpenOptions::new().write(true).open(segment_path(dir.path(), 0)).unwrap().set_len(12_288).unwrap();
        let mut buffer = vec![0; super::length_of(2)];
        let outcome = tier.get_one(content_key(2), &mut buffer);
        assert!(matches!(outcome, GetOutcome::Failed(_)), "{io:?}: {outcome:?}");
    }
}
