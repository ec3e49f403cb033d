//! Many batches at a time: the same as one after the other.

use kvik_index::holders::{Batch, BlockKey, Event, HolderIndex, IndexConfig, SourceId, Tier, Verdict};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::support::{Feed, NaiveMap, Random, keys, list, removed, stored};

/// A batch that owns its events.
#[derive(Debug, Clone)]
struct Sent {
    source: SourceId,
    epoch: u64,
    sequence: u64,
    events: Vec<Change>,
}

#[derive(Debug, Clone)]
enum Change {
    Store { tier: Tier, parent: Option<BlockKey>, keys: Vec<BlockKey> },
    Remove { tier: Tier, keys: Vec<BlockKey> },
    Clear { tier: Option<Tier> },
}

impl Change {
    fn as_event(&self) -> Event<'_> {
        match self {
            Self::Store { tier, parent, keys } => Event::Stored { tier: *tier, parent: *parent, keys },
            Self::Remove { tier, keys } => Event::Removed { tier: *tier, keys },
            Self::Clear { tier } => Event::Cleared { tier: *tier },
        }
    }
}

/// One index that is given batches in groups, one that is given them one after the other, and what is true.
struct Twins {
    grouped: HolderIndex,
    single: HolderIndex,
    model: NaiveMap,
    sources: Vec<SourceId>,
    epochs: Vec<u64>,
}

impl Twins {
    fn new(config: IndexConfig, n_sources: u32) -> Self {
        let (mut grouped, mut single) = (HolderIndex::new(config), HolderIndex::new(config));
        let sources: Vec<SourceId> =
            (0..n_sources).map(|rank| grouped.add_source("w", rank).unwrap()).collect();
        for (rank, source) in (0..).zip(&sources) {
            assert_eq!(single.add_source("w", rank).unwrap(), *source);
        }
        let epochs = vec![0; sources.len()];
        Self { grouped, single, model: NaiveMap::default(), sources, epochs }
    }

    fn send(&mut self, group: &[Sent]) {
        let events: Vec<Vec<Event<'_>>> =
            group.iter().map(|sent| sent.events.iter().map(Change::as_event).collect()).collect();
        let batches: Vec<Batch<'_>> = group
            .iter()
            .zip(&events)
            .map(|(sent, events)| Batch {
                source: sent.source,
                epoch: Some(sent.epoch),
                sequence: sent.sequence,
                replayed: false,
                events,
            })
            .collect();
        let mut verdicts = Vec::new();
        self.grouped.apply_all(&batches, &mut verdicts);
        let expected: Vec<Verdict> = batches.iter().map(|batch| self.single.apply(batch)).collect();
        assert_eq!(verdicts, expected);
        for (batch, verdict) in batches.iter().zip(&verdicts) {
            let epoch = &mut self.epochs[batch.source.as_index()];
            if batch.epoch > Some(*epoch) {
                *epoch = batch.epoch.unwrap();
                self.model.forget(batch.source);
            }
            if matches!(verdict, Verdict::Applied | Verdict::Restarted) {
                batch.events.iter().for_each(|event| self.model.apply(batch.source, event));
            }
        }
    }

    fn check(&self, queries: &[Vec<BlockKey>]) {
        for query in queries {
            self.model.assert_same(&self.grouped, &self.sources, query);
        }
        let counters = |index: &HolderIndex| {
            let counters = index.counters();
            [
                counters.blocks_stored,
                counters.blocks_repeated,
                counters.blocks_removed,
                counters.removals_unknown,
                counters.blocks_refused,
            ]
        };
        assert_eq!(counters(&self.grouped), counters(&self.single));
        assert_eq!(self.grouped.stats().n_holdings, self.model.n_holdings());
        for source in &self.sources {
            assert_eq!(self.grouped.n_blocks_of(*source), self.single.n_blocks_of(*source));
        }
    }
}

/// Prompts that share beginnings, as numbers of a block and of the prompt it is first in.
fn prompt(number: u64, n_blocks: u64) -> Vec<BlockKey> {
    keys((0..n_blocks).map(|at| if at < 4 * number { at } else { (number + 1) << 20 | at }))
}

