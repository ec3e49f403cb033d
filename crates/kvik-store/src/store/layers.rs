//! Reading layer by layer: the model works on one layer while the next ones are on their way.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kvik_tier::{GetItem, GetOutcome, Lease, Slot};

use super::Store;
use super::core::Core;
use super::promotion::{PromotionSource, Promotions};
use crate::chain::Chain;
use crate::counters::Counter;
use crate::lower::{Lower, ReadJob};
use crate::promise::{Answer, Promise, promise};
use crate::residents::ResidentPin;
use crate::tiers::{MAX_TIERS, RAM, TierIdx, TierRanks};

/// Gives the layers of a chain one after the other, each for all chunks.
///
/// Chunks in memory are leased at the start. Of the others one layer is read at a time, for all chunks before
/// the next layer, a few layers ahead of what was asked for. A chunk of which a layer does not come ends the
/// hit before it: [`LayerReader::n_tokens`] becomes less, later layers leave the chunk out, and the caller
/// computes those tokens itself, from the first layer on.
///
/// A chunk whose layers have all arrived stays in memory if that is worth it, as one that is read whole does.
#[derive(Debug)]
pub struct LayerReader {
    core: Arc<Core>,
    chain: Chain,
    first_chunk: usize,
    generation: u64,
    /// Where each rank of each chunk comes from, chunk by chunk.
    sources: Vec<Source>,
    /// Chunks that still hold.
    n_chunks: usize,
    /// The layers that were asked for and not given out, in order.
    asked: VecDeque<Vec<TierSections>>,
    /// The next layer to be given out.
    layer_idx: usize,
    promotions: Arc<Promotions>,
    _pin: Option<ResidentPin>,
}

/// One layer of the chunks of a [`LayerReader`].
#[derive(Debug)]
pub struct Layer {
    idx: usize,
    n_ranks: usize,
    /// What each rank holds, chunk by chunk.
    sections: Vec<(Lease, Range<usize>)>,
}

#[derive(Debug, Clone)]
enum Source {
    Memory(Lease),
    Lower(TierIdx),
}

/// Sections of one layer that are read from one tier.
#[derive(Debug)]
struct TierSections {
    /// Their places in `sources`.
    places: Vec<usize>,
    answer: Answer<Vec<Option<Lease>>>,
}

/// What one rank holds of one chunk in the layer that is read.
#[derive(Debug)]
struct WantedSection {
    place: usize,
    chunk_idx: usize,
    rank: u16,
    n_bytes: usize,
}

/// The read of one layer of chunks of one tier.
struct LayerReading {
    core: Arc<Core>,
    chain: Chain,
    generation: u64,
    layer_idx: usize,
    wanted: Vec<WantedSection>,
    promotions: Arc<Promotions>,
    promise: Promise<Vec<Option<Lease>>>,
}

/// What became of a question for a layer.
enum Asked {
    /// The tier has no part in it.
    Nothing,
    Sections(TierSections),
    /// The tier's queue is full.
    Refused,
}

// === impl Store ===

impl Store {
    /// Begins to read a chain from `first_chunk` on, layer by layer.
    ///
    /// Chunks that no local tier has are asked of the remote ones, for at most
    /// [`lookup_timeout`](crate::StoreOptions::lookup_timeout).
    pub fn retrieve_layers(&self, chain: &Chain, first_chunk: usize) -> LayerReader {
        let core = self.core();
        let first_chunk = first_chunk.min(core.n_chunks(chain));
        let generation = chain.namespace().generation();
        let found = core.find_for(chain, first_chunk, Instant::now() + core.options.lookup_timeout);
        let sources = locate(core, chain, first_chunk, &found);
        let n_chunks = sources.len() / usize::from(chain.n_ranks());
        // Before others leave memory for what shall stay.
        let pin = core.pin_deepest(chain, first_chunk + n_chunks);
        let promotions = start_promotions(core, chain, first_chunk, generation, &sources);
        core.counters.add(Counter::Retrieves, 1);
        let asked = chain.tokens_between(first_chunk..chain.n_chunks());
        core.counters.add(Counter::RequestedTokens, asked as u64);
        let mut reader = LayerReader {
            core: Arc::clone(core),
            chain: chain.clone(),
            first_chunk,
            generation,
            sources,
            n_chunks,
            asked: VecDeque::new(),
            layer_idx: 0,
            promotions: Arc::new(promotions),
            _pin: pin,
        };
        reader.count_hits();
        reader.ask_ahead();
        reader
    }
}

