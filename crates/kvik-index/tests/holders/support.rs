//! A feed of events that numbers batches, and a naive map to compare with.

use std::collections::{BTreeMap, HashMap};

use kvik_index::holders::{
    Batch, BlockKey, Event, HolderIndex, HolderReader, IndexConfig, LookupOptions, Matches, Scorer, SourceId,
    Tier, TierWeights, Verdict, WorkerMatch,
};

pub(crate) fn keys(numbers: impl IntoIterator<Item = u64>) -> Vec<BlockKey> {
    numbers.into_iter().map(BlockKey).collect()
}

pub(crate) fn stored(keys: &[BlockKey]) -> Event<'_> {
    Event::Stored { tier: Tier::Gpu, parent: None, keys }
}

pub(crate) fn removed(keys: &[BlockKey]) -> Event<'_> {
    Event::Removed { tier: Tier::Gpu, keys }
}

/// An index with some sources whose batches are numbered without gaps.
pub(crate) struct Feed {
    pub(crate) index: HolderIndex,
    pub(crate) sources: Vec<SourceId>,
    next: Vec<u64>,
}

impl Feed {
    pub(crate) fn new(config: IndexConfig, n_sources: usize) -> Self {
        let mut index = HolderIndex::new(config);
        let sources =
            (0..n_sources).map(|source| index.add_source("worker", source as u32).unwrap()).collect();
        Self { index, sources, next: vec![0; n_sources] }
    }

    pub(crate) fn send(&mut self, source: usize, event: Event<'_>) {
        let sequence = self.next[source];
        self.next[source] += 1;
        let source = self.sources[source];
        let batch = Batch { source, epoch: Some(1), sequence, replayed: false, events: &[event] };
        assert_eq!(self.index.apply(&batch), Verdict::Applied);
    }

