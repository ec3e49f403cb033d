//! How much of a chain is there.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kvik_tier::{ChunkKey, TierKind};

use super::Store;
use super::core::Core;
use super::stats::Counter;
use crate::chain::Chain;
use crate::directory::{MAX_TIERS, TierIdx};
use crate::lower::ReadJob;
use crate::promise::promise;

/// How much of a chain is there, from its start on.
///
/// It is what was known at that time: a later retrieve may give less.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lookup {
    /// Tokens that can be retrieved.
    pub n_tokens: usize,
    /// Chunks that can be retrieved.
    pub n_chunks: usize,
    /// The tokens by the slowest tier that a rank of their chunk comes from; tiers with none are left out.
    pub tokens_by_tier: Vec<(TierKind, usize)>,
}

/// The ranks of one chunk that tiers were found to have.
pub(crate) type Found = [u64; MAX_TIERS];

/// A question to the remote tiers, one after the other. Its answer comes whatever happens.
pub(crate) struct Survey {
    chain: Chain,
    first_chunk: usize,
    found: Vec<Found>,
    then: Option<Then>,
}

type Then = Box<dyn FnOnce(&[Found]) + Send>;

impl Store {
    /// Says how much of a chain can be retrieved, remote tiers included.
    ///
    /// What local tiers do not have is asked of the remote ones, for at most
    /// [`lookup_timeout`](crate::StoreOptions::lookup_timeout); without remote tiers nothing waits.
    pub fn lookup(&self, chain: &Chain) -> Lookup {
        let core = self.core();
        core.counters.add(Counter::Lookups, 1);
        let found = core.find_for(chain, 0, Instant::now() + core.options.lookup_timeout);
        core.sum_up(chain, &found)
    }

    /// Says how much of a chain memory and local tiers have. Nobody is asked and nothing waits.
    pub fn lookup_local(&self, chain: &Chain) -> Lookup {
        let core = self.core();
        core.counters.add(Counter::Lookups, 1);
        core.sum_up(chain, &core.find_known(chain, 0..core.n_chunks(chain)))
    }

    /// The tiers that have all ranks of a chunk, memory first. For remote tiers it is what was seen.
    pub fn tiers_of(&self, chain: &Chain, chunk_idx: usize) -> Vec<TierKind> {
        let core = self.core();
        if chunk_idx >= core.n_chunks(chain) {
            return Vec::new();
        }
        let all_ranks = chain.space().format().all_ranks();
        let entry = core.directory.view(chain.hash(chunk_idx));
        let tiers = (0..=core.lowers.len()).filter(|tier| entry.ranks[*tier] == all_ranks);
        tiers.map(|tier| core.kind_of(tier)).collect()
    }
}

impl Core {
    pub(crate) fn kind_of(&self, tier: TierIdx) -> TierKind {
        self.lower(tier).map_or(TierKind::Ram, |lower| lower.kind)
    }

    pub(crate) fn has_remote(&self) -> bool {
        self.lowers.iter().any(|lower| !lower.is_local())
    }

    /// The chunks of a range that the directory knows, up to the first that it does not.
    pub(crate) fn find_known(&self, chain: &Chain, range: Range<usize>) -> Vec<Found> {
        let all_ranks = chain.space().format().all_ranks();
        range
            .map(|chunk_idx| self.directory.view(chain.hash(chunk_idx)).ranks)
            .take_while(|found| tier_of(found, all_ranks).is_some())
            .collect()
    }

    /// The chunks from `first_chunk` on that can be found until the deadline.
    pub(crate) fn find_for(
        self: &Arc<Self>,
        chain: &Chain,
        first_chunk: usize,
        deadline: Instant,
    ) -> Vec<Found> {
        let n_chunks = self.n_chunks(chain);
        let mut found = self.find_known(chain, first_chunk..n_chunks);
        let n_known = first_chunk + found.len();
        if n_known < n_chunks && self.has_remote() {
            let (promise, answer) = promise();
            let survey = Survey::new(chain, n_known, move |found| promise.keep(found.to_vec()));
            self.ask(survey, 0);
            let all_ranks = chain.space().format().all_ranks();
            let more = answer.wait(deadline).unwrap_or_default();
            found.extend(more.into_iter().take_while(|found| tier_of(found, all_ranks).is_some()));
        }
        found
    }