/// Where the ranks of the chunks that were found come from, up to the first that is gone meanwhile.
fn locate(core: &Core, chain: &Chain, first_chunk: usize, found: &[TierRanks]) -> Vec<Source> {
    let mut sources = Vec::new();
    for (place, found) in found.iter().enumerate() {
        let ranks = (0..chain.n_ranks()).map(|rank| {
            let bit = 1 << rank;
            let key = chain.key_of(first_chunk + place, rank);
            let digest = chain.digest_of(first_chunk + place);
            let lease = if found[RAM] & bit == 0 { None } else { core.ram.lease(&key, digest) };
            let lower = || (1..MAX_TIERS).find(|tier| found[*tier] & bit != 0).map(Source::Lower);
            lease.map(Source::Memory).or_else(lower)
        });
        let Some(ranks) = ranks.collect::<Option<Vec<Source>>>() else { break };
        sources.extend(ranks);
    }
    sources
}

/// Takes memory for the chunks of lower tiers that shall stay, and notes that they are used.
fn start_promotions(
    core: &Core,
    chain: &Chain,
    first_chunk: usize,
    generation: u64,
    sources: &[Source],
) -> Promotions {
    let n_ranks = usize::from(chain.n_ranks());
    let mut promoted = Vec::with_capacity(sources.len());
    for (place, ranks) in sources.chunks(n_ranks).enumerate() {
        let chunk_idx = first_chunk + place;
        let entry = core.directory.view(chain.hash(chunk_idx));
        promoted.extend(ranks.iter().zip(0..).map(|(source, rank)| match source {
            Source::Memory(_) => PromotionSource::Memory,
            Source::Lower(tier) => {
                let may_displace = core.may_displace(&entry, rank);
                PromotionSource::Lower { may_displace, tier: core.kind_of(*tier) }
            }
        }));
        core.note_used(chain, chunk_idx, &entry);
    }
    Promotions::start(core, chain, first_chunk, generation, &promoted)
}

// === impl LayerReader ===

impl LayerReader {
    /// Tokens whose chunks still hold.
    pub fn n_tokens(&self) -> usize {
        self.chain.tokens_between(self.first_chunk..self.first_chunk + self.n_chunks)
    }

    /// Chunks that still hold.
    pub fn n_chunks(&self) -> usize {
        self.n_chunks
    }

