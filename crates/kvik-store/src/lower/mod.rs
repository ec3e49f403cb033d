//! A tier below memory, with its queues and the threads that work on them.

mod queue;
mod reads;
mod writes;

use std::fmt;
use std::sync::{Arc, Weak};

use kvik_tier::{ChunkKey, Lease, Tier, TierKind};
use parking_lot::Mutex;

pub(crate) use queue::Queue;
pub(crate) use reads::lose;

use crate::book::Book;
use crate::chain::Chain;
use crate::directory::TierIdx;
use crate::flight::Flight;
use crate::store::core::{BookPin, Core};

/// A tier below memory.
///
/// Its threads own what they work on: the memory that a read fills moves into the read, and what is written
/// is leased by the write. So a tier that hangs holds memory, and never touches what has gone to others.
#[derive(Debug)]
pub(crate) struct Lower {
    pub(crate) tier: Arc<dyn Tier>,
    pub(crate) kind: TierKind,
    pub(crate) tier_idx: TierIdx,
    /// The order of its chunks, for a local tier. A remote one looks after itself.
    pub(crate) book: Option<Mutex<Book>>,
    pub(crate) reads: Queue<ReadJob>,
    pub(crate) writes: Queue<WriteJob>,
}

/// What the reading threads do.
pub(crate) enum ReadJob {
    /// Reads a chunk, if anybody still waits for it.
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
pub(crate) type Task = Box<dyn FnOnce(&Arc<Core>, &Lower) + Send>;

/// What one rank holds of one chunk, to be written.
#[derive(Debug)]
pub(crate) struct PutJob {
    pub(crate) chain: Chain,
    pub(crate) chunk_idx: usize,
    pub(crate) rank: u16,
    pub(crate) lease: Lease,
    /// The namespace's generation when it was stored.
    pub(crate) generation: u64,
    /// Keeps it in memory until it is written.
    pub(crate) _pin: Option<BookPin>,
}

impl Lower {
    pub(crate) fn is_local(&self) -> bool {
        self.book.is_some()
    }
}

/// Ends the queues of a tier if a thread that works on them panics: who waits is answered, and nothing more
/// is queued.
pub(crate) struct QueueGuard<'a>(pub(crate) &'a Lower);

impl Drop for QueueGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            reads::lose(self.0.reads.abort());
            drop(self.0.writes.abort());
        }
    }
}

impl PutJob {
    pub(crate) fn key(&self) -> ChunkKey {
        self.chain.key_of(self.chunk_idx, self.rank)
    }

    fn is_stale(&self) -> bool {
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
