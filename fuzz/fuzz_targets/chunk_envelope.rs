//! An envelope of a chunk and the chunk behind it, as they come from a disk or a network.
//!
//! An envelope that is accepted must be exactly what sealing its chunk gives, if the chunk proves itself.

#![no_main]

use kvik_tier::{ChunkKey, ENVELOPE_BYTES, Envelope, NamespaceId, TokenDigest, seal};
use kvik_types::BlockHash;
use libfuzzer_sys::fuzz_target;

/// What the envelope's own checksum covers; it stands behind.
const COVERED_BYTES: usize = ENVELOPE_BYTES - 8;

/// What stands before the checksums of sections.
const FIELD_BYTES: usize = 96;

fuzz_target!(|input: &[u8]| {
    check(input);
    // A random checksum is never right; this one is, so that the checks behind it are reached.
    check(&with_checksum(input));
    check_sealed(input);
});

fn check(input: &[u8]) {
    let Some((envelope_bytes, chunk)) = input.split_at_checked(ENVELOPE_BYTES) else {
        assert!(Envelope::decode(input).is_err());
        return;
    };
    let Ok(envelope) = Envelope::decode(envelope_bytes) else {
        return;
    };
    let chunk_bytes = envelope.chunk_bytes();
    assert_eq!(u64::from(envelope.n_sections()), chunk_bytes.div_ceil(envelope.section_bytes()));
    for offset in [0, 1, chunk_bytes / 2, chunk_bytes, u64::MAX] {
        if let Some((start, end)) = envelope.widen(offset, offset.saturating_add(1)) {
            assert!(start <= offset && offset < end && end <= chunk_bytes);
        }
        let _ = envelope.prove(offset, chunk);
    }
    // Sealing makes no section longer than its chunk, so only such an envelope comes back.
    let is_canonical = envelope.section_bytes() <= chunk_bytes.max(1);
    if chunk.len() as u64 == chunk_bytes && is_canonical && envelope.prove(0, chunk).is_ok() {
        let mut sealed = [0; ENVELOPE_BYTES];
        seal(envelope.key(), envelope.digest(), &[chunk], envelope.section_bytes() as usize, &mut sealed);
        assert_eq!(sealed, envelope_bytes);
    }
}

/// The input as a chunk, whose first bytes are also its size of sections: what is sealed proves itself.
fn check_sealed(chunk: &[u8]) {
    let section_bytes = chunk.first_chunk().map_or(0, |start| usize::from(u16::from_le_bytes(*start)));
    let key = ChunkKey { namespace: NamespaceId(BlockHash([1; 16])), chunk: BlockHash([2; 16]), rank: 3 };
    let mut sealed = [0; ENVELOPE_BYTES];
    let digest = TokenDigest([4; 32]);
    seal(key, digest, &[chunk], section_bytes, &mut sealed);
    let envelope = Envelope::decode(&sealed).expect("a sealed envelope");
    assert_eq!(envelope.key(), key);
    assert_eq!(envelope.digest(), digest);
    envelope.prove(0, chunk).expect("a sealed chunk");
    check(&[sealed.as_slice(), chunk].concat());
}

/// The input as an envelope with magic, version and own checksum put right, and what is left as its chunk.
fn with_checksum(input: &[u8]) -> Vec<u8> {
    let mut repaired = input.to_vec();
    repaired.resize(input.len().max(FIELD_BYTES), 0);
    // The fields are the input's; the checksums of sections are zeros and the chunk is what comes after.
    let chunk = repaired.split_off(FIELD_BYTES);
    repaired[..12].copy_from_slice(b"KVIKCHNK\x02\0\0\0");
    repaired.resize(COVERED_BYTES, 0);
    let own_checksum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &repaired);
    repaired.extend(own_checksum.to_le_bytes());
    repaired.extend(chunk);
    repaired
}