    /// Waits for the next layer, at most [`retrieve_timeout`](crate::StoreOptions::retrieve_timeout); `None`
    /// after the last one and when no chunk holds.
    pub fn next_layer(&mut self) -> Option<Layer> {
        let deadline = Instant::now() + self.core.options.retrieve_timeout;
        self.ask_ahead();
        if self.n_chunks == 0 {
            return None;
        }
        let parts = self.asked.pop_front()?;
        let n_ranks = usize::from(self.chain.n_ranks());
        let layer_idx = self.layer_idx;
        self.layer_idx += 1;
        let mut sections: Vec<Option<(Lease, Range<usize>)>> = (0..self.n_chunks * n_ranks)
            .map(|place| match &self.sources[place] {
                Source::Memory(lease) => {
                    let section_bytes = self.chain.section_bytes(self.first_chunk + place / n_ranks);
                    let start = layer_idx * section_bytes;
                    Some((lease.clone(), start..start + section_bytes))
                }
                Source::Lower(_) => None,
            })
            .collect();
        for part in parts {
            let TierSections { places, answer } = part;
            let leases = answer.wait(deadline).unwrap_or_default();
            for (place, lease) in places.into_iter().zip(leases) {
                // Chunks may have been given up since the layer was asked for.
                if let (Some(section), Some(lease)) = (sections.get_mut(place), lease) {
                    let n_bytes = lease.len();
                    *section = Some((lease, 0..n_bytes));
                }
            }
        }
        let n_whole = sections.iter().take_while(|section| section.is_some()).count() / n_ranks;
        if n_whole < self.n_chunks {
            self.core.counters.add(Counter::Truncated, 1);
            self.n_chunks = n_whole;
        }
        if self.n_chunks == 0 {
            return None;
        }
        // Asked before the layer is given out, so that it is read while the caller works.
        self.ask_ahead();
        if self.layer_idx == self.chain.space().format().n_layers as usize {
            // After the last layer the chunks are found in memory.
            self.promotions.wait();
        }
        let sections = sections.into_iter().take(n_whole * n_ranks).flatten().collect();
        Some(Layer { idx: layer_idx, n_ranks, sections })
    }

    /// Asks for the next layer, and for those after it that may be read ahead and that the queues take.
    fn ask_ahead(&mut self) {
        let n_layers = self.chain.space().format().n_layers as usize;
        let end = (self.layer_idx + 1 + self.core.options.read_ahead_layers).min(n_layers);
        while self.layer_idx + self.asked.len() < end && self.n_chunks > 0 {
            let layer_idx = self.layer_idx + self.asked.len();
            let mut parts = Vec::new();
            let mut is_refused = false;
            for tier in 1..=self.core.lowers.len() {
                match self.ask(layer_idx, tier) {
                    Asked::Nothing => {}
                    Asked::Sections(sections) => parts.push(sections),
                    Asked::Refused => is_refused = true,
                }
            }
            // The chunks of a tier that refuses the next layer are given up when it is given out.
            if is_refused && layer_idx > self.layer_idx {
                return;
            }
            self.asked.push_back(parts);
        }
    }

    /// Asks one tier for its part of one layer.
    fn ask(&self, layer_idx: usize, tier: TierIdx) -> Asked {
        let n_ranks = usize::from(self.chain.n_ranks());
        let places: Vec<usize> = (0..self.n_chunks * n_ranks)
            .filter(|place| matches!(self.sources[*place], Source::Lower(source) if source == tier))
            .collect();
        let Some(lower) = self.core.lower(tier).filter(|_| !places.is_empty()) else { return Asked::Nothing };
        let wanted: Vec<WantedSection> = places
            .iter()
            .map(|place| {
                let chunk_idx = self.first_chunk + place / n_ranks;
                let rank = (place % n_ranks) as u16;
                WantedSection { place: *place, chunk_idx, rank, n_bytes: self.chain.section_bytes(chunk_idx) }
            })
            .collect();
        let n_bytes: usize = wanted.iter().map(|section| section.n_bytes).sum();
        let (promise, answer) = promise();
        let reading = LayerReading {
            core: Arc::clone(&self.core),
            chain: self.chain.clone(),
            generation: self.generation,
            layer_idx,
            wanted,
            promotions: Arc::clone(&self.promotions),
            promise,
        };
        let task = move |lower: &Lower| reading.run(lower);
        match lower.reads.push(n_bytes as u64, ReadJob::Task(Box::new(task))) {
            Ok(()) => Asked::Sections(TierSections { places, answer }),
            Err(_) => Asked::Refused,
        }
    }

