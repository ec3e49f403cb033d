//! KV that arrives layer by layer, until it is whole.
//!
//! A sequence's KV is put one layer at a time. It waits here until every layer has the same tokens;
//! then it goes into the engine at once, so that nobody can continue half a sequence. All that waits
//! is bounded in bytes and in time.
//!
//! `replace` gives a layer its KV. Where its tokens differ from those of the layers that wait, the
//! sender has started over and the other layers are dropped. `append` continues what the layer has;
//! if nothing waits, what the engine has under the name.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kvik_model::{LayerKv, SequenceKv};
use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::Instant;

use crate::engine_thread::EngineHandle;
use crate::error::Refusal;

/// What a put does with the KV that a layer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PutMode {
    Append,
    Replace,
}

/// KV that was put, checked for its shape.
#[derive(Debug)]
pub(crate) struct PutLayer {
    pub(crate) layer_idx: usize,
    pub(crate) mode: PutMode,
    pub(crate) tokens: Vec<u32>,
    pub(crate) keys: Vec<u8>,
    pub(crate) values: Vec<u8>,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PutOutcome {
    pub(crate) n_tokens: usize,
    pub(crate) is_complete: bool,
}

/// All KV that waits.
#[derive(Debug)]
pub(crate) struct Staging {
    limit_bytes: usize,
    by_id: Mutex<HashMap<String, Slot>>,
}

#[derive(Debug)]
struct Slot {
    /// Puts to one sequence wait for each other.
    staged: Arc<AsyncMutex<Staged>>,
    n_bytes: usize,
    last_use: Instant,
}

/// The layers of one sequence.
#[derive(Debug, Default)]
struct Staged {
    layers: Vec<StagedLayer>,
}

#[derive(Debug, Default)]
struct StagedLayer {
    tokens: Vec<u32>,
    kv: LayerKv,
}

impl Staging {
    pub(crate) fn new(limit_bytes: usize) -> Self {
        Self { limit_bytes, by_id: Mutex::new(HashMap::new()) }
    }

    /// Takes a layer and, if the sequence is whole with it, hands that to the engine.
    pub(crate) async fn put(
        &self,
        engine: &EngineHandle,
        n_layers: usize,
        seq_id: &str,
        put: PutLayer,
    ) -> Result<PutOutcome, Refusal> {
        loop {
            let staged = self.slot(seq_id);
            let mut guard = staged.lock().await;
            // The sequence became whole, or was dropped, while this put waited.
            if !self.is_current(seq_id, &staged) {
                continue;
            }
            let outcome = self.put_into(&mut guard, engine, n_layers, seq_id, put).await;
            if outcome.is_err() {
                guard.clear_if_untouched();
            }
            self.note_bytes(seq_id, guard.n_bytes());
            return outcome;
        }
    }

    async fn put_into(
        &self,
        staged: &mut Staged,
        engine: &EngineHandle,
        n_layers: usize,
        seq_id: &str,
        put: PutLayer,
    ) -> Result<PutOutcome, Refusal> {
        if staged.layers.is_empty() {
            staged.layers.resize_with(n_layers, StagedLayer::default);
            if put.mode == PutMode::Append
                && let Some(kv) = engine.export_kv(seq_id, 0..n_layers).await?
            {
                for (layer, exported) in staged.layers.iter_mut().zip(kv.layers) {
                    *layer = StagedLayer { tokens: kv.tokens.clone(), kv: exported };
                }
            }
        }
        let n_new = put.keys.len() + put.values.len();
        let n_others: usize =
            self.by_id.lock().iter().filter(|(id, _)| *id != seq_id).map(|(_, slot)| slot.n_bytes).sum();
        if self.limit_bytes < n_others + staged.n_bytes() + n_new {
            let message =
                format!("`kv_staging_bytes` ({}) are in use by KV that waits for layers", self.limit_bytes);
            return Err(Refusal::too_many(message, 1));
        }
        let n_tokens = staged.apply(put)?;
        let is_complete = staged.layers.iter().all(|layer| layer.tokens.len() == n_tokens);
        if is_complete {
            let tokens = staged.layers.first().map(|layer| layer.tokens.clone()).unwrap_or_default();
            let layers = std::mem::take(&mut staged.layers).into_iter().map(|layer| layer.kv).collect();
            engine.import_kv(seq_id, SequenceKv { tokens, layers }).await?;
        }
        Ok(PutOutcome { n_tokens, is_complete })
    }

    /// Drops the KV that nobody has added to for `idle`.
    pub(crate) fn end_idle(&self, idle: Duration) {
        self.by_id.lock().retain(|_, slot| slot.last_use.elapsed() < idle);
    }

