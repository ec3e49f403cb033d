//! Putting a store together.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use kvik_tier::{Tier, TierKind};
use parking_lot::Mutex;

use super::Store;
use super::core::Core;
use super::kept::KeptMemory;
use super::threads::Threads;
use crate::chain::block_id;
use crate::counters::Counters;
use crate::directory::Directory;
use crate::error::{Result, StoreError};
use crate::flight::Flights;
use crate::lower::{Lower, Queue};
use crate::namespaces::Namespaces;
use crate::options::StoreOptions;
use crate::residents::Residents;
use crate::tiers::MAX_TIERS;
use crate::wake::Wake;

/// The policies' guess of a chunk's size, before there is one; it scales what they remember of the past.
const TYPICAL_CHUNK_BYTES: u64 = 4 << 20;

/// A store in the making.
#[derive(Debug)]
pub struct StoreBuilder {
    options: StoreOptions,
    memory: KeptMemory,
    locals: Vec<Arc<dyn Tier>>,
    remotes: Vec<Arc<dyn Tier>>,
    /// Threads that read from the tiers of a kind, where it is not the number of the options.
    read_threads: HashMap<TierKind, usize>,
}

impl StoreBuilder {
    pub(super) fn new(options: StoreOptions, memory: KeptMemory) -> Self {
        Self { options, memory, locals: Vec::new(), remotes: Vec::new(), read_threads: HashMap::new() }
    }

    /// Adds a tier that only this store writes and that knows its keys, faster ones first. The store decides
    /// what leaves it when it is full.
    #[must_use]
    pub fn local(mut self, tier: Arc<dyn Tier>) -> Self {
        self.locals.push(tier);
        self
    }

    /// Adds a tier that others write too and that is asked for what it has, faster ones first.
    #[must_use]
    pub fn remote(mut self, tier: Arc<dyn Tier>) -> Self {
        self.remotes.push(tier);
        self
    }

    /// Reads from the tier of a kind with as many threads, instead of those of
    /// [`StoreOptions::n_read_threads`].
    #[must_use]
    pub fn read_threads(mut self, kind: TierKind, n_threads: usize) -> Self {
        self.read_threads.insert(kind, n_threads);
        self
    }

    /// Opens the store: learns what memory and the local tiers hold and starts the threads.
    ///
    /// # Errors
    /// If a setting is not allowed, if two tiers are of one kind, or if there are no threads.
    pub fn open(self) -> Result<Store> {
        let Self { options, memory, locals, remotes, read_threads } = self;
        let KeptMemory { ram, chunks } = memory;
        options.validate()?;
        if let Some(n_threads) = read_threads.values().find(|n_threads| !(1..=64).contains(*n_threads)) {
            return Err(StoreError::invalid("read_threads", n_threads, "1 to 64"));
        }
        let n_locals = locals.len();
        let tiers: Vec<Arc<dyn Tier>> = locals.into_iter().chain(remotes).collect();
        validate_tiers(&tiers)?;
        let ram_bytes = ram.arena().stat().capacity_bytes;
        let residents_of = |capacity_bytes: u64| {
            let capacity_blocks = (capacity_bytes / TYPICAL_CHUNK_BYTES).max(1) as usize;
            Arc::new(Mutex::new(Residents::new(options.policy, capacity_blocks)))
        };
        let mut lowers = Vec::with_capacity(tiers.len());
        for (lower_idx, tier) in tiers.into_iter().enumerate() {
            let capacity_bytes = tier.stat().capacity_bytes.unwrap_or(ram_bytes);
            lowers.push(Lower {
                kind: tier.kind(),
                tier_idx: lower_idx + 1,
                residents: (lower_idx < n_locals).then(|| residents_of(capacity_bytes)),
                n_read_threads: *read_threads.get(&tier.kind()).unwrap_or(&options.n_read_threads),
                reads: Queue::new(options.load_in_flight_bytes.unwrap_or(ram_bytes / 2)),
                writes: Queue::new(options.write_queue_bytes.unwrap_or(ram_bytes / 4)),
                tier,
            });
        }
        let core = Core {
            ram_residents: residents_of(ram_bytes),
            options,
            ram,
            directory: Directory::new(1 + n_locals),
            lowers,
            flights: Arc::new(Flights::new()),
            namespaces: Namespaces::default(),
            pinned: Mutex::new(HashMap::new()),
            reclaim_wake: Wake::default(),
            counters: Counters::new(),
            opened: Instant::now(),
        };
        core.learn_kept(&chunks);
        core.learn_residents();
        Ok(Store { threads: Arc::new(Threads::start(&Arc::new(core))?) })
    }
}

fn validate_tiers(tiers: &[Arc<dyn Tier>]) -> Result<()> {
    if tiers.len() >= MAX_TIERS {
        let allowed = format!("at most {} below memory", MAX_TIERS - 1);
        return Err(StoreError::invalid("tiers", &tiers.len(), allowed));
    }
    for (tier_idx, tier) in tiers.iter().enumerate() {
        let kind = tier.kind();
        if kind == TierKind::Ram || tiers[..tier_idx].iter().any(|other| other.kind() == kind) {
            return Err(StoreError::invalid("tier", &kind, "one tier of each kind, and memory only once"));
        }
    }
    Ok(())
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
