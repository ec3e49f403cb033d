//! A binary frame of keys and values, as it comes from a disk or a network.
//!
//! A frame that is accepted must be exactly what writing its payload gives.

#![no_main]

use kvik_types::layout::{BINARY_HEADER_BYTES, BinaryFrame, KvLayout, KvPlacement, convert};
use libfuzzer_sys::fuzz_target;
use xxhash_rust::xxh3::xxh3_64;

/// Where the checksum stands in the header; it covers all other bytes.
const CHECKSUM: std::ops::Range<usize> = 32..40;

fuzz_target!(|input: &[u8]| {
    check(input);
    // A random checksum is never right; this one is, so that the checks behind it are reached.
    if let Some(repaired) = with_checksum(input) {
        check(&repaired);
    }
});

fn check(input: &[u8]) {
    let Ok(frame) = BinaryFrame::decode(input) else {
        return;
    };
    assert_eq!(frame.payload().len() + BINARY_HEADER_BYTES, input.len());
    let dense = if frame.is_mla() { KvLayout::KvMlaFmt } else { KvLayout::Kv2Ltd };
    let dense = KvPlacement::dense(dense).expect("a dense layout");
    let binary = KvPlacement::dense(KvLayout::Binary).expect("a frame is dense");
    let mut written = vec![0; input.len()];
    convert(frame.shape(), &dense, frame.payload(), &binary, &mut written)
        .expect("an accepted frame converts");
    assert_eq!(written, input);
}

/// The frame with magic, version and checksum put right.
fn with_checksum(input: &[u8]) -> Option<Vec<u8>> {
    let mut frame = input.to_vec();
    frame.get_mut(..6)?.copy_from_slice(b"KVBF\x01\x00");
    let covered = [frame.get(..CHECKSUM.start)?, frame.get(CHECKSUM.end..)?].concat();
    frame.get_mut(CHECKSUM)?.copy_from_slice(&xxh3_64(&covered).to_le_bytes());
    Some(frame)
}
