//! From an engine's keys to keys of our own chain, for engines whose hashes cannot be recomputed.
//!
//! A removal names only the engine's key, so what that key stood for must be remembered. An engine's
//! block may be as large as ours, a part of it, or several. One of our blocks is there as long as the
//! engine has every block that it overlaps. One bridge serves one source.

use std::collections::{HashMap, VecDeque};

use super::pending::{PendingEvent, PendingEvents};
use super::types::{BlockKey, Event, N_TIERS, Tier};

/// The chain whose keys the index uses.
pub trait OwnChain {
    /// Tokens of one of its blocks, at least one.
    fn block_tokens(&self) -> usize;

    /// The key of the block of these tokens after `parent`. The caller hands in one whole block.
    fn key(&self, parent: Option<BlockKey>, tokens: &[u32]) -> BlockKey;
}

/// What an engine says, in its own keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BridgeEvent<'a> {
    /// It has these blocks now.
    Stored {
        /// Where.
        tier: Tier,
        /// The block before the first; `None` at the start of a prompt.
        parent: Option<BlockKey>,
        /// The blocks.
        keys: &'a [BlockKey],
        /// Their tokens; empty if the event only says that known blocks are now in this tier too.
        tokens: &'a [u32],
        /// Tokens of one block.
        block_tokens: usize,
    },
    /// It has lost these blocks.
    Removed {
        /// Where.
        tier: Tier,
        /// The blocks.
        keys: &'a [BlockKey],
    },
    /// It has lost all blocks.
    Cleared {
        /// Where; `None` is everywhere.
        tier: Option<Tier>,
    },
}

/// A translated event, to be applied to the index in the order in which they come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OwnRun {
    /// See [`Event::Stored`].
    Stored {
        /// Where.
        tier: Tier,
        /// The blocks.
        keys: Vec<BlockKey>,
    },
    /// See [`Event::Removed`].
    Removed {
        /// Where.
        tier: Tier,
        /// The blocks.
        keys: Vec<BlockKey>,
    },
    /// See [`Event::Cleared`].
    Cleared {
        /// Where; `None` is everywhere.
        tier: Option<Tier>,
    },
}

/// The bounds of a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BridgeConfig {
    /// Engine blocks that are remembered; default one million. The oldest leave first, those that the
    /// engine still has last.
    pub max_blocks: usize,
    /// Bytes of events that wait for their parent; default 16 MiB.
    pub max_pending_bytes: usize,
}

/// What a bridge did not translate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BridgeCounters {
    /// Events that had to wait for their parent.
    pub events_pending: u64,
    /// Waiting events that were dropped for space or by a clear.
    pub pending_dropped: u64,
    /// Events whose tokens do not fit their keys.
    pub events_malformed: u64,
    /// Blocks named without tokens that are not known.
    pub blocks_unknown: u64,
    /// Removals of blocks that are not there.
    pub removals_unknown: u64,
    /// Blocks forgotten for space.
    pub blocks_forgotten: u64,
}

/// Translates the events of one source.
#[derive(Debug)]
pub struct Bridge {
    config: BridgeConfig,
    blocks: HashMap<BlockKey, Block>,
    /// Engine blocks that one of our blocks overlaps, where it is more than one.
    parts: HashMap<BlockKey, Box<[BlockKey]>>,
    /// Engine blocks in the order in which they may leave.
    order: VecDeque<BlockKey>,
    pending: PendingEvents,
    /// Raised by a clear: counts of earlier lives are zero.
    lives: [u32; N_TIERS],
    counters: BridgeCounters,
}

/// Where our chain stands behind an engine block.
#[derive(Debug, Clone, Default)]
struct Point {
    /// Our last whole block.
    parent: Option<BlockKey>,
    /// Tokens since then.
    tokens: Box<[u32]>,
    /// Engine blocks that those tokens are of.
    parts: Box<[BlockKey]>,
}

/// An engine block.
#[derive(Debug, Default)]
struct Block {
    /// How often it was stored, and in which life of the tier.
    counts: [u16; N_TIERS],
    lives: [u32; N_TIERS],
    point: Point,
    /// Our blocks that overlap it.
    own: Vec<BlockKey>,
}

impl Default for BridgeConfig {
    fn default() -> Self {
        Self { max_blocks: 1_000_000, max_pending_bytes: 16 << 20 }
    }
}

impl OwnRun {
    /// The same for [`HolderIndex::apply`](super::HolderIndex::apply).
    pub fn as_event(&self) -> Event<'_> {
        match self {
            Self::Stored { tier, keys } => Event::Stored { tier: *tier, parent: None, keys },
            Self::Removed { tier, keys } => Event::Removed { tier: *tier, keys },
            Self::Cleared { tier } => Event::Cleared { tier: *tier },
        }
    }
}

impl Bridge {
    /// Builds a bridge that knows nothing.
    pub fn new(config: BridgeConfig) -> Self {
        Self {
            config,
            blocks: HashMap::new(),
            parts: HashMap::new(),
            order: VecDeque::new(),
            pending: PendingEvents::new(config.max_pending_bytes),
            lives: [1; N_TIERS],
            counters: BridgeCounters::default(),
        }
    }

