//! The global KV index: which worker already has how much of a prompt.
//!
//! [`HolderIndex`] is the only writer: it takes numbered batches of events of its sources and keeps,
//! for every block key, the exact set of holders. [`HolderReader`] answers lookups from any number of
//! threads without a lock. [`Matches`] is an answer, and [`Scorer`] turns a row of it into a number.
//! [`Bridge`] translates keys of an engine into keys of another chain.
//!
//! Invariants:
//!
//! * Presence is one bit per block and holder. Nothing is inferred from a neighbor: a hole is a hole and
//!   a refill closes it, in whatever order blocks come and go.
//! * What is dropped (for space, for order, for a bound) is counted and becomes a miss. No answer names
//!   a block for a holder that never had it.
//! * A single-block answer is the truth of some moment between the start and the end of its lookup.
//! * No call does work in proportion to what a worker holds, except [`HolderIndex::replace`] for the blocks
//!   that it is handed; [`HolderIndex::begin_replace`] does the same in steps. [`HolderReader::blocks_of`]
//!   lists a source page by page. What a restart or a clear leaves behind is swept in bounded steps.
//!
//! ```
//! use kvik_index::holders::{
//!     Batch, BlockKey, Event, HolderIndex, IndexConfig, LookupOptions, Matches, Scorer, Tier, TierWeights,
//! };
//!
//! let mut index = HolderIndex::new(IndexConfig::default());
//! let source = index.add_source("worker-0", 0)?;
//! let keys: Vec<BlockKey> = (1..=8).map(BlockKey).collect();
//! let events = [Event::Stored { tier: Tier::Gpu, parent: None, keys: &keys }];
//! index.apply(&Batch { source, epoch: Some(1), sequence: 0, replayed: false, events: &events });
//!
//! let mut matches = Matches::default();
//! index.reader().lookup(&keys, LookupOptions::default(), &mut matches);
//! assert_eq!(matches.rows()[0].prefix_blocks(), 8);
//! assert_eq!(Scorer::LongestPrefix.score(&matches.rows()[0], &TierWeights::default()), 8.0);
//! # Ok::<(), kvik_index::holders::IndexError>(())
//! ```

mod arena;
mod bridge;
mod bulk;
mod compaction;
mod hash_key;
mod index;
mod ingest;
mod listing;
mod lookup;
mod matches;
mod ordering;
mod pending;
mod reclaim;
mod replace;
mod replacements;
mod score;
mod sets;
mod snapshot;
mod sources;
mod store_bulk;
mod store_counts;
mod sweep;
mod table;
mod tiers;
mod types;

pub use bridge::{Bridge, BridgeConfig, BridgeCounters, BridgeEvent, OwnChain, OwnRun};
pub use index::{Counters, HolderIndex, HolderStats};
pub use listing::{BlockPage, SourceNames, SourceStatus};
pub use lookup::HolderReader;
pub use matches::{LookupOptions, Matches, SourceSet, Walk, WorkerMatch};
pub use ordering::Verdict;
pub use replacements::ReplacementId;
pub use score::{CostModel, CostQuery, Scorer};
pub use sources::SourceName;
pub use tiers::{TierOrder, TierWeights};
pub use types::{Batch, BlockKey, Event, IndexConfig, IndexError, N_TIERS, SourceId, Tier};
