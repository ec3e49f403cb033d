//! Eviction and admission: pure policies over a tree of blocks.
//!
//! A policy is notified of every request ([`Policy::access`]), of every block that becomes resident
//! ([`Policy::insert`]) or leaves for a reason of its own ([`Policy::remove`]), and is asked for a victim
//! when room is needed. All of them keep their blocks in a [`Tree`], which is what makes eviction leaf
//! first: a prefix stays as long as anything resident hangs on it.

mod arc;
mod cost;
mod fifo;
mod ghosts;
mod kvik;
mod lfu;
mod lru;
mod ranked;
mod s3fifo;
mod tree;

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

pub use arc::ArcPolicy;
pub use cost::{CostPolicy, Saving};
pub use fifo::{Arrival, FifoPolicy};
pub use kvik::KvikPolicy;
pub use lfu::{Frequency, LfuPolicy};
pub use lru::{LruPolicy, Recency};
pub use ranked::{RankedPolicy, Ranking};
pub use s3fifo::S3FifoPolicy;
pub use tree::Tree;

/// Names a block (or chunk) to a policy: equal ids are the same content after the same prefix.
///
/// A policy remembers some blocks after they are gone, so an id must not be given to another content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct BlockId(pub u64);

/// One block of a request's chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Its name.
    pub id: BlockId,
    /// What it occupies.
    pub bytes: u64,
    /// Time to compute it again when everything before it is there.
    pub recompute_us: u64,
    /// Whether all its tokens are there; only the tail of a chain may be partly full.
    pub is_full: bool,
}

impl Block {
    /// A full block of one byte that takes one microsecond: for callers that count blocks alone.
    pub fn full(id: BlockId) -> Self {
        Self { id, bytes: 1, recompute_us: 1, is_full: true }
    }
}

/// A request as the store sees it: a chain of blocks from the root, each the prefix of the next.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The chain, root first.
    pub blocks: &'a [Block],
    /// Tokens that were generated after the chain, where that is known.
    pub n_generated_tokens: Option<u32>,
}

impl<'a> Request<'a> {
    /// A request of which nothing is known but its chain.
    pub fn new(blocks: &'a [Block]) -> Self {
        Self { blocks, n_generated_tokens: None }
    }
}

/// Decides what leaves when room is needed, and what is not worth storing.
///
/// Time is in milliseconds from any origin and never goes back; a policy that is handed an earlier time
/// takes it for the latest it has seen. Equal sequences of calls give equal answers.
pub trait Policy: fmt::Debug + Send {
    /// Tells of a request, before its missing blocks are inserted.
    ///
    /// Blocks of the chain that are not resident are no error: a policy may learn from them.
    fn access(&mut self, now_ms: u64, request: &Request<'_>);

    /// Says whether a missing block is worth storing when another one would have to leave for it.
    ///
    /// The caller asks only when room must be made, and stores nothing behind a refused block.
    fn admits(&mut self, _now_ms: u64, _request: &Request<'_>, _index: usize) -> bool {
        true
    }

    /// Tells that block `index` of the request's chain became resident.
    ///
    /// Returns false, and changes nothing, where it is resident already or its parent is not.
    fn insert(&mut self, now_ms: u64, request: &Request<'_>, index: usize) -> bool;

    /// Names a block that must leave, and forgets it as a resident.
    ///
    /// `None` when nothing is resident that is neither pinned nor a prefix of a resident block.
    fn victim(&mut self, now_ms: u64) -> Option<BlockId>;

    /// Tells that a block left for another reason than eviction.
    ///
    /// Returns false, and changes nothing, where it is not resident, is pinned or has resident children.
    fn remove(&mut self, id: BlockId) -> bool;

    /// Keeps a resident block, and so everything before it, from being a victim until it is unpinned as
    /// often as it was pinned. Returns false where it is not resident.
    fn pin(&mut self, id: BlockId) -> bool;

    /// Takes one pin away. Returns false where the block is not resident or has none.
    fn unpin(&mut self, id: BlockId) -> bool;

    /// Says whether another place has a resident block too. A copy leaves before blocks that are hardly worth more to
    /// the policy; a block that is no copy is spared so for a bounded number of victims. Returns false where the block
    /// is not resident. A block that becomes resident is no copy.
    fn set_copy(&mut self, id: BlockId, is_copy: bool) -> bool;

    /// The resident blocks.
    fn tree(&self) -> &Tree;
}

/// The policies by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyKind {
    /// Least recently used.
    Lru,
    /// Least often used.
    Lfu,
    /// First in, first out.
    Fifo,
    /// A small queue for what was seen once, a main queue for the rest.
    S3Fifo,
    /// Recency and frequency in a balance that follows the ghosts.
    Arc,
    /// Least recompute time saved per byte, aged.
    Cost,
    /// Least expected reuse for the room and time it takes, learned as requests come.
    Kvik,
}

impl PolicyKind {
    /// All of them, the default last.
    pub const ALL: [Self; 7] =
        [Self::Lru, Self::Lfu, Self::Fifo, Self::S3Fifo, Self::Arc, Self::Cost, Self::Kvik];

    /// The name that [`FromStr`] reads.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::Fifo => "fifo",
            Self::S3Fifo => "s3fifo",
            Self::Arc => "arc",
            Self::Cost => "cost",
            Self::Kvik => "kvik",
        }
    }

    /// Builds the policy for a cache of about that many blocks.
    ///
    /// The capacity scales queues and memory of evicted blocks; the caller enforces it.
    pub fn build(self, capacity_blocks: usize) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(LruPolicy::new()),
            Self::Lfu => Box::new(LfuPolicy::new()),
            Self::Fifo => Box::new(FifoPolicy::new()),
            Self::S3Fifo => Box::new(S3FifoPolicy::new(capacity_blocks)),
            Self::Arc => Box::new(ArcPolicy::new(capacity_blocks)),
            Self::Cost => Box::new(CostPolicy::new()),
            Self::Kvik => Box::new(KvikPolicy::new(capacity_blocks)),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// No policy has that name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no policy is named '{0}': there are lru, lfu, fifo, s3fifo, arc, cost and kvik")]
pub struct UnknownPolicy(pub String);

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}
