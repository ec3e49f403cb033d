//! How sequences end, and what stays of those that have a name.

use kvik_types::TokenId;

use super::lost_device::lose;
use super::resident::{Resident, SequenceKv};
use super::sequence::Sequence;
use super::{Engine, EngineEvent, RequestId};
use crate::error::{ModelError, Result};
use crate::paging::{BLOCK_TOKENS, BlockId};

impl Engine {
    /// Number of ended sequences that are resident.
    pub fn n_residents(&self) -> usize {
        self.residents.len()
    }

    /// Number of blocks that only residents hold: free for the taking.
    pub fn n_resident_blocks(&self) -> usize {
        self.residents.n_own_blocks(&self.pool)
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

    /// The KV of the named sequence, resident or running, in the given layers; `None` if there is no such sequence.
    ///
    /// # Errors
    /// [`ModelError::DeviceLost`] if the device has failed, now or before.
    pub fn export_kv(&mut self, name: &str, layers: std::ops::Range<usize>) -> Result<Option<SequenceKv>> {
        self.check_device()?;
        let (tokens, table, salt) = if let Some(resident) = self.residents.get(name) {
            (resident.tokens.as_slice(), resident.table.as_slice(), resident.salt.as_ref())
        } else {
            let Some(sequence) = self.running.iter().find(|sequence| sequence.is_named(name)) else {
                return Ok(None);
            };
            (sequence.computed_tokens(), sequence.table(), sequence.salt())
        };
        let exported: Result<_> =
            layers.map(|layer_idx| self.backend.export_kv(layer_idx, table, tokens.len())).collect();
        match exported {
            Ok(layers) => Ok(Some(SequenceKv { tokens: tokens.to_vec(), layers, salt: salt.cloned() })),
            Err(error) => {
                lose(&mut self.lost_device, &error);
                self.check_device().map(|()| None)
            }
        }
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
        while !self.ensure_free(n_blocks) {
            if !self.residents.evict_oldest(&mut self.pool) && !self.end_loans() {
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
        let resident = Resident { tokens: kv.tokens.clone(), table, is_foreign: true, salt: kv.salt.clone() };
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
    pub(super) fn retire(&mut self, mut sequence: Sequence) {
        sequence.end_import(&mut self.pool);
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
    pub fn finish(&mut self, id: RequestId) {
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
