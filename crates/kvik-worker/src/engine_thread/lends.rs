//! Blocks of running requests that other threads ask the engine for.

use kvik_model::LentBlocks;
use tokio::sync::oneshot;

/// Asks for full blocks of an output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LendRequest {
    pub(crate) ticket: u64,
    pub(crate) choice: u32,
    pub(crate) first_block: usize,
    pub(crate) max_blocks: usize,
    pub(crate) wait: LendWait,
}

/// What is waited for while no block is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LendWait {
    /// Nothing.
    No,
    /// The end of the next block, as long as the output advances.
    Block,
    /// The end of the next block, as long as the request has no token.
    Prompt,
}

/// A loan that waits.
#[derive(Debug)]
pub(super) struct WaitingLend {
    pub(super) request: LendRequest,
    pub(super) reply: oneshot::Sender<Option<LentBlocks>>,
}