    /// Sends events of several sources as one group.
    pub(crate) fn send_group(&mut self, events: &[(usize, Event<'_>)]) {
        let mut batches = Vec::new();
        for (source, event) in events {
            let (epoch, sequence) = (Some(1), self.next[*source]);
            let (source, events) = (self.sources[*source], std::slice::from_ref(event));
            self.next[source.as_index()] += 1;
            batches.push(Batch { source, epoch, sequence, replayed: false, events });
        }
        let mut verdicts = Vec::new();
        self.index.apply_all(&batches, &mut verdicts);
        assert_eq!(verdicts, vec![Verdict::Applied; events.len()]);
    }

    /// Blocks from the first on that a source has.
    pub(crate) fn prefix(&self, source: usize, keys: &[BlockKey]) -> u32 {
        prefix_of(&self.index.reader(), self.sources[source], keys)
    }
}

/// All blocks of a source by key, listed in pages of `limit`. No key is listed twice.
pub(crate) fn list(reader: &HolderReader, source: SourceId, limit: usize) -> Vec<(BlockKey, u8)> {
    let mut blocks = Vec::new();
    let mut from = None;
    loop {
        let page = reader.blocks_of(source, from, limit);
        assert!(page.blocks.len() <= limit.max(1), "{} blocks on a page of {limit}", page.blocks.len());
        blocks.extend(page.blocks);
        from = page.next;
        if from.is_none() {
            break;
        }
    }
    blocks.sort_unstable();
    assert!(blocks.windows(2).all(|pair| pair[0].0 != pair[1].0), "a block is listed twice");
    blocks
}

pub(crate) fn prefix_of(reader: &HolderReader, source: SourceId, keys: &[BlockKey]) -> u32 {
    let mut matches = Matches::default();
    reader.lookup(keys, LookupOptions::default(), &mut matches);
    matches.row(source).map_or(0, WorkerMatch::prefix_blocks)
}

/// What every holder has, as plainly as possible.
#[derive(Debug, Default, Clone)]
pub(crate) struct NaiveMap {
    counts: HashMap<(SourceId, Tier), HashMap<BlockKey, u32>>,
}

impl NaiveMap {
    pub(crate) fn apply(&mut self, source: SourceId, event: &Event<'_>) {
        match event {
            Event::Stored { tier, keys, .. } => {
                let held = self.counts.entry((source, *tier)).or_default();
                keys.iter().for_each(|key| *held.entry(*key).or_default() += 1);
            }
            Event::Removed { tier, keys } => {
                let held = self.counts.entry((source, *tier)).or_default();
                for key in *keys {
                    if let Some(count) = held.get_mut(key) {
                        *count -= 1;
                        if *count == 0 {
                            held.remove(key);
                        }
                    }
                }
            }
            Event::Cleared { tier } => {
                self.counts
                    .retain(|(holder, at), _| *holder != source || tier.is_some_and(|tier| tier != *at));
            }
        }
    }

    pub(crate) fn forget(&mut self, source: SourceId) {
        self.counts.retain(|(holder, _), _| *holder != source);
    }

    /// Takes blocks away from a source in every tier.
    pub(crate) fn forget_blocks(&mut self, source: SourceId, keys: &[BlockKey]) {
        for ((holder, _), held) in &mut self.counts {
            if *holder == source {
                held.retain(|key, _| !keys.contains(key));
            }
        }
    }

    /// The blocks of a source, with their tiers.
    pub(crate) fn blocks_of(&self, source: SourceId) -> Vec<(BlockKey, u8)> {
        let mut blocks = BTreeMap::new();
        for ((holder, tier), held) in &self.counts {
            for key in held.keys().filter(|_| *holder == source) {
                *blocks.entry(*key).or_default() |= 1 << tier.as_index();
            }
        }
        blocks.into_iter().collect()
    }

    pub(crate) fn n_holdings(&self) -> u64 {
        self.counts.values().map(|held| held.len() as u64).sum()
    }

    fn has(&self, source: SourceId, tier: Tier, key: BlockKey) -> bool {
        self.counts.get(&(source, tier)).is_some_and(|held| held.contains_key(&key))
    }

    /// The weight of a block at a source: the largest of the tiers that have it.
    fn weight(&self, source: SourceId, key: BlockKey, weights: &TierWeights) -> Option<f64> {
        Tier::ALL
            .into_iter()
            .filter(|tier| self.has(source, *tier, key))
            .map(|tier| weights.weight(tier))
            .reduce(f64::max)
    }

    pub(crate) fn score(
        &self,
        scorer: Scorer,
        source: SourceId,
        keys: &[BlockKey],
        weights: &TierWeights,
    ) -> f64 {
        let weight = |key: &BlockKey| self.weight(source, *key, weights);
        match scorer {
            Scorer::LongestPrefix => keys.iter().map_while(weight).sum(),
            Scorer::HighestBlockHit => {
                keys.iter().rposition(|key| weight(key).is_some()).map_or(0.0, |at| at as f64 + 1.0)
            }
            Scorer::Coverage => keys.iter().filter_map(weight).sum(),
        }
    }

    pub(crate) fn tier_run(&self, source: SourceId, tier: Tier, keys: &[BlockKey]) -> u32 {
        keys.iter().take_while(|key| self.has(source, tier, **key)).count() as u32
    }

    /// Compares all scorers and the runs of every tier for one query.
    pub(crate) fn assert_same(&self, index: &HolderIndex, sources: &[SourceId], keys: &[BlockKey]) {
        // Sums of these are exact whatever the order of addition; one weight is out of order on purpose.
        let weights = TierWeights::try_new([1.0, 0.75, 0.25, 0.5]).unwrap();
        let mut matches = Matches::default();
        for scorer in [Scorer::LongestPrefix, Scorer::HighestBlockHit, Scorer::Coverage] {
            index.reader().lookup(keys, LookupOptions::for_scorer(scorer, &weights), &mut matches);
            for source in sources {
                let got = matches.row(*source).map_or(0.0, |row| scorer.score(row, &weights));
                let want = self.score(scorer, *source, keys, &weights);
                assert!((got - want).abs() == 0.0, "{scorer:?} of {source:?}: {got}, the model says {want}");
                for tier in Tier::ALL {
                    let run = matches.row(*source).map_or(0, |row| row.tier_run(tier));
                    assert_eq!(run, self.tier_run(*source, tier, keys), "{tier:?} of {source:?}");
                }
            }
            assert!(matches.rows().iter().all(|row| sources.contains(&row.source())));
        }
    }
}

/// A small generator for tests that need many numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

impl NaiveMap {
    /// The same with other ids; sources without a pair are left out.
    pub(crate) fn renamed(self, pairs: &[(SourceId, SourceId)]) -> Self {
        let rename = |id: SourceId| pairs.iter().find(|(old, _)| *old == id).map(|(_, new)| *new);
        let counts =
            self.counts.into_iter().filter_map(|((id, tier), held)| Some(((rename(id)?, tier), held)));
        Self { counts: counts.collect() }
    }
}