    fn count_hits(&self) {
        let n_ranks = usize::from(self.chain.n_ranks());
        for (place, ranks) in self.sources.chunks(n_ranks).enumerate() {
            let tiers = ranks.iter().map(|source| match source {
                Source::Memory(_) => RAM,
                Source::Lower(tier) => *tier,
            });
            let n_tokens = self.chain.tokens_of(self.first_chunk + place).len() as u64;
            self.core.counters.add(Counter::HitTokens(tiers.max().unwrap_or(RAM)), n_tokens);
        }
    }
}

// === impl LayerReading ===

impl LayerReading {
    fn run(self, lower: &Lower) {
        if !self.promise.is_wanted() || !self.is_current() {
            return;
        }
        let Self { core, chain, layer_idx, wanted, .. } = &self;
        // What lies behind a chunk that finds no memory is of no use.
        let mut slots: Vec<Slot> = wanted.iter().map_while(|section| self.reserve(section.n_bytes)).collect();
        core.counters.add(Counter::Refused, (wanted.len() - slots.len()) as u64);
        let mut items: Vec<GetItem<'_>> = wanted
            .iter()
            .zip(&mut slots)
            .map(|(section, slot)| {
                let key = chain.key_of(section.chunk_idx, section.rank);
                let offset = (layer_idx * section.n_bytes) as u64;
                GetItem::range(key, offset, &mut slot[..]).for_tokens(chain.digest_of(section.chunk_idx))
            })
            .collect();
        lower.tier.get(&mut items);
        let outcomes: Vec<GetOutcome> = items.into_iter().map(|item| item.outcome).collect();
        let mut leases = Vec::with_capacity(slots.len());
        for ((section, slot), outcome) in wanted.iter().zip(slots).zip(&outcomes) {
            core.note_outcome(lower, chain, section.chunk_idx, section.rank, outcome);
            leases.push(outcome.is_hit().then(|| slot.freeze()));
        }
        if !self.is_current() {
            return;
        }
        // The reader goes on while the layer is copied to where it stays.
        let Self { core, layer_idx, wanted, promotions, promise, .. } = self;
        let tell = || promise.keep(leases.clone());
        let sections = wanted.iter().zip(&leases);
        let sections = sections.filter_map(|(section, lease)| Some((section.place, lease.as_ref()?)));
        promotions.fill_after(&core, layer_idx, tell, sections);
    }

    /// Takes memory for a section, if need be that of the chunks that were to stay.
    fn reserve(&self, n_bytes: usize) -> Option<Slot> {
        self.core.reserve(n_bytes).or_else(|| {
            self.promotions.give_up();
            self.core.reserve(n_bytes)
        })
    }

    /// Whether the namespace was not cleared since the reader began.
    fn is_current(&self) -> bool {
        self.chain.namespace().generation() == self.generation
    }
}

// === impl Layer ===

impl Layer {
    /// Which layer it is.
    pub fn idx(&self) -> usize {
        self.idx
    }

    /// Chunks that still hold.
    pub fn n_chunks(&self) -> usize {
        self.sections.len() / self.n_ranks
    }

    /// What a rank holds of a chunk in this layer, chunks counted from the first that was asked for; empty
    /// where there is no such chunk or rank.
    pub fn section(&self, chunk_idx: usize, rank: u16) -> &[u8] {
        let rank = usize::from(rank);
        let place = chunk_idx.saturating_mul(self.n_ranks).saturating_add(rank);
        let section = self.sections.get(place).filter(|_| rank < self.n_ranks);
        section.map_or(&[], |(lease, range)| &lease[range.clone()])
    }

    /// Where what a rank holds of a chunk in this layer starts in the arena's memory file, for a reader in another
    /// process.
    pub fn offset(&self, chunk_idx: usize, rank: u16) -> Option<u64> {
        let rank = usize::from(rank);
        let place = chunk_idx.checked_mul(self.n_ranks)?.checked_add(rank)?;
        let (lease, range) = self.sections.get(place).filter(|_| rank < self.n_ranks)?;
        Some(lease.offset() + range.start as u64)
    }
}
