//! Bringing chunks to memory before they are needed.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Store;
use super::core::{BookPin, Core};
use super::lookup::{Found, Survey};
use super::retrieve::Retrieved;
use super::stats::Counter;
use crate::chain::Chain;
use crate::directory::{Entry, MAX_TIERS, RAM, TierIdx};
use crate::flight::{Landing, Waiter};
use crate::gather::{Cell, Gather};

/// A retrieve that is under way. Dropping it gives up the reads that have not begun and that nobody else
/// waits for.
#[derive(Debug)]
pub struct Prefetch {
    core: Arc<Core>,
    chain: Chain,
    first_chunk: usize,
    purpose: Purpose,
    gather: Arc<Gather>,
    /// Keeps what was in memory from being evicted meanwhile.
    pin: Option<BookPin>,
}

/// Why chunks are brought to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A request uses them, which decides what is kept and written down.
    Use,
    /// The store works on them itself.
    Move,
}

/// A read that a plan needs.
struct Boarding {
    chunk_idx: usize,
    rank: u16,
    may_displace: bool,
    sources: VecDeque<TierIdx>,
}

impl Store {
    /// Leases what is in memory of a chain from `first_chunk` on, and starts to read the rest.
    ///
    /// Chunks that nobody is known to have are asked of the remote tiers, in the background.
    pub fn prefetch(&self, chain: &Chain, first_chunk: usize) -> Prefetch {
        Prefetch::start(self.core(), chain, first_chunk, Purpose::Use)
    }
}

impl Prefetch {
    pub(crate) fn start(core: &Arc<Core>, chain: &Chain, first_chunk: usize, purpose: Purpose) -> Self {
        let gather = Arc::new(Gather::new());
        let n_chunks = core.n_chunks(chain);
        let first_chunk = first_chunk.min(n_chunks);
        // Before anything is looked up: what a clear removes meanwhile then belongs to an earlier generation.
        let generation = chain.namespace().generation();
        let planned = plan(core, &gather, chain, first_chunk..n_chunks, &[], generation, purpose);
        let pin = core.pin_deepest(chain, planned);
        if planned < n_chunks && core.has_remote() {
            let (waiting, chain, core_then) = (Arc::downgrade(&gather), chain.clone(), Arc::clone(core));
            let survey = Survey::new(&chain.clone(), planned, move |found| {
                if let Some(gather) = waiting.upgrade() {
                    plan(&core_then, &gather, &chain, planned..n_chunks, found, generation, purpose);
                    gather.end_search();
                }
            });
            core.ask(survey, 0);
        } else {
            gather.end_search();
        }
        Self { core: Arc::clone(core), chain: chain.clone(), first_chunk, purpose, gather, pin }
    }

    /// Whether nothing more will arrive.
    pub fn is_done(&self) -> bool {
        self.gather.is_done()
    }

    /// Calls `callback` once when nothing more will arrive or is waited for: at once if that is so, and
    /// otherwise on a thread of the store, which it must not hold up. A prefetch that is dropped before calls
    /// nobody.
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
        let n_found = self.first_chunk + gathered.cells.len();
        let pin = self.core.pin_deepest(&self.chain, n_found).or(self.pin);
        let (is_truncated, is_timed_out) = (gathered.is_truncated, gathered.is_timed_out);
        let retrieved = Retrieved::new(&self.chain, self.first_chunk, gathered, pin);
        if self.purpose == Purpose::Use {
            let counters = &self.core.counters;
            counters.add(Counter::Retrieves, 1);
            counters.add(Counter::Truncated, u64::from(is_truncated));
            counters.add(Counter::Timeouts, u64::from(is_timed_out));
            let asked = self.chain.tokens_between(self.first_chunk..self.chain.n_chunks());
            counters.add(Counter::RequestedTokens, asked as u64);
            for chunk in retrieved.chunks() {
                let tier = self.core.tier_idx(chunk.tier()).unwrap_or(RAM);
                counters.add(Counter::HitTokens(tier), chunk.token_range().len() as u64);
            }
        }
        retrieved
    }
}

