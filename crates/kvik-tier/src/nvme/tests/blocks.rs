//! The blocks that describe a segment.

use crate::conformance::content_key;
use crate::nvme::format::{
    BLOCK_BYTES, BatchHeader, Content, Entry, Footer, MAX_BATCH_ENTRIES, SegmentHeader, batch_header_bytes,
    footer_bytes, padded,
};

const SEGMENT_BYTES: u64 = 64 << 20;
const GENERATION: u64 = 0x0123_4567_89ab_cdef;

fn entries(n_entries: u64, first: u64) -> Vec<Entry> {
    let content_of = |entry_idx: u64| match entry_idx % 3 {
        0 => Content::Gone,
        _ => Content::Chunk { offset: first + entry_idx * BLOCK_BYTES, n_bytes: 1 + entry_idx % BLOCK_BYTES },
    };
    let entry_of = |entry_idx| Entry {
        key: content_key(entry_idx),
        sequence: 1000 + entry_idx,
        content: content_of(entry_idx),
    };
    (0..n_entries).map(entry_of).collect()
}

fn header() -> SegmentHeader {
    SegmentHeader { generation: GENERATION, segment_bytes: SEGMENT_BYTES, first_sequence: 77 }
}

fn batch(n_entries: u64) -> BatchHeader {
    let offset = 10 * BLOCK_BYTES;
    let first = offset + batch_header_bytes(n_entries as usize);
    let end = first + n_entries * BLOCK_BYTES;
    BatchHeader { generation: GENERATION, offset, end, entries: entries(n_entries, first) }
}

fn footer(n_entries: u64) -> Footer {
    Footer { generation: GENERATION, entries: entries(n_entries, BLOCK_BYTES) }
}

fn decode_batch(blocks: &[u8]) -> Result<BatchHeader, &'static str> {
    BatchHeader::decode(blocks, GENERATION, 10 * BLOCK_BYTES, SEGMENT_BYTES)
}

fn decode_footer(blocks: &[u8]) -> Result<Footer, &'static str> {
    Footer::decode(blocks, GENERATION, SEGMENT_BYTES)
}

#[test]
fn blocks_come_back_as_they_were() {
    assert_eq!(SegmentHeader::decode(&header().encode()), Ok(header()));
    for n_entries in [0, 1, 2, 72, 73, 500, MAX_BATCH_ENTRIES as u64] {
        let blocks = batch(n_entries).encode();
        assert_eq!(blocks.len() as u64, batch_header_bytes(n_entries as usize));
        assert_eq!(decode_batch(&blocks), Ok(batch(n_entries)));
    }
    for n_entries in [0, 1, 72, 73, 5000] {
        let blocks = footer(n_entries).encode();
        assert_eq!(blocks.len() as u64, footer_bytes(n_entries as usize));
        assert_eq!(decode_footer(&blocks), Ok(footer(n_entries)));
    }
}

/// The layout is on users' disks: a change of these bytes needs a new version.
#[test]
fn the_bytes_of_version_one_do_not_change() {
    let block = header().encode();
    assert_eq!(&block[..8], b"KVIKSEGM");
    assert_eq!(
        block[8..40],
        [
            1, 0, 0, 0, 0, 0, 0, 0, 0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01, 0, 0, 0, 4, 0, 0, 0, 0,
            77, 0, 0, 0, 0, 0, 0, 0
        ]
    );
    let blocks = batch(2).encode();
    assert_eq!(&blocks[..8], b"KVIKBTCH");
    assert_eq!(blocks[12..16], [2, 0, 0, 0]);
    assert_eq!(blocks[24..40], [0, 0xa0, 0, 0, 0, 0, 0, 0, 0, 0xd0, 0, 0, 0, 0, 0, 0]);
    let chunk = &blocks[40 + 56..40 + 112];
    assert_eq!(chunk[..16], [0x5a; 16]);
    assert_eq!(chunk[16..32], content_key(1).chunk.0);
    assert_eq!(chunk[32..], [0xe9, 3, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0, 0, 0, 0, 1, 0]);
    let blocks = footer(2).encode();
    assert_eq!(&blocks[4096 - 40..4096 - 32], b"KVIKFOOT");
    let crcs = [header().encode(), batch(2).encode(), footer(2).encode()]
        .map(|block| u64::from_le_bytes(*block.last_chunk().unwrap()));
    assert_eq!(crcs, [2_858_413_414_499_383_823, 9_323_943_899_443_224_184, 2_237_766_636_722_084_375]);
}

#[test]
fn a_flip_of_any_byte_is_noticed() {
    let (header, batch, footer) = (header().encode(), batch(60).encode(), footer(60).encode());
    for (at, bit) in (0..header.len()).zip((0..8).cycle()) {
        let flipped = |block: &[u8]| {
            let mut flipped = block.to_vec();
            flipped[at] ^= 1 << bit;
            flipped
        };
        assert!(SegmentHeader::decode(&flipped(&header)).is_err(), "header, byte {at}");
        assert!(decode_batch(&flipped(&batch)).is_err(), "batch header, byte {at}");
        assert!(decode_footer(&flipped(&footer)).is_err(), "footer, byte {at}");
    }
}

#[test]
fn blocks_of_another_life_place_or_length_prove_nothing() {
    let blocks = batch(3).encode();
    let offset = 10 * BLOCK_BYTES;
    assert_eq!(BatchHeader::decode(&blocks, GENERATION + 1, offset, SEGMENT_BYTES), Err("generation"));
    assert_eq!(BatchHeader::decode(&blocks, GENERATION, offset + BLOCK_BYTES, SEGMENT_BYTES), Err("offset"));
    assert_eq!(BatchHeader::decode(&blocks, GENERATION, offset, offset), Err("end of the batch"));
    assert_eq!(decode_batch(&[&blocks[..], &[0; 4096]].concat()), Err("header length"));
    assert_eq!(decode_batch(&blocks[..100]), Err("header length"));
    let blocks = footer(3).encode();
    assert_eq!(Footer::decode(&blocks, GENERATION + 1, SEGMENT_BYTES), Err("generation"));
    assert_eq!(Footer::decode(&blocks, GENERATION, 4096), Err("footer length"));
    assert_eq!(decode_footer(&[]), Err("too short"));
}

#[test]
fn places_outside_of_a_batch_are_refused() {
    let misplaced = |content| {
        let mut header = batch(1);
        header.entries = vec![Entry { key: content_key(0), sequence: 1, content }];
        decode_batch(&header.encode()).unwrap_err()
    };
    let (offset, end) = (10 * BLOCK_BYTES, batch(1).end);
    assert_eq!(misplaced(Content::Chunk { offset, n_bytes: 1 }), "a chunk lies before its batch");
    let offset = offset + BLOCK_BYTES;
    assert_eq!(misplaced(Content::Chunk { offset: end, n_bytes: 1 }), "a chunk lies behind its batch");
    assert_eq!(misplaced(Content::Chunk { offset, n_bytes: u64::MAX }), "a chunk lies behind its batch");
    let mut footer = footer(0);
    let content = Content::Chunk { offset: SEGMENT_BYTES - BLOCK_BYTES, n_bytes: 1 };
    footer.entries.push(Entry { key: content_key(0), sequence: 1, content });
    assert_eq!(decode_footer(&footer.encode()), Err("a chunk lies behind its batch"));
}

#[test]
fn padding_never_wraps() {
    assert_eq!([0, 1, 4096, 4097].map(padded), [0, 4096, 4096, 8192]);
    assert_eq!(padded(u64::MAX), u64::MAX - 4095);
}
