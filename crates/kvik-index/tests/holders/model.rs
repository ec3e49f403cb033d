//! The index against a naive map, over random streams with loss, reorder, duplicates and restarts.

use kvik_index::holders::{Batch, BlockKey, Event, HolderIndex, IndexConfig, SourceId, Tier, Verdict};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::support::{NaiveMap, Random, list};

/// Chains of the test: four prompts that share beginnings.
fn chain(number: u64, depth: u64) -> Vec<BlockKey> {
    let key = |at| BlockKey(if at < 5 * (number + 1) { at } else { (number + 1) * 1000 + at });
    (0..depth).map(key).collect()
}

#[derive(Debug, Clone)]
enum Step {
    Store { source: usize, tier: usize, chain: u64, from: usize, n_blocks: usize },
    Remove { source: usize, tier: usize, chain: u64, from: usize, n_blocks: usize, backward: bool },
    Clear { source: usize, tier: Option<usize> },
    Restart { source: usize },
    Rejoin { source: usize },
    Replace { source: usize, chain: u64, n_blocks: usize },
    Forget { source: usize, chain: u64, from: usize, n_blocks: usize },
    Maintain { n_entries: usize },
}

fn steps() -> impl Strategy<Value = Step> {
    let place = || (0..4_usize, 0..4_usize, 0..4_u64, 0..30_usize, 1..30_usize);
    prop_oneof![
        8 => place().prop_map(|(source, tier, chain, from, n_blocks)| Step::Store { source, tier, chain, from, n_blocks }),
        6 => (place(), any::<bool>()).prop_map(|((source, tier, chain, from, n_blocks), backward)| {
            Step::Remove { source, tier, chain, from, n_blocks, backward }
        }),
        1 => (0..4_usize, proptest::option::of(0..4_usize)).prop_map(|(source, tier)| Step::Clear { source, tier }),
        1 => (0..4_usize).prop_map(|source| Step::Restart { source }),
        1 => (0..4_usize).prop_map(|source| Step::Rejoin { source }),
        1 => (0..4_usize, 0..4_u64, 0..30_usize).prop_map(|(source, chain, n_blocks)| Step::Replace { source, chain, n_blocks }),
        2 => place().prop_map(|(source, _, chain, from, n_blocks)| Step::Forget { source, chain, from, n_blocks }),
        2 => (0..200_usize).prop_map(|n_entries| Step::Maintain { n_entries }),
    ]
}

/// One source as its engine sees it.
struct Engine {
    source: SourceId,
    epoch: u64,
    next: u64,
    /// Batches sent in this epoch, for replay.
    log: Vec<(Tier, bool, Vec<BlockKey>)>,
}

