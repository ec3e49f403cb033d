//! kvik's own policy: evicts what is expected to be used least for the room and time it takes.
//!
//! The unit of learning is the request, because a conversation comes back as a whole or not at all. Each
//! request is put in a class by what it shows (its turn, its size, the time since the turn before, how
//! much was generated), and is watched until another one continues it, whether or not its blocks are
//! still resident. From that [`model`] learns how likely a class is used again at which age. Blocks that
//! lie under many conversations, and partly full tails, which a longer prompt replaces, are classes of
//! their own.
//!
//! A victim is the lowest of a sample of leaves. Memory is bounded: so many requests are watched and so
//! many blocks remembered after they left, at some dozen bytes each.

mod ages;
mod features;
mod model;
mod watch;

use self::features::Observation;
use self::model::{LEFT_BEHIND_CLASS, Model, TAIL_CLASS};
use self::watch::{LeftBehind, NOT_WATCHED, Watch, Watched};
use super::ghosts::Ghosts;
use super::{Block, BlockId, Policy, Request, Tree};

/// Leaves that are compared for a victim: the lowest of 128 is among the lowest 4 % with 99 % certainty.
const N_SAMPLES: usize = 128;

/// Blocks that are remembered after they left, at least, and as a multiple of the capacity.
const MIN_REMEMBERED_BLOCKS: usize = 1 << 17;
const REMEMBERED_PER_RESIDENT: usize = 4;

/// The model is fitted again after this part of all requests, within limits: often while it is young.
const REFIT_PART: u64 = 16;
const MIN_REFIT_REQUESTS: u64 = 64;
const MAX_REFIT_REQUESTS: u64 = 4096;

/// How much the latest gap changes the usual one of a block.
const PACE_PART: f32 = 0.25;

/// Requests after which the weight of everything seen before is halved.
const FADE_REQUESTS: u64 = 1 << 16;

/// A missing block is refused if it is worth less than this part of the last victim. The rest of the
/// difference is left to eviction, which sees all leaves.
const ADMISSION_PART: f64 = 0.5;

/// What a copy is worth of a block that no other place has: to lose it costs a read from the other place, and not that it is
/// computed.
const COPY_PART: f64 = 0.25;

/// The default policy.
#[derive(Debug)]
pub struct KvikPolicy {
    tree: Tree,
    /// What is known of resident blocks, by slot.
    residents: Vec<Resident>,
    leaves: Vec<u32>,
    remembered: Ghosts<Memory>,
    remembered_limit: usize,
    model: Model,
    watch: Watch,
    now_ms: u64,
    n_requests: u64,
    next_fit: u64,
    last_victim_value: f64,
    random: u64,
}

#[derive(Debug, Clone, Copy)]
struct Resident {
    memory: Memory,
    /// Place in `leaves`, where it is one.
    leaf_position: u32,
}

/// What is known of a block, resident or not.
#[derive(Debug, Clone, Copy)]
struct Memory {
    /// The watch over the request that used it last.
    request: u64,
    /// The watch over the block alone, where it has a class of its own.
    own: u64,
    last_used_ms: u64,
    /// Usual time between its uses; infinite before the second.
    pace_s: f32,
    /// Recompute time per byte.
    us_per_byte: f32,
    request_class: u16,
    own_class: Option<u16>,
    n_forks: u8,
}

/// What the blocks of a request have in common.
struct Arrival {
    request: u64,
    class: u16,
    /// How many blocks from the root a second conversation has been found under.
    n_forked_blocks: usize,
}

