//! KV that arrives layer by layer, until it is whole.
//!
//! A sequence's KV is put one layer at a time. It waits here until every layer has the same tokens;
//! then it goes into the engine at once, so that no request can continue half a sequence. All that waits
//! is bounded in bytes and in time.
//!
//! `replace` gives a layer its KV. Where its tokens differ from those of the layers that wait, the
//! sender has started over and the other layers are dropped. `append` continues what the layer has;
//! if nothing waits, what the engine has under the name.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvik_model::{LayerKv, SequenceKv};
use kvik_types::CacheSalt;
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};
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
    budget: Arc<Budget>,
    by_id: Mutex<HashMap<String, Slot>>,
}

/// The bytes that KV may take while it waits.
#[derive(Debug)]
struct Budget {
    limit_bytes: usize,
    used_bytes: AtomicUsize,
}

/// Bytes of the budget, given back when dropped.
#[derive(Debug)]
struct Charge {
    budget: Arc<Budget>,
    n_bytes: usize,
}

#[derive(Debug)]
struct Slot {
    /// Puts to one sequence wait for each other.
    staged: Arc<AsyncMutex<Staged>>,
    last_use: Instant,
}

/// The layers of one sequence.
#[derive(Debug)]
struct Staged {
    layers: Vec<StagedLayer>,
    /// That of the KV that is appended to.
    salt: Option<CacheSalt>,
    /// At least the bytes of all layers.
    charge: Charge,
}

#[derive(Debug, Default)]
struct StagedLayer {
    tokens: Vec<u32>,
    kv: LayerKv,
}

/// A sequence that a put works on. When the put ends, also because its client left, what was only fetched from
/// the engine is dropped, and so is the sequence if nothing waits any more.
struct Held<'a> {
    staging: &'a Staging,
    seq_id: &'a str,
    slot: Arc<AsyncMutex<Staged>>,
    staged: OwnedMutexGuard<Staged>,
}

impl Staging {
    pub(crate) fn new(limit_bytes: usize) -> Self {
        let budget = Arc::new(Budget { limit_bytes, used_bytes: AtomicUsize::new(0) });
        Self { budget, by_id: Mutex::new(HashMap::new()) }
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
            let slot = self.slot(seq_id);
            let staged = Arc::clone(&slot).lock_owned().await;
            // The sequence became whole, or was dropped, while this put waited.
            if !self.is_current(seq_id, &slot) {
                continue;
            }
            let mut held = Held { staging: self, seq_id, slot, staged };
            return held.put(engine, n_layers, put).await;
        }
    }

    /// Drops the KV that nothing was added to for `idle`.
    pub(crate) fn end_idle(&self, idle: Duration) {
        self.by_id.lock().retain(|_, slot| slot.last_use.elapsed() < idle);
    }

    fn is_current(&self, seq_id: &str, staged: &Arc<AsyncMutex<Staged>>) -> bool {
        self.by_id.lock().get(seq_id).is_some_and(|slot| Arc::ptr_eq(&slot.staged, staged))
    }

    fn remove(&self, seq_id: &str, staged: &Arc<AsyncMutex<Staged>>) {
        let mut by_id = self.by_id.lock();
        if by_id.get(seq_id).is_some_and(|slot| Arc::ptr_eq(&slot.staged, staged)) {
            by_id.remove(seq_id);
        }
    }

    fn slot(&self, seq_id: &str) -> Arc<AsyncMutex<Staged>> {
        let mut by_id = self.by_id.lock();
        let slot = by_id.entry(seq_id.to_owned()).or_insert_with(|| Slot {
            staged: Arc::new(AsyncMutex::new(Staged::new(&self.budget))),
            last_use: Instant::now(),
        });
        slot.last_use = Instant::now();
        Arc::clone(&slot.staged)
    }
}

impl Held<'_> {
    async fn put(
        &mut self,
        engine: &EngineHandle,
        n_layers: usize,
        put: PutLayer,
    ) -> Result<PutOutcome, Refusal> {
        let staged = &mut *self.staged;
        if staged.layers.is_empty() {
            staged.layers.resize_with(n_layers, StagedLayer::default);
            if put.mode == PutMode::Append
                && let Some(kv) = engine.export_kv(self.seq_id, 0..n_layers).await?
            {
                staged.salt = kv.salt;
                for (layer, exported) in staged.layers.iter_mut().zip(kv.layers) {
                    *layer = StagedLayer { tokens: kv.tokens.clone(), kv: exported };
                }
            }
        }
        let n_new = put.keys.len() + put.values.len();
        if !staged.charge.try_resize(staged.n_bytes() + n_new) {
            let limit_bytes = self.staging.budget.limit_bytes;
            let message =
                format!("`kv_staging_bytes` ({limit_bytes}) are in use by KV that waits for layers");
            return Err(Refusal::too_many(message, 1));
        }
        let n_tokens = staged.apply(put)?;
        if !staged.layers.iter().all(|layer| layer.tokens.len() == n_tokens) {
            return Ok(PutOutcome { n_tokens, is_complete: false });
        }
        let (kv, charge) = staged.take();
        let importing = engine.begin_import(self.seq_id, kv, Box::new(charge))?;
        // The engine has it now: the next put starts from there.
        self.staging.remove(self.seq_id, &self.slot);
        importing.await?;
        Ok(PutOutcome { n_tokens, is_complete: true })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.staged.clear_if_untouched();
        self.staged.fit_charge();
        if self.staged.layers.is_empty() {
            self.staging.remove(self.seq_id, &self.slot);
        }
    }
}

