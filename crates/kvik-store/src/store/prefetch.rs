//! Bringing chunks to memory before they are needed.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::Store;
use super::core::Core;
use super::retrieve::Retrieved;
use super::survey::{Survey, SurveyVisitor};
use crate::chain::Chain;
use crate::counters::Counter;
use crate::directory::Entry;
use crate::flight::{FlightEnd, FlightWaiter, Sources, WaitingCell};
use crate::gather::{Cell, Gather};
use crate::residents::ResidentPin;
use crate::tiers::{MAX_TIERS, RAM, TierIdx, TierRanks};

/// A retrieve that is under way. Dropping it gives up the reads that have not begun and that have no other
/// waiter.
#[derive(Debug)]
pub struct Prefetch {
    core: Arc<Core>,
    chain: Chain,
    chunks: Range<usize>,
    wish: Wish,
    gather: Arc<Gather>,
    /// Keeps what was in memory from being evicted meanwhile.
    pin: Option<ResidentPin>,
}

/// Why chunks are brought to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A request uses them, which decides what is kept and written down.
    Use,
    /// The same, as a part of what the request uses.
    UsePart,
    /// The store works on them itself.
    Move,
}

/// What is brought to memory, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wish {
    pub(crate) purpose: Purpose,
    /// The only tier that it is taken from.
    pub(crate) only: Option<TierIdx>,
}

/// Begins to read what a survey finds, as soon as it is found, so long as the prefetch is there.
struct Search {
    core: Arc<Core>,
    gather: Weak<Gather>,
    chain: Chain,
    generation: u64,
    wish: Wish,
}

/// A read that a plan needs.
struct PlannedRead {
    chunk_idx: usize,
    rank: u16,
    may_displace: bool,
    sources: Sources,
}

impl Store {
    /// Gets as much of a chain from `first_chunk` on as arrives until
    /// [`retrieve_timeout`](crate::StoreOptions::retrieve_timeout).
    ///
    /// A tier that fails or is slow shortens the answer. Use [`Store::prefetch`] where the thread must not
    /// wait.
    pub fn retrieve(&self, chain: &Chain, first_chunk: usize) -> Retrieved {
        self.prefetch(chain, first_chunk).wait(self.core().options.retrieve_timeout)
    }

    /// Leases what is in memory of a chain from `first_chunk` on, and starts to read the rest.
    ///
    /// Chunks that no tier is known to have are asked of the remote tiers, in the background.
    pub fn prefetch(&self, chain: &Chain, first_chunk: usize) -> Prefetch {
        Prefetch::start(self.core(), chain, first_chunk, Wish { purpose: Purpose::Use, only: None })
    }
}

impl Prefetch {
    pub(crate) fn start(core: &Arc<Core>, chain: &Chain, first_chunk: usize, wish: Wish) -> Self {
        core.end_times();
        Self::start_range(core, chain, first_chunk..usize::MAX, &[], wish)
    }

    /// Begins with the chunks of a range, of which `found` says what remote tiers have.
    pub(crate) fn start_range(
        core: &Arc<Core>,
        chain: &Chain,
        chunks: Range<usize>,
        found: &[TierRanks],
        wish: Wish,
    ) -> Self {
        let gather = Arc::new(Gather::new());
        let n_chunks = core.n_chunks(chain).min(chunks.end);
        let first_chunk = chunks.start.min(n_chunks);
        // Before anything is looked up: what a clear removes meanwhile then belongs to an earlier generation.
        let generation = chain.namespace().generation();
        let planned = plan(core, &gather, chain, first_chunk..n_chunks, found, generation, wish);
        let pin = core.pin_deepest(chain, planned);
        if planned < n_chunks && core.can_ask(wish.only) {
            let search = Search {
                core: Arc::clone(core),
                gather: Arc::downgrade(&gather),
                chain: chain.clone(),
                generation,
                wish,
            };
            core.survey(Survey::new(chain, planned..n_chunks, Box::new(search)).only_of(wish.only));
        } else {
            gather.end_search();
        }
        Self {
            core: Arc::clone(core),
            chain: chain.clone(),
            chunks: first_chunk..n_chunks,
            wish,
            gather,
            pin,
        }
    }

