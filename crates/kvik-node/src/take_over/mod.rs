//! A new daemon takes over from a running one: the memory with its chunks, and the listening socket.
//!
//! | step | new daemon | old daemon |
//! |---|---|---|
//! | 1 | sends its [terms](TakeOver): the settings that must agree | compares them, and writes down what waits for lower tiers |
//! | 2 | | pauses: sessions finish what they hold, and end |
//! | 3 | | closes the lower tiers, and sends the arena and the [list](ChunkList) of each tenant, then its socket |
//! | 4 | opens its stores on the arenas, and sends that it serves | |
//! | 5 | accepts clients | ends |
//!
//! Memory has one user at any time. The old daemon lets go of nothing before step 3, and changes nothing after it. If it
//! receives that the new one serves, it ends; if the connection ends without that, the new one has changed no byte, and the
//! old one opens its stores again. If it waits too long it closes the connection first: then either the word has
//! arrived before, or the new daemon cannot send it any more and gives up.

mod frame;
mod list;
mod successor;

use std::fmt;

use kvik_store::{KeptMemory, LowerTier, Store, StoreOptions, register_with_cuda};

use crate::error::{NodeError, Result};
use crate::tenant::Tenant;

pub(crate) use frame::is_take_over;
pub use frame::{TakeOver, TakeOverFrame, TenantTerms};
pub use list::{ChunkList, ListedChunk};
pub use successor::TakeOverOptions;

/// What a store is made of beside its memory.
#[derive(Debug)]
pub struct StoreParts {
    /// Its settings.
    pub options: StoreOptions,
    /// The tiers below memory, fastest first.
    pub tiers: Vec<LowerTier>,
    /// GPU through which its memory is registered with CUDA.
    pub cuda_device: Option<u32>,
}

/// Opens what the stores of a daemon are made of: after a take-over, or again after one that failed.
pub trait TenantOpener: fmt::Debug + Send + Sync {
    /// Opens the lower tiers of a tenant, which no other store has open.
    ///
    /// # Errors
    /// If a tier cannot be used.
    fn parts(&self, tenant: &str) -> Result<StoreParts>;

    /// Where other nodes read the chunks, `host:port`, which clients receive; `None` where they do not.
    fn peer_address(&self) -> Option<String> {
        None
    }

    /// Told before the stores are taken apart: nothing else may use them when it returns.
    fn pausing(&self) {}

    /// Told when a take-over failed, with the tenants that are served again.
    fn resumed(&self, _tenants: &[Tenant]) {}

    /// Told when another daemon serves in place of this one.
    fn taken_over(&self) {}
}

impl StoreParts {
    /// Puts the store together on memory that another one left, or that is new.
    ///
    /// # Errors
    /// If a setting is not allowed, or if there are no threads.
    pub fn open(self, memory: KeptMemory) -> Result<Store> {
        if let Some(ordinal) = self.cuda_device {
            register_with_cuda(memory.ram.arena(), ordinal).map_err(NodeError::opening)?;
        }
        let mut builder = Store::builder_on(self.options, memory);
        for tier in self.tiers {
            builder = builder.tier(tier);
        }
        builder.open().map_err(NodeError::opening)
    }
}
