//! Files whose bytes are not what was written.

use std::fs;
use std::path::Path;

use super::{SEGMENT_BYTES, get, open, put, segment_path, temporary_directory};
use crate::nvme::format::{BLOCK_BYTES, BatchHeader, Footer, SegmentHeader};
use crate::random::SplitMix64;
use crate::tier::Tier;

const N_CHUNKS: u64 = 3;

/// The bytes of a sealed segment with one chunk a batch.
fn sealed_segment() -> Vec<u8> {
    let dir = temporary_directory();
    let tier = open(dir.path());
    (0..N_CHUNKS).for_each(|chunk_idx| assert!(put(&tier, chunk_idx).is_present()));
    drop(tier);
    fs::read(segment_path(dir.path(), 0)).unwrap()
}

fn header_of(segment: &[u8]) -> SegmentHeader {
    SegmentHeader::decode(&segment[..BLOCK_BYTES as usize]).unwrap()
}

/// Offsets of the batch headers of a segment.
fn batch_offsets(segment: &[u8]) -> Vec<u64> {
    let header = header_of(segment);
    let mut offsets = vec![];
    let mut offset = BLOCK_BYTES;
    for _ in 0..N_CHUNKS {
        offsets.push(offset);
        let block = &segment[offset as usize..][..BLOCK_BYTES as usize];
        offset = BatchHeader::decode(block, header.generation, offset, SEGMENT_BYTES).unwrap().end;
    }
    offsets
}

/// Which chunks a tier finds in a directory with this segment.
fn chunks_found(dir: &Path, segment: &[u8], context: &str) -> Vec<u64> {
    fs::write(segment_path(dir, 0), segment).unwrap();
    let tier = open(dir);
    let found = (0..N_CHUNKS).filter(|chunk_idx| get(&tier, *chunk_idx, context).is_hit()).collect();
    drop(tier);
    fs::remove_file(segment_path(dir, 0)).unwrap();
    found
}

fn all_but(missing: Option<u64>) -> Vec<u64> {
    (0..N_CHUNKS).filter(|chunk_idx| Some(*chunk_idx) != missing).collect()
}

/// Bytes of a block that stand for all kinds: the fields, some of the padding, and the checksum.
fn bytes_of_block() -> impl Iterator<Item = usize> {
    (0..160).chain((160..4040).step_by(61)).chain(4040..4096)
}

#[test]
fn a_damaged_footer_loses_nothing() {
    let dir = temporary_directory();
    let segment = sealed_segment();
    for at in bytes_of_block() {
        let mut damaged = segment.clone();
        let last_block = damaged.len() - BLOCK_BYTES as usize;
        damaged[last_block + at] ^= 0x10;
        assert_eq!(chunks_found(dir.path(), &damaged, &format!("footer, byte {at}")), all_but(None));
    }
}

#[test]
fn a_damaged_batch_header_loses_nothing_beside_a_footer_and_its_batch_without() {
    let dir = temporary_directory();
    let segment = sealed_segment();
    let offsets = batch_offsets(&segment);
    let without_footer = {
        let mut segment = segment.clone();
        segment[(SEGMENT_BYTES - BLOCK_BYTES) as usize..].fill(0);
        segment
    };
    assert_eq!(chunks_found(dir.path(), &without_footer, "no footer"), all_but(None));
    for at in bytes_of_block() {
        for (original, missing) in [(&segment, None), (&without_footer, Some(1))] {
            let mut damaged = original.clone();
            damaged[offsets[1] as usize + at] ^= 0x04;
            let context = format!("batch header, byte {at}, {missing:?}");
            assert_eq!(chunks_found(dir.path(), &damaged, &context), all_but(missing), "{context}");
        }
    }
}

#[test]
fn a_damaged_segment_header_loses_its_segment_and_no_start() {
    let dir = temporary_directory();
    let segment = sealed_segment();
    for at in bytes_of_block() {
        let mut damaged = segment.clone();
        damaged[at] ^= 0x80;
        assert_eq!(chunks_found(dir.path(), &damaged, &format!("header, byte {at}")), [0; 0], "byte {at}");
    }
}

#[test]
fn flips_and_tears_anywhere_make_misses_at_worst() {
    let dir = temporary_directory();
    let segment = sealed_segment();
    let mut random = SplitMix64::new(11);
    let mut n_found = 0;
    for round in 0..400 {
        let mut damaged = segment.clone();
        for _ in 0..=random.below(3) {
            let at = random.below(SEGMENT_BYTES) as usize;
            match random.below(3) {
                0 => damaged[at] ^= 1 << random.below(8),
                1 => damaged[at..].iter_mut().take(512).for_each(|byte| *byte = 0),
                _ => {
                    let from = random.below(SEGMENT_BYTES - 4096) as usize;
                    damaged.copy_within(from..from + 512, at.min(SEGMENT_BYTES as usize - 512));
                }
            }
        }
        if random.below(10) == 0 {
            damaged.truncate(random.below(SEGMENT_BYTES) as usize);
        }
        n_found += chunks_found(dir.path(), &damaged, &format!("round {round}")).len();
    }
    assert!(n_found > 400, "only {n_found} chunks found");
}

#[test]
fn batches_of_an_earlier_life_are_not_found() {
    let dir = temporary_directory();
    let old = sealed_segment();
    let (old_header, offsets) = (header_of(&old), batch_offsets(&old));
    // A new life that has written its header and its first batch, which ends where an old batch begins.
    let header = SegmentHeader { generation: old_header.generation ^ 1, first_sequence: 1000, ..old_header };
    let mut segment = old.clone();
    segment[..BLOCK_BYTES as usize].copy_from_slice(&header.encode());
    assert_eq!(chunks_found(dir.path(), &segment, "no batch of its own"), [0; 0]);
    let first = offsets[0] as usize..(offsets[0] + BLOCK_BYTES) as usize;
    let mut batch =
        BatchHeader::decode(&old[first.clone()], old_header.generation, offsets[0], SEGMENT_BYTES).unwrap();
    batch.generation = header.generation;
    segment[first].copy_from_slice(&batch.encode());
    assert_eq!(chunks_found(dir.path(), &segment, "one batch of its own"), [0]);
    // The old life's footer under the new life's name is what the generation in the block prevents.
    let last = (SEGMENT_BYTES - BLOCK_BYTES) as usize;
    let footer = Footer::decode(&old[last..], old_header.generation, SEGMENT_BYTES).unwrap();
    assert_eq!(footer.entries.len() as u64, N_CHUNKS);
}

#[test]
fn a_recovered_segment_is_not_appended_to() {
    let dir = temporary_directory();
    let mut segment = sealed_segment();
    let offsets = batch_offsets(&segment);
    segment[(SEGMENT_BYTES - BLOCK_BYTES) as usize..].fill(0);
    // The second batch is torn: a later one in its place could lead to what lies behind it.
    segment[offsets[1] as usize..offsets[2] as usize].fill(0);
    fs::write(segment_path(dir.path(), 0), &segment).unwrap();
    let tier = open(dir.path());
    assert!(put(&tier, 100).is_present());
    drop(tier);
    let after = fs::read(segment_path(dir.path(), 0)).unwrap();
    let data = BLOCK_BYTES as usize..(SEGMENT_BYTES - BLOCK_BYTES) as usize;
    assert!(after[data.clone()] == segment[data], "batches were written into a recovered segment");
    let tier = open(dir.path());
    assert_eq!(tier.stat().n_chunks, Some(N_CHUNKS), "all but the torn one, and the new one");
}
