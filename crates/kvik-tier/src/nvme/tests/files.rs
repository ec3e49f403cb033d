//! Chunks that are read from their files by others.

use std::fs;

use crc_fast::{CrcAlgorithm, checksum};

use super::{device_image, length_of, open, options, put, segment_path, temporary_directory};
use crate::chunk_file::ChunkFile;
use crate::conformance::{content, content_key};
use crate::decorator::{Breaker, BreakerOptions, Checksummed, Metered, Throttled, ThrottledOptions};
use crate::key::TokenDigest;
use crate::nvme::NvmeTier;
use crate::nvme::aligned::AlignedBuffer;
use crate::tier::{GetOutcome, PutItem, Tier};

/// A chunk of two blocks behind its envelope, beside those that tests count up from 0.
const HELD: u64 = 7001;

type Opened = Result<ChunkFile, GetOutcome>;

fn open_chunk(tier: &dyn Tier, chunk_idx: u64) -> Opened {
    tier.open_chunk(content_key(chunk_idx), TokenDigest::NONE)
}

/// Reads a chunk past the tier, by whole blocks as direct I/O wants them.
pub(super) fn read(file: &ChunkFile) -> Vec<u8> {
    let n_bytes = file.n_bytes() as usize;
    let mut buffer = AlignedBuffer::new(n_bytes.next_multiple_of(4096));
    let n_read = rustix::io::pread(file.file(), &mut buffer[..], file.offset()).unwrap();
    assert!(n_bytes <= n_read, "the file ends inside of the chunk");
    buffer[..n_bytes].to_vec()
}

/// Whether every section of what was read has its checksum, as a reader finds out.
pub(super) fn is_proven(file: &ChunkFile, bytes: &[u8]) -> bool {
    let found =
        bytes.chunks(file.section_bytes() as usize).map(|part| checksum(CrcAlgorithm::Crc64Nvme, part));
    found.eq(file.checksums().iter().copied())
}

pub(super) fn detail(tier: &dyn Tier, name: &str) -> u64 {
    tier.stat().details.iter().find(|(known, _)| *known == name).unwrap().1
}

#[test]
fn a_file_has_the_bytes_of_its_chunk_in_sections_with_their_checksums_also_after_a_restart() {
    let dir = temporary_directory();
    let key = content_key(0);
    let bytes = content(key, 3 * 5000 + 100);
    let tier = open(dir.path());
    tier.put(&mut [PutItem::with_sections(key, &[&bytes], 5000)]);
    for chunk_idx in 1..4 {
        assert!(put(&tier, chunk_idx).is_present());
    }
    let check = |tier: &dyn Tier| {
        let file = open_chunk(tier, 0).unwrap();
        assert_eq!((file.n_bytes(), file.section_bytes()), (15_100, 5000));
        assert_eq!(file.checksums().len(), 4);
        assert!(file.offset().is_multiple_of(4096));
        assert!(read(&file) == bytes && is_proven(&file, &bytes));
        for chunk_idx in 1..4 {
            let file = open_chunk(tier, chunk_idx).unwrap();
            let read = read(&file);
            assert!(read == content(content_key(chunk_idx), length_of(chunk_idx)) && is_proven(&file, &read));
        }
    };
    assert!(tier.has_files());
    check(&tier);
    drop(tier);
    check(&open(dir.path()));
}

#[test]
fn a_file_that_is_held_keeps_its_bytes_whatever_is_deleted_and_emptied() {
    let dir = temporary_directory();
    let tier = open(dir.path());
    assert!(put(&tier, HELD).is_present());
    let file = open_chunk(&tier, HELD).unwrap();
    tier.delete(&[content_key(HELD)]).unwrap();
    assert!(matches!(open_chunk(&tier, HELD), Err(GetOutcome::Miss)), "a deleted chunk is not opened again");
    // Many lives of all other segments.
    for chunk_idx in 1..400 {
        assert!(put(&tier, chunk_idx).is_present(), "chunk {chunk_idx}");
        tier.delete(&[content_key(chunk_idx)]).unwrap();
        let read = read(&file);
        assert!(
            read == content(content_key(HELD), length_of(HELD)) && is_proven(&file, &read),
            "chunk {chunk_idx}"
        );
    }
    assert!(detail(&tier, "reclaimed_segments") > 20);
    let place = file.offset();
    let before = fs::read(segment_path(dir.path(), 0)).unwrap();
    drop(file);
    for chunk_idx in 1000..1400 {
        assert!(put(&tier, chunk_idx).is_present(), "chunk {chunk_idx}");
        tier.delete(&[content_key(chunk_idx)]).unwrap();
    }
    let after = fs::read(segment_path(dir.path(), 0)).unwrap();
    assert!(
        before[place as usize..][..4096] != after[place as usize..][..4096],
        "its room is never used again"
    );
}

