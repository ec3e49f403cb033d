//! Chunks in the hands of a writer.

use std::sync::Arc;

use kvik_tier::Slot;

use super::Store;
use super::core::Core;
use super::publish::{Arrival, Origin, Published};
use crate::chain::{Chain, NamedChain};
use crate::counters::Counter;
use crate::options::WriteBack;
use crate::residents::ResidentPin;
use crate::retention::{KeptUntil, Retention};

/// The answer to a wish to write.
#[derive(Debug)]
pub enum Write {
    /// Memory to be filled.
    Slot(ChunkWriter),
    /// It is in memory already: go on with the next chunk.
    Present,
    /// Memory is full of what is leased, pinned or still to be written: the chain ends here.
    NoRoom,
    /// The chunk before it is neither in memory nor being written, or the chain has no such chunk or rank.
    /// Nothing is stored behind a hole: begin with the first chunk, what is there costs nothing.
    NoParent,
    /// A chunk of other tokens has its name, so it cannot be kept: the chain ends here.
    Collision,
}

/// What became of a chunk that was committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Commit {
    /// It can be retrieved.
    Stored,
    /// Another writer stored it meanwhile, for the same tokens.
    Present,
    /// The chunk before it is not in memory (any more), so it was dropped. Commit in the order of the chain.
    NoParent,
    /// Its namespace was cleared since the writing began, so it was dropped.
    Cleared,
    /// A chunk of other tokens got its name meanwhile, so it was dropped.
    Collision,
}

/// Memory for what one rank holds of one chunk.
///
/// The bytes are undefined at first: the writer fills all of them. No reader sees them before
/// [`ChunkWriter::commit`]; dropping the writer without it leaves nothing behind.
#[derive(Debug)]
pub struct ChunkWriter {
    begun: Begun,
    rank: u16,
    generation: u64,
    slot: Slot,
    kept: KeptUntil,
    /// Keeps the chunk before it in memory.
    _parent: Option<ResidentPin>,
}