fn changes() -> impl Strategy<Value = Change> {
    let tier = || (0..2_usize).prop_map(|tier| Tier::ALL[tier]);
    let piece = || (0..6_u64, 0..40_usize, 1..20_usize);
    prop_oneof![
        8 => (tier(), piece(), any::<bool>()).prop_map(|(tier, (number, from, n_blocks), names_parent)| {
            let whole = prompt(number, 60);
            let parent = from.checked_sub(1).filter(|_| names_parent).map(|at| whole[at]);
            Change::Store { tier, parent, keys: whole[from..from + n_blocks].to_vec() }
        }),
        // A run that is no chain, with a block twice.
        1 => (tier(), vec(0..30_u64, 1..12)).prop_map(|(tier, numbers)| {
            Change::Store { tier, parent: None, keys: keys(numbers) }
        }),
        3 => (tier(), piece()).prop_map(|(tier, (number, from, n_blocks))| {
            Change::Remove { tier, keys: prompt(number, 60)[from..from + n_blocks].to_vec() }
        }),
        1 => proptest::option::of(tier()).prop_map(|tier| Change::Clear { tier }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn a_group_of_batches_leaves_what_its_batches_leave_one_after_the_other(
        groups in vec(vec((0..4_usize, vec(changes(), 0..4), 0..20_u32), 1..12), 1..8),
        max_blocks_per_source in prop_oneof![Just(1_u64 << 32), 20..200_u64],
        hash_seed in any::<u64>(),
    ) {
        let config = IndexConfig { hash_seed, max_blocks_per_source, ..IndexConfig::default() };
        let mut twins = Twins::new(config, 4);
        let mut state = [(1_u64, 0_u64); 4];
        for group in groups {
            let sent: Vec<Sent> = group
                .into_iter()
                .map(|(source, events, fate)| {
                    let (epoch, next) = &mut state[source];
                    match fate {
                        // A restart, a batch that comes again, and one that comes too early.
                        0 => (*epoch, *next) = (*epoch + 1, 0),
                        1 => *next = next.saturating_sub(1),
                        2 => {
                            let sequence = *next + 3;
                            return Sent { source: twins.sources[source], epoch: *epoch, sequence, events };
                        }
                        _ => {}
                    }
                    let sequence = *next;
                    *next += 1;
                    Sent { source: twins.sources[source], epoch: *epoch, sequence, events }
                })
                .collect();
            twins.send(&sent);
            if max_blocks_per_source > 1000 {
                let queries: Vec<Vec<BlockKey>> = (0..6).map(|number| prompt(number, 60)).collect();
                twins.check(&queries);
            } else {
                // Which blocks a bound refuses is the same, so the answers are.
                for rank in 0..4 {
                    let source = twins.sources[rank];
                    let blocks = |index: &HolderIndex| list(&index.reader(), source, usize::MAX);
                    prop_assert_eq!(blocks(&twins.grouped), blocks(&twins.single));
                }
            }
        }
    }
}

#[test]
fn large_groups_on_several_threads_score_as_a_naive_map() {
    // Enough for threads, for pages that split, and for extents that are opened within a group.
    let mut random = Random(11);
    let mut twins = Twins::new(IndexConfig { n_threads: 3, hash_seed: 3, ..IndexConfig::default() }, 3);
    let mut next = [0; 3];
    let family = |number: u64, from: u64, to: u64| keys((from..to).map(|at| (number + 1) << 24 | at));
    for round in 0..6_u64 {
        let mut group = Vec::new();
        for _ in 0..60 {
            let rank = random.below(3) as usize;
            let number = random.below(12);
            let (from, n_blocks) = (random.below(2) * random.below(3000), 1 + random.below(3000));
            let keys = family(number, from, from + n_blocks);
            let tier = Tier::ALL[random.below(2) as usize];
            let parent = from.checked_sub(1).map(|at| BlockKey((number + 1) << 24 | at));
            let event = match random.below(40) {
                0 if round > 2 => Change::Clear { tier: Some(tier) },
                1..14 if round > 0 => Change::Remove { tier, keys },
                _ => Change::Store { tier, parent, keys },
            };
            let (source, sequence) = (twins.sources[rank], next[rank]);
            next[rank] += 1;
            group.push(Sent { source, epoch: 1, sequence, events: vec![event] });
        }
        twins.send(&group);
        twins.check(&[]);
    }
    let queries: Vec<Vec<BlockKey>> = (0..12).step_by(2).map(|number| family(number, 0, 6000)).collect();
    twins.check(&queries);
    let counters = twins.grouped.counters();
    assert!(counters.blocks_stored > 100_000 && counters.blocks_repeated > 0, "{counters:?}");
    for index in [&mut twins.grouped, &mut twins.single] {
        while index.maintain(1 << 16) {}
    }
    twins.check(&queries);
    let (grouped, single) = (twins.grouped.stats(), twins.single.stats());
    assert_eq!(grouped.n_blocks, single.n_blocks);
    assert!(grouped.bytes <= single.bytes * 3 / 2, "{grouped:?} and {single:?}");
}

#[test]
fn a_group_keeps_to_the_budget_and_to_the_bound_of_a_source() {
    const BUDGET_BYTES: u64 = 12 << 20;
    let config = IndexConfig { budget_bytes: BUDGET_BYTES, ..IndexConfig::default() };
    let mut index = HolderIndex::new(config);
    let source = index.add_source("w", 0).unwrap();
    let mut verdicts = Vec::new();
    let run = |number: u64| keys((0..1000).map(|block| number << 20 | block));
    for group in 0..6 {
        let runs: Vec<Vec<BlockKey>> = (group * 100..(group + 1) * 100).map(run).collect();
        let events: Vec<[Event<'_>; 1]> =
            runs.iter().map(|keys| [Event::Stored { tier: Tier::Gpu, parent: None, keys }]).collect();
        let batch = |(sequence, events)| Batch { source, epoch: Some(1), sequence, replayed: false, events };
        let batches: Vec<Batch<'_>> =
            (group * 100..).zip(events.iter().map(<[_; 1]>::as_slice)).map(batch).collect();
        index.apply_all(&batches, &mut verdicts);
        assert!(index.stats().bytes <= BUDGET_BYTES, "{:?}", index.stats());
    }
    assert_eq!(verdicts, vec![Verdict::Applied; 600]);
    let stats = index.stats();
    assert_eq!(index.counters().blocks_evicted + stats.n_holdings, 600_000);
    assert!(stats.n_blocks > 150_000, "the budget is used: {stats:?}");

    let mut bounded = HolderIndex::new(IndexConfig { max_blocks_per_source: 1500, ..IndexConfig::default() });
    let source = bounded.add_source("w", 0).unwrap();
    let runs: Vec<Vec<BlockKey>> = (0..3).map(run).collect();
    let events: Vec<Event<'_>> =
        runs.iter().map(|keys| Event::Stored { tier: Tier::Gpu, parent: None, keys }).collect();
    let batch = Batch { source, epoch: Some(1), sequence: 0, replayed: false, events: &events };
    bounded.apply_all(&[batch], &mut verdicts);
    assert_eq!((bounded.n_blocks_of(source), bounded.counters().blocks_refused), (Some(1500), 1500));
}

#[test]
fn blocks_can_be_stored_and_taken_away_within_one_group() {
    let mut feed = Feed::new(IndexConfig::default(), 2);
    let (old, first, second) = (keys(0..50), keys(1000..1600), keys(10_000..15_000));
    feed.send(0, stored(&old));
    feed.send_group(&[
        (0, stored(&first)),
        (1, removed(&old[..10])),
        (0, removed(&old[40..])),
        (1, stored(&second)),
        (1, removed(&second[100..])),
        (0, removed(&first[..1])),
        (0, stored(&second[..200])),
    ]);
    let prefixes = |source| [&old, &first, &second].map(|keys| feed.prefix(source, keys));
    assert_eq!((prefixes(0), prefixes(1)), ([40, 0, 200], [0, 0, 100]));
    assert_eq!(feed.prefix(0, &first[1..]), 599);
    assert_eq!(feed.index.counters().removals_unknown, 10);
}

#[test]
fn what_a_group_took_to_be_taken_up_is_given_back() {
    let mut feed = Feed::new(IndexConfig::default(), 1);
    // Every block begins a run, which is what takes the most.
    let blocks: Vec<[BlockKey; 1]> = (0..100_000).map(|block| [BlockKey(block << 8)]).collect();
    let events: Vec<(usize, Event<'_>)> = blocks.iter().map(|keys| (0, stored(keys))).collect();
    feed.send_group(&events);
    let grouped = feed.index.stats();
    let mut single = Feed::new(IndexConfig::default(), 1);
    for keys in &blocks {
        single.send(0, stored(keys));
    }
    assert_eq!(grouped.n_blocks, 100_000);
    assert!(grouped.bytes < single.index.stats().bytes + (256 << 10), "{grouped:?}");
}
