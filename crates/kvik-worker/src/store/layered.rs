//! A prompt's KV whose layers come one after the other, while the engine computes those that are there.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvik_model::{BLOCK_TOKENS, BlockSource, LayerProgress, PrefixKv};
use kvik_store::Layer;
use kvik_tier::TierKind;
use parking_lot::{Condvar, Mutex};

use super::arriving::TakenTokens;

/// One layer of the chunks of a prompt.
#[derive(Debug)]
pub(super) enum LayerBytes {
    /// In memory of the store.
    Leased(Layer),
    /// A copy for each chunk.
    Copied(Vec<Vec<u8>>),
}

/// The engine's side.
#[derive(Debug)]
pub(crate) struct LayeredPrefix {
    chunks: Vec<(Range<usize>, TierKind)>,
    layers: Arc<Layers>,
    taken: TakenTokens,
}

/// The side of the thread that reads; dropping it ends the prefix.
#[derive(Debug)]
pub(super) struct LayerSender(Arc<Layers>);

#[derive(Debug)]
struct Layers {
    /// Filled from the first on.
    bytes: Vec<OnceLock<LayerBytes>>,
    /// Chunks of which every layer has come so far.
    n_chunks: AtomicUsize,
    /// When no more layers are waited for.
    deadline: Instant,
    progress: Mutex<LayerProgress>,
    changed: Condvar,
}

/// Chunks of `n_layers` layers, which have to come until `deadline`.
pub(super) fn layered(
    chunks: Vec<(Range<usize>, TierKind)>,
    n_layers: usize,
    deadline: Instant,
) -> (LayeredPrefix, LayerSender) {
    let layers = Arc::new(Layers {
        bytes: (0..n_layers).map(|_| OnceLock::new()).collect(),
        n_chunks: AtomicUsize::new(chunks.len()),
        deadline,
        progress: Mutex::new(LayerProgress { n_there: 0, has_ended: false }),
        changed: Condvar::new(),
    });
    let sender = LayerSender(Arc::clone(&layers));
    (LayeredPrefix { chunks, layers, taken: Arc::default() }, sender)
}

// === impl LayerSender ===

impl LayerSender {
    /// Whether the layers are still waited for.
    pub(super) fn is_wanted(&self) -> bool {
        1 < Arc::strong_count(&self.0) && Instant::now() < self.0.deadline
    }

    /// Hands the next layer over, which has the first `n_chunks` chunks: the others will not come any more.
    pub(super) fn send(&self, layer: LayerBytes, n_chunks: usize) {
        self.0.n_chunks.fetch_min(n_chunks, Ordering::Release);
        let mut progress = self.0.progress.lock();
        if let Some(place) = self.0.bytes.get(progress.n_there)
            && place.set(layer).is_ok()
        {
            progress.n_there += 1;
            progress.has_ended = progress.n_there == self.0.bytes.len();
            self.0.changed.notify_all();
        }
    }
}

impl Drop for LayerSender {
    fn drop(&mut self) {
        self.0.progress.lock().has_ended = true;
        self.0.changed.notify_all();
    }
}

// === impl LayeredPrefix ===

impl LayeredPrefix {
    /// What the engine takes of it, also after it is gone.
    pub(super) fn taken(&self) -> TakenTokens {
        Arc::clone(&self.taken)
    }

    fn n_chunks(&self) -> usize {
        self.layers.n_chunks.load(Ordering::Acquire)
    }
}

impl BlockSource for LayeredPrefix {
    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]> {
        let token = block_idx.checked_mul(BLOCK_TOKENS)?;
        let chunk_idx = self.chunks.partition_point(|(tokens, _)| tokens.end <= token);
        let (tokens, _) = self.chunks.get(chunk_idx)?;
        let layer = self.layers.bytes.get(layer_idx)?.get()?;
        // After the layer: it may be the one that lacks the chunk.
        if self.n_chunks() <= chunk_idx {
            return None;
        }
        let section = match layer {
            LayerBytes::Leased(layer) => layer.section(chunk_idx, 0),
            LayerBytes::Copied(sections) => sections.get(chunk_idx)?.as_slice(),
        };
        let block_bytes = section.len().checked_div(tokens.len() / BLOCK_TOKENS)?;
        let place = token.checked_sub(tokens.start)? / BLOCK_TOKENS;
        section.get(place * block_bytes..(place + 1) * block_bytes)
    }

    fn layers(&self) -> LayerProgress {
        let progress = *self.layers.progress.lock();
        let is_late = self.layers.deadline <= Instant::now();
        LayerProgress { has_ended: progress.has_ended || is_late, ..progress }
    }

    fn wait_layer(&self, layer_idx: usize, timeout: Duration) -> bool {
        let until = self.layers.deadline.min(Instant::now() + timeout);
        let mut progress = self.layers.progress.lock();
        let is_missing = |progress: &mut LayerProgress| progress.n_there <= layer_idx && !progress.has_ended;
        self.layers.changed.wait_while_until(&mut progress, is_missing, until);
        layer_idx < progress.n_there
    }
}

