//! What the index knows, source by source, for whoever administers it, and what is taken away from a source
//! by hand.

use std::collections::BinaryHeap;
use std::sync::Arc;

use super::ordering::Gap;
use super::sets::SetRef;
use super::{BlockKey, HolderIndex, HolderReader, N_TIERS, SourceId, SourceName};

/// Where a source stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceStatus {
    /// Its id.
    pub id: SourceId,
    /// Its worker and rank.
    pub name: Arc<SourceName>,
    /// The last epoch that it named.
    pub epoch: Option<u64>,
    /// The number of the batch that is due; `None` after the last of all numbers.
    pub due: Option<u64>,
    /// Whether batches of it are missing.
    pub is_unsure: bool,
    /// Pairs of block and tier that it has.
    pub n_blocks: u64,
}

/// The names of all sources at one moment.
#[derive(Debug, Clone)]
pub struct SourceNames {
    names: Arc<Vec<Option<Arc<SourceName>>>>,
}

impl SourceNames {
    /// The name of a source.
    pub fn get(&self, source: SourceId) -> Option<&Arc<SourceName>> {
        self.names.get(source.as_index())?.as_ref()
    }
}

impl HolderReader {
    /// The names of all sources. A lookup's row is of the source of that name if the name was the same, by
    /// address, before and after the lookup; otherwise its number was given out again meanwhile.
    pub fn names(&self) -> SourceNames {
        SourceNames { names: self.shared.names.load_full() }
    }
}

impl HolderIndex {
    /// Where a source stands.
    pub fn status(&self, source: SourceId) -> Option<SourceStatus> {
        let entry = self.sources.get(source)?;
        Some(SourceStatus {
            id: source,
            name: Arc::clone(&entry.name),
            epoch: entry.ordering.epoch,
            due: entry.ordering.due,
            is_unsure: entry.ordering.gap != Gap::None,
            n_blocks: entry.n_blocks,
        })
    }

    /// Where all sources stand.
    pub fn statuses(&self) -> impl Iterator<Item = SourceStatus> {
        (0..self.sources.list.len() as u32).filter_map(|number| self.status(SourceId(number)))
    }

    /// Takes blocks away from a source in every tier, however often it stored them; gives how many pairs of
    /// block and tier it had.
    pub fn forget(&mut self, source: SourceId, keys: &[BlockKey]) -> u64 {
        let Some(entry) = self.sources.get(source) else { return 0 };
        let holders = entry.holders;
        let mut n_forgotten = 0;
        for &BlockKey(key) in keys {
            let Some((index, set)) = self.find_entry(key) else { continue };
            let mut n_leaving = 0;
            for holder in holders.into_iter().flatten() {
                if !self.sets.contains(set, holder) {
                    continue;
                }
                self.take_repeats(holder, index);
                self.sources.count(holder, -1);
                n_leaving += 1;
            }
            if n_leaving > 0 {
                let rest = self.sets.without(set, |member| holders.contains(&Some(member)));
                self.publish_grown_sets();
                self.put_entry_set(index, key, set, rest);
                n_forgotten += n_leaving;
            }
        }
        self.counters.blocks_removed += n_forgotten;
        self.settle();
        n_forgotten
    }

    /// Up to `limit` blocks of a source that come behind `after`, in the order of their keys, each with a set
    /// of tiers (bit `i` is [`Tier::ALL`](super::Tier::ALL)`[i]`).
    ///
    /// It looks at every entry of the index and takes memory for `limit` blocks. Readers go on meanwhile; the
    /// writer waits.
    pub fn blocks_of(&self, source: SourceId, after: Option<BlockKey>, limit: usize) -> Vec<(BlockKey, u8)> {
        let Some(entry) = self.sources.get(source) else { return Vec::new() };
        let holders = entry.holders;
        // Neighbors mostly have the same set.
        let (mut last_set, mut last_tiers) = (SetRef::EMPTY, 0);
        let mut first_blocks = BinaryHeap::new();
        for state in self.arena.states.iter().flatten() {
            for offset in 0..state.n_used {
                let set = state.extent.set(offset);
                if set != last_set {
                    (last_set, last_tiers) = (set, self.tiers_in(set, &holders));
                }
                let key = BlockKey(state.extent.key(offset));
                if last_tiers == 0 || after.is_some_and(|after| key <= after) {
                    continue;
                }
                if first_blocks.len() < limit {
                    first_blocks.push((key, last_tiers));
                } else if let Some(mut largest) = first_blocks.peek_mut()
                    && key < largest.0
                {
                    *largest = (key, last_tiers);
                }
            }
        }
        first_blocks.into_sorted_vec()
    }

    /// The tiers of those holders that are in a set.
    fn tiers_in(&self, set: SetRef, holders: &[Option<u16>; N_TIERS]) -> u8 {
        let is_in = |holder: &Option<u16>| holder.is_some_and(|holder| self.sets.contains(set, holder));
        holders.iter().enumerate().fold(0, |tiers, (tier, holder)| tiers | u8::from(is_in(holder)) << tier)
    }
}
