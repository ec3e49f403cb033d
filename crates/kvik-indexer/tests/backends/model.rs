//! What a book must answer, as plainly as possible.

use std::collections::{BTreeMap, BTreeSet};

use kvik_index::holders::{BlockKey, Event, N_TIERS, SourceName, Tier, Verdict, Walk};
use kvik_indexer::backend::{KeyedBatch, KeyedHolding, Row, SourceState};

/// What one source has and where it stands.
#[derive(Debug, Clone)]
struct Source {
    epoch: Option<u64>,
    due: Option<u64>,
    gap: Gap,
    /// How often each block was stored in each tier.
    counts: BTreeMap<(BlockKey, usize), u32>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Gap {
    None,
    Until(u64),
    Forever,
}

/// A book.
#[derive(Debug, Clone, Default)]
pub(crate) struct Model {
    first_sequence: u64,
    sources: BTreeMap<(String, u32), Source>,
}

pub(crate) fn name(worker: &str, rank: u32) -> SourceName {
    SourceName { worker: worker.into(), rank }
}

impl Model {
    pub(crate) fn new(first_sequence: u64) -> Self {
        Self { first_sequence, sources: BTreeMap::new() }
    }

    fn source(&mut self, source: &SourceName) -> &mut Source {
        let new = Source::new(self.first_sequence);
        self.sources.entry((source.worker.to_string(), source.rank)).or_insert(new)
    }

    pub(crate) fn apply(&mut self, source: &SourceName, batch: KeyedBatch<'_>) -> Verdict {
        let first = self.first_sequence;
        let source = self.source(source);
        let is_restart = match (batch.epoch, source.epoch) {
            (Some(epoch), Some(current)) if epoch < current => return Verdict::OldEpoch,
            (Some(epoch), Some(current)) => epoch > current,
            (Some(_), None) => source.due != Some(first),
            (None, _) => !batch.replayed && source.due.is_none_or(|due| batch.sequence < due),
        };
        let epoch = batch.epoch.or(source.epoch);
        if is_restart {
            *source = Source::new(first);
        }
        source.epoch = epoch;
        let Some(due) = source.due.filter(|due| batch.sequence >= *due) else { return Verdict::Duplicate };
        if batch.sequence > due {
            source.gap = match source.gap {
                Gap::None => Gap::Until(batch.sequence),
                Gap::Until(until) => Gap::Until(until.max(batch.sequence)),
                Gap::Forever => Gap::Forever,
            };
            return Verdict::Gap { expected: due, got: batch.sequence };
        }
        for event in batch.events {
            source.apply(event);
        }
        source.due = due.checked_add(1);
        if matches!(source.gap, Gap::Until(until) if until <= due) {
            source.gap = Gap::None;
        }
        if is_restart { Verdict::Restarted } else { Verdict::Applied }
    }

    pub(crate) fn replace(&mut self, source: &SourceName, holding: KeyedHolding<'_>) -> bool {
        let source = self.source(source);
        if holding.epoch.is_some() && holding.epoch < source.epoch {
            return false;
        }
        let epoch = holding.epoch.or(source.epoch);
        *source = Source { epoch, ..Source::new(holding.next_sequence) };
        for (tier, keys) in holding.runs {
            source.apply(&Event::Stored { tier: *tier, parent: None, keys });
        }
        true
    }

    pub(crate) fn skip_gap(&mut self, source: &SourceName, next: u64) {
        if let Some(source) = self.sources.get_mut(&(source.worker.to_string(), source.rank))
            && source.due.is_some_and(|due| next > due)
        {
            (source.due, source.gap) = (Some(next), Gap::Forever);
        }
    }

    pub(crate) fn remove_source(&mut self, source: &SourceName) -> bool {
        self.sources.remove(&(source.worker.to_string(), source.rank)).is_some()
    }

    pub(crate) fn forget(&mut self, source: &SourceName, keys: &[BlockKey]) {
        if let Some(source) = self.sources.get_mut(&(source.worker.to_string(), source.rank)) {
            let keys: BTreeSet<&BlockKey> = keys.iter().collect();
            source.counts.retain(|(key, _), _| !keys.contains(key));
        }
    }

    /// The rows of a lookup, in the order of their sources.
    pub(crate) fn lookup(&self, keys: &[BlockKey], walk: Walk) -> Vec<Row> {
        let row = |((worker, rank), source): (&(String, u32), &Source)| {
            let mut row = Row {
                source: name(worker, *rank),
                is_unsure: source.gap != Gap::None,
                prefix_in: [0; N_TIERS],
                covered_in: [0; N_TIERS],
                highest_block: 0,
            };
            for tier in keys.iter().map_while(|key| source.fastest(*key)) {
                row.prefix_in[tier] += 1;
            }
            if walk == Walk::All {
                for (at, key) in keys.iter().enumerate() {
                    if let Some(tier) = source.fastest(*key) {
                        row.covered_in[tier] += 1;
                        row.highest_block = at as u32 + 1;
                    }
                }
            }
            let has_any = row.highest_block > 0 || row.prefix_in != [0; N_TIERS];
            has_any.then_some(row)
        };
        self.sources.iter().filter_map(row).collect()
    }

    pub(crate) fn states(&self) -> Vec<SourceState> {
        let state = |((worker, rank), source): (&(String, u32), &Source)| SourceState {
            source: name(worker, *rank),
            epoch: source.epoch,
            due_sequence: source.due,
            is_unsure: source.gap != Gap::None,
            n_blocks: Some(source.counts.len() as u64),
        };
        self.sources.iter().map(state).collect()
    }

    pub(crate) fn blocks_of(&self, source: &SourceName) -> BTreeMap<BlockKey, u8> {
        let mut blocks = BTreeMap::new();
        if let Some(source) = self.sources.get(&(source.worker.to_string(), source.rank)) {
            for (key, tier) in source.counts.keys() {
                *blocks.entry(*key).or_default() |= 1 << tier;
            }
        }
        blocks
    }
}

impl Source {
    fn new(due: u64) -> Self {
        Self { epoch: None, due: Some(due), gap: Gap::None, counts: BTreeMap::new() }
    }

    fn apply(&mut self, event: &Event<'_>) {
        match event {
            Event::Stored { tier, keys, .. } => {
                keys.iter().for_each(|key| *self.counts.entry((*key, tier.as_index())).or_default() += 1);
            }
            Event::Removed { tier, keys } => {
                for key in *keys {
                    if let Some(count) = self.counts.get_mut(&(*key, tier.as_index())) {
                        *count -= 1;
                        if *count == 0 {
                            self.counts.remove(&(*key, tier.as_index()));
                        }
                    }
                }
            }
            Event::Cleared { tier: None } => self.counts.clear(),
            Event::Cleared { tier: Some(tier) } => self.counts.retain(|(_, at), _| *at != tier.as_index()),
        }
    }

    fn fastest(&self, key: BlockKey) -> Option<usize> {
        (0..Tier::ALL.len()).find(|tier| self.counts.contains_key(&(key, *tier)))
    }
}
