//! The engine's grants: those of its pages, and those of what it keeps beside them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvik_memory::Result;
use kvik_memory::ledger::Member;
use kvik_memory::pages::{Claim, Event, GrantEvents, Grants, Usage};
use parking_lot::Mutex;

use crate::block_pool::BlockPool;

/// How often the agent looks at events of the device while some are pending.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// One place in the ledger for pages, chunks and admitted memory.
#[derive(Debug)]
pub(crate) struct EngineGrants {
    member: Member,
    /// Bytes of chunks and of what was admitted.
    beside_bytes: AtomicU64,
    /// What the pages published last.
    used_bytes: AtomicU64,
    parked_bytes: AtomicU64,
    /// What the agent looks after while the pool is open.
    block_pool: Mutex<Weak<BlockPool>>,
}

impl EngineGrants {
    pub(crate) fn new(member: Member) -> Self {
        Self {
            member,
            beside_bytes: AtomicU64::new(0),
            used_bytes: AtomicU64::new(0),
            parked_bytes: AtomicU64::new(0),
            block_pool: Mutex::new(Weak::new()),
        }
    }

    pub(crate) fn member(&self) -> &Member {
        &self.member
    }

    /// From now on the agent looks after `block_pool`.
    pub(crate) fn attach(&self, block_pool: &Arc<BlockPool>) {
        *self.block_pool.lock() = Arc::downgrade(block_pool);
    }

    /// The agent does not use the blocks any more when this returns.
    pub(crate) fn detach(&self) {
        *self.block_pool.lock() = Weak::new();
    }

    /// Claims memory beside the pages.
    pub(crate) fn claim_beside(&self, n_bytes: u64) -> Result<Claim> {
        let claim = self.member.claim(n_bytes)?;
        if claim == Claim::Granted {
            self.beside_bytes.fetch_add(n_bytes, Ordering::Relaxed);
            self.publish_all();
        }
        Ok(claim)
    }

    /// Gives back what [`claim_beside`](Self::claim_beside) took.
    pub(crate) fn give_back_beside(&self, n_bytes: u64) {
        self.beside_bytes.fetch_sub(n_bytes, Ordering::Relaxed);
        self.publish_all();
        self.member.give_back(n_bytes);
    }

    fn publish_all(&self) {
        let used_bytes = self.used_bytes.load(Ordering::Relaxed);
        let beside_bytes = self.beside_bytes.load(Ordering::Relaxed);
        self.member.publish(Usage {
            used_bytes: used_bytes.saturating_add(beside_bytes),
            parked_bytes: self.parked_bytes.load(Ordering::Relaxed),
        });
    }

    /// Frees blocks whose events are over; says whether some are pending still.
    fn look_at_events(&self) -> bool {
        let block_pool = self.block_pool.lock();
        // Goes before the lock does, so that the thread that detached knows that the agent has none.
        block_pool.upgrade().is_some_and(|block_pool| block_pool.poll())
    }
}

impl Grants for EngineGrants {
    fn claim(&self, n_bytes: u64) -> Result<Claim> {
        self.member.claim(n_bytes)
    }

    fn give_back(&self, n_bytes: u64) {
        self.member.give_back(n_bytes);
    }

    fn claimable_bytes(&self) -> u64 {
        self.member.claimable_bytes().saturating_sub(self.beside_bytes.load(Ordering::Relaxed))
    }

    fn limit_bytes(&self) -> u64 {
        self.member.limit_bytes().saturating_sub(self.beside_bytes.load(Ordering::Relaxed))
    }

    fn publish(&self, usage: Usage) {
        self.used_bytes.store(usage.used_bytes, Ordering::Relaxed);
        self.parked_bytes.store(usage.parked_bytes, Ordering::Relaxed);
        self.publish_all();
    }

    fn stop_waiting(&self) {
        self.member.stop_waiting();
    }
}

impl GrantEvents for EngineGrants {
    fn wait(&self, timeout: Duration) -> Event {
        let timeout = if self.look_at_events() { timeout.min(LOOK_EVERY) } else { timeout };
        self.member.wait(timeout)
    }

    fn interrupt(&self) {
        self.member.interrupt();
    }
}