struct World {
    index: HolderIndex,
    model: NaiveMap,
    engines: Vec<Engine>,
    random: Random,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut index = HolderIndex::new(IndexConfig { hash_seed: seed, ..IndexConfig::default() });
        let engine = |rank| Engine {
            source: index.add_source("w", rank).unwrap(),
            epoch: 1,
            next: 0,
            log: Vec::new(),
        };
        let engines = (0..4).map(engine).collect();
        Self { index, model: NaiveMap::default(), engines, random: Random(seed) }
    }

    fn deliver(&mut self, engine: usize, sequence: u64, replayed: bool, event: &Event<'_>) -> Verdict {
        let Engine { source, epoch, .. } = self.engines[engine];
        let events = [*event];
        let known = self.index.position(source).unwrap().0;
        let verdict =
            self.index.apply(&Batch { source, epoch: Some(epoch), sequence, replayed, events: &events });
        if known.is_some_and(|known| known < epoch) {
            self.model.forget(source);
        }
        if matches!(verdict, Verdict::Applied | Verdict::Restarted) {
            self.model.apply(source, event);
        }
        verdict
    }

    /// Sends an event the way networks do: it may come twice, too early, or only by replay.
    fn send(&mut self, engine: usize, tier: Tier, is_store: bool, keys: Vec<BlockKey>) {
        let sequence = self.engines[engine].next;
        self.engines[engine].next += 1;
        self.engines[engine].log.push((tier, is_store, keys));
        let fate = self.random.below(8);
        if fate == 0 {
            return; // Lost; found out by the next one.
        }
        let event = self.engines[engine].log[sequence as usize].clone();
        match self.deliver(engine, sequence, false, &as_event(&event)) {
            Verdict::Gap { expected, got } => {
                assert_eq!(got, sequence);
                for missing in expected..=got {
                    let event = self.engines[engine].log[missing as usize].clone();
                    let verdict = self.deliver(engine, missing, true, &as_event(&event));
                    assert!(matches!(verdict, Verdict::Applied), "{verdict:?}");
                }
            }
            verdict => assert!(matches!(verdict, Verdict::Applied | Verdict::Restarted), "{verdict:?}"),
        }
        if fate == 1 {
            let early = sequence.saturating_sub(self.random.below(3));
            let event = self.engines[engine].log[early as usize].clone();
            assert_eq!(self.deliver(engine, early, false, &as_event(&event)), Verdict::Duplicate);
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Store { source, tier, chain: number, from, n_blocks } => {
                let keys = chain(*number, 60)[*from..from + n_blocks].to_vec();
                self.send(*source, Tier::ALL[*tier], true, keys);
            }
            Step::Remove { source, tier, chain: number, from, n_blocks, backward } => {
                let mut keys = chain(*number, 60)[*from..from + n_blocks].to_vec();
                if *backward {
                    keys.reverse();
                }
                self.send(*source, Tier::ALL[*tier], false, keys);
            }
            Step::Clear { source, tier } => {
                let sequence = self.engines[*source].next;
                let event = Event::Cleared { tier: tier.map(|tier| Tier::ALL[tier]) };
                // A clear that came in a gap would not be judged; only send it in order.
                let (epoch, due) = self.index.position(self.engines[*source].source).unwrap();
                let is_current = epoch.is_none_or(|epoch| epoch == self.engines[*source].epoch);
                if is_current && due == Some(sequence) {
                    self.engines[*source].next += 1;
                    self.engines[*source].log.push((Tier::Gpu, false, Vec::new()));
                    let verdict = self.deliver(*source, sequence, false, &event);
                    assert!(matches!(verdict, Verdict::Applied | Verdict::Restarted));
                }
            }
            Step::Restart { source } => {
                let engine = &mut self.engines[*source];
                let stale = Batch {
                    source: engine.source,
                    epoch: Some(engine.epoch),
                    sequence: engine.next,
                    replayed: false,
                    events: &[],
                };
                *engine = Engine { source: engine.source, epoch: engine.epoch + 1, next: 0, log: Vec::new() };
                if self.random.below(2) == 0 {
                    assert!(
                        self.index.start_epoch(self.engines[*source].source, self.engines[*source].epoch)
                    );
                    self.model.forget(self.engines[*source].source);
                    assert_eq!(self.index.apply(&stale), Verdict::OldEpoch);
                }
            }
            Step::Rejoin { source } => {
                let gone = self.engines[*source].source;
                assert!(self.index.remove_source(gone));
                self.model.forget(gone);
                let source_id = self.index.add_source("w", *source as u32).unwrap();
                self.engines[*source] = Engine { source: source_id, epoch: 1, next: 0, log: Vec::new() };
            }
            Step::Replace { source, chain: number, n_blocks } => {
                let Engine { source: id, epoch, next, .. } = self.engines[*source];
                let keys = chain(*number, 60);
                let runs = [(Tier::Cpu, &keys[..*n_blocks]), (Tier::Gpu, &keys[20..20 + n_blocks])];
                if self.random.below(2) == 0 {
                    assert!(self.index.replace(id, Some(epoch), next, runs));
                } else {
                    let replacement = self.index.begin_replace(id, Some(epoch), next).unwrap();
                    for (tier, keys) in runs {
                        let half = keys.len() / 2;
                        let (first, second) = keys.split_at(half);
                        assert!(self.index.replace_some(replacement, [(tier, None, first)]));
                        self.index.maintain(64);
                        let parent = first.last().copied();
                        assert!(self.index.replace_some(replacement, [(tier, parent, second)]));
                    }
                    assert_eq!(self.index.finish_replace(replacement), Some(true));
                }
                self.model.forget(id);
                for (tier, keys) in runs {
                    self.model.apply(id, &Event::Stored { tier, parent: None, keys });
                }
            }
            Step::Forget { source, chain: number, from, n_blocks } => {
                let id = self.engines[*source].source;
                let keys = &chain(*number, 60)[*from..from + n_blocks];
                let n_before = self.model.n_holdings();
                self.model.forget_blocks(id, keys);
                assert_eq!(self.index.forget(id, keys), n_before - self.model.n_holdings());
            }
            Step::Maintain { n_entries } => {
                self.index.maintain(*n_entries);
            }
        }
    }

    fn check(&mut self) {
        let sources: Vec<SourceId> = self.engines.iter().map(|engine| engine.source).collect();
        let number = self.random.below(4);
        self.model.assert_same(&self.index, &sources, &chain(number, 60));
        // A prompt that no engine ever saw whole.
        let start = self.random.below(60) as usize;
        let mixed: Vec<BlockKey> =
            chain(0, 60)[start..].iter().chain(&chain(3, 60)[..start]).copied().collect();
        self.model.assert_same(&self.index, &sources, &mixed);
        assert_eq!(self.index.stats().n_holdings, self.model.n_holdings());
        let source = sources[self.random.below(4) as usize];
        let limit = self.random.below(40) as usize;
        assert_eq!(list(&self.index.reader(), source, limit), self.model.blocks_of(source));
    }
}