impl PrefixKv for LayeredPrefix {
    fn there_until(&self, token: usize) -> usize {
        let first_token = self.chunks.first().map_or(0, |(tokens, _)| tokens.start);
        let last = self.n_chunks().checked_sub(1).and_then(|last| self.chunks.get(last));
        match last {
            Some((tokens, _)) if first_token <= token => tokens.end,
            _ => token,
        }
    }

    fn note_taken(&self, tokens: Range<usize>) {
        let mut taken = self.taken.lock();
        for (of_chunk, tier) in &self.chunks {
            let part = of_chunk.start.max(tokens.start)..of_chunk.end.min(tokens.end);
            if !part.is_empty() {
                taken.push((part, *tier));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const N_LAYERS: usize = 3;
    const BLOCK_BYTES: usize = 4;

    /// A layer of two chunks of one block and of two blocks, of bytes that tell their place.
    fn layer(layer_idx: u8) -> LayerBytes {
        let section = |chunk_idx: u8, n_blocks: u8| {
            let block = |block_idx: u8| [layer_idx * 16 + chunk_idx * 4 + block_idx; BLOCK_BYTES];
            (0..n_blocks).flat_map(block).collect::<Vec<u8>>()
        };
        LayerBytes::Copied(vec![section(0, 1), section(1, 2)])
    }

    fn prefix(timeout: Duration) -> (LayeredPrefix, LayerSender) {
        let chunks =
            vec![(0..BLOCK_TOKENS, TierKind::Nvme), (BLOCK_TOKENS..3 * BLOCK_TOKENS, TierKind::Peer)];
        let (prefix, sender) = layered(chunks, N_LAYERS, Instant::now() + timeout);
        assert_eq!(prefix.layers().n_there, 0);
        sender.send(layer(0), 2);
        (prefix, sender)
    }

    #[test]
    fn a_layer_is_there_as_soon_as_it_was_sent() {
        let (prefix, sender) = prefix(Duration::from_mins(1));
        assert_eq!(prefix.layers(), LayerProgress { n_there: 1, has_ended: false });
        assert_eq!(prefix.block(0, 2), Some([5; BLOCK_BYTES].as_slice()));
        assert_eq!((prefix.block(1, 2), prefix.block(0, 3)), (None, None));
        assert!(!prefix.wait_layer(1, Duration::ZERO));
        std::thread::scope(|scope| {
            scope.spawn(|| sender.send(layer(1), 2));
            assert!(prefix.wait_layer(1, Duration::from_mins(1)));
        });
        assert_eq!(prefix.block(1, 2), Some([21; BLOCK_BYTES].as_slice()));
        sender.send(layer(2), 2);
        assert_eq!(prefix.layers(), LayerProgress { n_there: 3, has_ended: true });
        prefix.note_taken(4..20);
        assert_eq!(*prefix.taken().lock(), [(4..16, TierKind::Nvme), (16..20, TierKind::Peer)]);
    }

    #[test]
    fn a_chunk_that_loses_a_layer_is_gone_in_all_layers() {
        let (prefix, sender) = prefix(Duration::from_mins(1));
        assert_eq!(prefix.there_until(0), 3 * BLOCK_TOKENS);
        sender.send(layer(1), 1);
        assert_eq!(prefix.there_until(0), BLOCK_TOKENS);
        assert!(prefix.block(0, 0).is_some() && prefix.block(0, 1).is_none() && prefix.block(1, 1).is_none());
    }

    #[test]
    fn a_reader_that_ends_or_is_late_ends_the_wait() {
        let (ended, sender) = prefix(Duration::from_mins(1));
        std::thread::scope(|scope| {
            scope.spawn(move || drop(sender));
            assert!(!ended.wait_layer(1, Duration::from_mins(1)));
        });
        assert_eq!(ended.layers(), LayerProgress { n_there: 1, has_ended: true });
        let (late, sender) = prefix(Duration::ZERO);
        assert!(
            late.layers().has_ended && !late.wait_layer(2, Duration::from_mins(1)) && !sender.is_wanted()
        );
    }

    #[test]
    fn the_reader_learns_that_nothing_waits_for_it() {
        let (prefix, sender) = prefix(Duration::from_mins(1));
        assert!(sender.is_wanted());
        drop(prefix);
        assert!(!sender.is_wanted());
    }
}
