//! The tier on local disks, as its users see it.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::cell::RefCell;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use kvik_tier::conformance::{self, Traits, content, content_key};
use kvik_tier::nvme::{IoKind, SyncMode};
use kvik_tier::{
    Checksummed, Encrypted, EncryptionKeys, FaultRates, Faulty, GetItem, NvmeOptions, NvmeTier, PutItem,
    PutOutcome, Tier, TierExt, TierHealth,
};

const MIB: u64 = 1 << 20;

fn options(dir: &Path, capacity_bytes: u64) -> NvmeOptions {
    NvmeOptions::new(dir, capacity_bytes)
}

fn open(options: &NvmeOptions) -> Checksummed<NvmeTier> {
    Checksummed::new(NvmeTier::open(options).unwrap())
}

fn put(tier: &dyn Tier, chunk_idx: u64, n_bytes: usize) -> PutOutcome {
    tier.put_one(content_key(chunk_idx), &content(content_key(chunk_idx), n_bytes))
}

fn is_hit(tier: &dyn Tier, chunk_idx: u64, n_bytes: usize) -> bool {
    let key = content_key(chunk_idx);
    let mut buffer = vec![0; n_bytes];
    let is_hit = tier.get_one(key, &mut buffer).is_hit();
    assert!(!is_hit || buffer == content(key, n_bytes), "chunk {chunk_idx}: a hit with other bytes");
    is_hit
}

fn detail(tier: &dyn Tier, name: &str) -> u64 {
    tier.stat().details.iter().find(|(known, _)| *known == name).unwrap().1
}

/// Segment files by name.
fn segments(dir: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("segment-"))
        .collect();
    paths.sort();
    paths
}

fn run_suite(io: IoKind, sync: SyncMode) {
    let dirs = RefCell::new(Vec::new());
    let make = || -> Box<dyn Tier> {
        let dir = tempfile::tempdir().unwrap();
        let options = NvmeOptions { io, sync, ..options(dir.path(), 64 * MIB) };
        dirs.borrow_mut().push(dir);
        Box::new(open(&options))
    };
    let traits = Traits { capacity_bytes: Some(40 * MIB), ..Traits::default() };
    conformance::run(&make, &traits);
}

#[test]
fn it_is_a_tier_with_io_uring() {
    run_suite(IoKind::Uring, SyncMode::AtSeal);
}

#[test]
fn it_is_a_tier_when_it_is_encrypted() {
    let dir = tempfile::tempdir().unwrap();
    let key_file = dir.path().join("keys");
    fs::write(&key_file, "5e".repeat(32)).unwrap();
    fs::set_permissions(&key_file, fs::Permissions::from_mode(0o600)).unwrap();
    let keys = Arc::new(EncryptionKeys::open(key_file).unwrap());
    let n_tiers = AtomicU64::new(0);
    let make = || -> Box<dyn Tier> {
        let dir = dir.path().join(n_tiers.fetch_add(1, Ordering::Relaxed).to_string());
        let tier = NvmeTier::open(&options(&dir, 64 * MIB)).unwrap();
        Box::new(Encrypted::new(tier, Arc::clone(&keys)))
    };
    let traits = Traits { capacity_bytes: Some(40 * MIB), ..Traits::default() };
    conformance::run(&make, &traits);
}

#[test]
fn it_is_a_tier_with_positional_io() {
    run_suite(IoKind::Positional, SyncMode::Never);
}

#[test]
fn it_is_a_tier_when_every_batch_is_synced() {
    run_suite(IoKind::Auto, SyncMode::EveryBatch);
}

#[test]
fn whatever_its_disk_does_a_hit_is_right() {
    let dirs = RefCell::new(Vec::new());
    let rates = FaultRates {
        fail: 40,
        fail_late: 40,
        lose: 40,
        tear: 60,
        shorten: 40,
        duplicate: 40,
        flip: 80,
        mix: 80,
        ..FaultRates::default()
    };
    let make = |seed| -> Box<dyn Tier> {
        let dir = tempfile::tempdir().unwrap();
        let io = if seed % 2 == 0 { IoKind::Uring } else { IoKind::Positional };
        let tier = NvmeTier::open(&NvmeOptions { io, ..options(dir.path(), 2 * MIB) }).unwrap();
        dirs.borrow_mut().push(dir);
        Box::new(Checksummed::new(Faulty::new(tier, rates.clone(), seed)))
    };
    let n_hits = conformance::run_under_faults(&make, 0..6);
    assert!(n_hits > 100, "only {n_hits} hits");
}