    /// Whether nothing more will arrive.
    pub fn is_done(&self) -> bool {
        self.gather.is_done()
    }

    /// Calls `callback` once when nothing more will arrive or is waited for: at once if that is so, and
    /// otherwise on a thread of the store, which it must not hold up. If the prefetch is dropped before,
    /// `callback` is not called.
    pub fn on_done(&self, callback: impl FnOnce() + Send + 'static) {
        self.gather.on_done(Box::new(callback));
    }

    /// Waits until nothing more will arrive, at most `timeout`, and gives what is there without a gap.
    pub fn wait(self, timeout: Duration) -> Retrieved {
        let now = Instant::now();
        // A wait too long for the clock is a day.
        let deadline = now.checked_add(timeout).unwrap_or(now + Duration::from_hours(24));
        let gathered = self.gather.take(deadline);
        self.core.keep_all(&gathered.flights);
        let first_chunk = self.chunks.start;
        let n_found = first_chunk + gathered.cells.len();
        let pin = self.core.pin_deepest(&self.chain, n_found).or(self.pin);
        let (is_truncated, is_timed_out) = (gathered.is_truncated, gathered.is_timed_out);
        let retrieved = Retrieved::new(&self.chain, first_chunk, gathered, &self.core.labels, pin);
        let counters = &self.core.counters;
        if self.wish.purpose == Purpose::Use {
            counters.add(Counter::Retrieves, 1);
            counters.add(Counter::Truncated, u64::from(is_truncated));
            counters.add(Counter::Timeouts, u64::from(is_timed_out));
            let asked = self.chain.tokens_between(self.chunks.clone());
            counters.add(Counter::RequestedTokens, asked as u64);
        }
        if self.wish.purpose != Purpose::Move {
            for chunk in retrieved.chunks() {
                counters.add(Counter::HitTokens(chunk.tier_idx()), chunk.token_range().len() as u64);
            }
        }
        retrieved
    }
}

impl SurveyVisitor for Search {
    fn found(&mut self, first_chunk: usize, found: &[TierRanks]) -> bool {
        let Some(gather) = self.gather.upgrade() else { return false };
        let range = first_chunk..first_chunk + found.len();
        let end = range.end;
        // A search that was cut short takes no more.
        gather.is_searching()
            && plan(&self.core, &gather, &self.chain, range, found, self.generation, self.wish) == end
    }
}

impl Drop for Search {
    fn drop(&mut self) {
        if let Some(gather) = self.gather.upgrade() {
            gather.end_search();
        }
    }
}

/// Leases and starts to read the chunks of a range, up to the first that no tier is known to have, which
/// it returns. `found` says what remote tiers have of each chunk of the range.
fn plan(
    core: &Arc<Core>,
    gather: &Arc<Gather>,
    chain: &Chain,
    range: Range<usize>,
    found: &[TierRanks],
    generation: u64,
    wish: Wish,
) -> usize {
    let is_use = wish.purpose != Purpose::Move;
    let first_chunk = range.start;
    let mut cells = Vec::with_capacity(range.len());
    let mut reads = Vec::new();
    let mut reused = Vec::new();
    for chunk_idx in range {
        let mut entry = core.directory.view(chain.hash(chunk_idx));
        if let Some(found) = found.get(chunk_idx - first_chunk) {
            for (ranks, found) in entry.ranks.iter_mut().zip(found).skip(1) {
                *ranks |= found;
            }
        }
        if let Some(only) = wish.only {
            let ranks = entry.ranks[only];
            entry.ranks = [0; MAX_TIERS];
            entry.ranks[only] = ranks;
        }
        let n_reads = reads.len();
        let Some(cell) = plan_chunk(core, chain, chunk_idx, &entry, (generation, wish), &mut reads) else {
            reads.truncate(n_reads);
            break;
        };
        if is_use && wish.only.is_none() && reads.len() == n_reads && core.lacks_write(&entry, chain) {
            reused.push((chunk_idx, entry));
        }
        if is_use {
            core.note_used(chain, chunk_idx, &entry);
        }
        cells.push(cell);
    }
    for (chunk_idx, entry) in reused {
        core.write_reused(chain, chunk_idx, &entry, generation, &cells[chunk_idx - first_chunk]);
    }
    let end = first_chunk + cells.len();
    let first_cell = gather.extend(cells);
    for read in reads {
        let cell_idx = first_cell + (read.chunk_idx - first_chunk);
        start_read(core, gather, chain, generation, cell_idx, read);
    }
    end
}