    fn is_current(&self, seq_id: &str, staged: &Arc<AsyncMutex<Staged>>) -> bool {
        self.by_id.lock().get(seq_id).is_some_and(|slot| Arc::ptr_eq(&slot.staged, staged))
    }

    fn note_bytes(&self, seq_id: &str, n_bytes: usize) {
        let mut by_id = self.by_id.lock();
        if n_bytes == 0 {
            by_id.remove(seq_id);
        } else if let Some(slot) = by_id.get_mut(seq_id) {
            slot.n_bytes = n_bytes;
            slot.last_use = Instant::now();
        }
    }

    fn slot(&self, seq_id: &str) -> Arc<AsyncMutex<Staged>> {
        let mut by_id = self.by_id.lock();
        let slot = by_id.entry(seq_id.to_owned()).or_insert_with(|| Slot {
            staged: Arc::default(),
            n_bytes: 0,
            last_use: Instant::now(),
        });
        slot.last_use = Instant::now();
        Arc::clone(&slot.staged)
    }
}

impl Staged {
    fn n_bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.kv.keys.len() + layer.kv.values.len()).sum()
    }

    /// Drops what was only fetched from the engine: layers that were put are never all alike.
    fn clear_if_untouched(&mut self) {
        let n_tokens = self.layers.first().map_or(0, |layer| layer.tokens.len());
        if self.layers.iter().all(|layer| layer.tokens.len() == n_tokens) {
            self.layers.clear();
        }
    }

    /// Changes one layer; returns the tokens it then has.
    fn apply(&mut self, put: PutLayer) -> Result<usize, Refusal> {
        let Some(layer) = self.layers.get(put.layer_idx) else {
            let allowed = format!("0 to {}", self.layers.len().saturating_sub(1));
            return Err(Refusal::field("layer", put.layer_idx, &allowed));
        };
        let mut tokens = match put.mode {
            PutMode::Append => layer.tokens.clone(),
            PutMode::Replace => Vec::new(),
        };
        tokens.extend_from_slice(&put.tokens);
        let agrees = |other: &StagedLayer| other.tokens.iter().zip(&tokens).all(|(a, b)| a == b);
        let is_odd =
            self.layers.iter().enumerate().any(|(idx, other)| idx != put.layer_idx && !agrees(other));
        if is_odd {
            if put.mode == PutMode::Append {
                let message = "`token_ids` differ from those of the other layers; allowed: the same tokens in all layers";
                return Err(Refusal::invalid(message, Some("token_ids")));
            }
            self.layers.iter_mut().for_each(|layer| *layer = StagedLayer::default());
        }
        let layer = &mut self.layers[put.layer_idx];
        match put.mode {
            PutMode::Append => {
                layer.kv.keys.extend_from_slice(&put.keys);
                layer.kv.values.extend_from_slice(&put.values);
            }
            PutMode::Replace => {
                layer.kv.keys = put.keys;
                layer.kv.values = put.values;
            }
        }
        layer.kv.n_tokens = tokens.len();
        layer.tokens = tokens;
        Ok(layer.tokens.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(layer_idx: usize, mode: PutMode, tokens: &[u32]) -> PutLayer {
        let bytes = tokens.iter().map(|&token| token as u8).collect::<Vec<u8>>();
        PutLayer { layer_idx, mode, tokens: tokens.to_vec(), keys: bytes.clone(), values: bytes }
    }

    fn staged(n_layers: usize) -> Staged {
        let mut staged = Staged::default();
        staged.layers.resize_with(n_layers, StagedLayer::default);
        staged
    }

    #[test]
    fn parts_of_a_layer_are_appended_in_order() {
        let mut staged = staged(2);
        assert_eq!(staged.apply(put(0, PutMode::Append, &[1, 2])).unwrap(), 2);
        assert_eq!(staged.apply(put(0, PutMode::Append, &[3])).unwrap(), 3);
        assert_eq!(staged.layers[0].kv.keys, [1, 2, 3]);
        assert_eq!(staged.apply(put(0, PutMode::Replace, &[9])).unwrap(), 1);
        assert_eq!((staged.layers[0].kv.n_tokens, staged.layers[0].tokens.as_slice()), (1, &[9][..]));
    }

    #[test]
    fn other_tokens_are_refused_when_appended_and_start_over_when_they_replace() {
        let mut staged = staged(2);
        staged.apply(put(0, PutMode::Replace, &[1, 2])).unwrap();
        assert!(staged.apply(put(1, PutMode::Append, &[1, 3])).is_err());
        assert_eq!(staged.layers[1].tokens.len(), 0);
        staged.apply(put(1, PutMode::Replace, &[1, 3])).unwrap();
        assert_eq!(staged.layers[0].tokens.len(), 0);
        assert!(staged.apply(put(2, PutMode::Append, &[1])).is_err());
    }
}
