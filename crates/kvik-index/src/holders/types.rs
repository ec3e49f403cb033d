//! Types of the index that all its parts share: keys, events, configuration, errors.

/// The longest name of a worker, in bytes.
pub(super) const MAX_NAME_BYTES: usize = 512;
/// The most sources: each may have a holder in every tier.
pub(super) const MAX_SOURCES: usize = 8191;

/// Stands for a token block and everything before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub u64);

/// One worker and rank, as [`HolderIndex::add_source`](super::HolderIndex::add_source) numbered it.
///
/// It stands for that source until the source is removed; the number may later be given out again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceId(pub(crate) u32);

impl SourceId {
    /// A small number, dense over the sources, to index a table of the caller's with.
    pub fn as_index(self) -> usize {
        self.0 as usize
    }
}

/// How many tiers there are.
pub const N_TIERS: usize = 4;

/// The kind of place where a worker has a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// Memory of the device that computes.
    Gpu,
    /// Memory of the host.
    Cpu,
    /// A disk of the host.
    Disk,
    /// A store outside of the host.
    Remote,
}

impl Tier {
    /// All of them, fastest first.
    pub const ALL: [Self; N_TIERS] = [Self::Gpu, Self::Cpu, Self::Disk, Self::Remote];

    /// Its place in [`Self::ALL`].
    pub fn as_index(self) -> usize {
        self as usize
    }
}

/// What one event says about a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// The source has these blocks now; the run is in the order of the prompt.
    Stored {
        /// Where it has them.
        tier: Tier,
        /// The block before the first one, where the event names it. It only helps to keep a prompt
        /// together; whether it is known does not matter.
        parent: Option<BlockKey>,
        /// The blocks.
        keys: &'a [BlockKey],
    },
    /// The source has lost these blocks, in any order.
    Removed {
        /// Where it had them.
        tier: Tier,
        /// The blocks.
        keys: &'a [BlockKey],
    },
    /// The source has lost all its blocks, in one tier or in every tier.
    Cleared {
        /// Where; `None` is everywhere.
        tier: Option<Tier>,
    },
}

/// Events that a source sent under one sequence number.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// The sender.
    pub source: SourceId,
    /// The sender's epoch; `None` from engines that have no such thing.
    pub epoch: Option<u64>,
    /// Its number, from [`IndexConfig::first_sequence`] on, without gaps within an epoch.
    pub sequence: u64,
    /// Whether it comes from a replay that the caller asked for. In a live stream without epochs a
    /// sequence that falls back is a restart; in a replay it is a duplicate.
    pub replayed: bool,
    /// What happened, in order.
    pub events: &'a [Event<'a>],
}

/// What a holder index is built with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexConfig {
    /// Bytes the index may take, all of it counted; default 4 GiB. Below
    /// [`HolderIndex::MIN_BUDGET_BYTES`](super::HolderIndex::MIN_BUDGET_BYTES) that is taken instead.
    pub budget_bytes: u64,
    /// Block and tier pairs one source may hold; what it stores beyond is dropped and counted. Default 2^32.
    pub max_blocks_per_source: u64,
    /// How many sources there may be, at most [`HolderIndex::MAX_SOURCES`](super::HolderIndex::MAX_SOURCES), which is the default.
    pub max_sources: usize,
    /// The number of the first batch of an epoch; default 0.
    pub first_sequence: u64,
    /// Seed of the table's hash function, a random number, so that keys from outside cannot be chosen to collide.
    /// Default 0.
    pub hash_seed: u64,
    /// Tokens of a block, carried in the snapshot so that indexes of another size refuse it. Default 16.
    pub block_tokens: u32,
    /// Which chain the keys belong to, as the caller numbers them; carried in the snapshot. Default 0.
    pub key_mode: u32,
    /// Threads that store many blocks at a time, at least 1; default 4, or fewer where there are fewer cores. They end
    /// with each call.
    pub n_threads: usize,
}

impl Default for IndexConfig {
    fn default() -> Self {
        Self {
            budget_bytes: 4 << 30,
            max_blocks_per_source: 1 << 32,
            max_sources: MAX_SOURCES,
            first_sequence: 0,
            hash_seed: 0,
            block_tokens: 16,
            key_mode: 0,
            n_threads: std::thread::available_parallelism().map_or(1, |n_cores| n_cores.get().min(4)),
        }
    }
}

/// What a holder index refuses, by what the caller can do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// The source is there already; use its id.
    #[error("source {name} rank {rank} is already in the index")]
    SourceExists {
        /// The worker's name.
        name: String,
        /// Its rank.
        rank: u32,
    },
    /// A name is empty or longer than [`HolderIndex::MAX_NAME_BYTES`](super::HolderIndex::MAX_NAME_BYTES).
    #[error("name of {n_bytes} bytes: allowed are 1 to {MAX_NAME_BYTES}")]
    BadName {
        /// Its length.
        n_bytes: usize,
    },
    /// No further source fits; remove one, or wait until removed ones are swept.
    #[error("no room for another source: at most {max_sources}")]
    TooManySources {
        /// The configured bound.
        max_sources: usize,
    },
    /// The bytes are not a snapshot of this version, or they are damaged.
    #[error("snapshot is unusable: {reason}")]
    BadSnapshot {
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The snapshot is sound but of other keys; start empty.
    #[error("snapshot is of {field} {found}, this index has {expected}")]
    OtherKeys {
        /// Which setting differs.
        field: &'static str,
        /// Its value in the snapshot.
        found: u32,
        /// Its value here.
        expected: u32,
    },
    /// The snapshot needs more than the budget; start empty or raise the budget.
    #[error("snapshot needs about {needed_bytes} bytes, the budget is {budget_bytes}")]
    OverBudget {
        /// An estimate of its size in memory.
        needed_bytes: u64,
        /// The configured bound.
        budget_bytes: u64,
    },
    /// The writer of a snapshot failed.
    #[error("write a snapshot: {0}")]
    Write(#[from] std::io::Error),
}
