//! Finding out where the chunks of a chain are, without a wait.

use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::Store;
use super::lookup::{all_ranks_of, tier_of};
use super::survey::{Survey, SurveyVisitor};
use crate::chain::Chain;
use crate::tiers::{RAM, TierIdx, TierRanks};

/// A question where the chunks of a chain are. Local tiers are known at once, remote ones are asked in the background;
/// dropping it ends that.
#[derive(Debug)]
pub struct Inquiry {
    answer: Arc<Answer>,
    n_known: usize,
}

/// Where chunks of a chain are, from one of them on and without a gap.
#[derive(Debug, Clone, Default)]
pub struct ChunkPlaces {
    pub(crate) ranks: Vec<TierRanks>,
    all_ranks: u64,
}

type Callback = Box<dyn FnOnce() + Send>;

struct Answer {
    all_ranks: u64,
    state: Mutex<State>,
}

struct State {
    found: Vec<TierRanks>,
    is_done: bool,
    callback: Option<Callback>,
}

/// Takes what remote tiers answer.
struct Collect(Weak<Answer>);

impl Store {
    /// Asks where the chunks of a chain are, from `first_chunk` on.
    pub fn inquire(&self, chain: &Chain, first_chunk: usize) -> Inquiry {
        let core = self.core();
        core.end_times();
        let n_chunks = core.n_chunks(chain);
        let first_chunk = first_chunk.min(n_chunks);
        let found = core.find_known(chain, first_chunk..n_chunks);
        let n_known = found.len();
        let end = first_chunk + n_known;
        let is_done = end == n_chunks || !core.has_remote();
        let state = Mutex::new(State { found, is_done, callback: None });
        let answer = Arc::new(Answer { all_ranks: all_ranks_of(chain), state });
        if !is_done {
            let collect = Collect(Arc::downgrade(&answer));
            core.survey(Survey::new(chain, end..n_chunks, Box::new(collect)));
        }
        Inquiry { answer, n_known }
    }
}

impl Inquiry {
    /// Whether nothing more will be found.
    pub fn is_done(&self) -> bool {
        self.answer.state.lock().is_done
    }

    /// Calls `callback` once when nothing more will be found: at once, or on a thread of the store, which it must not hold
    /// up. If this is dropped before, `callback` is not called.
    pub fn on_done(&self, callback: impl FnOnce() + Send + 'static) {
        let mut state = self.answer.state.lock();
        if !state.is_done {
            state.callback = Some(Box::new(callback));
            return;
        }
        drop(state);
        callback();
    }

    /// What was found by now.
    pub fn places(&self) -> ChunkPlaces {
        ChunkPlaces { ranks: self.answer.state.lock().found.clone(), all_ranks: self.answer.all_ranks }
    }

    /// Chunks that were known at once.
    pub fn n_known(&self) -> usize {
        self.n_known
    }
}

impl ChunkPlaces {
    /// Number of chunks.
    pub fn n_chunks(&self) -> usize {
        self.ranks.len()
    }

    /// The slowest tier that is needed for a chunk, as a place in [`Store::tiers`]; memory is the first.
    pub fn tier(&self, place: usize) -> usize {
        self.ranks.get(place).and_then(|ranks| tier_of(ranks, self.all_ranks)).unwrap_or(RAM)
    }

    /// What is known of a chunk's tiers; nothing where there is no such chunk.
    pub(crate) fn ranks_of(&self, place: usize) -> &[TierRanks] {
        self.ranks.get(place).map_or(&[], std::slice::from_ref)
    }

    /// Whether a chunk is in memory.
    pub fn is_in_memory(&self, place: usize) -> bool {
        let tier: TierIdx = self.tier(place);
        tier == RAM
    }
}

impl SurveyVisitor for Collect {
    fn found(&mut self, _: usize, found: &[TierRanks]) -> bool {
        let Some(answer) = self.0.upgrade() else { return false };
        let whole: Vec<TierRanks> =
            found.iter().copied().take_while(|found| tier_of(found, answer.all_ranks).is_some()).collect();
        let goes_on = whole.len() == found.len();
        answer.state.lock().found.extend(whole);
        goes_on
    }
}

impl Drop for Collect {
    fn drop(&mut self) {
        let Some(answer) = self.0.upgrade() else { return };
        let callback = {
            let mut state = answer.state.lock();
            state.is_done = true;
            state.callback.take()
        };
        if let Some(callback) = callback {
            callback();
        }
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        let mut shown = formatter.debug_struct("Answer");
        shown.field("n_found", &state.found.len()).field("is_done", &state.is_done).finish_non_exhaustive()
    }
}
