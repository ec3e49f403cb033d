//! The course of events of a replay.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::router::{Placed, Policy, Router};
use super::worker::Worker;
use super::{ReplayConfig, ReplayOutcome, ReplayRequest};
use kvik_index::holders::IndexError;

/// Steps of the search for the saturation, each of which halves what is left: to a part in 500.
const N_SEARCH_STEPS: usize = 8;
/// How far the search goes: a trace that is found in the caches as a whole has no end.
const MAX_SATURATION: f64 = 1e6;

/// What happens at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// A request comes.
    Arrival { request: usize },
    /// A worker has computed a prompt.
    FirstToken { worker: usize },
    /// A request has all its tokens.
    End { worker: usize, request: usize, n_held: usize },
    /// What a worker said comes to the index.
    Heard { worker: usize, message: usize },
}

/// Blocks that a worker has evicted and stored.
type Message = (Vec<u64>, Vec<u64>);

/// Replays requests, in the order of their arrival, `speed` times as fast as they came.
///
/// # Errors
/// If there are more workers than an index takes.
pub fn run(
    requests: &[ReplayRequest],
    policy: Policy,
    speed: f64,
    config: &ReplayConfig,
) -> Result<ReplayOutcome, IndexError> {
    let config = &ReplayConfig { n_workers: config.n_workers.max(1), ..*config };
    let mut router = Router::try_new(policy, *config)?;
    let mut workers: Vec<Worker> = (0..config.n_workers).map(|_| Worker::new(config.cache_blocks)).collect();
    let mut placed = vec![Placed::default(); requests.len()];
    let mut messages: Vec<Message> = Vec::new();
    let mut ttfts_us = Vec::with_capacity(requests.len());
    let arrival_us = |request: usize| (requests[request].arrival_us as f64 / speed) as u64;

    let mut agenda = BinaryHeap::new();
    // Counted, so that what is due at one moment happens in the order in which it was put down.
    let mut n_put_down = 0_u64;
    let mut put_down = |agenda: &mut BinaryHeap<_>, at_us: u64, happening| {
        n_put_down += 1;
        agenda.push(Reverse((at_us, n_put_down, happening)));
    };
    for request in 0..requests.len() {
        put_down(&mut agenda, arrival_us(request), Happening::Arrival { request });
    }
    while let Some(Reverse((now_us, _, happening))) = agenda.pop() {
        let free_worker = match happening {
            Happening::Arrival { request } => {
                placed[request] = router.place(&requests[request]);
                let worker = placed[request].worker;
                workers[worker].enqueue(request);
                Some(worker)
            }
            Happening::FirstToken { worker } => {
                if let Some(done) = workers[worker].finish_prompt(requests, config) {
                    let request = done.request;
                    ttfts_us.push(now_us - arrival_us(request));
                    router.note_first_token(placed[request]);
                    let decode_us = requests[request].output_tokens * config.decode_token_us;
                    let end = Happening::End { worker, request, n_held: done.n_held };
                    put_down(&mut agenda, now_us + decode_us, end);
                    let message = messages.len();
                    messages.push((done.evicted, done.stored));
                    put_down(
                        &mut agenda,
                        now_us + config.event_delay_us,
                        Happening::Heard { worker, message },
                    );
                }
                Some(worker)
            }
            Happening::End { worker, request, n_held } => {
                workers[worker].finish(&requests[request], n_held);
                router.note_end(placed[request], &requests[request]);
                None
            }
            Happening::Heard { worker, message } => {
                let (evicted, stored) = std::mem::take(&mut messages[message]);
                router.hear(worker, &evicted, &stored);
                None
            }
        };
        if let Some(worker) = free_worker
            && let Some(duration_us) = workers[worker].start_next(requests, config)
        {
            put_down(&mut agenda, now_us + duration_us, Happening::FirstToken { worker });
        }
    }
    let last_us = requests.len().checked_sub(1).map_or(0, arrival_us);
    let outcome = outcome(requests, &workers, ttfts_us, last_us);
    let Router { n_on_owner, max_load_over_bound, .. } = router;
    Ok(ReplayOutcome { n_on_owner, max_load_over_bound, ..outcome })
}

/// The speed at which the prompts of a trace keep all workers busy from its first arrival to its last, and no
/// longer: beyond it queues only grow. What prompts take depends on the policy and, a little, on the speed.
///
/// # Errors
/// If there are more workers than an index takes.
pub fn saturation(
    requests: &[ReplayRequest],
    policy: Policy,
    config: &ReplayConfig,
) -> Result<f64, IndexError> {
    let capacity = |outcome: &ReplayOutcome| {
        outcome.arrival_span_s * config.n_workers as f64 / outcome.prefill_s.max(f64::MIN_POSITIVE)
    };
    // What prompts take without a cache is the most they can take, and so its speed the least.
    let mut low = capacity(&run(requests, policy, 1.0, &ReplayConfig { cache_blocks: 0, ..*config })?);
    let mut high = 2.0 * low;
    while high < MAX_SATURATION && capacity(&run(requests, policy, high, config)?) >= 1.0 {
        (low, high) = (high, 2.0 * high);
    }
    for _ in 0..N_SEARCH_STEPS {
        let middle = f64::midpoint(low, high);
        if capacity(&run(requests, policy, middle, config)?) >= 1.0 {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(low)
}

fn outcome(
    requests: &[ReplayRequest],
    workers: &[Worker],
    mut ttfts_us: Vec<u64>,
    arrival_span_us: u64,
) -> ReplayOutcome {
    ttfts_us.sort_unstable();
    let n = ttfts_us.len();
    let p99_us = n.checked_sub(1).map_or(0, |last| ttfts_us[last * 99 / 100]);
    ReplayOutcome {
        ttft_mean_s: ttfts_us.iter().sum::<u64>() as f64 / n.max(1) as f64 / 1e6,
        ttft_p99_s: p99_us as f64 / 1e6,
        prompt_tokens: requests.iter().map(|request| request.prompt_tokens).sum(),
        hit_tokens: workers.iter().map(|worker| worker.hit_tokens).sum(),
        prefill_s: workers.iter().map(|worker| worker.prefill_us).sum::<u64>() as f64 / 1e6,
        arrival_span_s: arrival_span_us as f64 / 1e6,
        n_placed: workers.iter().map(|worker| worker.n_placed).collect(),
        n_on_owner: 0,
        max_load_over_bound: 0.0,
    }
}