    /// What was not translated so far.
    pub fn counters(&self) -> BridgeCounters {
        self.counters
    }

    /// How many engine blocks are remembered.
    pub fn n_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// How many events wait for their parent.
    pub fn n_pending(&self) -> usize {
        self.pending.len()
    }

    /// Our keys that overlap an engine block.
    pub fn own_keys(&self, key: BlockKey) -> &[BlockKey] {
        self.blocks.get(&key).map_or(&[], |block| &block.own)
    }

    /// Forgets everything: the engine restarted.
    pub fn reset(&mut self) {
        let counters = self.counters;
        *self = Self::new(self.config);
        self.counters = counters;
    }

    /// Translates an event and appends what it means to `out`.
    pub fn translate(&mut self, event: &BridgeEvent<'_>, chain: &impl OwnChain, out: &mut Vec<OwnRun>) {
        match *event {
            BridgeEvent::Stored { tier, keys, tokens: [], .. } => self.also_in(tier, keys, out),
            BridgeEvent::Stored { tier, parent, keys, tokens, block_tokens } => {
                if block_tokens == 0 || keys.len().checked_mul(block_tokens) != Some(tokens.len()) {
                    self.counters.events_malformed += 1;
                    return;
                }
                match parent {
                    Some(parent) if !self.blocks.contains_key(&parent) && !self.knows_all(keys) => {
                        let (keys, tokens) = (keys.to_vec(), tokens.to_vec());
                        self.counters.events_pending += 1;
                        let event =
                            PendingEvent { parent, tier, keys, tokens, block_tokens, removed: Vec::new() };
                        self.counters.pending_dropped += self.pending.add(event);
                    }
                    _ => self.store(Stored { tier, parent, keys, tokens, block_tokens }, chain, out),
                }
            }
            BridgeEvent::Removed { tier, keys } => self.remove(tier, keys, out),
            BridgeEvent::Cleared { tier } => {
                for (at, life) in self.lives.iter_mut().enumerate() {
                    if tier.is_none_or(|tier| tier.as_index() == at) {
                        *life = life.wrapping_add(1);
                    }
                }
                self.counters.pending_dropped += self.pending.clear(tier);
                out.push(OwnRun::Cleared { tier });
            }
        }
        self.keep_bound(out);
    }

    fn knows_all(&self, keys: &[BlockKey]) -> bool {
        keys.iter().all(|key| self.blocks.contains_key(key))
    }

    fn also_in(&mut self, tier: Tier, keys: &[BlockKey], out: &mut Vec<OwnRun>) {
        let mut stored = Vec::new();
        for key in keys {
            if self.blocks.contains_key(key) {
                self.count_up(*key, tier, &[], &mut stored);
            } else {
                self.counters.blocks_unknown += 1;
            }
        }
        push_run(out, stored, |keys| OwnRun::Stored { tier, keys });
    }

    /// Stores a run whose parent is known, and all that waited for its blocks.
    fn store(&mut self, event: Stored<'_>, chain: &impl OwnChain, out: &mut Vec<OwnRun>) {
        self.store_run(event, chain, out);
        let mut arrived: VecDeque<BlockKey> = event.keys.iter().copied().collect();
        while let Some(parent) = arrived.pop_front() {
            for child in self.pending.take_children(parent) {
                let PendingEvent { tier, keys, tokens, block_tokens, removed, .. } = child;
                let run = Stored { tier, parent: Some(parent), keys: &keys, tokens: &tokens, block_tokens };
                self.store_run(run, chain, out);
                self.remove(tier, &removed, out);
                arrived.extend(keys);
            }
        }
    }

    fn store_run(&mut self, event: Stored<'_>, chain: &impl OwnChain, out: &mut Vec<OwnRun>) {
        let Stored { tier, parent, keys, tokens, block_tokens } = event;
        let own_tokens = chain.block_tokens().max(1);
        let parent = parent.and_then(|parent| self.blocks.get(&parent));
        let mut point = parent.map_or_else(Point::default, |parent| parent.point.clone());
        let mut stored = Vec::new();
        let mut fresh = Vec::new();
        for (key, tokens) in keys.iter().zip(tokens.chunks(block_tokens)) {
            fresh.clear();
            if let Some(block) = self.blocks.get(key) {
                point = block.point.clone();
            } else {
                let mut pending = point.tokens.to_vec();
                pending.extend_from_slice(tokens);
                let mut parts = point.parts.to_vec();
                parts.push(*key);
                let mut n_done = 0;
                while pending.len() - n_done >= own_tokens {
                    let own = chain.key(point.parent, &pending[n_done..n_done + own_tokens]);
                    n_done += own_tokens;
                    point.parent = Some(own);
                    self.overlap(own, &parts, *key);
                    fresh.push(own);
                    parts = vec![*key];
                }
                if n_done == pending.len() {
                    parts.clear();
                }
                point.tokens = pending[n_done..].into();
                point.parts = parts.into();
                let block = self.blocks.entry(*key).or_default();
                block.point = point.clone();
                block.own.extend_from_slice(&fresh);
                self.order.push_back(*key);
            }
            self.count_up(*key, tier, &fresh, &mut stored);
        }
        push_run(out, stored, |keys| OwnRun::Stored { tier, keys });
    }

