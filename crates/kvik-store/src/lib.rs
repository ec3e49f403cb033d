//! The cache engine: which KV is kept when there is no room for all of it.
//!
//! [`policy`] has the eviction and admission policies: pure state machines over a tree of blocks that are
//! told what happens and asked for victims. [`sim`] replays request traces through the same code.
//!
//! The crate does no I/O of its own and reads no clock: time is an argument, and the sequence of calls
//! determines every answer.
//!
//! Invariants:
//!
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

pub mod policy;
pub mod sim;
