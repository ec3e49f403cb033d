//! Chunks whose bytes their writer puts into files by itself.

use std::fs;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use crc_fast::{CrcAlgorithm, checksum};

use super::files::{detail, is_proven, read};
use super::{device_image, length_of, open, options, put, temporary_directory};
use crate::conformance::{content, content_key};
use crate::decorator::{Breaker, BreakerOptions, Checksummed, Metered, Throttled, ThrottledOptions};
use crate::key::TokenDigest;
use crate::nvme::aligned::AlignedBuffer;
use crate::nvme::{NvmeOptions, NvmeTier};
use crate::tier::{FileItem, GetItem, GetOutcome, PutOutcome, Tier, TierExt};

/// Section length of what is written to files.
const SECTION_BYTES: usize = 4096;

fn item_of(chunk_idx: u64, n_sections: usize) -> (FileItem, Vec<u8>) {
    let (key, n_bytes) = (content_key(chunk_idx), n_sections * SECTION_BYTES);
    let (n_bytes, section_bytes) = (n_bytes as u64, SECTION_BYTES as u64);
    let item = FileItem { key, digest: TokenDigest([3; 32]), n_bytes, section_bytes };
    (item, content(key, n_bytes as usize))
}

fn checksums_of(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks(SECTION_BYTES).map(|section| checksum(CrcAlgorithm::Crc64Nvme, section)).collect()
}

/// Writes as a device does: past the tier.
fn write(file: BorrowedFd<'_>, offset: u64, bytes: &[u8]) -> io::Result<Vec<u64>> {
    let aligned = AlignedBuffer::copy_of(bytes);
    assert_eq!(rustix::io::pwrite(file, &aligned, offset)?, bytes.len());
    Ok(checksums_of(bytes))
}

fn put_file(tier: &dyn Tier, chunk_idx: u64) -> PutOutcome {
    let (item, bytes) = item_of(chunk_idx, 5);
    tier.put_file(&item, &mut |file, offset| write(file, offset, &bytes))
}

/// Reads what was put by [`put_file`] by way of memory, which proves it.
fn get_file(tier: &dyn Tier, chunk_idx: u64) -> GetOutcome {
    let (item, bytes) = item_of(chunk_idx, 5);
    let mut read = vec![0; bytes.len()];
    let mut batch = [GetItem::whole(item.key, &mut read).for_tokens(item.digest)];
    tier.get(&mut batch);
    let [GetItem { outcome, .. }] = batch;
    assert!(!outcome.is_hit() || read == bytes, "chunk {chunk_idx} has other bytes");
    outcome
}

#[test]
fn a_chunk_that_its_writer_puts_into_a_file_is_read_by_all_ways_also_after_a_restart() {
    let dir = temporary_directory();
    let tier = open(dir.path());
    assert!(put(&tier, 1).is_present());
    assert!(matches!(put_file(&tier, 0), PutOutcome::Stored));
    assert!(matches!(put_file(&tier, 0), PutOutcome::Present), "it is written once");
    assert!(put(&tier, 2).is_present());
    let (item, bytes) = item_of(0, 5);
    let check = |tier: &dyn Tier| {
        assert!(get_file(tier, 0).is_hit());
        assert!(matches!(tier.open_chunk(item.key, TokenDigest([4; 32])), Err(GetOutcome::TokenMismatch)));
        let file = tier.open_chunk(item.key, item.digest).unwrap();
        assert_eq!((file.n_bytes(), file.section_bytes()), (item.n_bytes, item.section_bytes));
        assert!(read(&file) == bytes && is_proven(&file, &bytes));
        for chunk_idx in 1..3 {
            let mut buffer = vec![0; length_of(chunk_idx)];
            assert!(tier.get_one(content_key(chunk_idx), &mut buffer).is_hit());
        }
    };
    check(&tier);
    drop(tier);
    check(&open(dir.path()));
}

#[test]
fn a_writer_that_fails_or_gives_other_checksums_leaves_nothing_and_costs_no_room() {
    let dir = temporary_directory();
    let tier = open(dir.path());
    let (item, bytes) = item_of(0, 5);
    let used_bytes = |tier: &dyn Tier| tier.stat().used_bytes.unwrap();
    for n_checksums in [None, Some(0), Some(4), Some(6)] {
        let outcome = tier.put_file(&item, &mut |file, offset| {
            let checksums = write(file, offset, &bytes)?;
            let n_checksums = n_checksums.ok_or_else(|| io::Error::other("the device is gone"))?;
            Ok(checksums.into_iter().cycle().take(n_checksums).collect())
        });
        assert!(matches!(outcome, PutOutcome::Failed(_)), "{outcome:?}");
        assert!(matches!(get_file(&tier, 0), GetOutcome::Miss));
        assert_eq!(used_bytes(&tier), 0);
    }
    // What was written are other bytes than were summed up.
    let outcome = tier.put_file(&item, &mut |file, offset| {
        let mut wrong = bytes.clone();
        wrong[2 * SECTION_BYTES] ^= 1;
        write(file, offset, &wrong)?;
        Ok(checksums_of(&bytes))
    });
    assert!(outcome.is_present());
    assert!(matches!(get_file(&tier, 0), GetOutcome::Corrupt(_)), "a reader finds out");
    tier.delete(&[item.key]).unwrap();
    assert!(matches!(put_file(&tier, 0), PutOutcome::Stored));
    assert!(get_file(&tier, 0).is_hit());
    drop(tier);
    assert!(get_file(&open(dir.path()), 0).is_hit());
}