#[test]
fn a_reopened_tier_has_every_chunk_and_names_them_in_the_order_of_its_log() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path(), 32 * MIB);
    let tier = open(&options);
    for chunk_idx in 0..60 {
        assert!(matches!(put(&tier, chunk_idx, 300_000), PutOutcome::Stored), "chunk {chunk_idx}");
    }
    drop(tier);
    let tier = open(&options);
    assert_eq!(tier.stat().n_chunks, Some(60));
    assert_eq!(detail(&tier, "walked_segments"), 0);
    assert!((0..60).all(|chunk_idx| is_hit(&tier, chunk_idx, 300_000)));
    let mut visited = Vec::new();
    tier.visit_keys(&mut |key, n_bytes| visited.push((key, n_bytes)));
    let expected: Vec<_> = (0..60).map(|chunk_idx| (content_key(chunk_idx), 300_000)).collect();
    assert_eq!(visited, expected);
}

#[test]
fn a_second_tier_on_the_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path(), 32 * MIB);
    let tier = open(&options);
    let error = NvmeTier::open(&options).unwrap_err().to_string();
    assert!(
        error.contains("no other tier has open") && error.contains(dir.path().to_str().unwrap()),
        "{error}"
    );
    drop(tier);
    open(&options);
}

#[test]
fn options_out_of_range_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let good = options(dir.path(), 32 * MIB);
    let refused = [
        ("capacity_bytes", NvmeOptions { capacity_bytes: 1000, ..good.clone() }),
        ("segment_bytes", NvmeOptions { segment_bytes: 0, ..good.clone() }),
        ("queue_depth", NvmeOptions { queue_depth: 0, ..good.clone() }),
    ];
    for (field, options) in refused {
        let error = NvmeTier::open(&options).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    }
    let under_a_file = dir.path().join("file");
    std::fs::write(&under_a_file, b"").unwrap();
    assert!(NvmeTier::open(&NvmeOptions { dir: under_a_file.join("dir"), ..good }).is_err());
}

#[test]
fn a_chunk_longer_than_a_segment_fails_and_the_longest_fits() {
    let dir = tempfile::tempdir().unwrap();
    let tier = NvmeTier::open(&options(dir.path(), 8 * MIB)).unwrap();
    let longest = MIB as usize - 3 * 4096;
    let outcome = put(&tier, 1, longest + 1);
    assert!(matches!(&outcome, PutOutcome::Failed(error) if !error.is_transient()), "{outcome:?}");
    assert!(matches!(put(&tier, 2, longest), PutOutcome::Stored));
    assert!(is_hit(&tier, 2, longest));
}

#[test]
fn deleted_chunks_stay_deleted_after_a_flush() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path(), 16 * MIB);
    let tier = open(&options);
    for chunk_idx in 0..40 {
        put(&tier, chunk_idx, 100_000);
    }
    let deleted: Vec<_> = (0..20).map(content_key).collect();
    assert_eq!(tier.delete(&deleted).unwrap(), 20);
    // Stored again after it was deleted.
    assert!(matches!(put(&tier, 7, 100_000), PutOutcome::Stored));
    tier.flush().unwrap();
    drop(tier);
    let tier = open(&options);
    for chunk_idx in 0..40 {
        assert_eq!(is_hit(&tier, chunk_idx, 100_000), chunk_idx >= 20 || chunk_idx == 7, "chunk {chunk_idx}");
    }
}

