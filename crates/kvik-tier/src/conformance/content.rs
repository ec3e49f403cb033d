//! Chunks whose content follows from their key, so that every reader knows what is right.

use kvik_types::BlockHash;

use crate::key::{ChunkKey, NamespaceId};
use crate::random::SplitMix64;
use crate::tier::{GetItem, GetOutcome, PutItem, Tier, TierExt};

/// The key of a chunk of a test.
pub fn content_key(chunk_idx: u64) -> ChunkKey {
    let mut chunk = [0xc4; 16];
    chunk[..8].copy_from_slice(&chunk_idx.to_le_bytes());
    ChunkKey { namespace: NamespaceId(BlockHash([0x5a; 16])), chunk: BlockHash(chunk), rank: 0 }
}

/// The bytes of a chunk: another key or another length has others.
pub fn content(key: ChunkKey, n_bytes: usize) -> Vec<u8> {
    let mut seed = n_bytes as u64 ^ u64::from(key.rank).rotate_left(48);
    for half in [key.namespace.0.0, key.chunk.0].as_flattened().as_chunks().0 {
        seed = SplitMix64::new(seed ^ u64::from_le_bytes(*half)).next_u64();
    }
    let mut random = SplitMix64::new(seed);
    let mut bytes = vec![0; n_bytes];
    for piece in bytes.chunks_mut(8) {
        piece.copy_from_slice(&random.next_u64().to_le_bytes()[..piece.len()]);
    }
    bytes
}

/// Stores the chunk of `key` and insists that it is there.
pub(super) fn put_content(tier: &dyn Tier, key: ChunkKey, n_bytes: usize) {
    let outcome = tier.put_one(key, &content(key, n_bytes));
    assert!(outcome.is_present(), "put {key} of {n_bytes} bytes: {outcome:?}");
}

/// Stores the chunk of `key` for reads in units of `section_bytes` and insists that it is there.
pub(super) fn put_sections(tier: &dyn Tier, key: ChunkKey, n_bytes: usize, section_bytes: usize) {
    let chunk = content(key, n_bytes);
    let parts = [chunk.as_slice()];
    let mut batch = [PutItem::with_sections(key, &parts, section_bytes)];
    tier.put(&mut batch);
    let [PutItem { outcome, .. }] = batch;
    assert!(outcome.is_present(), "put {key} of {n_bytes} bytes: {outcome:?}");
}

/// Reads the chunk of `key` and insists that a hit is the chunk.
pub(super) fn get_content(tier: &dyn Tier, key: ChunkKey, n_bytes: usize) -> GetOutcome {
    let mut buffer = vec![0xee; n_bytes];
    let outcome = tier.get_one(key, &mut buffer);
    assert!(!matches!(outcome, GetOutcome::Pending), "get {key} has no outcome");
    if outcome.is_hit() {
        assert!(buffer == content(key, n_bytes), "get {key} of {n_bytes} bytes: a hit with other bytes");
    }
    outcome
}

/// Insists that the chunk of `key` is there and right.
pub(super) fn assert_hit(tier: &dyn Tier, key: ChunkKey, n_bytes: usize) {
    let outcome = get_content(tier, key, n_bytes);
    assert!(outcome.is_hit(), "get {key} of {n_bytes} bytes: {outcome:?}");
}

/// Insists that nothing is there.
pub(super) fn assert_miss(tier: &dyn Tier, key: ChunkKey, n_bytes: usize) {
    let outcome = get_content(tier, key, n_bytes);
    assert!(matches!(outcome, GetOutcome::Miss), "get {key} of {n_bytes} bytes: {outcome:?}");
}

/// Reads a range.
pub(super) fn get_range(tier: &dyn Tier, key: ChunkKey, offset: usize, buffer: &mut [u8]) -> GetOutcome {
    let mut batch = [GetItem::range(key, offset as u64, buffer)];
    tier.get(&mut batch);
    let [GetItem { outcome, .. }] = batch;
    outcome
}

/// Whether the tier has the key.
pub(super) fn has_key(tier: &dyn Tier, key: ChunkKey) -> bool {
    let mut present = [false];
    tier.contains(&[key], &mut present).expect("the tier can be asked");
    present[0]
}
