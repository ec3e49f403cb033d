//! Where the blocks of a pool come from: a fixed number at the start, or memory that is shared.

mod elastic;
mod fixed;

use std::fmt;

pub use elastic::{ElasticMemory, MemoryGroup};
pub use fixed::FixedMemory;

use super::BlockId;

/// Whether others are to give memory up for what is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Nice to have: only memory that no other member wants.
    Spare,
    /// A sequence waits for it: members above their share are asked to give back.
    Required,
}

/// Hands blocks to a pool and takes them back.
///
/// A block that was taken is the pool's alone until it is given back; its memory can be written.
pub trait BlockMemory: Send + fmt::Debug {
    /// All ids are below this number.
    fn capacity_blocks(&self) -> usize;

    /// The most blocks that the pool could have if all others gave back what they can.
    fn limit_blocks(&self) -> usize;

    /// Appends blocks to `blocks`: at least `n_blocks`, or what there is, or none.
    fn take(&mut self, n_blocks: usize, need: Need, blocks: &mut Vec<BlockId>);

    /// Gives back blocks that were taken.
    fn give_back(&mut self, blocks: &[BlockId]);

    /// How many pages others ask for, returned once, or a limit forbids, returned as long as it does; the answer is
    /// given by giving blocks back.
    fn take_asked_pages(&mut self) -> usize;

    /// The page of `block`: memory goes back to others only page by page.
    fn page_of(&self, block: BlockId) -> usize;

    /// Notes the number of pages without a held block: what lies there can be computed again, so other
    /// members that need memory come first. Called whenever the number changes; does nothing by default.
    fn note_idle_pages(&mut self, _n_pages: usize) {}

    /// Tells that nothing can be computed until the blocks are there that were required last; does nothing by default.
    fn note_starved(&mut self) {}

    /// Tells that the blocks that were required and not there are no longer needed; does nothing by default.
    fn stop_waiting(&mut self) {}

    /// Sets what is called, on another thread, when others ask for memory or return some.
    fn set_waker(&mut self, waker: Box<dyn Fn() + Send + Sync>);
}
