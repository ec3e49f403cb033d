//! Traces with a known shape, for tests and for policies to be compared on more than one workload.
//!
//! Everything is a function of the arguments: equal seeds give equal traces.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::trace::{TOKENS_PER_BLOCK, Trace, TraceError, TraceRequest};

/// A stream of random numbers (splitmix64).
#[derive(Debug, Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in (0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }
}

/// Requests in the making, with ids that are never used twice.
#[derive(Default)]
struct Maker {
    requests: Vec<TraceRequest>,
    n_ids: u64,
}

impl Maker {
    fn fresh(&mut self, n_blocks: u64) -> Vec<u64> {
        let first = self.n_ids;
        self.n_ids += n_blocks;
        (first..self.n_ids).collect()
    }

    /// A request with a chain of full blocks and a partly full one at its end.
    fn request(&mut self, at_s: f64, full_blocks: &[u64], output_length: u32) {
        let mut hash_ids = full_blocks.to_vec();
        hash_ids.extend(self.fresh(1));
        let input_length = hash_ids.len() as u64 * TOKENS_PER_BLOCK - TOKENS_PER_BLOCK / 2;
        let timestamp = (at_s * 1000.0) as u64;
        self.requests.push(TraceRequest { timestamp, input_length, output_length, hash_ids });
    }

    fn finish(mut self) -> Result<Trace, TraceError> {
        self.requests.sort_by_key(|request| request.timestamp);
        Trace::try_new(self.requests)
    }
}

/// Conversations whose users think for a while between turns.
#[derive(Debug, Clone, Copy)]
pub struct Chats {
    /// How many requests there are.
    pub n_requests: usize,
    /// Requests a second.
    pub rate: f64,
    /// Mean time between the turns of a conversation.
    pub think_s: f64,
    /// Chance that a turn has a next one.
    pub next_turn: f64,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Chats {
    /// Makes the trace.
    pub fn trace(&self) -> Result<Trace, TraceError> {
        let mut random = Random(self.seed);
        let mut maker = Maker::default();
        let system = maker.fresh(1);
        // Conversations that wait for their next turn, by time in milliseconds.
        let mut waiting: BinaryHeap<Reverse<(u64, Vec<u64>)>> = BinaryHeap::new();
        let first_turn_rate = self.rate * (1.0 - self.next_turn);
        let mut next_new_ms = 0;
        for _ in 0..self.n_requests {
            let is_old = waiting.peek().is_some_and(|Reverse((due_ms, _))| *due_ms <= next_new_ms);
            let (now_ms, mut blocks) = if is_old && let Some(Reverse(conversation)) = waiting.pop() {
                conversation
            } else {
                let now_ms = next_new_ms;
                next_new_ms += (1000.0 * random.exponential(1.0 / first_turn_rate)) as u64;
                (now_ms, system.clone())
            };
            let n_fresh = 1 + random.exponential(4.0) as u64;
            blocks.extend(maker.fresh(n_fresh));
            let output_length = 50 + random.below(500) as u32;
            maker.request(now_ms as f64 / 1000.0, &blocks, output_length);
            if random.unit() < self.next_turn {
                let due_ms = now_ms + (1000.0 * (2.0 + random.exponential(self.think_s))) as u64;
                waiting.push(Reverse((due_ms, blocks)));
            }
        }
        maker.finish()
    }
}

/// Single requests on shared prompts whose popularity falls with their rank (Zipf).
pub fn shared_prompts(
    n_requests: usize,
    n_prompts: usize,
    exponent: f64,
    seed: u64,
) -> Result<Trace, TraceError> {
    let mut random = Random(seed);
    let mut maker = Maker::default();
    let prompts: Vec<Vec<u64>> = (0..n_prompts.max(1))
        .map(|_| {
            let n_blocks = 2 + random.below(12);
            maker.fresh(n_blocks)
        })
        .collect();
    let mut total = 0.0;
    let cumulative: Vec<f64> = (1..=prompts.len())
        .map(|rank| {
            total += (rank as f64).powf(-exponent);
            total
        })
        .collect();
    for number in 0..n_requests {
        let point = random.unit() * total;
        let rank = cumulative.partition_point(|&sum| sum < point).min(prompts.len() - 1);
        let n_own = random.below(3);
        let mut blocks = prompts[rank].clone();
        blocks.extend(maker.fresh(n_own));
        maker.request(number as f64 * 0.3, &blocks, 100);
    }
    maker.finish()
}

/// Agents that call the model in a tight loop on a growing context, while scans pass by once.
pub fn agents_and_scans(n_requests: usize, n_agents: usize, seed: u64) -> Result<Trace, TraceError> {
    let mut random = Random(seed);
    let mut maker = Maker::default();
    let tools = maker.fresh(6);
    let mut agents = vec![tools.clone(); n_agents.max(1)];
    for number in 0..n_requests {
        let at_s = number as f64 * 0.3;
        if random.unit() < 0.3 {
            let n_blocks = 20 + random.below(60);
            let scan = maker.fresh(n_blocks);
            maker.request(at_s, &scan, 10);
            continue;
        }
        let which = random.below(agents.len() as u64) as usize;
        if agents[which].len() > 80 {
            agents[which].clone_from(&tools);
        }
        let n_fresh = 1 + random.below(3);
        let fresh = maker.fresh(n_fresh);
        agents[which].extend(fresh);
        let blocks = agents[which].clone();
        maker.request(at_s, &blocks, 60);
    }
    maker.finish()
}

/// Questions about documents: a system prompt, one of many documents, a question.
pub fn documents(n_requests: usize, n_documents: usize, seed: u64) -> Result<Trace, TraceError> {
    let mut random = Random(seed);
    let mut maker = Maker::default();
    let system = maker.fresh(2);
    let documents: Vec<Vec<u64>> = (0..n_documents.max(1))
        .map(|_| {
            let n_blocks = 8 + random.below(40);
            maker.fresh(n_blocks)
        })
        .collect();
    for number in 0..n_requests {
        // The square of a uniform number: some documents are asked about more than others.
        let place = random.unit() * random.unit();
        let document = &documents[(place * documents.len() as f64) as usize % documents.len()];
        let mut blocks = system.clone();
        blocks.extend(document);
        maker.request(number as f64 * 0.5, &blocks, 200);
    }
    maker.finish()
}
