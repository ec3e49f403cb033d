//! The head of a sealed chunk and the chunk behind it, as they come from a disk or a network.
//!
//! Nothing that was not sealed with the key is opened, and what was sealed opens to what it was.

#![no_main]

use std::sync::LazyLock;

use kvik_tier::{
    ChunkKey, KeyRing, NamespaceId, SEALED_HEAD_BYTES, SealedHead, SealingKey, TokenDigest, seal_chunk,
};
use kvik_types::BlockHash;
use libfuzzer_sys::fuzz_target;

static KEY: LazyLock<SealingKey> =
    LazyLock::new(|| SealingKey::try_new(&[7; 32]).expect("a key of the right length"));

const CHUNK_KEY: ChunkKey =
    ChunkKey { namespace: NamespaceId(BlockHash([1; 16])), chunk: BlockHash([2; 16]), rank: 3 };
const DIGEST: TokenDigest = TokenDigest([4; 32]);

fuzz_target!(|input: &[u8]| {
    check_forged(input);
    // With the start put right, so that the checks behind it are reached.
    let mut repaired = input.to_vec();
    repaired.resize(input.len().max(SEALED_HEAD_BYTES), 0);
    repaired[..10].copy_from_slice(b"KVIKSEAL\x01\0");
    repaired[64..80].copy_from_slice(&KEY.id().0);
    check_forged(&repaired);
    check_sealed(input);
    // Lines of a key file come from outside too.
    let _ = KeyRing::parse(&String::from_utf8_lossy(input));
});

/// Bytes that no holder of the key has made.
fn check_forged(input: &[u8]) {
    let head = &input[..input.len().min(SEALED_HEAD_BYTES)];
    if let Ok(head) = SealedHead::decode(head) {
        assert!(head.open(&KEY).is_err(), "a forged head is opened");
    }
}

/// The input as a chunk, whose first bytes are also its size of sections and the place of a flipped bit.
fn check_sealed(chunk: &[u8]) {
    let number = chunk.first_chunk().map_or(0, |start| usize::from(u16::from_le_bytes(*start)));
    let mut sealed = vec![0; SEALED_HEAD_BYTES + chunk.len()];
    seal_chunk(&KEY, CHUNK_KEY, DIGEST, &[chunk], number, &mut sealed).expect("a chunk can be sealed");
    let mut damaged = sealed.clone();
    let (head, bytes) = sealed.split_at_mut(SEALED_HEAD_BYTES);
    let opened = SealedHead::decode(head).expect("a sealed head").open(&KEY).expect("a head of the key");
    assert_eq!((opened.key(), opened.digest()), (CHUNK_KEY, DIGEST));
    assert_eq!(opened.chunk_bytes(), chunk.len() as u64);
    for offset in [0, 1, chunk.len() as u64, u64::MAX] {
        if let Some((start, end)) = opened.widen(offset, offset.saturating_add(1)) {
            assert!(start <= offset && offset < end && end <= chunk.len() as u64);
        }
    }
    opened.open_sections(0, bytes).expect("sealed sections");
    assert_eq!(bytes, chunk);
    let place = number % damaged.len();
    damaged[place] ^= 1;
    let (head, bytes) = damaged.split_at_mut(SEALED_HEAD_BYTES);
    let opened = SealedHead::decode(head).and_then(|head| head.open(&KEY));
    let opened = opened.and_then(|head| head.open_sections(0, bytes));
    assert!(opened.is_err(), "a flipped bit at {place} is not found");
}
