//! The cache engine: what callers do with a store, and what its threads do for them.
//!
//! Each file stands on those named before it. `core` is the state that all share. On it stand `room` (what
//! leaves memory), `publish` (what becomes visible there) and `survey` (what remote tiers have), then `reads`
//! and `write_back`, which work on the queues of the lower tiers. What callers use comes last: `lookup`,
//! `inquiry`, `retrieve` with `prefetch` and `arriving`, `layers` with `promotion`, `direct` (chunks that a device reads from files), `write` with `layer_write`, `times` (chunks that end), `pins`, `moves`, `one_tier`, `recode`, `clear`, `observe`,
//! `provide` (for other nodes) and `stats`; `builder`, `threads` and `kept` begin and end a store.

mod arriving;
mod builder;
mod clear;
mod core;
mod direct;
mod direct_write;
mod inquiry;
mod kept;
mod kept_pins;
mod layer_write;
mod layers;
mod lookup;
mod moves;
mod observe;
mod one_tier;
mod pin_list;
mod pins;
mod prefetch;
mod probe;
mod promotion;
mod provide;
mod publish;
mod reads;
mod recode;
mod retrieve;
mod room;
mod stats;
mod survey;
mod threads;
mod time_list;
mod times;
mod write;
mod write_back;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_tier::{Arena, NamespaceId, RamTier};
use kvik_types::Namespace;

pub use arriving::Arriving;
pub use builder::StoreBuilder;
pub use clear::{Clear, Cleared};
pub use direct::{ChunkRead, FileChunks, OpenChunk};
pub use direct_write::FileWrite;
pub use inquiry::{ChunkPlaces, Inquiry};
pub use kept::{KeptChunk, KeptMemory};
pub use kept_pins::{KeptParent, KeptPin, KeptPins};
pub use layer_write::{LayerWrite, LayerWriter};
pub use layers::{Layer, LayerReader};
pub use lookup::Lookup;
pub use observe::Observation;
pub use one_tier::TierWrite;
pub use prefetch::Prefetch;
pub use provide::{LocalRange, LocalRead};
pub use retrieve::{Retrieved, RetrievedChunk};
pub use stats::StoreStats;
pub use times::KeptTime;
pub use write::{ChunkWriter, Commit, CommittedChunk, Write};

use self::core::Core;
use self::threads::Threads;
use crate::error::Result;
use crate::format::ChunkFormat;
use crate::lower::WriteJob;
use crate::options::StoreOptions;
use crate::promise::promise;
use crate::space::Space;
use crate::tiers::TierName;

/// A cache of KV over memory and the tiers below it.
///
/// A handle: clones share everything, and the last one closes the store. All operations may be called from
/// any thread. None of them fails once the store is open: a miss, a full memory and a broken tier make a
/// shorter answer.
///
/// An engine makes one [`Space`] for its model, and for every request a [`Chain`](crate::Chain) of its
/// tokens. Then, in this order:
///
/// ```
/// use kvik_store::{ChunkFormat, Store, StoreOptions, Write};
/// use kvik_tier::{Arena, ArenaOptions, RamTier};
/// use kvik_types::{BlockSize, Dtype, Namespace};
///
/// let ram = RamTier::new(Arena::new(ArenaOptions::new(64 << 20))?);
/// let store = Store::builder(StoreOptions::default(), ram).open()?;
/// let namespace = Namespace {
///     model: "kvik-tiny".into(),
///     dtype: Dtype::BF16,
///     layout: "kv_2ltd".into(),
///     tenant: String::new(),
/// };
/// let block_tokens = BlockSize::try_new(16)?;
/// let format = ChunkFormat { n_layers: 4, token_layer_bytes: 256, n_ranks: 1, block_tokens };
/// let space = store.space(&namespace, format)?;
///
/// // Two full chunks; the 88 tokens after them belong to none.
/// let prompt: Vec<u32> = (0..600).collect();
/// let chain = space.chain(&prompt);
/// assert_eq!(chain.n_chunks(), 2);
///
/// // 1. What is there is copied to the engine, and not computed.
/// let retrieved = store.retrieve(&chain, 0);
/// let n_cached_tokens = retrieved.n_tokens();
/// assert_eq!(n_cached_tokens, 0);
///
/// // 2. The policies are notified of the request.
/// store.note_request(&chain, None);
///
/// // 3. The engine computes the rest and stores what is new, from the first chunk on.
/// for chunk_idx in 0..chain.n_chunks() {
///     match store.begin_write(&chain, chunk_idx, 0) {
///         Write::Slot(mut writer) => {
///             writer.layer_mut(3).fill(7);
///             writer.commit();
///         }
///         Write::Present => {}
///         Write::NoRoom | Write::NoParent | Write::Collision => break,
///     }
/// }
///
/// // The next request with the same beginning finds it.
/// let retrieved = store.retrieve(&chain, 0);
/// assert_eq!(retrieved.n_tokens(), 512);
/// assert_eq!(retrieved.chunks()[1].layer(0, 3), [7; 256 * 256]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Store {
    threads: Arc<Threads>,
}

