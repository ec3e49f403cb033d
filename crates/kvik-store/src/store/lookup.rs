//! How much of a chain is there.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kvik_tier::TierKind;
use parking_lot::Mutex;

use super::Store;
use super::core::Core;
use super::survey::{Survey, SurveyVisitor};
use crate::chain::{Chain, NamedChain};
use crate::counters::Counter;
use crate::promise::{Promise, promise};
use crate::tiers::{MAX_TIERS, TierIdx, TierName, TierRanks};

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
    pub tokens_by_tier: Vec<(TierName, usize)>,
    /// What the slowest of these tiers is made of; `None` where nothing was found.
    pub slowest_tier: Option<TierKind>,
}

/// Keeps what is found for the waiter until all tiers were asked.
struct Collect {
    more: Arc<Mutex<Vec<TierRanks>>>,
    all_ranks: u64,
    /// Ends the wait when it is dropped.
    promise: Promise<()>,
}

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

    /// Says how much can be retrieved of a chain of which only the names are known, as [`Self::lookup`] does.
    pub fn lookup_named(&self, chain: &NamedChain) -> Lookup {
        self.lookup(chain.chain())
    }

    /// Says how much of a chain memory and local tiers have. Does no I/O and does not wait.
    pub fn lookup_local(&self, chain: &Chain) -> Lookup {
        let core = self.core();
        core.counters.add(Counter::Lookups, 1);
        core.end_times();
        core.sum_up(chain, &core.find_known(chain, 0..core.n_chunks(chain)))
    }

    /// The kinds of tiers that have all ranks of a chunk, memory first. For remote tiers it is what was seen.
    pub fn tiers_of(&self, chain: &Chain, chunk_idx: usize) -> Vec<TierKind> {
        let core = self.core();
        core.end_times();
        if chunk_idx >= core.n_chunks(chain) {
            return Vec::new();
        }
        let all_ranks = all_ranks_of(chain);
        core.kinds_having(&core.directory.view(chain.hash(chunk_idx)).ranks, all_ranks)
    }

    /// The names of the tiers that have all ranks of a chunk, memory first. For remote tiers it is what was seen.
    pub fn tier_names_of(&self, chain: &Chain, chunk_idx: usize) -> Vec<TierName> {
        let core = self.core();
        core.end_times();
        if chunk_idx >= core.n_chunks(chain) {
            return Vec::new();
        }
        let ranks = core.directory.view(chain.hash(chunk_idx)).ranks;
        let tiers = core.labels.iter().zip(ranks).filter(|(_, ranks)| *ranks == all_ranks_of(chain));
        tiers.map(|(label, _)| label.name.clone()).collect()
    }
}

impl Core {
    /// The chunks of a range that the directory knows, up to the first that it does not.
    pub(crate) fn find_known(&self, chain: &Chain, range: Range<usize>) -> Vec<TierRanks> {
        let all_ranks = all_ranks_of(chain);
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
    ) -> Vec<TierRanks> {
        self.end_times();
        let n_chunks = self.n_chunks(chain);
        let mut found = self.find_known(chain, first_chunk..n_chunks);
        let n_known = first_chunk + found.len();
        if n_known < n_chunks && self.has_remote() {
            let (promise, answer) = promise();
            let more = Arc::new(Mutex::new(Vec::new()));
            let collect = Collect { more: Arc::clone(&more), all_ranks: all_ranks_of(chain), promise };
            self.survey(Survey::new(chain, n_known..n_chunks, Box::new(collect)));
            // What was found until the deadline counts.
            let _: Option<()> = answer.wait(deadline);
            found.append(&mut more.lock());
        }
        found
    }

    fn sum_up(&self, chain: &Chain, found: &[TierRanks]) -> Lookup {
        let all_ranks = all_ranks_of(chain);
        let mut tokens = [0; MAX_TIERS];
        for (chunk_idx, found) in found.iter().enumerate() {
            if let Some(tier) = tier_of(found, all_ranks) {
                tokens[tier] += chain.tokens_of(chunk_idx).len();
            }
        }
        let by_tier = tokens.iter().enumerate().filter(|(_, n_tokens)| **n_tokens > 0);
        Lookup {
            n_tokens: tokens.iter().sum(),
            n_chunks: found.len(),
            slowest_tier: by_tier.clone().next_back().map(|(tier, _)| self.kind_of(tier)),
            tokens_by_tier: by_tier.map(|(tier, n_tokens)| (self.name_of(tier), *n_tokens)).collect(),
        }
    }
}

/// The slowest tier that is needed for all ranks of a chunk; `None` where they are not all there.
pub(crate) fn tier_of(found: &TierRanks, all_ranks: u64) -> Option<TierIdx> {
    let mut ranks = 0;
    found.iter().position(|tier_ranks| {
        ranks |= tier_ranks;
        ranks == all_ranks
    })
}

// === impl Lookup ===

impl Lookup {
    /// Tokens whose slowest tier is `tier`.
    pub fn tokens_in(&self, tier: impl Into<TierName>) -> usize {
        let tier = tier.into();
        self.tokens_by_tier.iter().find(|(name, _)| *name == tier).map_or(0, |(_, n_tokens)| *n_tokens)
    }
}

// === impl Collect ===

impl SurveyVisitor for Collect {
    fn found(&mut self, _: usize, found: &[TierRanks]) -> bool {
        let whole = found.iter().take_while(|found| tier_of(found, self.all_ranks).is_some());
        self.more.lock().extend(whole);
        self.promise.is_wanted()
    }
}

pub(crate) fn all_ranks_of(chain: &Chain) -> u64 {
    chain.space().format().all_ranks()
}
