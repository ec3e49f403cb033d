//! The cache engine: tokens to chunks to tiers, and what is kept when there is no room for all of it.
//!
//! [`Store`] owns the memory tier and the tiers below it. A [`Space`] is a namespace with a format, a
//! [`Chain`] the chunks of one sequence in it. Chunks are retrieved whole or layer by layer, in the foreground
//! or ahead of their use, and are held by leases; they are stored through slots that become visible as a
//! whole, and go to the lower tiers in the background. `docs/store.md` is the design.
//!
//! [`policy`] has the eviction and admission policies: pure state machines over a tree of blocks that are
//! fed with what happens and asked for victims. They do no I/O and read no clock: time is an argument, and the
//! sequence of calls determines every answer.
//!
//! Invariants:
//!
//! * What is retrieved under a chain is what was committed for its tokens, byte for byte, or nothing.
//! * A chunk is found after its last byte is there, and never after its namespace was cleared.
//! * Memory of a reader is not used again before its lease is gone; nothing is freed by a clock.
//! * No lock is held while a lower tier is called, and no caller waits for a queue.
//! * A block is never named as a victim while another resident block hangs on it, or while it is pinned.
//! * A policy names only blocks that were inserted, and each of them once.
//!
//! ```
//! use kvik_store::policy::{Block, BlockId, PolicyKind, Request};
//!
//! let mut policy = PolicyKind::Lru.build(2);
//! let chain = [Block::full(BlockId(1)), Block::full(BlockId(2))];
//! let request = Request::new(&chain);
//! policy.access(0, &request);
//! assert!(policy.insert(0, &request, 0));
//! assert!(policy.insert(0, &request, 1));
//! // Block 1 is the prefix of block 2, so block 2 goes first.
//! assert_eq!(policy.victim(1_000), Some(BlockId(2)));
//! assert_eq!(policy.victim(1_000), Some(BlockId(1)));
//! assert_eq!(policy.victim(1_000), None);
//! ```

#![forbid(unsafe_code)]

pub mod plan;
pub mod policy;

mod chain;
mod counters;
mod device;
mod digest;
mod directory;
mod error;
mod extras;
mod flight;
mod format;
mod gather;
mod lower;
mod namespaces;
mod observer;
mod options;
mod promise;
mod residents;
mod retention;
mod space;
mod store;
mod tiers;
mod wake;

pub use chain::{Chain, NamedChain};
pub use device::register_with_cuda;
pub use digest::DigestKey;
pub use error::{Result, StoreError};
pub use extras::ExtraKey;
pub use format::{ChunkFormat, MAX_RANKS};
pub use lower::{MeasuredRead, SpeedMeter, TierSpeed};
pub use observer::{ChunkChange, ChunkObserver};
pub use options::{StoreOptions, WriteBack};
pub use retention::{Priority, Retention};
pub use space::Space;
pub use store::{
    Arriving, ChunkPlaces, ChunkRead, ChunkWriter, Clear, Cleared, Commit, CommittedChunk, FileChunks,
    FileWrite, Inquiry, KeptChunk, KeptMemory, KeptParent, KeptPin, KeptPins, KeptTime, Layer, LayerReader,
    LayerWrite, LayerWriter, LocalRange, LocalRead, Lookup, Observation, OpenChunk, Prefetch, Retrieved,
    RetrievedChunk, Store, StoreBuilder, StoreStats, TierQueues, TierWrite, Write,
};
pub use tiers::{LowerTier, TierLabel, TierName};
