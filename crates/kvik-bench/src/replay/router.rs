//! The router of a replay: it knows what a gateway knows.

use super::worker::full_blocks;
use super::{ReplayConfig, ReplayRequest};
use kvik_index::holders::{
    Batch, BlockKey, Event, HolderIndex, HolderReader, IndexConfig, IndexError, LookupOptions, Matches,
    SourceId, Tier,
};
use kvik_index::placement::{self, Request};
use kvik_index::ring::{self, Loads, Ring, RingHash};

/// Virtual nodes of a worker, as the coordinator's default has it.
const VIRTUAL_NODES: u32 = 160;

/// A way of placing requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    /// One worker after the other.
    RoundRobin,
    /// The worker with the least outstanding tokens.
    LeastLoaded,
    /// The bounded-load ring with the beginning of the prompt as the key, here its first block.
    RingByPrefix,
    /// The bounded-load ring with a key for each conversation, as if clients named their session. Here it is the
    /// second block, where conversations with one system prompt part.
    RingBySession,
    /// By what workers have of the prompt.
    Kv,
    /// By the name of the conversation, which stays with its owner; the name is as for [`Self::RingBySession`].
    Named,
}

/// What a router keeps while it runs.
pub(super) struct Router {
    policy: Policy,
    config: ReplayConfig,
    ring: Ring,
    weights: Vec<f64>,
    loads: Vec<u64>,
    next: usize,
    index: HolderIndex,
    reader: HolderReader,
    /// Of each worker, what it said that it has.
    said: Vec<Feed>,
    /// Of each worker, the prompts that are under way to it: it will have them when a request placed now is due.
    promised: Vec<Feed>,
    matches: Matches,
    matched_tokens: Vec<f64>,
    keys: Vec<BlockKey>,
    pub(super) n_on_owner: usize,
    pub(super) max_load_over_bound: f64,
}

/// A source of the index and the number of its next batch.
#[derive(Debug, Clone, Copy)]
struct Feed {
    source: SourceId,
    sequence: u64,
}

/// Where a request went, and the load that it is there.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Placed {
    pub(super) worker: usize,
    pub(super) prompt_load: u64,
    pub(super) output_load: u64,
}

impl Policy {
    /// Those that requests without a name can be placed by, and [`Self::RingBySession`] for comparison.
    pub const ALL: [Self; 5] =
        [Self::RoundRobin, Self::LeastLoaded, Self::RingByPrefix, Self::RingBySession, Self::Kv];

    /// Its name, words joined by underscores.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round_robin",
            Self::LeastLoaded => "least_loaded",
            Self::RingByPrefix => "ring_by_prefix",
            Self::RingBySession => "ring_by_session",
            Self::Kv => "kv",
            Self::Named => "named",
        }
    }
}

impl Router {
    pub(super) fn try_new(policy: Policy, config: ReplayConfig) -> Result<Self, IndexError> {
        let n_workers = config.n_workers;
        let ids: Vec<String> = (0..n_workers).map(|worker| format!("worker-{worker:04}")).collect();
        let members: Vec<(&String, f64)> = ids.iter().map(|id| (id, 1.0)).collect();
        let ring = Ring::build(RingHash::Xxh3, VIRTUAL_NODES, &members)
            .unwrap_or_else(|_| unreachable!("ids differ and all weights are 1"));
        let mut index = HolderIndex::new(IndexConfig::default());
        let mut feeds = |rank: u32| -> Result<Vec<Feed>, IndexError> {
            ids.iter().map(|id| Ok(Feed { source: index.add_source(id, rank)?, sequence: 0 })).collect()
        };
        let (said, promised) = (feeds(0)?, feeds(1)?);
        Ok(Self {
            policy,
            config,
            ring,
            weights: vec![1.0; n_workers],
            loads: vec![0; n_workers],
            next: 0,
            reader: index.reader(),
            index,
            said,
            promised,
            matches: Matches::default(),
            matched_tokens: vec![0.0; n_workers],
            keys: Vec::new(),
            n_on_owner: 0,
            max_load_over_bound: 0.0,
        })
    }

    /// Places a request and notes its load.
    pub(super) fn place(&mut self, request: &ReplayRequest) -> Placed {
        let output_load = self.config.expected_output_tokens;
        let tokens = request.prompt_tokens + output_load;
        let first = |n: usize| request.blocks.get(n).or(request.blocks.last()).map_or(0, |block| *block);
        let mut left_tokens = tokens;
        let worker = match self.policy {
            Policy::RoundRobin => {
                self.next += 1;
                (self.next - 1) % self.config.n_workers
            }
            Policy::LeastLoaded => {
                (0..self.config.n_workers).min_by_key(|worker| self.loads[*worker]).unwrap_or(0)
            }
            Policy::RingByPrefix => self.place_on_ring(first(0), tokens),
            Policy::RingBySession => self.place_on_ring(first(1), tokens),
            Policy::Kv => {
                let n_matched = self.look_up(request);
                let key = key_of(first(n_matched)).0.to_le_bytes();
                let asked = Request { key: &key, tokens, matched_tokens: &self.matched_tokens };
                let loads = Loads { tokens: &self.loads, weights: &self.weights };
                let choice =
                    placement::choose(&self.ring, asked, loads, self.config.kv_load_factor, |_| true);
                let worker = choice.map_or(0, |choice| choice.member);
                left_tokens = asked.left(worker);
                self.promise(worker);
                worker
            }
            Policy::Named => {
                self.look_up(request);
                let name = key_of(first(1)).0.to_le_bytes();
                let choice = self.place_named(&name, tokens);
                left_tokens = choice.1;
                self.promise(choice.0);
                choice.0
            }
        };
        self.loads[worker] += left_tokens;
        let output_load = output_load.min(left_tokens);
        Placed { worker, prompt_load: left_tokens - output_load, output_load }
    }

