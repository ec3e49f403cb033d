//! A prompt's KV that arrives while the engine computes.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_model::{BLOCK_TOKENS, BlockSource, PrefixKv};
use kvik_store::plan::TierState;
use kvik_store::{Arriving, Chain, ChunkPlaces, Store};
use kvik_tier::TierKind;
use parking_lot::Mutex;

use super::planner::{LoadRequest, Planned, Planner};

/// A chunk is late when it has taken this much longer than it should, and a moment more.
const LATE_FACTOR: f64 = 1.25;
const LATE_S: f64 = 0.01;

/// The tokens that the engine took, and the tier of each run.
pub(crate) type TakenTokens = Arc<Mutex<Vec<(Range<usize>, TierKind)>>>;

/// Chunks of a prompt on their way, the last first. Dropping it gives up what has not begun.
#[derive(Debug)]
pub(crate) struct ArrivingPrefix {
    arriving: Arriving,
    chain: Chain,
    store: Store,
    planner: Arc<Planner>,
    /// The tier below memory that each chunk comes from.
    tiers: Vec<Option<usize>>,
    /// The tiers when it began.
    states: Vec<TierState>,
    load_timeout: Duration,
    /// The first chunk that is not to be computed if all goes as planned.
    planned_cut: usize,
    /// Chunks that are computed before the engine looks for more.
    piece_chunks: usize,
    progress: Mutex<Progress>,
    taken: TakenTokens,
}

/// When a chunk arrived last.
#[derive(Debug)]
struct Progress {
    at: Instant,
    n_arrived: usize,
    /// Those that were in memory when it began.
    n_at_once: usize,
}

impl ArrivingPrefix {
    /// Begins to read what a plan asks for; `None` where that is nothing. As long as nothing is known of the engine, a chunk is
    /// waited for until `load_timeout`.
    pub(crate) fn begin(
        store: &Store,
        planner: &Arc<Planner>,
        request: &LoadRequest,
        places: &ChunkPlaces,
        planned: Planned,
        load_timeout: Duration,
    ) -> Option<Self> {
        let Planned { plan, chunks, tiers: states, prefill } = planned;
        let first_chunk = request.first_chunk();
        let is_wanted = plan.n_chunks > 0 || chunks.iter().any(|chunk| chunk.tier.is_none());
        if !is_wanted {
            return None;
        }
        let range = first_chunk..first_chunk + chunks.len();
        let arriving = store.arrive(&request.chain, range, places, first_chunk + plan.n_chunks);
        let n_at_once = n_arrived(&arriving);
        let piece_tokens = prefill.map_or(0, |prefill| prefill.piece_tokens());
        Some(Self {
            arriving,
            chain: request.chain.clone(),
            planned_cut: first_chunk + plan.n_computed_chunks,
            piece_chunks: piece_tokens.div_ceil(request.chain.space().chunk_tokens()).max(1),
            store: store.clone(),
            planner: Arc::clone(planner),
            tiers: chunks.iter().map(|chunk| chunk.tier).collect(),
            states,
            load_timeout,
            progress: Mutex::new(Progress { at: Instant::now(), n_arrived: n_at_once, n_at_once }),
            taken: Arc::default(),
        })
    }

    /// What the engine takes of it, also after it is gone.
    pub(crate) fn taken(&self) -> TakenTokens {
        Arc::clone(&self.taken)
    }

    /// Calls `callback` whenever a chunk has come or is lost.
    pub(crate) fn on_each(&self, callback: &Arc<dyn Fn() + Send + Sync>) {
        self.arriving.on_each(callback);
    }

    fn chunk_of(&self, token: usize) -> usize {
        token / self.chain.space().chunk_tokens()
    }

    /// Where the piece ends that is computed next if it begins in a chunk: where the prompt is planned to be cut, or after so many
    /// tokens that looking for more costs little.
    fn piece_end(&self, chunk_idx: usize) -> usize {
        let end_chunk = chunk_idx.saturating_add(self.piece_chunks).min(self.arriving.chunks().end);
        let is_before_cut = (chunk_idx + 1..end_chunk).contains(&self.planned_cut);
        let end_chunk = if is_before_cut { self.planned_cut } else { end_chunk };
        self.chain.tokens_of(end_chunk.max(chunk_idx + 1) - 1).end
    }

