//! Where sources deliver the events of engines.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use kvik_index::holders::{BlockKey, Tier, Verdict};
use kvik_proto::events::KvEvent;
use kvik_types::BlockHash;

use crate::error::Result;

/// Whose events a feed takes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FeedName {
    /// The model, as requests name it.
    pub model: String,
    /// The worker: a worker's id, or the address of another engine.
    pub worker: String,
    /// Its data parallel rank; 0 where there is only one.
    pub rank: u32,
}

/// How the engine behind a feed names its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Naming {
    /// To be learned from its events: its own hashes where they can be computed from tokens, otherwise
    /// kvik's chain through a bridge.
    Learned,
    /// In a way that is not known: kvik's chain through a bridge.
    Bridged,
    /// The first eight bytes, big endian, of the hashes of kvik's chain.
    Kvik {
        /// The parent of the first block: the seed of the worker's namespace.
        root: BlockHash,
        /// Tokens of a block.
        block_tokens: u32,
    },
}

/// The events that an engine published under one number.
#[derive(Debug, Clone, PartialEq)]
pub struct FeedBatch {
    /// The engine's epoch; `None` from engines that have no such thing.
    pub epoch: Option<u64>,
    /// Its number, without gaps within an epoch.
    pub sequence: u64,
    /// Whether it comes from a replay.
    pub replayed: bool,
    /// When the engine published it, Unix time in seconds, by the engine's clock.
    pub published_s: f64,
    /// What happened, in order.
    pub events: Vec<KvEvent>,
}

/// All that an engine holds at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// The engine's epoch.
    pub epoch: Option<u64>,
    /// The number of the first batch that is not counted in.
    pub next_sequence: u64,
    /// Runs of blocks, each with the tier that has them.
    pub runs: Vec<(Tier, Vec<BlockKey>)>,
}

/// Opens feeds.
pub trait Feeds: Send + Sync {
    /// Opens the feed of a worker and rank; an earlier feed of that name is replaced.
    ///
    /// A worker that names blocks in several ways, such as token blocks and chunks of them, has a feed for
    /// each: feeds of one name and different [`Naming::Kvik`] stand side by side, with numbers of their own.
    ///
    /// # Errors
    /// If the name cannot be used or there is no room for another source.
    fn open(&self, name: FeedName, naming: Naming) -> BoxFuture<'_, Result<Arc<dyn Feed>>>;
}

/// Takes the events of one worker and rank, in the order in which it is called.
///
/// A caller waits for one call before it makes the next.
pub trait Feed: Send + Sync + std::fmt::Debug {
    /// Takes a batch and says what became of it; see [`Verdict`] for what a gap asks of the caller.
    fn apply(&self, batch: FeedBatch) -> BoxFuture<'_, Result<Verdict>>;

    /// Replaces all that is known by what the engine says it holds. False if it is of an earlier epoch. Of an engine
    /// whose naming is learned only an empty holding can be reported: it begins anew.
    fn replace(&self, holding: Holding) -> BoxFuture<'_, Result<bool>>;

    /// Gives up on batches that are missing; `next` is due now.
    fn skip_gap(&self, next: u64) -> BoxFuture<'_, Result<()>>;

    /// The last epoch that was named and the number that is due; what a replay starts from.
    fn position(&self) -> BoxFuture<'_, Result<(Option<u64>, Option<u64>)>>;

    /// The worker is gone: nothing of it is found any more.
    fn close(&self) -> BoxFuture<'_, Result<()>>;
}

/// Forgets all that is known of a feed's engine: the first batch of an epoch is due again.
///
/// # Errors
/// As [`Feed::replace`].
pub(crate) async fn forget(feed: &dyn Feed) -> Result<()> {
    feed.replace(Holding { epoch: None, next_sequence: 0, runs: Vec::new() }).await.map(|_| ())
}