/// Copies what the disk has at this moment.
fn copy_files(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn behind_a_writer_that_fails_others_go_on_in_its_segment_and_are_found_after_a_death() {
    let dir = temporary_directory();
    let open = |dir: &Path| {
        let options = NvmeOptions { segment_bytes: 1 << 20, ..NvmeOptions::new(dir, 8 << 20) };
        Checksummed::new(NvmeTier::open(&options).unwrap())
    };
    let tier = open(dir.path());
    assert!(put(&tier, 1).is_present());
    let n_segments = detail(&tier, "segments");
    for _ in 0..3 {
        let (item, bytes) = item_of(0, 5);
        let outcome = tier.put_file(&item, &mut |file, offset| {
            write(file, offset, &bytes)?;
            Err(io::Error::other("the device is gone"))
        });
        assert!(matches!(outcome, PutOutcome::Failed(_)));
    }
    assert!(put(&tier, 2).is_present());
    assert!(matches!(put_file(&tier, 3), PutOutcome::Stored));
    assert_eq!(detail(&tier, "segments"), n_segments);
    let copy = temporary_directory();
    copy_files(dir.path(), copy.path());
    let after_death = open(copy.path());
    assert!(get_file(&after_death, 3).is_hit());
    assert!(matches!(get_file(&after_death, 0), GetOutcome::Miss));
    for chunk_idx in 1..3 {
        let mut buffer = vec![0; length_of(chunk_idx)];
        assert!(after_death.get_one(content_key(chunk_idx), &mut buffer).is_hit());
    }
}

#[test]
fn a_flush_beside_a_writer_writes_the_deletions_before_it() {
    let dir = temporary_directory();
    let tier = open(dir.path());
    assert!(put(&tier, 1).is_present());
    tier.flush().unwrap();
    tier.delete(&[content_key(1)]).unwrap();
    let copy = temporary_directory();
    let (item, bytes) = item_of(0, 5);
    let outcome = tier.put_file(&item, &mut |file, offset| {
        tier.flush().unwrap();
        copy_files(dir.path(), copy.path());
        write(file, offset, &bytes)
    });
    assert!(outcome.is_present());
    let mut buffer = vec![0; length_of(1)];
    assert!(matches!(open(copy.path()).get_one(content_key(1), &mut buffer), GetOutcome::Miss));
}

#[test]
fn a_death_while_a_writer_writes_leaves_what_was_there_before() {
    let dir = temporary_directory();
    let tier = open(dir.path());
    assert!(matches!(put_file(&tier, 0), PutOutcome::Stored));
    let (item, bytes) = item_of(1, 5);
    let copy = temporary_directory();
    let outcome = tier.put_file(&item, &mut |file, offset| {
        let checksums = write(file, offset, &bytes)?;
        copy_files(dir.path(), copy.path());
        Ok(checksums)
    });
    assert!(outcome.is_present());
    let after_death = open(copy.path());
    assert!(get_file(&after_death, 0).is_hit());
    assert!(matches!(get_file(&after_death, 1), GetOutcome::Miss));
    assert!(matches!(put_file(&after_death, 1), PutOutcome::Stored));
    assert!(get_file(&after_death, 1).is_hit());
}

#[test]
fn writers_of_files_and_of_memory_use_segments_side_by_side_until_the_tier_is_full() {
    let dir = temporary_directory();
    let tier = open(dir.path());
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let tier = &tier;
            scope.spawn(move || {
                for chunk_idx in (0..200).map(|idx| 1000 * (thread + 10) + idx) {
                    let outcome = put_file(tier, chunk_idx);
                    assert!(outcome.is_present(), "{outcome:?}");
                    assert!(get_file(tier, chunk_idx).is_hit());
                    assert!(put(tier, 100_000 + chunk_idx).is_present());
                    tier.delete(&[item_of(chunk_idx, 5).0.key, content_key(100_000 + chunk_idx)]).unwrap();
                }
            });
        }
    });
    assert!(detail(&tier, "reclaimed_segments") > 20);
    let mut n_stored = 0;
    while put_file(&tier, n_stored).is_present() {
        n_stored += 1;
    }
    assert!(matches!(put_file(&tier, n_stored), PutOutcome::NoRoom));
    assert!((0..n_stored).all(|chunk_idx| get_file(&tier, chunk_idx).is_hit()));
}

#[test]
fn tiers_that_must_see_the_bytes_take_none_from_files() {
    let dir = temporary_directory();
    let bounds = ThrottledOptions { max_calls: 1, ..ThrottledOptions::default() };
    assert!(matches!(put_file(&Throttled::new(open(dir.path()), bounds), 0), PutOutcome::Skipped));
    let tier = Throttled::new(open(dir.path()), ThrottledOptions::default());
    let breaker = BreakerOptions { n_failures_to_open: 1, ..BreakerOptions::default() };
    let tier = Metered::new(Breaker::new(tier, breaker));
    let (item, _) = item_of(1, 5);
    let failed = tier.put_file(&item, &mut |_, _| Err(io::Error::other("the device is gone")));
    assert!(matches!(failed, PutOutcome::Failed(_)));
    assert!(matches!(put_file(&tier, 0), PutOutcome::Stored), "a writer's failure is not the tier's");
    assert!(get_file(&tier, 0).is_hit());
    let stat = tier.stat();
    let puts = stat.operations.iter().find(|operation| operation.operation == "put").unwrap();
    assert_eq!((puts.outcomes[0].1, puts.n_bytes), (1, item.n_bytes));
    let device_dir = temporary_directory();
    let device = Checksummed::new(NvmeTier::open(&options(&device_image(device_dir.path()))).unwrap());
    assert!(matches!(put_file(&device, 0), PutOutcome::Skipped));
}