/// Keeps a chunk that was committed, and all before it, in memory until it is dropped.
#[derive(Debug)]
pub struct CommittedChunk(#[expect(dead_code, reason = "it is held, not read")] ResidentPin);

/// Counts a writer in the directory, so that the next chunk can be begun before this one is committed.
#[derive(Debug)]
struct Begun {
    core: Arc<Core>,
    chain: Chain,
    chunk_idx: usize,
}

impl Store {
    /// Takes memory for what a rank holds of a chunk.
    ///
    /// Never waits: what is worth less leaves memory for it, and where nothing may leave it says so. Several
    /// chunks of a chain can be written at a time if they are begun and committed in the order of the chain.
    pub fn begin_write(&self, chain: &Chain, chunk_idx: usize, rank: u16) -> Write {
        self.begin_write_kept(chain, chunk_idx, rank, Retention::default())
    }

    /// As [`Self::begin_write`], for a chunk that is kept as `retention` says.
    ///
    /// Of several writers of a chunk the longest time and the highest priority count, also where the chunk is present. A
    /// chunk never lives longer than the one before it.
    pub fn begin_write_kept(
        &self,
        chain: &Chain,
        chunk_idx: usize,
        rank: u16,
        retention: Retention,
    ) -> Write {
        let core = self.core();
        core.end_times();
        let kept = retention.starting_at(core.now_ms());
        if chunk_idx >= core.n_chunks(chain) || chain.key(chunk_idx, rank).is_none() {
            return Write::NoParent;
        }
        let generation = chain.namespace().generation();
        match core.is_in_memory(chain, chunk_idx, rank) {
            Some(true) => {
                core.counters.add(Counter::StoredBefore, 1);
                core.keep_longer(chain, chunk_idx, kept);
                return Write::Present;
            }
            Some(false) => return Write::Collision,
            None => {}
        }
        let mut parent = None;
        if let Some(parent_idx) = chunk_idx.checked_sub(1) {
            let entry = core.directory.view(chain.hash(parent_idx));
            if core.is_in_memory(chain, parent_idx, rank) == Some(true) {
                parent = core.pin_placed(chain, parent_idx);
            }
            if parent.is_none() && entry.n_writers == 0 {
                return Write::NoParent;
            }
        }
        let begun = Begun::new(core, chain, chunk_idx);
        let slot = core.reserve(chain.payload_bytes(chunk_idx));
        let (Some(begun), Some(slot)) = (begun, slot) else {
            core.counters.add(Counter::Refused, 1);
            return Write::NoRoom;
        };
        Write::Slot(ChunkWriter { begun, rank, generation, slot, kept, _parent: parent })
    }

    /// Tells the eviction policies of a request: its whole chain, and how many tokens were generated after
    /// it where that is known.
    ///
    /// Call it once for each request, after its retrieve and before its first [`Store::begin_write`]: the
    /// policies tell what a request brought from what it found.
    pub fn note_request(&self, chain: &Chain, n_generated_tokens: Option<u32>) {
        self.note_named_request(&chain.named(), n_generated_tokens);
    }

    /// Tells the eviction policies of a request with a chain of which only the names are known, as
    /// [`Self::note_request`] does.
    pub fn note_named_request(&self, chain: &NamedChain, n_generated_tokens: Option<u32>) {
        let chain = chain.chain();
        let core = self.core();
        if core.n_chunks(chain) == 0 {
            return;
        }
        let lowers = core.lowers.iter().filter_map(|lower| lower.residents.as_ref());
        for residents in std::iter::once(&core.ram_residents).chain(lowers) {
            residents.lock().access(core.now_ms(), chain, n_generated_tokens);
        }
    }
}

// === impl ChunkWriter ===

impl ChunkWriter {
    /// The whole payload as far as it is written, layer 0 first.
    pub fn payload(&self) -> &[u8] {
        &self.slot
    }

    /// The whole payload, layer 0 first.
    pub fn payload_mut(&mut self) -> &mut [u8] {
        &mut self.slot
    }

    /// Where the payload starts in the arena's memory file, for a writer in another process.
    pub fn offset(&self) -> u64 {
        self.slot.offset()
    }

    /// One layer of the payload; empty where there is no such layer.
    pub fn layer_mut(&mut self, layer_idx: usize) -> &mut [u8] {
        let section_bytes = self.begun.chain.section_bytes(self.begun.chunk_idx);
        let start = layer_idx.saturating_mul(section_bytes);
        self.slot.get_mut(start..start.saturating_add(section_bytes)).unwrap_or_default()
    }

    /// Makes the chunk visible, as a whole, and has it written to the lower tiers in the background.
    pub fn commit(self) -> Commit {
        self.commit_and_keep().0
    }

    /// As [`Self::commit`], and keeps the chunk in memory: it cannot leave before what is written behind it.
    pub fn commit_and_keep(self) -> (Commit, Option<CommittedChunk>) {
        self.commit_to(true)
    }

    /// As [`Self::commit_and_keep`], and has the chunk written to the lower tiers if `is_written_down`.
    pub(super) fn commit_to(self, is_written_down: bool) -> (Commit, Option<CommittedChunk>) {
        let Self { begun, rank, generation, slot, kept, _parent } = self;
        let Begun { core, chain, chunk_idx } = &begun;
        let arrival = Arrival { lease: slot.freeze(), origin: Origin::Writer(kept) };
        let (published, pin) = core.publish_and_pin(chain, *chunk_idx, rank, generation, arrival);
        let outcome = match published {
            Published::Stored(lease) => {
                core.counters.add(Counter::StoredPayloads, 1);
                core.counters.add(Counter::StoredBytes, lease.len() as u64);
                let is_timed = core.directory.view(chain.hash(*chunk_idx)).is_timed();
                if is_written_down && !is_timed && core.options.write_back == WriteBack::OnStore {
                    for lower in core.written_lowers() {
                        core.queue_write(lower, chain, *chunk_idx, rank, &lease, generation);
                    }
                }
                Commit::Stored
            }
            Published::Present => {
                core.counters.add(Counter::StoredBefore, 1);
                Commit::Present
            }
            Published::NoParent => Commit::NoParent,
            Published::Stale => Commit::Cleared,
            Published::Collision => Commit::Collision,
        };
        (outcome, pin.map(CommittedChunk))
    }
}

// === impl Begun ===

impl Begun {
    /// `None` where another chunk has the place in the directory.
    fn new(core: &Arc<Core>, chain: &Chain, chunk_idx: usize) -> Option<Self> {
        let is_counted = core.directory.update(chain, chunk_idx, |entry| {
            let n_writers = entry.n_writers.checked_add(1);
            entry.n_writers = n_writers.unwrap_or(entry.n_writers);
            n_writers.is_some()
        });
        let begun = || Self { core: Arc::clone(core), chain: chain.clone(), chunk_idx };
        is_counted.filter(|is_counted| *is_counted).map(|_| begun())
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.core.directory.update(&self.chain, self.chunk_idx, |entry| {
            entry.n_writers = entry.n_writers.saturating_sub(1);
        });
    }
}