// === impl Charge ===

impl Charge {
    /// Charges `n_bytes` instead of what was charged before; false if that is more and the budget does not
    /// have it.
    fn try_resize(&mut self, n_bytes: usize) -> bool {
        if n_bytes <= self.n_bytes {
            self.budget.used_bytes.fetch_sub(self.n_bytes - n_bytes, Ordering::Relaxed);
            self.n_bytes = n_bytes;
            return true;
        }
        let (n_more, limit) = (n_bytes - self.n_bytes, self.budget.limit_bytes);
        // Relaxed: the number alone is shared.
        let taken = self.budget.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(n_more).filter(|used| *used <= limit)
        });
        if taken.is_ok() {
            self.n_bytes = n_bytes;
        }
        taken.is_ok()
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.used_bytes.fetch_sub(self.n_bytes, Ordering::Relaxed);
    }
}

// === impl Staged ===

impl Staged {
    fn new(budget: &Arc<Budget>) -> Self {
        Self { layers: Vec::new(), salt: None, charge: Charge { budget: Arc::clone(budget), n_bytes: 0 } }
    }

    /// Takes KV that is whole, with what is charged for it.
    fn take(&mut self) -> (SequenceKv, Charge) {
        let tokens = self.layers.first().map(|layer| layer.tokens.clone()).unwrap_or_default();
        let layers = std::mem::take(&mut self.layers).into_iter().map(|layer| layer.kv).collect();
        let nothing = Charge { budget: Arc::clone(&self.charge.budget), n_bytes: 0 };
        let charge = std::mem::replace(&mut self.charge, nothing);
        (SequenceKv { tokens, layers, salt: self.salt.take() }, charge)
    }

    /// Charges what is there and no more.
    fn fit_charge(&mut self) {
        let n_bytes = self.n_bytes().min(self.charge.n_bytes);
        self.charge.try_resize(n_bytes);
    }

    fn n_bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.kv.keys.len() + layer.kv.values.len()).sum()
    }

    /// Drops what was only fetched from the engine: layers that were put are never all alike.
    fn clear_if_untouched(&mut self) {
        let n_tokens = self.layers.first().map_or(0, |layer| layer.tokens.len());
        if self.layers.iter().all(|layer| layer.tokens.len() == n_tokens) {
            self.layers.clear();
            self.salt = None;
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
            self.salt = None;
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
        let mut staged = Staged::new(&Staging::new(1 << 20).budget);
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

    #[tokio::test]
    async fn a_client_that_leaves_while_its_kv_goes_to_the_engine_leaves_nothing_charged() {
        let staging = Staging::new(10);
        let (engine, commands) = EngineHandle::without_thread();
        staging.put(&engine, 2, "a", put(0, PutMode::Replace, &[1, 2])).await.unwrap();
        let leaving = staging.put(&engine, 2, "a", put(1, PutMode::Replace, &[1, 2]));
        // The engine does not answer; the client leaves.
        assert!(tokio::time::timeout(Duration::ZERO, leaving).await.is_err());
        assert!(staging.by_id.lock().is_empty());
        // Until the engine has taken the KV, it is there and counts.
        assert_eq!(staging.budget.used_bytes.load(Ordering::Relaxed), 8);
        let refused = staging.put(&engine, 2, "b", put(0, PutMode::Replace, &[1, 2])).await.unwrap_err();
        assert_eq!(refused.status, http::StatusCode::TOO_MANY_REQUESTS);
        drop(commands);
        assert_eq!(staging.budget.used_bytes.load(Ordering::Relaxed), 0);
        staging.put(&engine, 2, "b", put(0, PutMode::Replace, &[1, 2, 3, 4, 5])).await.unwrap();
        assert_eq!(staging.budget.used_bytes.load(Ordering::Relaxed), 10);
    }

    #[test]
    fn charges_of_several_threads_never_exceed_the_budget() {
        let budget = Staging::new(10).budget;
        let n_granted: usize = std::thread::scope(|scope| {
            let charge = || {
                let mut charge = Charge { budget: Arc::clone(&budget), n_bytes: 0 };
                let is_granted = charge.try_resize(4);
                // Kept: none of the others may have these bytes.
                std::mem::forget(charge);
                usize::from(is_granted)
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(charge)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!((n_granted, budget.used_bytes.load(Ordering::Relaxed)), (2, 8));
    }
}
