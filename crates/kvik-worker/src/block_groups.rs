//! The groups of blocks in the worker's log.

/// The engine's token blocks.
pub(crate) const BLOCKS: u32 = 0;
/// The store's chunks.
pub(crate) const CHUNKS: u32 = 1;