/// Leases and starts to read the chunks of a range, up to the first that nobody is known to have, which it
/// returns. `found` says what remote tiers have of each chunk of the range.
fn plan(
    core: &Arc<Core>,
    gather: &Arc<Gather>,
    chain: &Chain,
    range: Range<usize>,
    found: &[Found],
    generation: u64,
    purpose: Purpose,
) -> usize {
    let first_chunk = range.start;
    let mut cells = Vec::with_capacity(range.len());
    let mut boardings = Vec::new();
    let mut reused = Vec::new();
    for chunk_idx in range {
        let mut entry = core.directory.view(chain.hash(chunk_idx));
        if let Some(found) = found.get(chunk_idx - first_chunk) {
            for (ranks, found) in entry.ranks.iter_mut().zip(found).skip(1) {
                *ranks |= found;
            }
        }
        let n_boardings = boardings.len();
        let Some(cell) = plan_chunk(core, chain, chunk_idx, &entry, generation, &mut boardings) else {
            boardings.truncate(n_boardings);
            break;
        };
        if purpose == Purpose::Use && boardings.len() == n_boardings && core.lacks_write(&entry, chain) {
            reused.push((chunk_idx, entry));
        }
        if purpose == Purpose::Use && !entry.was_used {
            core.directory.update_known(chain.id(chunk_idx), |_, entry| entry.was_used = true);
        }
        cells.push(cell);
    }
    for (chunk_idx, entry) in reused {
        core.write_reused(chain, chunk_idx, &entry, generation, &cells[chunk_idx - first_chunk]);
    }
    let end = first_chunk + cells.len();
    let first_cell = gather.extend(cells);
    for boarding in boardings {
        let cell_idx = first_cell + (boarding.chunk_idx - first_chunk);
        board(core, gather, chain, generation, cell_idx, boarding);
    }
    end
}

/// Leases what is in memory of a chunk and says what must be read; `None` where a rank is nowhere.
fn plan_chunk(
    core: &Core,
    chain: &Chain,
    chunk_idx: usize,
    entry: &Entry,
    generation: u64,
    boardings: &mut Vec<Boarding>,
) -> Option<Cell> {
    let mut cell = Cell::new(chain.n_ranks());
    for rank in 0..chain.n_ranks() {
        let bit = 1 << rank;
        let key = chain.key_of(chunk_idx, rank);
        if entry.ranks[RAM] & bit != 0
            && let Some(lease) = core.ram.lease(&key)
        {
            cell.leases[usize::from(rank)] = Some(lease);
            continue;
        }
        let sources: VecDeque<TierIdx> =
            (1..MAX_TIERS).filter(|tier| entry.ranks[*tier] & bit != 0).collect();
        if sources.is_empty() && core.flights.find(&key, generation).is_none() {
            return None;
        }
        // Of a chunk that no local tier has, nobody remembers whether it was used before: the policy may.
        let is_only_remote =
            core.lowers.iter().all(|lower| !lower.is_local() || entry.ranks[lower.tier_idx] & bit == 0);
        let may_displace = entry.was_used || is_only_remote;
        boardings.push(Boarding { chunk_idx, rank, may_displace, sources });
    }
    Some(cell)
}

/// Joins or starts the flight for one rank of a chunk.
fn board(
    core: &Arc<Core>,
    gather: &Arc<Gather>,
    chain: &Chain,
    generation: u64,
    cell_idx: usize,
    boarding: Boarding,
) {
    let Boarding { chunk_idx, rank, may_displace, sources } = boarding;
    let (flight, is_new) = core.flights.board(chain, chunk_idx, rank, generation, may_displace, sources);
    core.counters.add(if is_new { Counter::Flights } else { Counter::JoinedFlights }, 1);
    if let Some(landing) = flight.wait_for(Waiter { gather: Arc::downgrade(gather), cell_idx }) {
        core.keep(&flight);
        gather.land(cell_idx, rank, &landing);
    } else if is_new {
        core.launch(&flight);
    }
    if matches!(flight.landing(), Some(Landing::Lost)) {
        return;
    }
    gather.hold(cell_idx, flight);
}

impl Core {
    /// Whether a lower tier should have all ranks of a chunk that is in memory, and does not.
    fn lacks_write(&self, entry: &Entry, chain: &Chain) -> bool {
        let all_ranks = chain.space().format().all_ranks();
        !entry.was_evicted_below && self.lowers.iter().any(|lower| entry.ranks[lower.tier_idx] != all_ranks)
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
        for lower in &self.lowers {
            for (rank, lease) in (0..).zip(&cell.leases) {
                let is_there = entry.ranks[lower.tier_idx] & (1 << rank) != 0;
                let Some(lease) = lease.as_ref().filter(|_| !is_there) else { continue };
                self.queue_write(lower, chain, chunk_idx, rank, lease, generation);
            }
        }
    }
}