    /// Remembers which engine blocks one of ours overlaps; `last` enters it in itself.
    fn overlap(&mut self, own: BlockKey, parts: &[BlockKey], last: BlockKey) {
        if parts.len() < 2 {
            return;
        }
        self.parts.insert(own, parts.into());
        for part in parts.iter().filter(|part| **part != last) {
            if let Some(block) = self.blocks.get_mut(part)
                && !block.own.contains(&own)
            {
                block.own.push(own);
            }
        }
    }

    /// Counts a store of a known block; what became whole by it goes to `stored`.
    fn count_up(&mut self, key: BlockKey, tier: Tier, fresh: &[BlockKey], stored: &mut Vec<BlockKey>) {
        let (at, life) = (tier.as_index(), self.lives[tier.as_index()]);
        let Some(block) = self.blocks.get_mut(&key) else { return };
        if block.lives[at] != life {
            (block.lives[at], block.counts[at]) = (life, 0);
        }
        let was_absent = block.counts[at] == 0;
        block.counts[at] = block.counts[at].saturating_add(1);
        let own = std::mem::take(&mut block.own);
        let whole =
            own.iter().filter(|own| (was_absent || fresh.contains(own)) && self.is_whole(**own, key, tier));
        stored.extend(whole);
        if let Some(block) = self.blocks.get_mut(&key) {
            block.own = own;
        }
    }

    /// Whether the engine has all that one of our blocks overlaps, apart from one block.
    fn is_whole(&self, own: BlockKey, except: BlockKey, tier: Tier) -> bool {
        let others = self.parts.get(&own).map_or(&[][..], |parts| parts);
        others.iter().all(|part| *part == except || self.count(*part, tier) > 0)
    }

    fn count(&self, key: BlockKey, tier: Tier) -> u16 {
        let at = tier.as_index();
        self.blocks
            .get(&key)
            .map_or(0, |block| if block.lives[at] == self.lives[at] { block.counts[at] } else { 0 })
    }

    fn remove(&mut self, tier: Tier, keys: &[BlockKey], out: &mut Vec<OwnRun>) {
        let mut removed = Vec::new();
        for key in keys {
            match self.count(*key, tier) {
                0 if self.pending.remove(*key, tier) => {}
                0 => self.counters.removals_unknown += 1,
                count => {
                    if let Some(block) = self.blocks.get_mut(key) {
                        block.counts[tier.as_index()] = count - 1;
                    }
                    if count == 1 {
                        self.collect_broken(*key, tier, &mut removed);
                    }
                }
            }
        }
        push_run(out, removed, |keys| OwnRun::Removed { tier, keys });
    }

    /// Our blocks that were whole until an engine block left.
    fn collect_broken(&self, key: BlockKey, tier: Tier, removed: &mut Vec<BlockKey>) {
        let own = self.blocks.get(&key).map_or(&[][..], |block| &block.own);
        removed.extend(own.iter().filter(|own| self.is_whole(**own, key, tier)));
    }

    /// Forgets the oldest blocks beyond the bound. What the engine still has of them can no longer be
    /// removed by name, so it is removed now.
    fn keep_bound(&mut self, out: &mut Vec<OwnRun>) {
        let mut n_chances = 0;
        while self.blocks.len() > self.config.max_blocks
            && let Some(key) = self.order.pop_front()
        {
            let is_held = Tier::ALL.iter().any(|tier| self.count(key, *tier) > 0);
            if is_held && n_chances < 16 {
                n_chances += 1;
                self.order.push_back(key);
                continue;
            }
            for tier in Tier::ALL {
                if self.count(key, tier) > 0 {
                    let mut removed = Vec::new();
                    self.collect_broken(key, tier, &mut removed);
                    push_run(out, removed, |keys| OwnRun::Removed { tier, keys });
                }
            }
            self.forget(key);
        }
    }

    fn forget(&mut self, key: BlockKey) {
        let Some(block) = self.blocks.remove(&key) else { return };
        self.counters.blocks_forgotten += 1;
        for own in block.own {
            for part in self.parts.remove(&own).iter().flatten() {
                if let Some(other) = self.blocks.get_mut(part) {
                    other.own.retain(|other| *other != own);
                }
            }
        }
    }
}

/// The fields of a store event.
#[derive(Clone, Copy)]
struct Stored<'a> {
    tier: Tier,
    parent: Option<BlockKey>,
    keys: &'a [BlockKey],
    tokens: &'a [u32],
    block_tokens: usize,
}

fn push_run(out: &mut Vec<OwnRun>, keys: Vec<BlockKey>, run: impl FnOnce(Vec<BlockKey>) -> OwnRun) {
    if !keys.is_empty() {
        out.push(run(keys));
    }
}
