//! Ended sequences whose KV stays.
//!
//! A named sequence that ends stays resident: it goes on holding its blocks, the last, partly
//! filled one too, so that the next turn under its name computes nothing twice. Blocks of residents
//! are for the taking: when a running sequence needs one and none is free, the resident that was
//! left alone longest gives its blocks back. What it had in full blocks may then still be found by
//! hash.

use std::collections::HashMap;

use kvik_types::TokenId;

use super::sequence::Sequence;
use super::{Engine, EngineEvent};
use crate::error::{ModelError, Result};
use crate::forward::LayerKv;
use crate::paging::{BLOCK_TOKENS, BlockId, BlockPool};

/// A named sequence at rest.
#[derive(Debug)]
pub(super) struct Resident {
    /// The tokens whose KV lies in `table`.
    pub(super) tokens: Vec<TokenId>,
    pub(super) table: Vec<BlockId>,
    /// Whether some of its KV was computed elsewhere.
    pub(super) is_foreign: bool,
}

/// The residents of an engine.
#[derive(Debug, Default)]
pub(super) struct Residents {
    /// With the number of the use that was the last: the order of eviction.
    by_name: HashMap<String, (u64, Resident)>,
    n_uses: u64,
}

/// The KV of a named sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceKv {
    /// The tokens whose KV is there.
    pub tokens: Vec<TokenId>,
    /// Keys and values of each layer that was asked for.
    pub layers: Vec<LayerKv>,
}

impl Residents {
    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    fn get(&self, name: &str) -> Option<&Resident> {
        self.by_name.get(name).map(|(_, resident)| resident)
    }

    pub(super) fn insert(&mut self, name: String, resident: Resident, pool: &mut BlockPool) {
        self.n_uses += 1;
        if let Some((_, mut replaced)) = self.by_name.insert(name, (self.n_uses, resident)) {
            pool.release(&mut replaced.table);
        }
    }

    pub(super) fn take(&mut self, name: &str) -> Option<Resident> {
        self.by_name.remove(name).map(|(_, resident)| resident)
    }

    /// Gives back the blocks of the resident that was left alone longest; false if there is none.
    pub(super) fn evict_oldest(&mut self, pool: &mut BlockPool) -> bool {
        let oldest = self.by_name.iter().min_by_key(|(_, (last_use, _))| *last_use);
        let Some(name) = oldest.map(|(name, _)| name.clone()) else { return false };
        if let Some(mut resident) = self.take(&name) {
            pool.release(&mut resident.table);
        }
        true
    }
}

impl Engine {
    /// Number of ended sequences that are resident.
    pub fn n_residents(&self) -> usize {
        self.residents.len()
    }

    /// Number of blocks that only residents hold: free for the taking.
    pub fn n_resident_blocks(&self) -> usize {
        let residents = self.residents.by_name.values().map(|(_, resident)| resident);
        residents
            .flat_map(|resident| &resident.table)
            .filter(|&&block| self.pool.n_holders(block) == 1)
            .count()
    }

    /// The tokens of the resident `name` whose KV is there.
    pub fn resident_tokens(&self, name: &str) -> Option<&[TokenId]> {
        self.residents.get(name).map(|resident| resident.tokens.as_slice())
    }

    /// Forgets the resident `name`; false if there is none.
    pub fn forget_resident(&mut self, name: &str) -> bool {
        let Some(mut resident) = self.residents.take(name) else { return false };
        self.pool.release(&mut resident.table);
        true
    }

    /// The KV of the named sequence, resident or running, in the given layers.
    pub fn export_kv(&self, name: &str, layers: std::ops::Range<usize>) -> Option<SequenceKv> {
        let (tokens, table) = if let Some(resident) = self.residents.get(name) {
            (resident.tokens.as_slice(), resident.table.as_slice())
        } else {
            let sequence = self.running.iter().find(|sequence| sequence.is_named(name))?;
            (sequence.computed_tokens(), sequence.table())
        };
        let layers = layers.map(|layer_idx| self.backend.export_kv(layer_idx, table, tokens.len())).collect();
        Some(SequenceKv { tokens: tokens.to_vec(), layers })
    }

    /// Makes `kv`, which must have every layer, the resident `name`.
    ///
    /// Its blocks are the resident's own: they are never found by hash, so KV from outside reaches
    /// no sequence but the one that asks for it by name.
    ///
    /// # Errors
    /// [`ModelError::InvalidRequest`] if the tokens are none, too many or not in the vocabulary, a
    /// layer is missing or has the wrong size; [`ModelError::NoRoom`] if running sequences hold the
    /// blocks it needs.
    pub fn import_kv(&mut self, name: &str, kv: &SequenceKv) -> Result<()> {
        let config = self.backend.config();
        let (n_layers, vocab_size) = (config.n_layers, config.vocab_size);
        let n_tokens = kv.tokens.len();
        if n_tokens == 0 || self.max_sequence_tokens() < n_tokens {
            let allowed = format!("1 to {} tokens", self.max_sequence_tokens());
            return Err(ModelError::request("token_ids", format!("{n_tokens} tokens"), allowed));
        }
        if let Some(token) = kv.tokens.iter().find(|&&token| vocab_size <= token as usize) {
            return Err(ModelError::request("token_ids", token, format!("token ids below {vocab_size}")));
        }
        if kv.layers.len() != n_layers || kv.layers.iter().any(|layer| layer.n_tokens != n_tokens) {
            let allowed = format!("{n_layers} layers of {n_tokens} tokens");
            return Err(ModelError::request("layers", kv.layers.len(), allowed));
        }
        let n_blocks = n_tokens.div_ceil(BLOCK_TOKENS);
        while !self.pool.ensure_free(n_blocks) {
            if !self.residents.evict_oldest(&mut self.pool) {
                return Err(ModelError::NoRoom { n_blocks, n_free: self.pool.n_free() });
            }
        }
        let mut table: Vec<BlockId> = (0..n_blocks).filter_map(|_| self.pool.allocate()).collect();
        for (layer_idx, layer) in kv.layers.iter().enumerate() {
            if let Err(error) = self.backend.import_kv(layer_idx, &table, layer) {
                self.pool.release(&mut table);
                return Err(error);
            }
        }
        let resident = Resident { tokens: kv.tokens.clone(), table, is_foreign: true };
        self.residents.insert(name.to_owned(), resident, &mut self.pool);
        Ok(())
    }

    /// Takes the ended sequences out of the running ones; named ones stay resident.
    pub(super) fn retire_finished(&mut self) {
        let finished: Vec<Sequence> =
            self.running.extract_if(.., |sequence| sequence.is_finished()).collect();
        for sequence in finished {
            self.retire(sequence);
        }
    }

    /// Ends one sequence; a named one stays resident.
    pub(super) fn retire(&mut self, sequence: Sequence) {
        self.offer(&sequence);
        match sequence.into_resident() {
            (Some(name), resident) if !resident.tokens.is_empty() => {
                self.residents.insert(name, resident, &mut self.pool);
            }
            (_, mut resident) => self.pool.release(&mut resident.table),
        }
    }

    /// Ends the request at its next chance, without further events; its named sequence stays
    /// resident with what was computed.
    pub fn finish(&mut self, id: super::RequestId) {
        for sequence in self.take_running(id) {
            self.retire(sequence);
        }
        self.waiting.retain(|sequence| sequence.request != id);
    }

    /// Steps until nothing can advance and returns all events.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn run_until_idle(&mut self) -> Result<Vec<EngineEvent>> {
        let mut events = Vec::new();
        while self.has_work() {
            self.step(&mut events)?;
        }
        Ok(events)
    }
}
