//! Items of a read as ranges that are proven one by one.

use crate::envelope::ENVELOPE_BYTES;
use crate::key::{ChunkKey, TokenDigest};
use crate::tier::{GetItem, GetOutcome, PutItem};

/// A range of a chunk, as the caller counts, and where it goes.
pub(super) struct Wanted<'a> {
    pub(super) key: ChunkKey,
    pub(super) digest: TokenDigest,
    pub(super) offset: u64,
    /// What the chunk must be long; none where it may be longer than the range.
    pub(super) chunk_bytes: Option<u64>,
    pub(super) buffer: &'a mut [u8],
}

/// Reads a batch by `get_wanted`, which gives the outcomes of ranges in their order: the head of an item is a range of
/// its own, and the item has the first outcome of its ranges that is no hit.
pub(super) fn get_by_range(
    batch: &mut [GetItem<'_>],
    get_wanted: impl FnOnce(&mut [Wanted<'_>]) -> Vec<GetOutcome>,
) {
    let mut wanted: Vec<Wanted<'_>> = Vec::with_capacity(batch.len());
    let mut owners: Vec<usize> = Vec::with_capacity(batch.len());
    for (item_idx, item) in batch.iter_mut().enumerate() {
        let (key, digest) = (item.key, item.digest);
        let chunk_bytes = item.is_whole.then_some(item.n_bytes() as u64);
        if !item.head.is_empty() {
            wanted.push(Wanted { key, digest, offset: 0, chunk_bytes, buffer: item.head });
            owners.push(item_idx);
        }
        wanted.push(Wanted { key, digest, offset: item.offset, chunk_bytes, buffer: item.buffer });
        owners.push(item_idx);
    }
    let outcomes = get_wanted(&mut wanted);
    drop(wanted);
    for item in &mut *batch {
        item.outcome = GetOutcome::Hit;
    }
    for (item_idx, outcome) in owners.into_iter().zip(outcomes) {
        let item = &mut batch[item_idx];
        if item.outcome.is_hit() {
            item.outcome = outcome;
        }
    }
}

/// The largest unit that a page before a chunk and the sections behind it are multiples of.
pub(super) fn section_bytes_behind_page(item: &PutItem<'_>) -> usize {
    if item.section_bytes == 0 || item.section_bytes >= item.n_bytes() {
        return ENVELOPE_BYTES;
    }
    ENVELOPE_BYTES.min(1 << item.section_bytes.trailing_zeros())
}