#[test]
fn a_deletion_outlives_the_segment_it_was_written_in() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path(), 8 * MIB);
    let tier = open(&options);
    // One segment that stays: its chunks live, but for the one that is deleted.
    for chunk_idx in 0..9 {
        assert!(matches!(put(&tier, chunk_idx, 100_000), PutOutcome::Stored));
    }
    tier.delete(&[content_key(4)]).unwrap();
    // Many lives of the other segments, all of whose chunks die.
    for chunk_idx in 100..400 {
        assert!(matches!(put(&tier, chunk_idx, 100_000), PutOutcome::Stored), "chunk {chunk_idx}");
        tier.delete(&[content_key(chunk_idx - 10)]).unwrap();
    }
    assert!(detail(&tier, "reclaimed_segments") > 20);
    drop(tier);
    let tier = open(&options);
    for chunk_idx in (0..9).chain(391..400) {
        assert_eq!(is_hit(&tier, chunk_idx, 100_000), chunk_idx != 4, "chunk {chunk_idx}");
    }
    assert_eq!(tier.stat().n_chunks, Some(8 + 10));
}

#[test]
fn room_comes_back_by_moving_what_lives() {
    let dir = tempfile::tempdir().unwrap();
    let tier = open(&options(dir.path(), 16 * MIB));
    let mut is_there = vec![false; 4000];
    let mut n_no_room = 0;
    for chunk_idx in 0..4000_u64 {
        // Of every three chunks one stays long, so that segments are rarely dead as a whole.
        for (age, stays_long) in [(60, false), (300, true)] {
            if let Some(old_idx) = chunk_idx.checked_sub(age)
                && old_idx.is_multiple_of(3) == stays_long
            {
                tier.delete(&[content_key(old_idx)]).unwrap();
                is_there[old_idx as usize] = false;
            }
        }
        match put(&tier, chunk_idx, 60_000) {
            PutOutcome::Stored => is_there[chunk_idx as usize] = true,
            PutOutcome::NoRoom => n_no_room += 1,
            outcome => panic!("chunk {chunk_idx}: {outcome:?}"),
        }
        let looked_at = chunk_idx.saturating_sub(chunk_idx % 320);
        assert_eq!(is_hit(&tier, looked_at, 60_000), is_there[looked_at as usize], "chunk {looked_at}");
    }
    assert_eq!(n_no_room, 0, "live bytes stay below the limit");
    assert!(detail(&tier, "copied_bytes") > 0);
    let amplification = detail(&tier, "written_bytes") as f64 / detail(&tier, "put_bytes") as f64;
    assert!(amplification < 2.5, "every byte is written {amplification} times");
    for (chunk_idx, is_there) in is_there.iter().enumerate() {
        assert_eq!(is_hit(&tier, chunk_idx as u64, 60_000), *is_there, "chunk {chunk_idx}");
    }
}

#[test]
fn a_full_tier_goes_on_when_its_owner_deletes() {
    let dir = tempfile::tempdir().unwrap();
    let tier = open(&options(dir.path(), 16 * MIB));
    let mut next_to_delete = 0;
    let mut n_stored = 0;
    for chunk_idx in 0..600 {
        // Lengths of every kind, up to nearly half a segment.
        let n_bytes = 1000 + (chunk_idx as usize * 7919) % 900_000;
        let mut n_tries = 0;
        while matches!(put(&tier, chunk_idx, n_bytes), PutOutcome::NoRoom) {
            assert!(next_to_delete < chunk_idx, "an empty tier has no room");
            tier.delete(&[content_key(next_to_delete)]).unwrap();
            next_to_delete += 1;
            n_tries += 1;
            assert!(n_tries < 100, "chunk {chunk_idx}: room for {n_bytes} bytes never comes");
        }
        n_stored += 1;
        assert!(is_hit(&tier, chunk_idx, n_bytes), "chunk {chunk_idx}");
    }
    assert_eq!(n_stored, 600);
    let stat = tier.stat();
    assert!(stat.used_bytes.unwrap() <= stat.capacity_bytes.unwrap());
    let file_bytes: u64 = segments(dir.path()).iter().map(|path| path.metadata().unwrap().len()).sum();
    assert!(file_bytes <= 16 * MIB, "{file_bytes} bytes in files");
}