/// Leases what is in memory of a chunk and says what must be read; `None` where a rank is nowhere.
fn plan_chunk(
    core: &Core,
    chain: &Chain,
    chunk_idx: usize,
    entry: &Entry,
    (generation, wish): (u64, Wish),
    reads: &mut Vec<PlannedRead>,
) -> Option<Cell> {
    let mut cell = Cell::new(chain.n_ranks());
    for rank in 0..chain.n_ranks() {
        let bit = 1 << rank;
        let key = chain.key_of(chunk_idx, rank);
        if entry.ranks[RAM] & bit != 0
            && let Some(lease) = core.ram.lease(&key, chain.digest_of(chunk_idx))
        {
            cell.leases[usize::from(rank)] = Some(lease);
            continue;
        }
        let tiers: VecDeque<TierIdx> = (1..MAX_TIERS).filter(|tier| entry.ranks[*tier] & bit != 0).collect();
        let sources = Sources { tiers, is_alone: wish.only.is_some() };
        let can_join =
            || !sources.is_alone && core.flights.find(chain, chunk_idx, rank, generation).is_some();
        if sources.tiers.is_empty() && !can_join() {
            return None;
        }
        let may_displace = core.may_displace(entry, rank);
        reads.push(PlannedRead { chunk_idx, rank, may_displace, sources });
    }
    Some(cell)
}

/// Joins or starts the flight for one rank of a chunk.
fn start_read(
    core: &Arc<Core>,
    gather: &Arc<Gather>,
    chain: &Chain,
    generation: u64,
    cell_idx: usize,
    read: PlannedRead,
) {
    let PlannedRead { chunk_idx, rank, may_displace, sources } = read;
    let (flight, is_new) =
        core.flights.join_or_start(chain, chunk_idx, rank, generation, may_displace, sources);
    core.counters.add(if is_new { Counter::Flights } else { Counter::JoinedFlights }, 1);
    let waiter: Weak<Gather> = Arc::downgrade(gather);
    if let Some(end) = flight.wait_for(WaitingCell { waiter, cell_idx }) {
        core.keep(&flight);
        gather.flight_ended(cell_idx, rank, &end);
    } else if is_new {
        core.launch(&flight);
    }
    if matches!(flight.ended(), Some(FlightEnd::Lost)) {
        return;
    }
    gather.hold(cell_idx, flight);
}

impl Core {
    /// Gets as much of a chain as arrives in time, of one tier where one is given, for the store's own ends.
    pub(crate) fn bring(self: &Arc<Self>, chain: &Chain, only: Option<TierIdx>) -> Retrieved {
        let wish = Wish { purpose: Purpose::Move, only };
        Prefetch::start(self, chain, 0, wish).wait(self.options.retrieve_timeout)
    }

    /// Whether a lower tier should have all ranks of a chunk that is in memory, and does not.
    fn lacks_write(&self, entry: &Entry, chain: &Chain) -> bool {
        let all_ranks = chain.space().format().all_ranks();
        !entry.is_timed()
            && self.written_lowers().any(|lower| {
                entry.ranks[lower.tier_idx] != all_ranks && !entry.left_tiers.contains(lower.tier_idx)
            })
    }

    /// Has a chunk written down that was used again: one that was not to be written before its first use,
    /// that came from a remote tier, or whose write was dropped.
    fn write_reused(
        self: &Arc<Self>,
        chain: &Chain,
        chunk_idx: usize,
        entry: &Entry,
        generation: u64,
        cell: &Cell,
    ) {
        for lower in self.written_lowers().filter(|lower| !entry.left_tiers.contains(lower.tier_idx)) {
            for (rank, lease) in (0..).zip(&cell.leases) {
                let is_there = entry.ranks[lower.tier_idx] & (1 << rank) != 0;
                let Some(lease) = lease.as_ref().filter(|_| !is_there) else { continue };
                self.queue_write(lower, chain, chunk_idx, rank, lease, generation);
            }
        }
    }
}