    /// Notes that a request has its first token: its prompt is no load any more.
    pub(super) fn note_first_token(&mut self, placed: Placed) {
        self.loads[placed.worker] -= placed.prompt_load;
    }

    /// Notes that a request has ended.
    pub(super) fn note_end(&mut self, placed: Placed, request: &ReplayRequest) {
        self.loads[placed.worker] -= placed.output_load;
        if matches!(self.policy, Policy::Kv | Policy::Named) {
            let keys = keys_of(full_blocks(request, &self.config));
            self.tell(placed.worker, false, &[Event::Removed { tier: Tier::Gpu, keys: &keys }]);
        }
    }

    /// Hears what a worker has stored and evicted.
    pub(super) fn hear(&mut self, worker: usize, evicted: &[u64], stored: &[u64]) {
        let (evicted, stored) = (keys_of(evicted), keys_of(stored));
        let events = [
            Event::Removed { tier: Tier::Gpu, keys: &evicted },
            Event::Stored { tier: Tier::Gpu, parent: None, keys: &stored },
        ];
        self.tell(worker, true, &events);
    }

    fn tell(&mut self, worker: usize, is_said: bool, events: &[Event<'_>]) {
        let feed = if is_said { &mut self.said[worker] } else { &mut self.promised[worker] };
        let Feed { source, sequence } = *feed;
        feed.sequence += 1;
        // Nothing is lost on the way, so every batch is the one that is due.
        let _verdict = self.index.apply(&Batch { source, epoch: Some(1), sequence, replayed: false, events });
    }

    /// The worker that a named request goes to, and its load there.
    fn place_named(&mut self, name: &[u8], tokens: u64) -> (usize, u64) {
        let asked = Request { key: name, tokens, matched_tokens: &self.matched_tokens };
        let loads = Loads { tokens: &self.loads, weights: &self.weights };
        let is_known = self.matched_tokens.iter().any(|n_tokens| *n_tokens > 0.0);
        let factor = if is_known { self.config.kv_load_factor } else { self.config.load_factor };
        let floor = self.config.named_floor_tokens;
        let choice = placement::choose_named(&self.ring, asked, loads, factor, floor, |_| true);
        let Some(choice) = choice else { return (0, tokens) };
        let left_tokens = asked.left(choice.member);
        self.n_on_owner += usize::from(self.ring.walk(name).next() == Some(choice.member));
        let most = (choice.bound.max(floor) + left_tokens) as f64;
        self.max_load_over_bound = self.max_load_over_bound.max((choice.load + left_tokens) as f64 / most);
        (choice.member, left_tokens)
    }

    /// Notes that a worker will have the prompt that was looked up.
    fn promise(&mut self, worker: usize) {
        let keys = std::mem::take(&mut self.keys);
        self.tell(worker, false, &[Event::Stored { tier: Tier::Gpu, parent: None, keys: &keys }]);
    }

    fn place_on_ring(&self, block: u64, tokens: u64) -> usize {
        let loads = Loads { tokens: &self.loads, weights: &self.weights };
        let key = key_of(block).0.to_le_bytes();
        let choice = ring::choose(&self.ring, &key, loads, self.config.load_factor, tokens, |_| true);
        choice.map_or(0, |choice| choice.member)
    }

    /// Finds what every worker has; gives the most blocks that one of them has.
    fn look_up(&mut self, request: &ReplayRequest) -> usize {
        self.keys = keys_of(full_blocks(request, &self.config));
        self.reader.lookup(&self.keys, LookupOptions::default(), &mut self.matches);
        self.matched_tokens.fill(0.0);
        let mut n_most = 0;
        for row in self.matches.rows() {
            n_most = n_most.max(row.prefix_blocks() as usize);
            // Sources are numbered in the order of the members, first what was said and then what was promised.
            let tokens = &mut self.matched_tokens[row.source().as_index() % self.config.n_workers];
            let matched = u64::from(row.prefix_blocks()) * self.config.block_tokens;
            *tokens = tokens.max(matched.min(request.prompt_tokens.saturating_sub(1)) as f64);
        }
        n_most
    }
}

fn keys_of(blocks: &[u64]) -> Vec<BlockKey> {
    blocks.iter().map(|block| key_of(*block)).collect()
}

/// Spreads ids, which a trace numbers from 0.
fn key_of(block: u64) -> BlockKey {
    BlockKey(xxhash_rust::xxh3::xxh3_64(&block.to_le_bytes()))
}
