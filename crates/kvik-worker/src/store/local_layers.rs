//! Chunks of the store of this process, read layer by layer.

use std::ops::Range;
use std::time::{Duration, Instant};

use kvik_store::{Chain, ChunkPlaces, LayerReader, Store};
use kvik_tier::TierKind;

use super::PanicGuard;
use super::layered::{LayerBytes, LayerSender, LayeredPrefix, layered};
use super::load_threads::{LoadTask, LoadThreads};
use super::planner::{LoadRequest, Planned};

/// The reading of chunks that a plan asks for.
struct LayersTask {
    store: Store,
    chain: Chain,
    first_chunk: usize,
    sender: LayerSender,
    panic_guard: PanicGuard,
}

/// Begins to read all chunks of a plan layer by layer; `None` where too many prompts wait for that.
pub(super) fn begin_layers(
    store: &Store,
    threads: &LoadThreads,
    panic_guard: &PanicGuard,
    request: &LoadRequest,
    places: &ChunkPlaces,
    planned: &Planned,
    timeout: Duration,
) -> Option<LayeredPrefix> {
    let (chain, first_chunk) = (request.chain.clone(), request.first_chunk());
    let labels = store.tiers();
    let chunk = |place: usize| {
        let kind = labels.get(places.tier(place)).map_or(TierKind::Ram, |label| label.kind);
        (chain.tokens_of(first_chunk + place), kind)
    };
    let chunks: Vec<(Range<usize>, TierKind)> = (0..planned.chunks.len()).map(chunk).collect();
    let (prefix, sender) = layered(chunks, n_layers(&chain), Instant::now() + timeout);
    let (store, panic_guard) = (store.clone(), panic_guard.clone());
    let task = LayersTask { store, chain, first_chunk, sender, panic_guard };
    threads.begin(Box::new(task)).then_some(prefix)
}

/// Layers of the chunks of a chain.
pub(super) fn n_layers(chain: &Chain) -> usize {
    chain.space().format().n_layers as usize
}

/// Sends the layers of chunks as they come.
pub(super) fn send_layers(reader: &mut LayerReader, sender: &LayerSender) {
    while sender.is_wanted()
        && let Some(layer) = reader.next_layer()
    {
        sender.send(LayerBytes::Leased(layer), reader.n_chunks());
    }
}

impl LoadTask for LayersTask {
    fn is_wanted(&self) -> bool {
        self.sender.is_wanted()
    }

    fn run(self: Box<Self>) {
        self.panic_guard.run(|| {
            if self.sender.is_wanted() {
                send_layers(&mut self.store.retrieve_layers(&self.chain, self.first_chunk), &self.sender);
            }
        });
    }
}
