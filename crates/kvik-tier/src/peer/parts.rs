//! How the chunks of one read are shared out among the connections to a peer.

use crate::key::{ChunkKey, TokenDigest};
use crate::tier::{GetItem, GetOutcome};

/// Bytes that are worth a connection and a thread of their own: they take milliseconds in a fast network.
pub(super) const SHARE_BYTES: usize = 4 << 20;

/// What one connection brings of a chunk.
#[derive(Debug)]
pub(super) struct Part<'a> {
    pub(super) item_idx: usize,
    pub(super) key: ChunkKey,
    pub(super) digest: TokenDigest,
    /// The length that the whole chunk must have; 0 for any.
    pub(super) chunk_bytes: u64,
    /// Where the chunk's first bytes go; empty where they are not wanted.
    pub(super) head: &'a mut [u8],
    /// Where the bytes from `offset` on go.
    pub(super) buffer: &'a mut [u8],
    pub(super) offset: u64,
    pub(super) outcome: GetOutcome,
}

impl<'a> Part<'a> {
    /// The whole of what an item wants.
    pub(super) fn of(item_idx: usize, item: &'a mut GetItem<'_>) -> Self {
        let chunk_bytes = if item.is_whole { item.n_bytes() as u64 } else { 0 };
        let GetItem { key, digest, offset, head, buffer, .. } = item;
        Self {
            item_idx,
            key: *key,
            digest: *digest,
            chunk_bytes,
            head,
            buffer,
            offset: *offset,
            outcome: GetOutcome::Skipped,
        }
    }

    pub(super) fn n_bytes(&self) -> usize {
        self.head.len() + self.buffer.len()
    }

    /// Cuts off what comes behind the first `n_bytes` of the buffer.
    fn split_off(&mut self, n_bytes: usize) -> Self {
        let (buffer, rest) = std::mem::take(&mut self.buffer).split_at_mut(n_bytes);
        self.buffer = buffer;
        Self {
            item_idx: self.item_idx,
            key: self.key,
            digest: self.digest,
            chunk_bytes: self.chunk_bytes,
            head: &mut [],
            buffer: rest,
            offset: self.offset + n_bytes as u64,
            outcome: GetOutcome::Skipped,
        }
    }
}

/// Shares parts out among so many connections, each of about as many bytes; none of the shares is empty, so there may be fewer.
pub(super) fn shared_out(parts: Vec<Part<'_>>, n_shares: usize) -> Vec<Vec<Part<'_>>> {
    let n_bytes: usize = parts.iter().map(Part::n_bytes).sum();
    let share_bytes = n_bytes.div_ceil(n_shares.max(1)).max(1);
    let mut shares: Vec<Vec<Part<'_>>> = Vec::with_capacity(n_shares);
    let mut n_left = 0;
    for mut part in parts {
        loop {
            if shares.is_empty() || n_left == 0 && part.n_bytes() > 0 {
                shares.push(Vec::new());
                n_left = share_bytes;
            }
            let is_cut = n_left < part.n_bytes() && !part.buffer.is_empty();
            let rest = is_cut.then(|| part.split_off(n_left.saturating_sub(part.head.len())));
            n_left = n_left.saturating_sub(part.n_bytes());
            if let Some(share) = shares.last_mut() {
                share.push(part);
            }
            let Some(rest) = rest else { break };
            part = rest;
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use kvik_types::BlockHash;
    use proptest::prelude::*;

    use super::*;
    use crate::key::NamespaceId;

    proptest! {
        #[test]
        fn shares_have_every_byte_once_and_differ_little(
            lengths in prop::collection::vec((0_usize..40, 0_usize..1000), 1..20),
            n_shares in 1_usize..10,
        ) {
            let key = ChunkKey { namespace: NamespaceId(BlockHash([7; 16])), chunk: BlockHash([1; 16]), rank: 0 };
            let mut buffers: Vec<_> = lengths.iter().map(|(head, body)| (vec![0; *head], vec![0; *body])).collect();
            let mut items: Vec<GetItem<'_>> =
                buffers.iter_mut().map(|(head, body)| GetItem::with_head(key, head, 100, body)).collect();
            let parts = items.iter_mut().enumerate().map(|(item_idx, item)| Part::of(item_idx, item)).collect();
            let shares = shared_out(parts, n_shares);
            let n_all: usize = lengths.iter().map(|(head, body)| head + body).sum();
            prop_assert!(shares.len() <= n_shares.max(1) && shares.iter().all(|share| !share.is_empty()));
            let mut next: Vec<u64> = vec![100; lengths.len()];
            for share in &shares {
                let n_bytes: usize = share.iter().map(Part::n_bytes).sum();
                // A head is not cut.
                prop_assert!(n_bytes <= n_all.div_ceil(n_shares) + 40);
            }
            for part in shares.into_iter().flatten() {
                prop_assert_eq!(part.offset, next[part.item_idx]);
                if !part.head.is_empty() {
                    prop_assert_eq!((part.offset, part.head.len()), (100, lengths[part.item_idx].0));
                }
                next[part.item_idx] += part.buffer.len() as u64;
                part.head.iter_mut().chain(part.buffer.iter_mut()).for_each(|byte| *byte += 1);
            }
            drop(items);
            prop_assert!(buffers.iter().all(|(head, body)| head.iter().chain(body).all(|byte| *byte == 1)));
        }
    }
}
