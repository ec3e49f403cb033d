//! How often a holder stored blocks that it had.
//!
//! Engines repeat whole beginnings of prompts, whose entries are neighbors: counts are kept for groups of
//! entries, so that a repeated prompt is a few searches and not one for each block.

use std::collections::HashMap;

use super::arena::EntryIndex;
use super::hash_key::HashKey;

/// Entries of a group: few enough that a single repeated block does not take much.
const GROUP_ENTRIES: u32 = 8;

type Counts = [u32; GROUP_ENTRIES as usize];

/// The repetitions of one holder: how many removals each of its entries outlives.
#[derive(Debug)]
pub(super) struct StoreCounts {
    groups: HashMap<u32, Counts, HashKey>,
    n_entries: u64,
}

impl StoreCounts {
    pub(super) fn new(hash_key: HashKey) -> Self {
        Self { groups: HashMap::with_hasher(hash_key), n_entries: 0 }
    }

    /// Entries with a repetition.
    pub(super) fn n_entries(&self) -> u64 {
        self.n_entries
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.groups.capacity() * (size_of::<(u32, Counts)>() + 1)) as u64
    }

    /// Notes that neighbors from `first` on were stored once more each.
    pub(super) fn add_run(&mut self, first: EntryIndex, n_entries: usize) {
        let end = first.0 + n_entries as u32;
        let mut at = first.0;
        while at < end {
            let (group, lane) = (at / GROUP_ENTRIES, at % GROUP_ENTRIES);
            let n_here = (GROUP_ENTRIES - lane).min(end - at);
            let counts = self.groups.entry(group).or_default();
            // Whole groups, which are most, are of a known length: a few instructions.
            self.n_entries += if n_here == GROUP_ENTRIES {
                add_one_each(counts)
            } else {
                add_one_each(&mut counts[lane as usize..(lane + n_here) as usize])
            };
            at += n_here;
        }
    }

    /// Notes that an entry was stored some times more.
    pub(super) fn add(&mut self, index: EntryIndex, n_times: u32) {
        let counts = self.groups.entry(index.0 / GROUP_ENTRIES).or_default();
        let count = &mut counts[(index.0 % GROUP_ENTRIES) as usize];
        self.n_entries += u64::from(*count == 0 && n_times > 0);
        *count = count.saturating_add(n_times);
    }

    /// Takes one repetition of an entry away; false if it has no repetition.
    pub(super) fn take_one(&mut self, index: EntryIndex) -> bool {
        let Some(counts) = self.groups.get_mut(&(index.0 / GROUP_ENTRIES)) else { return false };
        match &mut counts[(index.0 % GROUP_ENTRIES) as usize] {
            0 => false,
            1 => self.take_all(index) > 0,
            count => {
                *count -= 1;
                true
            }
        }
    }

    /// Takes all repetitions of an entry away and says how many there were.
    pub(super) fn take_all(&mut self, index: EntryIndex) -> u32 {
        let group = index.0 / GROUP_ENTRIES;
        let Some(counts) = self.groups.get_mut(&group) else { return 0 };
        let count = std::mem::take(&mut counts[(index.0 % GROUP_ENTRIES) as usize]);
        self.n_entries -= u64::from(count > 0);
        if *counts == Counts::default() {
            self.groups.remove(&group);
            if self.groups.len() * 8 < self.groups.capacity() {
                self.groups.shrink_to(self.groups.len() * 2);
            }
        }
        count
    }

    /// All entries with a repetition, and how many each has.
    pub(super) fn iter(&self) -> impl Iterator<Item = (EntryIndex, u32)> {
        self.groups.iter().flat_map(|(group, counts)| {
            let index = move |lane: usize| EntryIndex(group * GROUP_ENTRIES + lane as u32);
            let counts = counts.iter().enumerate().filter(|(_, count)| **count > 0);
            counts.map(move |(lane, count)| (index(lane), *count))
        })
    }
}

/// Adds one to each count, as far as it goes, and says how many were none before.
#[inline]
fn add_one_each(counts: &mut [u32]) -> u64 {
    let mut n_new = 0;
    for count in counts {
        n_new += u32::from(*count == 0);
        *count = count.saturating_add(1);
    }
    u64::from(n_new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_neighbors_are_kept_apart() {
        let mut store_counts = StoreCounts::new(HashKey::new(1));
        store_counts.add_run(EntryIndex(5), 20);
        store_counts.add_run(EntryIndex(7), 2);
        store_counts.add(EntryIndex(40), 3);
        let mut all: Vec<(u32, u32)> = store_counts.iter().map(|(index, count)| (index.0, count)).collect();
        all.sort_unstable();
        let expected = (5..25).map(|at| (at, if at == 7 || at == 8 { 2 } else { 1 })).chain([(40, 3)]);
        assert_eq!(all, expected.collect::<Vec<_>>());
        assert_eq!(store_counts.n_entries(), 21);
    }

    #[test]
    fn what_is_taken_away_takes_no_memory() {
        let mut store_counts = StoreCounts::new(HashKey::new(1));
        store_counts.add_run(EntryIndex(0), 1000);
        assert_eq!((store_counts.take_all(EntryIndex(3)), store_counts.take_all(EntryIndex(3))), (1, 0));
        assert!(!store_counts.take_one(EntryIndex(3)));
        for at in (0..1000).filter(|at| *at != 3) {
            assert!(store_counts.take_one(EntryIndex(at)), "{at}");
        }
        assert!(!store_counts.take_one(EntryIndex(0)));
        assert_eq!((store_counts.n_entries(), store_counts.bytes()), (0, 0));
    }
}