#[test]
fn many_threads_store_read_and_delete_while_segments_move() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path(), 24 * MIB);
    let tier = Arc::new(open(&options));
    let n_hits = AtomicU64::new(0);
    thread::scope(|scope| {
        for thread_idx in 0..4_u64 {
            let (tier, n_hits) = (&tier, &n_hits);
            scope.spawn(move || {
                for round in 0..300 {
                    let chunk_idx = thread_idx * 1000 + round;
                    let n_bytes = 20_000 + (chunk_idx as usize % 7) * 30_000;
                    let outcome = put(&**tier, chunk_idx, n_bytes);
                    assert!(outcome.is_present(), "chunk {chunk_idx}: {outcome:?}");
                    // Of another thread, which may be behind or ahead.
                    let other_idx = (thread_idx + 1) % 4 * 1000 + round / 2 * 2;
                    let n_other_bytes = 20_000 + (other_idx as usize % 7) * 30_000;
                    n_hits.fetch_add(u64::from(is_hit(&**tier, other_idx, n_other_bytes)), Ordering::Relaxed);
                    if round >= 20 {
                        tier.delete(&[content_key(chunk_idx - 20)]).unwrap();
                    }
                }
            });
        }
    });
    assert!(detail(&*tier, "reclaimed_segments") > 5);
    assert!(n_hits.into_inner() > 0);
    drop(tier);
    let tier = open(&options);
    assert_eq!(tier.stat().n_chunks, Some(80));
    for chunk_idx in (0..4).flat_map(|thread_idx| thread_idx * 1000 + 280..thread_idx * 1000 + 300) {
        assert!(is_hit(&tier, chunk_idx, 20_000 + (chunk_idx as usize % 7) * 30_000), "chunk {chunk_idx}");
    }
}

#[test]
fn another_segment_length_or_less_capacity_keeps_what_fits() {
    let dir = tempfile::tempdir().unwrap();
    let tier = open(&options(dir.path(), 32 * MIB));
    for chunk_idx in 0..80 {
        assert!(put(&tier, chunk_idx, 200_000).is_present());
    }
    drop(tier);
    let longer = NvmeOptions { segment_bytes: 2 * MIB, ..options(dir.path(), 32 * MIB) };
    let tier = open(&longer);
    assert!((0..80).all(|chunk_idx| is_hit(&tier, chunk_idx, 200_000)));
    for chunk_idx in 100..400 {
        assert!(put(&tier, chunk_idx, 200_000).is_present(), "chunk {chunk_idx}");
        tier.delete(&[content_key(chunk_idx - 100)]).unwrap();
    }
    assert!((300..400).all(|chunk_idx| is_hit(&tier, chunk_idx, 200_000)));
    assert!(segments(dir.path()).iter().all(|path| path.metadata().unwrap().len() == 2 * MIB));
    drop(tier);
    let tier = open(&NvmeOptions { capacity_bytes: 16 * MIB, ..longer });
    let n_kept = (300..400).filter(|chunk_idx| is_hit(&tier, *chunk_idx, 200_000)).count();
    assert!((10..100).contains(&n_kept), "{n_kept} of 100 kept");
    assert!(segments(dir.path()).len() as u64 * 2 * MIB <= 16 * MIB);
    assert_eq!(tier.stat().n_chunks, Some(n_kept as u64));
}

#[test]
fn files_of_others_are_left_alone_and_files_that_are_no_segments_are_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path(), 8 * MIB);
    std::fs::write(dir.path().join("notes.txt"), b"mine").unwrap();
    std::fs::write(dir.path().join("segment-x.kvik"), b"mine too").unwrap();
    std::fs::write(dir.path().join("segment-00000000.kvik"), vec![7; MIB as usize]).unwrap();
    std::fs::write(dir.path().join("segment-00000001.kvik"), b"short").unwrap();
    std::fs::create_dir(dir.path().join("segment-00000002.kvik")).unwrap();
    let tier = open(&options);
    assert_eq!(tier.stat().health, TierHealth::Up);
    assert_eq!(detail(&tier, "bad_segments"), 3);
    for chunk_idx in 0..40 {
        assert!(put(&tier, chunk_idx, 100_000).is_present(), "chunk {chunk_idx}");
    }
    assert!((0..40).all(|chunk_idx| is_hit(&tier, chunk_idx, 100_000)));
    assert_eq!(std::fs::read(dir.path().join("notes.txt")).unwrap(), b"mine");
    assert_eq!(std::fs::read(dir.path().join("segment-x.kvik")).unwrap(), b"mine too");
}

