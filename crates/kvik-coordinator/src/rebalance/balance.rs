//! Which worker gives a running request to which, as a state machine; the time is an argument of its calls.
//!
//! **What is counted.** A worker's load is its sequences, running and waiting. Each costs a row of every step and the KV that is read
//! for it, and a move takes exactly as many from one worker as it adds to another. Outstanding tokens would not do: they
//! count outputs as far as their limit, which most never reach.
//!
//! **When.** The share of a worker is its weight's part of all sequences of the model. A worker begins to give when it
//! has more than `1 + load_factor` times its share, and ends when it is down to its share; only workers below their
//! share take. A move never brings its source below its share nor its destination above it, rounded to whole sequences, so the two never
//! change their parts.
//!
//! **How often.** Moves begin at least `1 / max_moves_per_s` apart. A request that came from another worker stays for
//! `min_stay`, and one that could not be moved is not asked again for as long.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvik_proto::moves::RunningSequence;

/// Tokens that each output of a request must have to go: with fewer it would end before its move pays.
const MIN_TOKENS_LEFT: u64 = 32;

/// How requests are moved.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct BalanceSettings {
    pub(crate) load_factor: f64,
    pub(crate) move_interval: Duration,
    pub(crate) min_stay: Duration,
}

/// What has been decided so far, as far as it matters.
#[derive(Debug)]
pub(crate) struct Balance {
    settings: BalanceSettings,
    /// Workers that were above their bound and are not down to their share yet, by id.
    giving: BTreeSet<String>,
    /// When the last move began.
    last_move: Option<Duration>,
    /// By name on their workers: requests that were asked to move, and when.
    asked: BTreeMap<String, Duration>,
}

/// A worker with its load.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BalancedWorker {
    pub(crate) id: String,
    pub(crate) model: String,
    /// Its part relative to the other workers.
    pub(crate) weight: f64,
    /// Whether it takes requests; one that drains takes none and gives its own away by itself.
    pub(crate) is_ready: bool,
    /// Running and waiting.
    pub(crate) n_sequences: u64,
}

/// A request of `from` should go to `to`; both are places in the list of workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Transfer {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Most sequences that the request may have.
    pub(crate) max_sequences: u64,
}

impl Balance {
    pub(crate) fn new(settings: BalanceSettings) -> Self {
        Self { settings, giving: BTreeSet::new(), last_move: None, asked: BTreeMap::new() }
    }

    /// What should be done at `now`, the most uneven pair first; `None` if nothing, or not yet.
    pub(crate) fn choose(&mut self, workers: &[BalancedWorker], now: Duration) -> Option<Transfer> {
        let shares = shares(workers);
        self.giving.retain(|id| workers.iter().any(|worker| worker.id == *id && worker.is_ready));
        for (worker, share) in workers.iter().zip(&shares).filter(|(worker, _)| worker.is_ready) {
            let n_sequences = worker.n_sequences as f64;
            if n_sequences <= share.ceil() {
                self.giving.remove(&worker.id);
            } else if (share * (1.0 + self.settings.load_factor)).max(share + 1.0) < n_sequences {
                self.giving.insert(worker.id.clone());
            }
        }
        if self.last_move.is_some_and(|last| now < last + self.settings.move_interval) {
            return None;
        }
        let pair = |from: usize, to: usize| {
            let (source, destination) = (&workers[from], &workers[to]);
            let fits = source.model == destination.model
                && destination.is_ready
                && (destination.n_sequences as f64) < shares[to];
            let max_sequences =
                if fits { max_sequences(source, destination, shares[from], shares[to]) } else { 0 };
            (0 < max_sequences).then_some(Transfer { from, to, max_sequences })
        };
        let places = || 0..workers.len();
        let giving = places().filter(|from| self.giving.contains(&workers[*from].id));
        let pairs = giving.flat_map(|from| places().filter_map(move |to| pair(from, to)));
        let unevenness =
            |transfer: &Transfer| fullness(&workers[transfer.from]) - fullness(&workers[transfer.to]);
        pairs.max_by(|one, other| unevenness(one).total_cmp(&unevenness(other)))
    }

    /// The request that moves, of those that run on the source: the one with the most tokens to go, for it gains the
    /// most; among equal ones the one with the least KV. It counts as asked from `now` on.
    pub(crate) fn pick<'a>(
        &mut self,
        running: &'a [RunningSequence],
        max_sequences: u64,
        now: Duration,
    ) -> Option<&'a RunningSequence> {
        let min_stay = self.settings.min_stay;
        self.asked.retain(|_, asked| now < *asked + min_stay);
        let stays = |request: &RunningSequence| {
            let moved = request.moved_ms_ago.map(Duration::from_millis);
            moved.is_some_and(|moved| moved < min_stay) || self.asked.contains_key(&request.id)
        };
        let may_move = |request: &&RunningSequence| {
            request.can_move
                && !request.is_moving
                && request.outputs <= max_sequences
                && MIN_TOKENS_LEFT.saturating_mul(request.outputs) <= request.tokens_left
                && !stays(request)
        };
        let gain = |request: &&RunningSequence| {
            (request.tokens_left, Reverse(request.prompt_tokens.saturating_add(request.output_tokens)))
        };
        let picked = running.iter().filter(may_move).max_by_key(gain)?;
        self.asked.insert(picked.id.clone(), now);
        self.last_move = Some(now);
        Some(picked)
    }
}

/// For each worker, its part of the sequences of its model. Workers that are not ready have none, and theirs are not counted.
fn shares(workers: &[BalancedWorker]) -> Vec<f64> {
    let mut totals: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for worker in workers.iter().filter(|worker| worker.is_ready) {
        let (weight, n_sequences) = totals.entry(&worker.model).or_default();
        *weight += worker.weight;
        *n_sequences += worker.n_sequences as f64;
    }
    let share = |worker: &BalancedWorker| match totals.get(worker.model.as_str()) {
        Some((weight, n_sequences)) if worker.is_ready && 0.0 < *weight => {
            n_sequences * worker.weight / weight
        }
        _ => 0.0,
    };
    workers.iter().map(share).collect()
}

/// Most sequences that may go from one worker to another: the destination is not fuller than the source afterwards, and neither has
/// passed its share.
fn max_sequences(
    source: &BalancedWorker,
    destination: &BalancedWorker,
    share: f64,
    destination_share: f64,
) -> u64 {
    let (from, to) = (source.n_sequences as f64, destination.n_sequences as f64);
    let level = (from * destination.weight - to * source.weight) / (source.weight + destination.weight);
    let n_sequences = level.min(from - share.floor()).min(destination_share.ceil() - to);
    // Rounds down, and to 0 what is negative or not a number.
    n_sequences as u64
}

/// Sequences for the weight.
fn fullness(worker: &BalancedWorker) -> f64 {
    // The least positive number: a worker without weight should have none, and is the fullest with any.
    worker.n_sequences as f64 / worker.weight.max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests;