fn as_event((tier, is_store, keys): &(Tier, bool, Vec<BlockKey>)) -> Event<'_> {
    if *is_store {
        Event::Stored { tier: *tier, parent: None, keys }
    } else {
        Event::Removed { tier: *tier, keys }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn every_score_is_that_of_a_naive_map_at_every_step(steps in vec(steps(), 1..60), seed in any::<u64>()) {
        let mut world = World::new(seed);
        for step in &steps {
            world.step(step);
            world.check();
        }
    }
}

#[test]
fn many_blocks_of_many_sources_score_as_in_a_naive_map() {
    // Enough to split pages, fill extents, clean them and intern sets of every small size.
    let mut random = Random(7);
    let mut index = HolderIndex::new(IndexConfig::default());
    let sources: Vec<SourceId> = (0..24).map(|rank| index.add_source("w", rank).unwrap()).collect();
    let mut next = vec![0; sources.len()];
    let mut model = NaiveMap::default();
    for round in 0..3_000 {
        let at = random.below(sources.len() as u64) as usize;
        let family = random.below(300);
        let (from, n_blocks) = (random.below(300), 1 + random.below(300));
        let keys: Vec<BlockKey> =
            (from..from + n_blocks).map(|block| BlockKey(family << 16 | block)).collect();
        let tier = Tier::ALL[random.below(2) as usize];
        let event = match random.below(40) {
            0 => Event::Cleared { tier: None },
            1..18 => Event::Removed { tier, keys: &keys },
            _ => Event::Stored { tier, parent: None, keys: &keys },
        };
        let source = sources[at];
        let batch = Batch { source, epoch: Some(1), sequence: next[at], replayed: false, events: &[event] };
        assert_eq!(index.apply(&batch), Verdict::Applied);
        next[at] += 1;
        model.apply(source, &event);
        if round % 100 == 0 {
            index.maintain(random.below(20_000) as usize);
            let family = random.below(300);
            let query: Vec<BlockKey> = (0..400).map(|block| BlockKey(family << 16 | block)).collect();
            model.assert_same(&index, &sources, &query);
            model.assert_same(&index, &sources, &keys);
        }
    }
    assert_eq!(index.stats().n_holdings, model.n_holdings());
    assert!(index.counters().entries_moved > 0, "cleaning was part of this");
    for family in (0..300).step_by(7) {
        let query: Vec<BlockKey> = (0..600).map(|block| BlockKey(family << 16 | block)).collect();
        model.assert_same(&index, &sources, &query);
    }
}
