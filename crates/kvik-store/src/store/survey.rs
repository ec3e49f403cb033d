//! Asking the remote tiers which chunks of a chain they have.

use std::ops::Range;
use std::sync::Arc;

use kvik_tier::ChunkKey;

use super::core::Core;
use crate::chain::Chain;
use crate::lower::{Lower, ReadJob};
use crate::tiers::{MAX_TIERS, TierIdx, TierRanks};

/// Chunks that are asked for at a time, at most: a few round trips for the longest prompts.
const MAX_GROUP_CHUNKS: usize = 64;

/// What is done with the answers to a survey. Dropping it says that no more will come.
pub(crate) trait SurveyVisitor: Send {
    /// Takes what tiers have of the chunks from `first_chunk` on, which follow those of the call before. False
    /// ends the survey.
    fn found(&mut self, first_chunk: usize, found: &[TierRanks]) -> bool;
}

/// A question about a range of chunks.
///
/// It is asked in groups of 1, 2, 4 ... chunks, each of all remote tiers that are needed for it, and ends with
/// the first group that has a hole: what lies behind a hole cannot be used. So a prompt that no tier has costs
/// one request for its first chunk, and one that is there costs a few.
pub(crate) struct Survey {
    chain: Chain,
    /// Chunks that were not asked for yet.
    rest: Range<usize>,
    /// Where the group that is being asked for begins, and what was found of it.
    first_chunk: usize,
    group: Vec<TierRanks>,
    /// The only tier that is asked, and whose chunks count.
    only: Option<TierIdx>,
    visitor: Box<dyn SurveyVisitor>,
}

impl Survey {
    /// A question about the chunks `range` of a chain.
    pub(crate) fn new(chain: &Chain, range: Range<usize>, visitor: Box<dyn SurveyVisitor>) -> Self {
        let first_chunk = range.start;
        Self { chain: chain.clone(), rest: range, first_chunk, group: Vec::new(), only: None, visitor }
    }

    /// The same question to one tier alone, where one is given.
    pub(crate) fn only_of(self, only: Option<TierIdx>) -> Self {
        Self { only, ..self }
    }

    /// Goes on to the next group, twice as long as this one; false at the end.
    fn next_group(&mut self) -> bool {
        if !self.group.is_empty() && !self.visitor.found(self.first_chunk, &self.group) {
            return false;
        }
        if self.rest.is_empty() || !self.missing().is_empty() {
            self.group.clear();
            return false;
        }
        let n_chunks = (2 * self.group.len()).clamp(1, MAX_GROUP_CHUNKS).min(self.rest.len());
        self.first_chunk = self.rest.start;
        self.rest.start += n_chunks;
        self.group.clear();
        self.group.resize(n_chunks, [0; MAX_TIERS]);
        true
    }

    /// Takes over what the directory knows of the group.
    fn see_known(&mut self, core: &Core) {
        for (place, found) in self.group.iter_mut().enumerate() {
            let known = core.directory.view(self.chain.hash(self.first_chunk + place)).ranks;
            for (tier, (ranks, known)) in found.iter_mut().zip(known).enumerate() {
                if self.only.is_none_or(|only| only == tier) {
                    *ranks |= known;
                }
            }
        }
    }

    /// What no tier is known to have of the group.
    fn missing(&self) -> Vec<(usize, ChunkKey)> {
        let mut missing = Vec::new();
        for (place, found) in self.group.iter().enumerate() {
            let ranks = found.iter().fold(0, |ranks, tier_ranks| ranks | tier_ranks);
            for rank in (0..self.chain.n_ranks()).filter(|rank| ranks & (1 << rank) == 0) {
                missing.push((place, self.chain.key_of(self.first_chunk + place, rank)));
            }
        }
        missing
    }
}

impl Core {
    pub(crate) fn has_remote(&self) -> bool {
        self.can_ask(None)
    }

    /// Whether there is a remote tier, or whether `only` is one.
    pub(crate) fn can_ask(&self, only: Option<TierIdx>) -> bool {
        self.lowers.iter().any(|lower| lower.is_asked(only))
    }

    /// Asks the remote tiers. The visitor is dropped when all is asked, whatever happens.
    pub(crate) fn survey(self: &Arc<Self>, mut survey: Survey) {
        if survey.next_group() {
            self.ask(survey, 0);
        }
    }

    /// Asks the remote tiers from `lower_idx` on for what is missing of the group, then goes on to the next.
    fn ask(self: &Arc<Self>, mut survey: Survey, mut lower_idx: usize) {
        loop {
            survey.see_known(self);
            let wanted = survey.missing();
            let mut remotes = self.lowers.iter().enumerate().skip(lower_idx);
            let remote = remotes.find(|(_, lower)| lower.is_asked(survey.only));
            let Some((asked_idx, lower)) = remote.filter(|_| !wanted.is_empty()) else {
                if !survey.next_group() {
                    return;
                }
                lower_idx = 0;
                continue;
            };
            let core = Arc::clone(self);
            let task = move |lower: &Lower| {
                let keys: Vec<ChunkKey> = wanted.iter().map(|(_, key)| *key).collect();
                let mut is_present = vec![false; keys.len()];
                // A tier that cannot be asked has nothing.
                if lower.tier.contains(&keys, &mut is_present).is_ok() {
                    let present = wanted.iter().zip(&is_present).filter(|(_, is_present)| **is_present);
                    for ((place, key), _) in present {
                        survey.group[*place][lower.tier_idx] |= 1 << key.rank;
                    }
                }
                core.ask(survey, asked_idx + 1);
            };
            // A full queue drops the survey, which ends with what was found so far.
            let _ = lower.reads.push(0, ReadJob::Task(Box::new(task)));
            return;
        }
    }
}
