//! Putting a store together.

use std::sync::Arc;
use std::time::Instant;

use kvik_tier::Tier;
use parking_lot::Mutex;

use super::Store;
use super::core::Core;
use super::kept::KeptMemory;
use super::pin_list::Pins;
use super::threads::Threads;
use super::time_list::Times;
use crate::chain::block_id;
use crate::counters::Counters;
use crate::directory::Directory;
use crate::error::{Result, StoreError};
use crate::flight::Flights;
use crate::lower::{Lower, Queue, SpeedMeter};
use crate::namespaces::Namespaces;
use crate::options::StoreOptions;
use crate::residents::Residents;
use crate::tiers::{LowerTier, RAM, TierSet, label_tiers};
use crate::wake::Wake;

/// The policies' guess of a chunk's size, before there is one; it scales what they remember of the past.
const TYPICAL_CHUNK_BYTES: u64 = 4 << 20;

/// A store in the making.
#[derive(Debug)]
pub struct StoreBuilder {
    options: StoreOptions,
    memory: KeptMemory,
    /// The tiers below memory, in the order in which they are asked.
    lowers: Vec<LowerTier>,
}

impl StoreBuilder {
    pub(super) fn new(options: StoreOptions, memory: KeptMemory) -> Self {
        Self { options, memory, lowers: Vec::new() }
    }

    /// Adds a tier below those that were added before: faster ones first.
    ///
    /// A chunk is written to all tiers, each of which keeps what its policy says, and read from the first that
    /// has it.
    #[must_use]
    pub fn tier(mut self, lower: LowerTier) -> Self {
        self.lowers.push(lower);
        self
    }

    /// Adds a tier that only this store writes and that knows its keys. The store decides what leaves it when
    /// it is full.
    #[must_use]
    pub fn local(self, tier: Arc<dyn Tier>) -> Self {
        self.tier(LowerTier::local(tier))
    }

    /// Adds a tier that others write too and that is asked for what it has.
    #[must_use]
    pub fn remote(self, tier: Arc<dyn Tier>) -> Self {
        self.tier(LowerTier::remote(tier))
    }

    /// Opens the store: learns what memory and the local tiers hold and starts the threads.
    ///
    /// # Errors
    /// If a setting is not allowed, if two tiers have one name, or if there are no threads.
    pub fn open(self) -> Result<Store> {
        let Self { options, memory, lowers: tiers } = self;
        let KeptMemory { ram, chunks, pins, times } = memory;
        options.validate()?;
        let mut n_threads = tiers.iter().filter_map(|lower| lower.n_read_threads);
        if let Some(n_threads) = n_threads.find(|n_threads| !(1..=64).contains(n_threads)) {
            return Err(StoreError::invalid("n_read_threads", &n_threads, "1 to 64"));
        }
        let labels = label_tiers(&tiers)?;
        let ram_bytes = ram.arena().stat().capacity_bytes;
        let residents_of = |capacity_bytes: u64| {
            let capacity_blocks = (capacity_bytes / TYPICAL_CHUNK_BYTES).max(1) as usize;
            Arc::new(Mutex::new(Residents::new(options.policy, capacity_blocks)))
        };
        let mut lowers = Vec::with_capacity(tiers.len());
        let mut local_tiers = TierSet::from_iter([RAM]);
        for (lower_idx, LowerTier { tier, is_local, n_read_threads, .. }) in tiers.into_iter().enumerate() {
            let tier_idx = lower_idx + 1;
            if is_local {
                local_tiers.insert(tier_idx);
            }
            let capacity_bytes = tier.stat().capacity_bytes.unwrap_or(ram_bytes);
            lowers.push(Lower {
                tier_idx,
                residents: is_local.then(|| residents_of(capacity_bytes)),
                n_read_threads: n_read_threads.unwrap_or(options.n_read_threads),
                speed: SpeedMeter::default(),
                reads: Queue::new(options.load_in_flight_bytes.unwrap_or(ram_bytes / 2)),
                writes: Queue::new(options.write_queue_bytes.unwrap_or(ram_bytes / 4)),
                tier,
            });
        }
        let core = Core {
            ram_residents: residents_of(ram_bytes),
            options,
            ram,
            directory: Directory::new(local_tiers),
            lowers,
            labels,
            flights: Arc::new(Flights::new()),
            namespaces: Namespaces::default(),
            pins: Pins::new(),
            times: Times::new(),
            reclaim_wake: Wake::default(),
            counters: Counters::new(),
            opened: Instant::now(),
        };
        core.learn_kept(&chunks, &pins, &times);
        core.learn_residents();
        Ok(Store { threads: Arc::new(Threads::start(&Arc::new(core))?) })
    }
}

impl Core {
    /// Takes over what the local tiers kept from before.
    fn learn_residents(&self) {
        for lower in &self.lowers {
            let Some(residents) = &lower.residents else { continue };
            let mut residents = residents.lock();
            lower.tier.visit_keys(&mut |key, _| {
                if u32::from(key.rank) >= u64::BITS {
                    return;
                }
                let namespace = self.namespaces.intern(key.namespace);
                let noted = self.directory.update_hash(key.chunk, None, namespace.idx, 0, |entry| {
                    entry.ranks[lower.tier_idx] |= 1 << key.rank;
                });
                if noted.is_some() {
                    residents.add_unplaced(block_id(key.chunk));
                }
            });
        }
    }
}