impl KvikPolicy {
    /// An empty cache of about that many blocks.
    pub fn new(capacity_blocks: usize) -> Self {
        Self {
            tree: Tree::default(),
            residents: Vec::new(),
            leaves: Vec::new(),
            remembered: Ghosts::new(),
            remembered_limit: (capacity_blocks.saturating_mul(REMEMBERED_PER_RESIDENT))
                .max(MIN_REMEMBERED_BLOCKS),
            model: Model::new(),
            watch: Watch::new(),
            now_ms: 0,
            n_requests: 0,
            next_fit: MIN_REFIT_REQUESTS,
            last_victim_value: 0.0,
            // Any constant but zero; equal calls must give equal victims.
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    fn memory(&self, id: BlockId) -> Option<Memory> {
        match self.tree.slot(id) {
            Some(slot) => Some(self.residents[slot as usize].memory),
            None => self.remembered.get(id),
        }
    }

    fn advance(&mut self, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
        self.watch.advance(self.now_ms, &mut self.model);
    }

    fn learn(&mut self) {
        self.n_requests += 1;
        if self.n_requests.is_multiple_of(FADE_REQUESTS) {
            self.model.fade();
        }
        if self.n_requests >= self.next_fit {
            self.model.fit();
            let pause = (self.n_requests / REFIT_PART).clamp(MIN_REFIT_REQUESTS, MAX_REFIT_REQUESTS);
            self.next_fit = self.n_requests + pause;
        }
    }

    /// Finds the request that this one continues, tells the model, and puts this one under watch.
    fn arrive(&mut self, request: &Request<'_>) -> Arrival {
        let n_blocks = request.blocks.len();
        let known = request.blocks.iter().map_while(|block| self.memory(block.id));
        let (n_known, deepest) = known.fold((0, None), |(count, _), memory| (count + 1, Some(memory)));

        let mut observation = Observation {
            turn: 1,
            n_blocks,
            n_fresh_blocks: n_blocks - n_known,
            pace_s: None,
            n_generated_tokens: request.n_generated_tokens,
            has_shared_prefix: false,
        };
        let mut is_fork = n_known > 0;
        if let Some(memory) = deepest.filter(|memory| memory.n_forks == 0)
            && let Some(before) = self.watch.get(memory.request)
            // Less than half of the other's chain is a common beginning, not a next turn.
            && 2 * n_known >= before.n_blocks as usize
        {
            let before = *before;
            is_fork = before.left_behind.is_some();
            observation.turn = before.turn.saturating_add(1);
            let gap_s = self.seconds_since(before.begin_ms);
            observation.pace_s =
                Some(before.pace_s.map_or(gap_s, |pace_s| f64::midpoint(f64::from(pace_s), gap_s)));
            self.continue_request(memory.request);
        } else {
            // One block in common is a system prompt; more is a document or a template.
            observation.has_shared_prefix = n_known > 1;
        }
        let class = self.model.class(observation.levels());
        let n_blocks = u32::try_from(n_blocks).unwrap_or(u32::MAX);
        let pace_s = observation.pace_s.map(|pace_s| pace_s as f32);
        let watched = Watched { n_blocks, turn: observation.turn, pace_s, ..Watched::new(class, 1.0) };
        let request = self.watch.begin(self.now_ms, watched);
        Arrival { request, class, n_forked_blocks: if is_fork { n_known } else { 0 } }
    }

    fn seconds_since(&self, then_ms: u64) -> f64 {
        (self.now_ms - then_ms) as f64 / 1000.0
    }

    /// Ends the watch over a request that is continued. Blocks that stay with it from now on are those
    /// that the next turn did not use; they are watched together.
    fn continue_request(&mut self, request: u64) {
        self.watch.note_used(request, self.now_ms, &mut self.model);
        let watch = self.watch.begin(self.now_ms, Watched::new(LEFT_BEHIND_CLASS, 1.0));
        self.watch.leave_behind(request, LeftBehind { since_ms: self.now_ms, watch });
    }

    fn left_behind(&self, memory: &Memory) -> Option<LeftBehind> {
        self.watch.get(memory.request)?.left_behind
    }

    /// What is known of a block after a request used it.
    fn used(&mut self, arrival: &Arrival, request: &Request<'_>, index: usize, block: &Block) -> Memory {
        let before = self.memory(block.id);
        let (mut n_forks, mut pace_s) = (0, f32::INFINITY);
        if let Some(memory) = before {
            self.watch.note_used(memory.own, self.now_ms, &mut self.model);
            if let Some(left_behind) = self.left_behind(&memory) {
                self.watch.note_used(left_behind.watch, self.now_ms, &mut self.model);
            }
            n_forks = memory.n_forks;
            let gap_s = self.seconds_since(memory.last_used_ms) as f32;
            pace_s = if memory.pace_s.is_finite() {
                memory.pace_s + (gap_s - memory.pace_s) * PACE_PART
            } else {
                gap_s
            };
        }
        n_forks = n_forks.saturating_add(u8::from(index < arrival.n_forked_blocks));
        let own_class = match (block.is_full, n_forks) {
            (false, _) => Some(TAIL_CLASS),
            (true, 0) => None,
            (true, _) => Some(Model::shared_class(n_forks, pace_s)),
        };
        let own = own_class.map_or(NOT_WATCHED, |class| {
            // The blocks of a chain are one observation, whatever their number.
            let weight = if class == TAIL_CLASS { 1.0 } else { 1.0 / request.blocks.len() as f32 };
            self.watch.begin(self.now_ms, Watched::new(class, weight))
        });
        Memory {
            request: arrival.request,
            own,
            last_used_ms: self.now_ms,
            pace_s,
            us_per_byte: block.recompute_us.max(1) as f32 / block.bytes.max(1) as f32,
            request_class: arrival.class,
            own_class,
            n_forks,
        }
    }

    /// Recompute time that a byte is expected to save for each second it is held.
    fn value(&mut self, memory: &Memory) -> f64 {
        let age_s = self.seconds_since(memory.last_used_ms);
        let own_index = memory.own_class.map_or(0.0, |class| self.model.index(class, age_s));
        let index = match (memory.own_class, self.left_behind(memory)) {
            (Some(TAIL_CLASS), _) => own_index,
            (_, Some(left_behind)) => {
                let left_s = self.seconds_since(left_behind.since_ms);
                own_index + self.model.index(LEFT_BEHIND_CLASS, left_s)
            }
            // The same conversation may come back, and so may another one.
            (_, None) => own_index + self.model.index(memory.request_class, age_s),
        };
        index * f64::from(memory.us_per_byte)
    }

    fn add_leaf(&mut self, slot: u32) {
        self.residents[slot as usize].leaf_position = self.leaves.len() as u32;
        self.leaves.push(slot);
    }

    fn take_leaf(&mut self, slot: u32) {
        let position = self.residents[slot as usize].leaf_position as usize;
        self.leaves.swap_remove(position);
        if let Some(&moved) = self.leaves.get(position) {
            self.residents[moved as usize].leaf_position = position as u32;
        }
    }

    fn forget(&mut self, slot: u32) -> BlockId {
        let id = self.tree.id(slot);
        self.take_leaf(slot);
        if let Some(exposed) = self.tree.remove_leaf(slot) {
            self.add_leaf(exposed);
        }
        self.remembered.add(id, self.residents[slot as usize].memory, self.remembered_limit);
        id
    }

    fn sample(&mut self, nth: usize) -> u32 {
        if self.leaves.len() <= N_SAMPLES {
            return self.leaves[nth];
        }
        // xorshift64
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.leaves[(self.random % self.leaves.len() as u64) as usize]
    }
}

impl Policy for KvikPolicy {
    fn access(&mut self, now_ms: u64, request: &Request<'_>) {
        if request.blocks.is_empty() {
            return;
        }
        self.advance(now_ms);
        self.learn();
        let arrival = self.arrive(request);
        for (index, block) in request.blocks.iter().enumerate() {
            let memory = self.used(&arrival, request, index, block);
            match self.tree.slot(block.id) {
                Some(slot) => self.residents[slot as usize].memory = memory,
                None => self.remembered.add(block.id, memory, self.remembered_limit),
            }
        }
    }

    fn admits(&mut self, _now_ms: u64, request: &Request<'_>, index: usize) -> bool {
        match request.blocks.get(index).and_then(|block| self.memory(block.id)) {
            Some(memory) => self.value(&memory) >= ADMISSION_PART * self.last_victim_value,
            None => true,
        }
    }

    fn insert(&mut self, now_ms: u64, request: &Request<'_>, index: usize) -> bool {
        let Some(block) = request.blocks.get(index) else { return false };
        let parent = index.checked_sub(1).map(|above| request.blocks[above].id);
        if self.tree.contains(block.id) || parent.is_some_and(|parent_id| !self.tree.contains(parent_id)) {
            return false;
        }
        // What is known of the block is asked before it has a slot, which still holds another's memory.
        let memory = if let Some(memory) = self.remembered.take(block.id) {
            memory
        } else {
            // Inserted without a request, or so long after it that it is forgotten.
            self.advance(now_ms);
            let class = self.model.class([0; features::N_FEATURES]);
            self.used(&Arrival { request: NOT_WATCHED, class, n_forked_blocks: 0 }, request, index, block)
        };
        let Some(inserted) = self.tree.insert(block.id, parent, block.bytes) else { return false };
        if let Some(covered) = inserted.covered {
            self.take_leaf(covered);
        }
        let resident = Resident { memory, leaf_position: 0 };
        match self.residents.get_mut(inserted.slot as usize) {
            Some(place) => *place = resident,
            None => self.residents.push(resident),
        }
        self.add_leaf(inserted.slot);
        true
    }

    fn victim(&mut self, now_ms: u64) -> Option<BlockId> {
        self.advance(now_ms);
        let mut lowest: Option<(f64, u64, u32)> = None;
        for nth in 0..self.leaves.len().min(N_SAMPLES) {
            let slot = self.sample(nth);
            let memory = self.residents[slot as usize].memory;
            let part = if self.tree.is_copy(slot) { COPY_PART } else { 1.0 };
            let value = part * self.value(&memory);
            let is_lower = lowest.is_none_or(|(lowest_value, lowest_used_ms, _)| {
                value < lowest_value || (value <= lowest_value && memory.last_used_ms < lowest_used_ms)
            });
            if is_lower {
                lowest = Some((value, memory.last_used_ms, slot));
            }
        }
        let (value, _, slot) = lowest?;
        self.last_victim_value = value;
        Some(self.forget(slot))
    }

    fn remove(&mut self, id: BlockId) -> bool {
        let leaf = self.tree.slot(id).filter(|&slot| self.tree.is_leaf(slot));
        leaf.map(|slot| self.forget(slot)).is_some()
    }

    fn pin(&mut self, id: BlockId) -> bool {
        let Some(slot) = self.tree.slot(id) else { return false };
        if self.tree.pin(slot) {
            self.take_leaf(slot);
        }
        true
    }

    fn unpin(&mut self, id: BlockId) -> bool {
        let Some(slot) = self.tree.slot(id) else { return false };
        match self.tree.unpin(slot) {
            None => false,
            Some(is_leaf) => {
                if is_leaf {
                    self.add_leaf(slot);
                }
                true
            }
        }
    }

    fn set_copy(&mut self, id: BlockId, is_copy: bool) -> bool {
        let Some(slot) = self.tree.slot(id) else { return false };
        self.tree.set_copy(slot, is_copy);
        true
    }

    fn tree(&self) -> &Tree {
        &self.tree
    }
}