    /// Asks the remote tiers from `lower_idx` on for the chunks that were not found yet.
    pub(crate) fn ask(self: &Arc<Self>, mut survey: Survey, lower_idx: usize) {
        let remote = self.lowers.iter().enumerate().skip(lower_idx).find(|(_, lower)| !lower.is_local());
        let Some((lower_idx, lower)) = remote else { return };
        survey.see_known(self);
        let wanted = survey.missing();
        if wanted.is_empty() {
            return;
        }
        let task = move |core: &Arc<Self>, lower: &crate::lower::Lower| {
            let keys: Vec<ChunkKey> = wanted.iter().map(|(_, key)| *key).collect();
            let mut is_present = vec![false; keys.len()];
            // A tier that cannot be asked has nothing.
            if lower.tier.contains(&keys, &mut is_present).is_ok() {
                let present = wanted.iter().zip(&is_present).filter(|(_, is_present)| **is_present);
                for ((place, key), _) in present {
                    survey.found[*place][lower.tier_idx] |= 1 << key.rank;
                }
            }
            core.ask(survey, lower_idx + 1);
        };
        // A full queue drops the survey, which answers with what was found so far.
        let _ = lower.reads.push(0, ReadJob::Task(Box::new(task)));
    }

    fn sum_up(&self, chain: &Chain, found: &[Found]) -> Lookup {
        let all_ranks = chain.space().format().all_ranks();
        let mut tokens = [0; MAX_TIERS];
        for (chunk_idx, found) in found.iter().enumerate() {
            if let Some(tier) = tier_of(found, all_ranks) {
                tokens[tier] += chain.tokens_of(chunk_idx).len();
            }
        }
        let tokens_by_tier = tokens.iter().enumerate().filter(|(_, n_tokens)| **n_tokens > 0);
        Lookup {
            n_tokens: tokens.iter().sum(),
            n_chunks: found.len(),
            tokens_by_tier: tokens_by_tier.map(|(tier, n_tokens)| (self.kind_of(tier), *n_tokens)).collect(),
        }
    }
}

/// The slowest tier that is needed for all ranks of a chunk; `None` where they are not all there.
pub(crate) fn tier_of(found: &Found, all_ranks: u64) -> Option<TierIdx> {
    let mut ranks = 0;
    found.iter().position(|tier_ranks| {
        ranks |= tier_ranks;
        ranks == all_ranks
    })
}

// === impl Lookup ===

impl Lookup {
    /// Tokens whose slowest tier is `tier`.
    pub fn tokens_in(&self, tier: TierKind) -> usize {
        self.tokens_by_tier.iter().find(|(kind, _)| *kind == tier).map_or(0, |(_, n_tokens)| *n_tokens)
    }
}

// === impl Survey ===

impl Survey {
    /// A question about the chunks of a chain from `first_chunk` on; `then` hears what was found of each.
    pub(crate) fn new(
        chain: &Chain,
        first_chunk: usize,
        then: impl FnOnce(&[Found]) + Send + 'static,
    ) -> Self {
        let found = vec![[0; MAX_TIERS]; chain.n_chunks() - first_chunk];
        Self { chain: chain.clone(), first_chunk, found, then: Some(Box::new(then)) }
    }

    /// Takes over what the directory knows.
    fn see_known(&mut self, core: &Core) {
        for (place, found) in self.found.iter_mut().enumerate() {
            let known = core.directory.view(self.chain.hash(self.first_chunk + place)).ranks;
            for (ranks, known) in found.iter_mut().zip(known) {
                *ranks |= known;
            }
        }
    }

    /// What nobody has said to have.
    fn missing(&self) -> Vec<(usize, ChunkKey)> {
        let mut missing = Vec::new();
        for (place, found) in self.found.iter().enumerate() {
            let ranks = found.iter().fold(0, |ranks, tier_ranks| ranks | tier_ranks);
            for rank in (0..self.chain.n_ranks()).filter(|rank| ranks & (1 << rank) == 0) {
                missing.push((place, self.chain.key_of(self.first_chunk + place, rank)));
            }
        }
        missing
    }
}

impl Drop for Survey {
    fn drop(&mut self) {
        if let Some(then) = self.then.take() {
            then(&self.found);
        }
    }
}
