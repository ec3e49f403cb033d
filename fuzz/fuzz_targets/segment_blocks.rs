//! The blocks that describe a segment on a disk, as a damaged or hostile disk has them.
//!
//! A block that is accepted must be exactly what writing it again gives.

#![no_main]

use crc_fast::{CrcAlgorithm, checksum};
use kvik_tier::nvme::format::{BatchHeader, Footer, SegmentHeader};
use libfuzzer_sys::fuzz_target;

const GENERATION: u64 = 0x7766_5544_3322_1100;
const OFFSET: u64 = 8192;
const SEGMENT_BYTES: u64 = 1 << 24;

fuzz_target!(|input: &[u8]| {
    check(input);
    // Random bytes rarely have a start and an end that hold; these do, so that the checks behind are reached.
    let mut block = input.to_vec();
    block.resize(block.len().next_multiple_of(4096).max(4096), 0);
    for magic in [b"KVIKSEGM", b"KVIKBTCH"] {
        block[..8].copy_from_slice(magic);
        block[8..12].copy_from_slice(&1_u32.to_le_bytes());
        if magic == b"KVIKBTCH" {
            block[16..24].copy_from_slice(&GENERATION.to_le_bytes());
            block[24..32].copy_from_slice(&OFFSET.to_le_bytes());
        }
        seal(&mut block);
        check(&block);
    }
    let trailer = block.len() - 40;
    let n_bytes = block.len() as u64;
    block[trailer..trailer + 8].copy_from_slice(b"KVIKFOOT");
    block[trailer + 8..trailer + 12].copy_from_slice(&1_u32.to_le_bytes());
    block[trailer + 16..trailer + 24].copy_from_slice(&GENERATION.to_le_bytes());
    block[trailer + 24..trailer + 32].copy_from_slice(&n_bytes.to_le_bytes());
    seal(&mut block);
    check(&block);
});

fn check(input: &[u8]) {
    if let Ok(header) = SegmentHeader::decode(input) {
        assert_eq!(header.encode(), input);
    }
    if let Ok(header) = BatchHeader::decode(input, GENERATION, OFFSET, SEGMENT_BYTES) {
        assert_eq!(header.encode(), input);
    }
    if let Ok(footer) = Footer::decode(input, GENERATION, SEGMENT_BYTES) {
        assert_eq!(footer.encode(), input);
    }
}

fn seal(block: &mut [u8]) {
    let (inside, crc) = block.split_last_chunk_mut::<8>().expect("a block has more bytes than its checksum");
    *crc = checksum(CrcAlgorithm::Crc64Nvme, inside).to_le_bytes();
}