    /// Seconds that have passed since the last arrival, and seconds from it until all from `chunk_idx` on should be there;
    /// `None` for the second where a tier was never measured.
    fn progress_s(&self, chunk_idx: usize) -> (f64, Option<f64>) {
        let chunks = self.arriving.chunks();
        let mut bytes_by_tier = vec![0_u64; self.states.len()];
        for pending in (chunk_idx..chunks.end).filter(|idx| self.arriving.is_pending(*idx)) {
            if let Some(Some(tier)) = self.tiers.get(pending - chunks.start) {
                bytes_by_tier[*tier] += self.chain.payload_bytes(pending) as u64;
            }
        }
        let now = Instant::now();
        let n_arrived = n_arrived(&self.arriving);
        let mut progress = self.progress.lock();
        if progress.n_arrived < n_arrived {
            progress.n_arrived = n_arrived;
            progress.at = now;
        }
        let (is_first, passed_s) =
            (progress.n_arrived == progress.n_at_once, (now - progress.at).as_secs_f64());
        drop(progress);
        let needed = bytes_by_tier.into_iter().enumerate().filter(|(_, n_bytes)| *n_bytes > 0);
        let tier_s = |(tier, n_bytes): (usize, u64)| {
            let speed = self.store.tier_speed(tier + 1)?;
            Some(if is_first {
                speed.seconds(n_bytes.saturating_add(self.states[tier].queued_bytes))
            } else {
                n_bytes as f64 / speed.bytes_per_s
            })
        };
        let expected_s = needed.map(tier_s).try_fold(0.0, |longest: f64, tier_s| Some(longest.max(tier_s?)));
        (passed_s, expected_s)
    }
}

/// Chunks that are there.
fn n_arrived(arriving: &Arriving) -> usize {
    arriving.chunks().filter(|chunk_idx| arriving.chunk(*chunk_idx).is_some()).count()
}

impl BlockSource for ArrivingPrefix {
    fn block(&self, layer_idx: usize, block_idx: usize) -> Option<&[u8]> {
        let token = block_idx.checked_mul(BLOCK_TOKENS)?;
        let chunk_idx = self.chunk_of(token);
        let section = self.arriving.chunk(chunk_idx)?.layer(0, layer_idx);
        let tokens = self.chain.tokens_of(chunk_idx);
        let block_bytes = section.len().checked_div(tokens.len() / BLOCK_TOKENS)?;
        let place = token.checked_sub(tokens.start)? / BLOCK_TOKENS;
        section.get(place * block_bytes..(place + 1) * block_bytes)
    }
}

impl PrefixKv for ArrivingPrefix {
    fn there_until(&self, token: usize) -> usize {
        let chunks = self.chunk_of(token)..self.arriving.chunks().end;
        let there = chunks.take_while(|chunk_idx| self.arriving.chunk(*chunk_idx).is_some());
        there.last().map_or(token, |chunk_idx| self.chain.tokens_of(chunk_idx).end)
    }

    fn look_again_at(&self, token: usize) -> Option<usize> {
        let chunks = self.arriving.chunks();
        let chunk_idx = self.chunk_of(token);
        self.arriving.give_up_before(chunk_idx);
        let may_come = |idx: usize| self.arriving.is_pending(idx) || self.arriving.chunk(idx).is_some();
        (chunk_idx.max(chunks.start)..chunks.end).any(may_come).then(|| {
            // What lies before the first chunk is computed in one go.
            if chunk_idx < chunks.start {
                self.chain.tokens_of(chunks.start).start
            } else {
                self.piece_end(chunk_idx)
            }
        })
    }

    fn is_due(&self, token: usize) -> bool {
        let chunk_idx = self.chunk_of(token);
        if !self.arriving.is_pending(chunk_idx) {
            return false;
        }
        let (passed_s, expected_s) = self.progress_s(chunk_idx);
        let Some(prefill) = self.planner.prefill() else {
            return passed_s < self.load_timeout.as_secs_f64();
        };
        let compute_s = prefill.pass_s + prefill.seconds(token..self.piece_end(chunk_idx));
        match expected_s {
            Some(expected_s) => {
                expected_s - passed_s < compute_s && passed_s <= LATE_FACTOR * expected_s + LATE_S
            }
            // The wait costs no more than what it may save.
            None => passed_s < compute_s,
        }
    }

    fn note_taken(&self, tokens: Range<usize>) {
        let mut taken = self.taken.lock();
        for chunk_idx in self.chunk_of(tokens.start)..=self.chunk_of(tokens.end.saturating_sub(1)) {
            let of_chunk = self.chain.tokens_of(chunk_idx);
            if let Some(chunk) = self.arriving.chunk(chunk_idx) {
                taken.push((of_chunk.start.max(tokens.start)..of_chunk.end.min(tokens.end), chunk.tier()));
            }
        }
    }
}
