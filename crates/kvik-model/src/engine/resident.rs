//! Ended sequences whose KV stays.
//!
//! A named sequence that ends stays resident: it goes on holding its blocks, the last, partly
//! filled one too, so that the next turn under its name computes nothing twice. Blocks of residents
//! are for the taking: when a running sequence needs one and none is free, the resident that was
//! left alone longest gives its blocks back. What it had in full blocks may then still be found by
//! hash.

use std::collections::HashMap;

use kvik_types::{CacheSalt, TokenId};

use crate::forward::LayerKv;
use crate::paging::{BlockId, BlockPool};

/// A named sequence at rest.
#[derive(Debug)]
pub(super) struct Resident {
    /// The tokens whose KV lies in `table`.
    pub(super) tokens: Vec<TokenId>,
    pub(super) table: Vec<BlockId>,
    /// Whether some of its KV was computed elsewhere.
    pub(super) is_foreign: bool,
    /// That of the request that it comes from: only requests with the same one go on from it.
    pub(super) salt: Option<CacheSalt>,
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
    /// The salt of the requests that may go on from it.
    pub salt: Option<CacheSalt>,
}

impl Residents {
    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub(super) fn get(&self, name: &str) -> Option<&Resident> {
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

    /// Number of blocks that only residents hold.
    pub(super) fn n_own_blocks(&self, pool: &BlockPool) -> usize {
        let tables = self.by_name.values().flat_map(|(_, resident)| &resident.table);
        tables.filter(|&&block| pool.n_holders(block) == 1).count()
    }
}