#[test]
fn a_file_that_moves_while_it_is_held_is_read_where_it_was() {
    let dir = temporary_directory();
    let tier = open(dir.path());
    assert!(put(&tier, HELD).is_present());
    let held = open_chunk(&tier, HELD).unwrap();
    // The chunk stays, so it is what moves when its segment is emptied.
    let mut chunk_idx = 1;
    while detail(&tier, "copied_bytes") == 0 {
        assert!(put(&tier, chunk_idx).is_present(), "chunk {chunk_idx}");
        if chunk_idx % 5 > 0 {
            tier.delete(&[content_key(chunk_idx)]).unwrap();
        }
        chunk_idx += 1;
        assert!(chunk_idx < 500, "nothing moves");
    }
    for file in [held, open_chunk(&tier, HELD).unwrap()] {
        let read = read(&file);
        assert!(read == content(content_key(HELD), length_of(HELD)) && is_proven(&file, &read));
    }
}

#[test]
fn what_is_not_what_was_stored_is_not_opened_or_not_proven_and_is_counted() {
    let dir = temporary_directory();
    let tier = open(dir.path());
    (0..3).for_each(|chunk_idx| assert!(put(&tier, chunk_idx).is_present()));
    let places: Vec<u64> = (0..3).map(|chunk_idx| open_chunk(&tier, chunk_idx).unwrap().offset()).collect();
    assert!(matches!(open_chunk(&tier, 9), Err(GetOutcome::Miss)));
    let other = TokenDigest([7; 32]);
    assert!(matches!(tier.open_chunk(content_key(0), other), Err(GetOutcome::TokenMismatch)));
    assert_eq!((detail(&tier, "token_mismatches"), detail(&tier, "corrupt_reads")), (1, 0));
    drop(tier);

    let path = segment_path(dir.path(), 0);
    let whole = fs::read(&path).unwrap();
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = whole.clone();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
        open(dir.path())
    };
    let envelope = |chunk_idx: usize| places[chunk_idx] as usize - 4096..places[chunk_idx] as usize;
    for at in [0, 9, 17, 33, 60, 70, 97, 4000, 4090] {
        let tier = with(&|bytes| bytes[envelope(0).start + at] ^= 1);
        assert!(matches!(open_chunk(&tier, 0), Err(GetOutcome::Corrupt(_))), "byte {at}");
        assert_eq!(detail(&tier, "corrupt_reads"), 1);
    }
    // The envelope of another chunk, and one of a chunk that is longer.
    let tier = with(&|bytes| bytes.copy_within(envelope(1), envelope(0).start));
    assert!(matches!(open_chunk(&tier, 0), Err(GetOutcome::Corrupt("key"))));
    drop(tier);
    // Bytes of the chunk itself: the reader finds out.
    for at in [0, 1, 4096, length_of(1) - 1] {
        let tier = with(&|bytes| bytes[places[1] as usize + at] ^= 0x40);
        let file = open_chunk(&tier, 1).unwrap();
        assert!(!is_proven(&file, &read(&file)), "byte {at}");
        file.note_corrupt();
        assert_eq!(detail(&tier, "corrupt_reads"), 1);
    }
    // A write that was torn behind the envelope.
    let tier = with(&|bytes| bytes[places[2] as usize..][..length_of(2)].fill(0));
    let file = open_chunk(&tier, 2).unwrap();
    assert!(!is_proven(&file, &read(&file)));
}

#[test]
fn tiers_around_a_disk_open_its_files_unless_they_must_see_the_bytes() {
    let dir = temporary_directory();
    let tier = open(dir.path());
    assert!(put(&tier, 0).is_present());
    let tier = Throttled::new(tier, ThrottledOptions::default());
    let tier: Box<dyn Tier> = Box::new(Metered::new(Breaker::new(tier, BreakerOptions::default())));
    assert!(tier.has_files());
    let file = open_chunk(&tier, 0).unwrap();
    assert!(is_proven(&file, &read(&file)));
    drop((file, tier));
    for bounds in [
        ThrottledOptions { bytes_per_s: Some(1 << 20), ..ThrottledOptions::default() },
        ThrottledOptions { max_calls: 1, ..ThrottledOptions::default() },
        ThrottledOptions { max_bytes_in_flight: 1 << 20, ..ThrottledOptions::default() },
    ] {
        assert!(!Throttled::new(open(dir.path()), bounds).has_files());
    }
    let device_dir = temporary_directory();
    let image = device_image(device_dir.path());
    let device = Checksummed::new(NvmeTier::open(&options(&image)).unwrap());
    assert!(!device.has_files(), "a device has no files");
    assert!(put(&device, 0).is_present());
    assert!(matches!(open_chunk(&device, 0), Err(GetOutcome::Miss)));
}