#[test]
fn parts_and_buffers_of_any_alignment_come_back() {
    for io in [IoKind::Uring, IoKind::Positional] {
        let dir = tempfile::tempdir().unwrap();
        let tier = NvmeTier::open(&NvmeOptions { io, ..options(dir.path(), 64 * MIB) }).unwrap();
        let memory = content(content_key(0), 3 << 20);
        let aligned = memory.as_ptr().addr().next_multiple_of(4096) - memory.as_ptr().addr();
        let cuts: [&[usize]; 6] = [
            &[4096, 1 << 20],
            &[4096, (2 << 20) + 17],
            &[100, 4096, 5000, 4096],
            &[1, 4095, 8192],
            &[0, 12288, 0, 1],
            &[],
        ];
        for (cut_idx, lengths) in cuts.iter().enumerate() {
            for shift in [0, 1, 512] {
                let mut start = aligned + shift;
                let parts: Vec<&[u8]> = lengths
                    .iter()
                    .map(|n_bytes| {
                        start += n_bytes;
                        &memory[start - n_bytes..start]
                    })
                    .collect();
                let expected = parts.concat();
                let key = content_key((cut_idx * 1000 + shift) as u64);
                let mut batch = [PutItem::new(key, &parts)];
                tier.put(&mut batch);
                assert!(batch[0].outcome.is_present(), "{:?}", batch[0].outcome);
                let mut buffer = vec![0; expected.len() + 8192];
                let aligned = buffer.as_ptr().addr().next_multiple_of(4096) - buffer.as_ptr().addr();
                for read_shift in [0, 7] {
                    let buffer = &mut buffer[aligned + read_shift..][..expected.len()];
                    buffer.fill(0xee);
                    assert!(tier.get_one(key, buffer).is_hit());
                    assert!(buffer == expected, "{lengths:?} at {shift} into {read_shift}");
                }
                for (offset, end) in [(0, 1), (4095, 4097), (4096, 8192), (5000, expected.len())] {
                    if offset <= end && end <= expected.len() {
                        let range = &mut buffer[aligned..][..end - offset];
                        let mut batch = [GetItem::range(key, offset as u64, range)];
                        tier.get(&mut batch);
                        assert!(batch[0].outcome.is_hit(), "{:?}", batch[0].outcome);
                        assert!(
                            buffer[aligned..][..end - offset] == expected[offset..end],
                            "{offset}..{end}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn more_pieces_than_the_queue_takes_come_back() {
    for queue_depth in [1, 3] {
        let dir = tempfile::tempdir().unwrap();
        let io = IoKind::Uring;
        let tier = open(&NvmeOptions { io, queue_depth, ..options(dir.path(), 128 * MIB) });
        let chunks: Vec<Vec<u8>> =
            (0..5).map(|idx| content(content_key(idx), (3 << 20) + idx as usize)).collect();
        let parts: Vec<[&[u8]; 1]> = chunks.iter().map(|chunk| [chunk.as_slice()]).collect();
        let mut batch: Vec<PutItem<'_>> =
            parts.iter().zip(0..).map(|(parts, idx)| PutItem::new(content_key(idx), parts)).collect();
        tier.put(&mut batch);
        assert!(batch.iter().all(|item| item.outcome.is_present()));
        let mut buffers: Vec<Vec<u8>> = chunks.iter().map(|chunk| vec![0; chunk.len()]).collect();
        let mut batch: Vec<GetItem<'_>> = buffers
            .iter_mut()
            .zip(0..)
            .map(|(buffer, idx)| GetItem::whole(content_key(idx), buffer))
            .collect();
        tier.get(&mut batch);
        assert!(batch.iter().all(|item| item.outcome.is_hit()));
        assert!(buffers == chunks, "queue depth {queue_depth}: other bytes");
    }
}