/// What waits for a lower tier, or is being done there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierQueues {
    /// The tier.
    pub tier: TierName,
    /// Bytes to be written to it.
    pub write_bytes: u64,
    /// Bytes to be read from it.
    pub read_bytes: u64,
}

impl Store {
    /// Begins to put a store together on a memory tier.
    pub fn builder(options: StoreOptions, ram: RamTier) -> StoreBuilder {
        StoreBuilder::new(options, KeptMemory::new(ram))
    }

    /// A namespace with the format of the chunks in it. Spaces that differ in either share nothing. The chains
    /// that are made in it are for this store; another one takes them for empty.
    ///
    /// # Errors
    /// If the format is not allowed.
    pub fn space(&self, namespace: &Namespace, format: ChunkFormat) -> Result<Space> {
        let core = self.core();
        let options = &core.options;
        format.validate(options.chunk_tokens)?;
        let namespace = options.namespace_of(namespace);
        if let Some(spaces) = &options.coded_spaces {
            spaces.learn(&namespace, format.token_layer_bytes);
        }
        let qualified = format.qualify(&namespace, options.chunk_tokens);
        let state = core.namespaces.intern(NamespaceId::from(&namespace));
        Ok(Space::new(state, format, options, &qualified))
    }

    /// As [`Self::space`], with tails kept whatever the store's settings say: for sequences whose every token counts.
    ///
    /// # Errors
    /// If the format is not allowed.
    pub fn space_with_tails(&self, namespace: &Namespace, format: ChunkFormat) -> Result<Space> {
        let core = self.core();
        let options = StoreOptions { stores_tails: true, ..core.options.clone() };
        format.validate(options.chunk_tokens)?;
        let qualified = format.qualify(namespace, options.chunk_tokens);
        let state = core.namespaces.intern(NamespaceId::from(namespace));
        Ok(Space::new(state, format, &options, &qualified))
    }

    /// The settings it was opened with.
    pub fn options(&self) -> &StoreOptions {
        &self.core().options
    }

    /// The memory of its chunks, for other processes that use leases and slots at their offsets.
    pub fn arena(&self) -> &Arena {
        self.core().ram.arena()
    }

    /// Waits until what is to be written down by now is, and is durable; false where that takes longer than
    /// `timeout` or a tier does not confirm.
    pub fn flush(&self, timeout: Duration) -> bool {
        let now = Instant::now();
        let deadline = now.checked_add(timeout).unwrap_or(now + Duration::from_hours(24));
        let mut answers = Vec::new();
        for lower in &self.core().lowers {
            let (promise, answer) = promise();
            let task = WriteJob::Task(Box::new(move |lower| promise.keep(lower.tier.flush().is_ok())));
            // A full queue drops the promise.
            let _ = lower.writes.push(0, task);
            answers.push(answer);
        }
        // Every answer is waited for: one tier's failure says nothing about another's.
        let confirmed: Vec<bool> =
            answers.into_iter().map(|answer| answer.wait(deadline) == Some(true)).collect();
        confirmed.into_iter().all(|is_confirmed| is_confirmed)
    }

    /// What waits for each lower tier, or is being done there.
    pub fn queues(&self) -> Vec<TierQueues> {
        let queues = self.core().lowers.iter().map(|lower| TierQueues {
            tier: self.core().name_of(lower.tier_idx),
            write_bytes: lower.writes.n_bytes(),
            read_bytes: lower.reads.n_bytes(),
        });
        queues.collect()
    }

    /// Ends the store: what waits to be written is written as far as
    /// [`close_timeout`](StoreOptions::close_timeout) allows, and the threads end.
    ///
    /// Memory goes on being served, without the lower tiers, until the last handle is gone. Dropping the last
    /// handle closes too.
    pub fn close(&self) {
        self.threads.close();
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        self.threads.core()
    }
}
