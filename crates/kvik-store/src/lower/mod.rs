//! A tier below memory, with the queues of what is to be read from it and written to it.

mod queue;
mod speed;

use std::fmt;
use std::sync::{Arc, Weak};

use kvik_tier::{ChunkKey, GetItem, GetOutcome, Lease, Tier};
pub(crate) use queue::{Batch, Queue};
pub use speed::{MeasuredRead, SpeedMeter, TierSpeed};

use crate::chain::Chain;
use crate::flight::{Flight, FlightEnd};
use crate::residents::{ResidentPin, SharedResidents};
use crate::tiers::TierIdx;

/// Time that a call of a tier may take with its bytes, where its latency does not ask for more.
const MIN_BATCH_S: f64 = 0.02;

/// A tier below memory.
///
/// Its threads own what they work on: the memory that a read fills moves into the read, and what is written
/// is leased by the write. So a tier that hangs holds memory, and never touches what has gone to others.
#[derive(Debug)]
pub(crate) struct Lower {
    pub(crate) tier: Arc<dyn Tier>,
    pub(crate) tier_idx: TierIdx,
    /// The order of its chunks, for a local tier. A remote one looks after itself.
    pub(crate) residents: Option<SharedResidents>,
    /// Threads that read from it.
    pub(crate) n_read_threads: usize,
    pub(crate) reads: Queue<ReadJob>,
    pub(crate) speed: SpeedMeter,
    pub(crate) writes: Queue<WriteJob>,
}

/// What the reading threads do.
pub(crate) enum ReadJob {
    /// Reads a chunk, if it still has a waiter.
    Load(Weak<Flight>),
    /// Does something else with the tier.
    Task(Task),
}

/// What the writing thread does.
pub(crate) enum WriteJob {
    /// Writes a chunk.
    Put(PutJob),
    /// Does something else with the tier, after what was to be written before it.
    Task(Task),
}

/// Work on a tier.
pub(crate) type Task = Box<dyn FnOnce(&Lower) + Send>;

/// What one rank holds of one chunk, to be written.
#[derive(Debug)]
pub(crate) struct PutJob {
    pub(crate) part: ChunkPart,
    pub(crate) lease: Lease,
    /// Keeps it in memory until it is written.
    pub(crate) _pin: Option<ResidentPin>,
    /// A request names the tier: others leave a full one for this, whatever they are worth.
    pub(crate) is_requested: bool,
}

/// Names what one rank holds of one chunk.
#[derive(Debug, Clone)]
pub(crate) struct ChunkPart {
    pub(crate) chain: Chain,
    pub(crate) chunk_idx: usize,
    pub(crate) rank: u16,
    /// The namespace's generation when it was stored.
    pub(crate) generation: u64,
}

impl Lower {
    /// Bytes that one call should read, of at most `limit_bytes`: chunks that arrive together arrive with the last of them,
    /// so a slow tier reads few at a time, unless its calls take long by themselves.
    pub(crate) fn batch_bytes(&self, limit_bytes: u64) -> u64 {
        let Some(TierSpeed { bytes_per_s, latency_s }) = self.speed.speed() else { return limit_bytes };
        limit_bytes.min((bytes_per_s * (4.0 * latency_s).max(MIN_BATCH_S)) as u64)
    }

    /// Reads chunks and measures how fast they came; what became of each.
    pub(crate) fn read(&self, mut items: Vec<GetItem<'_>>) -> Vec<GetOutcome> {
        let read = || {
            self.tier.get(&mut items);
            items
        };
        let hit_bytes = |items: &Vec<GetItem<'_>>| {
            let hits = items.iter().filter(|item| item.outcome.is_hit());
            hits.map(|item| item.n_bytes() as u64).sum()
        };
        self.speed.measure(read, hit_bytes).into_iter().map(|item| item.outcome).collect()
    }

    pub(crate) fn is_local(&self) -> bool {
        self.residents.is_some()
    }

    /// Whether it is a remote tier, and the one that is meant if only one is.
    pub(crate) fn is_asked(&self, only: Option<TierIdx>) -> bool {
        !self.is_local() && only.is_none_or(|only| only == self.tier_idx)
    }
}

/// Ends the queues of a tier if a thread that works on them panics: waiters are answered, and nothing more
/// is queued.
pub(crate) struct QueueGuard<'a>(pub(crate) &'a Lower);

impl Drop for QueueGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            lose(self.0.reads.abort());
            drop(self.0.writes.abort());
        }
    }
}

/// Ends the flights of a queue that is closed.
pub(crate) fn lose(jobs: Vec<ReadJob>) {
    for job in jobs {
        if let ReadJob::Load(flight) = job
            && let Some(flight) = Weak::upgrade(&flight)
        {
            flight.end(&FlightEnd::Lost);
        }
    }
}

impl ChunkPart {
    pub(crate) fn key(&self) -> ChunkKey {
        self.chain.key_of(self.chunk_idx, self.rank)
    }

    /// Whether its namespace was cleared since.
    pub(crate) fn is_stale(&self) -> bool {
        self.generation != self.chain.namespace().generation()
    }
}

impl fmt::Debug for ReadJob {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Load(_) => "Load",
            Self::Task(_) => "Task",
        })
    }
}

impl fmt::Debug for WriteJob {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Put(_) => "Put",
            Self::Task(_) => "Task",
        })
    }
}
