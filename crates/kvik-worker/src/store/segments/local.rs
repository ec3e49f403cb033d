//! Segments in a store of this process.

use std::sync::Arc;
use std::time::Duration;

use kvik_model::{ComputedSegment, SegmentKv, SegmentPart};
use kvik_store::{Prefetch, Retrieved, Space, Store, Write};
use kvik_types::{CacheSalt, TokenId};

use super::{ComingSegment, SegmentKind, SegmentPlace, copy_layer};
use crate::error::Result;
use crate::store::refused;

/// The place of a model's segments in a store.
#[derive(Debug)]
pub(in crate::store) struct LocalSegments {
    store: Store,
    space: Space,
    first_position: usize,
}

/// A segment whose chunks are read.
#[derive(Debug)]
struct PrefetchedSegment {
    prefetch: Prefetch,
    n_tokens: usize,
    first_position: usize,
}

/// A segment in leases of the store.
#[derive(Debug)]
struct LeasedSegment {
    retrieved: Retrieved,
    n_tokens: usize,
    first_position: usize,
}

impl LocalSegments {
    /// The segments of a kind.
    ///
    /// # Errors
    /// If the store refuses the format.
    pub(in crate::store) fn open(store: &Store, kind: &SegmentKind) -> Result<Self> {
        let space = store.space_with_tails(&kind.namespace, kind.format).map_err(refused)?;
        Ok(Self { store: store.clone(), space, first_position: kind.first_position })
    }
}

impl SegmentPlace for LocalSegments {
    fn load(&self, tokens: &[TokenId], salt: Option<&CacheSalt>) -> Option<Box<dyn ComingSegment>> {
        let chain = self.space.salted_chain(tokens, salt);
        self.store.note_request(&chain, None);
        let prefetch = self.store.prefetch(&chain, 0);
        Some(Box::new(PrefetchedSegment {
            prefetch,
            n_tokens: tokens.len(),
            first_position: self.first_position,
        }))
    }

    fn write(&self, segment: &ComputedSegment, salt: Option<&CacheSalt>) {
        let chain = self.space.salted_chain(&segment.tokens, salt);
        for chunk_idx in 0..chain.n_chunks() {
            let mut writer = match self.store.begin_write(&chain, chunk_idx, 0) {
                Write::Slot(writer) => writer,
                Write::Present => continue,
                Write::NoRoom | Write::NoParent | Write::Collision => return,
            };
            for (layer_idx, layer) in segment.layers.iter().enumerate() {
                copy_layer(layer, &chain.tokens_of(chunk_idx), writer.layer_mut(layer_idx));
            }
            writer.commit();
        }
    }
}

impl ComingSegment for PrefetchedSegment {
    fn is_done(&self) -> bool {
        self.prefetch.is_done()
    }

    fn on_done(&self, callback: Box<dyn FnOnce() + Send>) {
        self.prefetch.on_done(callback);
    }

    fn finish(self: Box<Self>) -> Option<Arc<dyn SegmentKv>> {
        let Self { prefetch, n_tokens, first_position } = *self;
        let retrieved = prefetch.wait(Duration::ZERO);
        let is_whole = retrieved.n_tokens() == n_tokens && 0 < n_tokens;
        let segment = || Arc::new(LeasedSegment { retrieved, n_tokens, first_position });
        is_whole.then(|| segment() as Arc<dyn SegmentKv>)
    }
}

impl SegmentKv for LeasedSegment {
    fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    fn first_position(&self) -> usize {
        self.first_position
    }

    fn n_parts(&self) -> usize {
        self.retrieved.chunks().len()
    }

    fn part(&self, layer_idx: usize, part_idx: usize) -> Option<SegmentPart<'_>> {
        let section = self.retrieved.chunks().get(part_idx)?.layer(0, layer_idx);
        let (keys, values) = section.split_at(section.len() / 2);
        (!keys.is_empty()).then_some(SegmentPart { keys, values })
    }
}
