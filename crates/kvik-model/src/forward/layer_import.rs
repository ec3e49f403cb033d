//! KV whose layers come one after the other, copied in by the passes that need them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{BlockSource, KvImport};
use crate::error::{ModelError, Result};
use crate::paging::BlockId;

/// How long passes wait for layers in all: the other sequences of a pass wait too.
const PATIENCE: Duration = Duration::from_millis(200);

/// Blocks of a source that are copied layer by layer, when they are taken.
#[derive(Debug)]
pub(super) struct LayerImport {
    source: Arc<dyn BlockSource>,
    /// Their numbers in the source, and where they go.
    blocks: Vec<(usize, BlockId)>,
    n_layers: usize,
    block_bytes: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug)]
struct Taken {
    n_layers: usize,
    is_lost: bool,
    patience: Duration,
}

impl LayerImport {
    pub(super) fn new(
        source: Arc<dyn BlockSource>,
        blocks: Vec<(usize, BlockId)>,
        n_layers: usize,
        block_bytes: usize,
    ) -> Self {
        let taken = Mutex::new(Taken { n_layers: 0, is_lost: false, patience: PATIENCE });
        Self { source, blocks, n_layers, block_bytes, taken }
    }

    /// The bytes of a layer, a slice for each block; `None` unless all of them have the right length.
    fn layer(&self, layer_idx: usize) -> Option<Vec<&[u8]>> {
        let block = |(block_idx, _): &(usize, BlockId)| {
            let bytes = self.source.block(layer_idx, *block_idx)?;
            (bytes.len() == self.block_bytes).then_some(bytes)
        };
        self.blocks.iter().map(block).collect()
    }
}

impl KvImport for LayerImport {
    fn is_done(&self) -> bool {
        let layers = self.source.layers();
        layers.has_ended || self.n_layers <= layers.n_there
    }

    fn n_layers_there(&self) -> usize {
        self.source.layers().n_there.min(self.n_layers)
    }

    fn take_layer(&self, layer_idx: usize, put: &mut dyn FnMut(BlockId, &[u8])) {
        let mut taken = self.taken.lock();
        if taken.is_lost || layer_idx < taken.n_layers {
            return;
        }
        let begin = Instant::now();
        let has_come = self.source.wait_layer(layer_idx, taken.patience);
        taken.patience = taken.patience.saturating_sub(begin.elapsed());
        let Some(bytes) = self.layer(layer_idx).filter(|_| has_come && layer_idx == taken.n_layers) else {
            taken.is_lost = true;
            return;
        };
        for ((_, block), bytes) in self.blocks.iter().zip(bytes) {
            put(*block, bytes);
        }
        taken.n_layers += 1;
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let n_taken = self.taken.lock().n_layers;
        if n_taken < self.n_layers {
            let allowed = format!("{} layers of blocks of {} bytes", self.n_layers, self.block_bytes);
            return Err(ModelError::request("kv", format!("{n_taken} layers"), allowed));
        }
        Ok(())
    }
}
