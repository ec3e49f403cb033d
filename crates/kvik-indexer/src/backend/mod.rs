//! Where a book is kept: in memory, or on a server that several gateways share.

use futures_util::future::BoxFuture;
use kvik_index::holders::{BlockKey, Event, N_TIERS, SourceName, Verdict, Walk};

use crate::error::Result;

pub mod memory;
pub mod redis;

/// Events in the keys of a book.
#[derive(Debug, Clone, Copy)]
pub struct KeyedBatch<'a> {
    /// The engine's epoch; `None` from engines that have no such thing.
    pub epoch: Option<u64>,
    /// Its number, without gaps within an epoch.
    pub sequence: u64,
    /// Whether it comes from a replay.
    pub replayed: bool,
    /// When the engine published it, Unix time in seconds, by the engine's clock. Where several gateways
    /// write one book, it distinguishes a restart (the number falls, the time rises) from a batch that another
    /// gateway was faster with (both fall).
    pub published_s: f64,
    /// What happened, in order.
    pub events: &'a [Event<'a>],
}

/// All that a source holds, in the keys of a book.
#[derive(Debug, Clone, Copy)]
pub struct KeyedHolding<'a> {
    /// The engine's epoch.
    pub epoch: Option<u64>,
    /// The number of the first batch that is not counted in.
    pub next_sequence: u64,
    /// Runs of blocks, each with the tier that has them.
    pub runs: &'a [(kvik_index::holders::Tier, Vec<BlockKey>)],
}

/// What one source has of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Whose it is.
    pub source: SourceName,
    /// Whether events of the source are missing, so that it may have more or less than this.
    pub is_unsure: bool,
    /// Blocks from the first on that it has, by the fastest tier that has each.
    pub prefix_in: [u32; N_TIERS],
    /// Blocks anywhere that it has, by the fastest tier that has each; only of [`Walk::All`].
    pub covered_in: [u32; N_TIERS],
    /// The 1-based place of the last block that it has; only of [`Walk::All`].
    pub highest_block: u32,
}

/// Where a source stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceState {
    /// Whose it is.
    pub source: SourceName,
    /// The last epoch that was named.
    pub epoch: Option<u64>,
    /// The number of the batch that is due.
    pub due_sequence: Option<u64>,
    /// Whether events are missing.
    pub is_unsure: bool,
    /// Pairs of block and tier that it has; `None` where it is not counted.
    pub n_blocks: Option<u64>,
}

/// A page of the blocks of a source.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SourceBlocks {
    /// Blocks in no particular order, each with a set of tiers (bit `i` is `Tier::ALL[i]`).
    pub blocks: Vec<(BlockKey, u8)>,
    /// The cursor of the next page; `None` after the last one.
    pub next: Option<u64>,
}

/// Keeps the holders of every block.
///
/// Every implementation answers as the in-memory one does: presence by block and holder, nothing inferred
/// from neighbors, a restart forgets at once. Where the server is away a call fails; whether it changed
/// something is then not known, and to make it again is safe.
pub trait Backend: Send + Sync + std::fmt::Debug {
    /// Its kind: `memory`, `redis`.
    fn kind(&self) -> &'static str;

    /// Takes a batch of a source, which is added if it is new.
    fn apply<'a>(&'a self, source: &'a SourceName, batch: KeyedBatch<'a>) -> BoxFuture<'a, Result<Verdict>>;

    /// Replaces all that is known of a source, which is added if it is new. False if it is of an earlier
    /// epoch.
    fn replace<'a>(
        &'a self,
        source: &'a SourceName,
        holding: KeyedHolding<'a>,
    ) -> BoxFuture<'a, Result<bool>>;

    /// Gives up on batches that are missing; `next` is due now.
    fn skip_gap<'a>(&'a self, source: &'a SourceName, next: u64) -> BoxFuture<'a, Result<()>>;

    /// The last epoch that a source named and the number that is due; `None` if there is no such source.
    fn state<'a>(&'a self, source: &'a SourceName) -> BoxFuture<'a, Result<Option<SourceState>>>;

    /// All sources.
    fn states(&self) -> BoxFuture<'_, Result<Vec<SourceState>>>;

    /// Forgets a source and all that it holds; false if there is no such source.
    fn remove_source<'a>(&'a self, source: &'a SourceName) -> BoxFuture<'a, Result<bool>>;

    /// Forgets these blocks of a source in every tier, because a worker was found not to have them.
    fn forget<'a>(&'a self, source: &'a SourceName, keys: &'a [BlockKey]) -> BoxFuture<'a, Result<()>>;

    /// Finds how much of a prompt each source has; `keys` are its blocks in order. Sources without any are
    /// left out.
    fn lookup<'a>(&'a self, keys: &'a [BlockKey], walk: Walk) -> BoxFuture<'a, Result<Vec<Row>>>;

    /// About `limit` blocks of a source, from the cursor `from` on that the page before gave; `None` is the first page.
    ///
    /// A page costs a bounded number of steps and lets neither lookups nor changes wait. It may have fewer blocks, or
    /// none, although more follow. Over all pages, every block that the source has throughout is listed.
    fn blocks_of<'a>(
        &'a self,
        source: &'a SourceName,
        from: Option<u64>,
        limit: usize,
    ) -> BoxFuture<'a, Result<SourceBlocks>>;
}
