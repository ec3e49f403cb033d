//! All blocks of a source replaced at once, in steps between which other changes go on.
//!
//! The new blocks get holders that no reader sees. The last step makes them visible and retires the old ones: readers
//! see either all of the old or all of the new.

use super::index::HolderIndex;
use super::ordering::{Gap, Ordering};
use super::replacements::{Replacement, ReplacementId};
use super::types::{BlockKey, N_TIERS, SourceId, Tier};

impl HolderIndex {
    /// Replaces all that is known of a source by what the source says it holds, as of just before the
    /// batch `next`. Readers see the old until all of the new is there. False if there is no such source,
    /// or if its epoch is a later one.
    pub fn replace<'a>(
        &mut self,
        source: SourceId,
        epoch: Option<u64>,
        next: u64,
        runs: impl IntoIterator<Item = (Tier, &'a [BlockKey])>,
    ) -> bool {
        let Some(id) = self.begin_replace(source, epoch, next) else { return false };
        self.in_bulk(|index| {
            for (tier, keys) in runs {
                index.store_replacing(id, tier, None, keys);
            }
        });
        self.finish_replace(id) == Some(true)
    }

    /// Begins what [`Self::replace`] does in one call. The blocks follow by [`Self::replace_some`], and
    /// [`Self::finish_replace`] makes them visible. `None` where [`Self::replace`] returns false.
    ///
    /// Anything else may be called between the steps. Removing the source or writing a snapshot abandons the
    /// replacement. The caller abandons one that it does not finish.
    pub fn begin_replace(
        &mut self,
        source: SourceId,
        epoch: Option<u64>,
        next: u64,
    ) -> Option<ReplacementId> {
        if is_older(epoch, self.sources.get(source)?.ordering.epoch) {
            return None;
        }
        let id = ReplacementId(self.replacements.n_begun);
        self.replacements.n_begun += 1;
        self.replacements.list.push(Replacement { id, source, epoch, next, holders: [None; N_TIERS] });
        Some(id)
    }

    /// Adds runs of blocks, each behind its parent where that is known, to a replacement; false if it was abandoned.
    pub fn replace_some<'a>(
        &mut self,
        id: ReplacementId,
        runs: impl IntoIterator<Item = (Tier, Option<BlockKey>, &'a [BlockKey])>,
    ) -> bool {
        let is_known = self.in_bulk(|index| {
            runs.into_iter().all(|(tier, parent, keys)| index.store_replacing(id, tier, parent, keys))
        });
        self.settle();
        is_known
    }

    /// Makes all blocks of a replacement visible and retires what the source held before; false if the source has
    /// begun a later epoch meanwhile, `None` if the replacement was abandoned.
    pub fn finish_replace(&mut self, id: ReplacementId) -> Option<bool> {
        let at = self.replacements.list.iter().position(|replacement| replacement.id == id)?;
        let Replacement { source, epoch, next, holders, .. } = self.replacements.list.swap_remove(at);
        let entry = self.sources.get_mut(source)?;
        if is_older(epoch, entry.ordering.epoch) {
            self.retire_all(holders);
            return Some(false);
        }
        entry.ordering = Ordering { epoch: epoch.or(entry.ordering.epoch), due: Some(next), gap: Gap::None };
        // The next generation is the one that `forget` starts: with it these holders appear and the old ones go.
        let generation = entry.generation.wrapping_add(1);
        for holder in holders.into_iter().flatten() {
            self.sources.show_holder(holder, generation);
        }
        self.sources.forget(source);
        let n_blocks = self.n_blocks_in(&holders);
        if let Some(entry) = self.sources.get_mut(source) {
            entry.holders = holders;
            entry.n_blocks = n_blocks;
        }
        self.settle();
        Some(true)
    }

    /// Drops a replacement; the source keeps what it held.
    pub fn abandon_replace(&mut self, id: ReplacementId) {
        self.abandon_replacements(|replacement| replacement.id == id);
    }

    pub(super) fn abandon_replacements(&mut self, is_abandoned: impl Fn(&Replacement) -> bool) {
        let list = std::mem::take(&mut self.replacements.list);
        let (abandoned, kept) = list.into_iter().partition(is_abandoned);
        self.replacements.list = kept;
        for replacement in abandoned as Vec<Replacement> {
            self.retire_all(replacement.holders);
        }
    }

    /// The blocks of the replacement that a holder belongs to; `None` for holders that readers see.
    pub(super) fn n_blocks_of_replacement(&self, holder: u16) -> Option<u64> {
        let mut replacements = self.replacements.list.iter();
        let replacement = replacements.find(|replacement| replacement.holders.contains(&Some(holder)))?;
        Some(self.n_blocks_in(&replacement.holders))
    }

    fn store_replacing(
        &mut self,
        id: ReplacementId,
        tier: Tier,
        parent: Option<BlockKey>,
        keys: &[BlockKey],
    ) -> bool {
        let position = |index: &Self| index.replacements.list.iter().position(|one| one.id == id);
        let Some(at) = position(self) else { return false };
        let Replacement { source, holders, .. } = self.replacements.list[at];
        let holder = holders[tier.as_index()].or_else(|| self.open_holder(source, tier));
        match holder {
            Some(holder) => {
                self.replacements.list[at].holders[tier.as_index()] = Some(holder);
                self.store(source, holder, parent, keys);
            }
            None => self.counters.blocks_refused += keys.len() as u64,
        }
        true
    }

    fn n_blocks_in(&self, holders: &[Option<u16>; N_TIERS]) -> u64 {
        holders.iter().flatten().map(|holder| self.sources.n_blocks_of(*holder)).sum()
    }

    fn retire_all(&mut self, holders: [Option<u16>; N_TIERS]) {
        for holder in holders.into_iter().flatten() {
            self.sources.retire(holder);
        }
    }
}

fn is_older(epoch: Option<u64>, current: Option<u64>) -> bool {
    matches!((epoch, current), (Some(epoch), Some(current)) if epoch < current)
}
