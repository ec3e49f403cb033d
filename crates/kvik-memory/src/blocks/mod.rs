//! Blocks of any size on pages: what an engine's block table points to.
//!
//! A [`BlockAllocator`] hands out block ids in batches that are all or nothing. Its pages come from
//! a [`PageAllocator`](crate::pages::PageAllocator) when no block is free, and go back there when their
//! last block is freed; one empty page is kept, so that an engine that takes and frees a lone block
//! does not move a page each time.
//!
//! # Invariants
//!
//! * A block is free, used, in limbo, or belongs to no page that is held; the null block is always used.
//! * What is freed was used: anything else is refused as a whole and changes nothing.
//! * A page with a block in limbo is not given back, since a kernel may still read or write it.

mod allocator;
mod tracker;

#[cfg(test)]
mod tests;

pub use allocator::BlockAllocator;

use crate::geometry::PageId;
use crate::pages::Shortage;

/// A point in the order of an engine's work, after which blocks that were freed before it are free.
///
/// The engine counts: it frees blocks after the epoch that last touches them, and tells the allocator
/// when an epoch is complete, for example when a CUDA event fired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// What came of asking for blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum BlocksOutcome {
    /// All of them.
    Allocated,
    /// None of them.
    NoMemory(Shortage),
}

/// Counts of a [`BlockAllocator`] at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BlockCounters {
    /// Blocks that are handed out, the null block included.
    pub n_used: u32,
    /// Blocks that are free on pages that are held.
    pub n_free: u32,
    /// Blocks that wait for their epoch.
    pub n_limbo: u32,
    /// Pages that are held.
    pub n_pages: u32,
    /// Pages that are held without a used block.
    pub n_empty_pages: u32,
}

/// How much memory moving blocks would set free.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fragmentation {
    /// Pages that would be empty, those with the fewest blocks first.
    pub pages: Vec<PageId>,
    /// How many blocks have to be moved off these pages; the pages that remain have room for them.
    pub n_moves: u32,
}
