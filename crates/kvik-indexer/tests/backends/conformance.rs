//! The suite that every backend runs: random streams with loss, reorder, duplicates, restarts, replacements
//! and removals, and after each step the answers of the model.

use std::collections::BTreeMap;

use futures_util::future::BoxFuture;
use kvik_index::holders::{BlockKey, Event, SourceName, Tier, Verdict, Walk};
use kvik_indexer::backend::{Backend, KeyedBatch, KeyedHolding, Row};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::model::{Model, name};

const N_ENGINES: usize = 4;
const N_BLOCKS: usize = 60;

/// Makes an empty book whose streams begin with a number.
pub(crate) type Make<'a> = &'a dyn Fn(u64) -> Box<dyn Backend>;

/// Runs the whole suite.
pub(crate) fn run(make: Make<'_>, n_cases: u32) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(batches_of_many_blocks_are_whole(&*make(0)));
    runtime.block_on(numbers_are_exact_beyond_doubles(&*make(u64::MAX - 4)));
    runtime.block_on(names_of_any_kind_are_told_apart(&*make(0)));
    runtime.block_on(a_gap_closes_with_the_highest_number_that_came_early(&*make(0)));
    runtime.block_on(a_block_that_was_stored_twice_is_forgotten_at_once(&*make(0)));
    runtime.block_on(only_what_is_missing_is_skipped(&*make(0)));
    let mut runner =
        TestRunner::new(Config { cases: n_cases, failure_persistence: None, ..Config::default() });
    runner
        .run(&(vec(steps(), 1..50), any::<u64>()), |(steps, seed)| {
            let backend = make(0);
            runtime.block_on(async {
                let mut world = World::new(&*backend, seed);
                for step in &steps {
                    world.step(step).await;
                    world.check().await;
                }
            });
            Ok(())
        })
        .unwrap();
}

/// The key of a number, spread over all 64 bits.
pub(crate) fn key(number: u64) -> BlockKey {
    BlockKey(number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Prompts that share beginnings.
fn chain(number: u64) -> Vec<BlockKey> {
    let block = |at| key(if at < 5 * (number + 1) { at } else { (number + 1) * 1000 + at });
    (0..N_BLOCKS as u64).map(block).collect()
}

#[derive(Debug, Clone)]
enum Op {
    Store { tier: usize, chain: u64, from: usize, n_blocks: usize },
    Remove { tier: usize, chain: u64, from: usize, n_blocks: usize, backward: bool },
    Clear { tier: Option<usize> },
}

/// How a batch gets to the book.
#[derive(Debug, Clone, Copy)]
enum Fate {
    InOrder,
    Lost,
    BehindTheNext,
    Twice,
}

/// What a listener does about a gap.
#[derive(Debug, Clone, Copy)]
enum Cure {
    Replay,
    Skip,
    Wait,
}

#[derive(Debug, Clone)]
enum Step {
    Send { engine: usize, ops: Vec<Op>, fate: Fate, cure: Cure },
    Restart { engine: usize, sends_late: bool },
    Replace { engine: usize, chain: u64, n_blocks: usize, is_old: bool },
    Remove { engine: usize },
    Forget { engine: usize, chain: u64, from: usize, n_blocks: usize },
}

fn steps() -> impl Strategy<Value = Step> {
    let engine = || 0..N_ENGINES;
    let place = || (0..4_usize, 0..4_u64, 0..30_usize, 1..30_usize);
    let op = prop_oneof![
        8 => place().prop_map(|(tier, chain, from, n_blocks)| Op::Store { tier, chain, from, n_blocks }),
        5 => (place(), any::<bool>()).prop_map(|((tier, chain, from, n_blocks), backward)| {
            Op::Remove { tier, chain, from, n_blocks, backward }
        }),
        1 => proptest::option::of(0..4_usize).prop_map(|tier| Op::Clear { tier }),
    ];
    let fate = prop_oneof![
        6 => Just(Fate::InOrder),
        1 => Just(Fate::Lost),
        1 => Just(Fate::BehindTheNext),
        1 => Just(Fate::Twice),
    ];
    let cure = prop_oneof![4 => Just(Cure::Replay), 1 => Just(Cure::Skip), 1 => Just(Cure::Wait)];
    prop_oneof![
        12 => (engine(), vec(op, 0..4), fate, cure)
            .prop_map(|(engine, ops, fate, cure)| Step::Send { engine, ops, fate, cure }),
        1 => (engine(), any::<bool>()).prop_map(|(engine, sends_late)| Step::Restart { engine, sends_late }),
        1 => (engine(), 0..4_u64, 0..30_usize, prop::bool::weighted(0.2))
            .prop_map(|(engine, chain, n_blocks, is_old)| Step::Replace { engine, chain, n_blocks, is_old }),
        1 => engine().prop_map(|engine| Step::Remove { engine }),
        2 => (engine(), place())
            .prop_map(|(engine, (_, chain, from, n_blocks))| Step::Forget { engine, chain, from, n_blocks }),
    ]
}

#[derive(Debug, Clone)]
enum OwnedEvent {
    Stored(Tier, Vec<BlockKey>),
    Removed(Tier, Vec<BlockKey>),
    Cleared(Option<Tier>),
}

impl OwnedEvent {
    fn of(op: &Op) -> Self {
        match op {
            Op::Store { tier, chain: number, from, n_blocks } => {
                Self::Stored(Tier::ALL[*tier], chain(*number)[*from..from + n_blocks].to_vec())
            }
            Op::Remove { tier, chain: number, from, n_blocks, backward } => {
                let mut keys = chain(*number)[*from..from + n_blocks].to_vec();
                if *backward {
                    keys.reverse();
                }
                Self::Removed(Tier::ALL[*tier], keys)
            }
            Op::Clear { tier } => Self::Cleared(tier.map(|tier| Tier::ALL[tier])),
        }
    }

    fn as_event(&self) -> Event<'_> {
        match self {
            Self::Stored(tier, keys) => Event::Stored { tier: *tier, parent: None, keys },
            Self::Removed(tier, keys) => Event::Removed { tier: *tier, keys },
            Self::Cleared(tier) => Event::Cleared { tier: *tier },
        }
    }
}

/// A worker as it sees itself. Every other one has no epochs.
struct Engine {
    source: SourceName,
    epoch: Option<u64>,
    /// Its batches in this life, with the time of each.
    log: Vec<(f64, Vec<OwnedEvent>)>,
}

struct World<'a> {
    backend: &'a dyn Backend,
    model: Model,
    engines: Vec<Engine>,
    seed: u64,
    now_s: f64,
}

impl<'a> World<'a> {
    fn new(backend: &'a dyn Backend, seed: u64) -> Self {
        let engine = |at: usize| Engine {
            source: name(["one", "two"][at / 2], at as u32),
            epoch: at.is_multiple_of(2).then_some(1),
            log: Vec::new(),
        };
        let engines = (0..N_ENGINES).map(engine).collect();
        Self { backend, model: Model::new(0), engines, seed, now_s: 1.7e9 }
    }

    fn random(&mut self, n: u64) -> u64 {
        self.seed = self.seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.seed >> 33) % n
    }

    async fn deliver(&mut self, engine: usize, sequence: usize, replayed: bool) -> Verdict {
        let Engine { source, epoch, log } = &self.engines[engine];
        let (published_s, events) = &log[sequence];
        let events: Vec<Event<'_>> = events.iter().map(OwnedEvent::as_event).collect();
        let (epoch, sequence, published_s) = (*epoch, sequence as u64, *published_s);
        let batch = KeyedBatch { epoch, sequence, replayed, published_s, events: &events };
        let verdict = self.backend.apply(source, batch).await.unwrap();
        assert_eq!(verdict, self.model.apply(source, batch), "batch {sequence} of {source:?}");
        verdict
    }

    async fn skip_gap(&mut self, engine: usize, next: u64) {
        let source = &self.engines[engine].source;
        self.backend.skip_gap(source, next).await.unwrap();
        self.model.skip_gap(source, next);
    }

    /// Delivers a batch and cures the gap that it may show.
    fn send(&mut self, engine: usize, sequence: usize, cure: Cure) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let verdict = self.deliver(engine, sequence, false).await;
            if let Verdict::Gap { expected, got } = verdict {
                match cure {
                    Cure::Replay => {
                        for missing in expected..=got {
                            self.deliver(engine, missing as usize, true).await;
                        }
                    }
                    Cure::Skip => {
                        self.skip_gap(engine, got).await;
                        self.deliver(engine, sequence, true).await;
                    }
                    Cure::Wait => {}
                }
            }
        })
    }

    async fn step(&mut self, step: &Step) {
        self.now_s += 0.001;
        match step {
            Step::Send { engine, ops, fate, cure } => {
                let events = ops.iter().map(OwnedEvent::of).collect();
                let log = &mut self.engines[*engine].log;
                log.push((self.now_s, events));
                let last = log.len() - 1;
                match fate {
                    Fate::InOrder => self.send(*engine, last, *cure).await,
                    Fate::Lost => {}
                    Fate::BehindTheNext => {
                        self.now_s += 0.001;
                        let next = OwnedEvent::Stored(Tier::Gpu, chain(1)[..5].to_vec());
                        self.engines[*engine].log.push((self.now_s, vec![next]));
                        self.deliver(*engine, last + 1, false).await;
                        self.deliver(*engine, last, true).await;
                        self.deliver(*engine, last + 1, true).await;
                    }
                    Fate::Twice => {
                        self.send(*engine, last, *cure).await;
                        let earlier = last - self.random(3).min(last as u64) as usize;
                        // In a live stream without epochs that would be a restart.
                        let replayed = self.engines[*engine].epoch.is_none();
                        self.deliver(*engine, earlier, replayed).await;
                    }
                }
            }
            Step::Restart { engine, sends_late } => {
                let Engine { source, epoch, log } = &mut self.engines[*engine];
                let old_epoch = *epoch;
                *epoch = old_epoch.map(|epoch| epoch + 1 + (1 << 60));
                let sequence = log.len() as u64;
                log.clear();
                if let Some(old_epoch) = old_epoch.filter(|_| *sends_late) {
                    let source = source.clone();
                    let holding = KeyedHolding { epoch: *epoch, next_sequence: 0, runs: &[] };
                    assert!(self.backend.replace(&source, holding).await.unwrap());
                    assert!(self.model.replace(&source, holding));
                    let late = KeyedBatch {
                        epoch: Some(old_epoch),
                        sequence,
                        replayed: false,
                        published_s: self.now_s,
                        events: &[],
                    };
                    assert_eq!(self.backend.apply(&source, late).await.unwrap(), Verdict::OldEpoch);
                }
            }
            Step::Replace { engine, chain: number, n_blocks, is_old } => {
                let Engine { source, epoch, log } = &self.engines[*engine];
                let keys = chain(*number);
                let runs = [
                    (Tier::Cpu, keys[..*n_blocks].to_vec()),
                    (Tier::Gpu, keys[20..20 + n_blocks].to_vec()),
                    (Tier::Cpu, keys[..n_blocks / 2].to_vec()),
                ];
                let epoch = if *is_old { epoch.map(|epoch| epoch - 1) } else { *epoch };
                let holding = KeyedHolding { epoch, next_sequence: log.len() as u64, runs: &runs };
                let replaced = self.backend.replace(source, holding).await.unwrap();
                assert_eq!(replaced, self.model.replace(source, holding));
            }
            Step::Remove { engine } => {
                let source = &self.engines[*engine].source;
                let removed = self.backend.remove_source(source).await.unwrap();
                assert_eq!(removed, self.model.remove_source(source));
            }
            Step::Forget { engine, chain: number, from, n_blocks } => {
                let source = &self.engines[*engine].source;
                let keys = &chain(*number)[*from..from + n_blocks];
                self.backend.forget(source, keys).await.unwrap();
                self.model.forget(source, keys);
            }
        }
    }

    async fn check(&mut self) {
        let number = self.random(4);
        let start = self.random(N_BLOCKS as u64) as usize;
        // A prompt that no engine ever saw whole.
        let mixed = [&chain(0)[start..], &chain(3)[..start]].concat();
        for keys in [chain(number), mixed] {
            check_lookups(self.backend, &self.model, &keys).await;
        }
        check_states(self.backend, &self.model).await;
        if self.random(8) > 0 {
            return;
        }
        let engine = self.random(N_ENGINES as u64) as usize;
        let limit = self.random(40) as usize;
        let source = &self.engines[engine].source;
        let mut listed = BTreeMap::new();
        let mut from = None;
        loop {
            let page = self.backend.blocks_of(source, from, limit).await.unwrap();
            listed.extend(page.blocks);
            from = page.next;
            if from.is_none() {
                break;
            }
        }
        assert_eq!(listed, self.model.blocks_of(source));
    }
}

/// Compares the rows of both walks with those of the model.
pub(crate) async fn check_lookups(backend: &dyn Backend, model: &Model, keys: &[BlockKey]) {
    for walk in [Walk::Prefix, Walk::All] {
        assert_eq!(rows(backend, keys, walk).await, model.lookup(keys, walk), "{walk:?}");
    }
}

/// The rows of a lookup, in the order of their sources.
pub(crate) async fn rows(backend: &dyn Backend, keys: &[BlockKey], walk: Walk) -> Vec<Row> {
    let mut rows = backend.lookup(keys, walk).await.unwrap();
    rows.sort_by(|a, b| (&a.source.worker, a.source.rank).cmp(&(&b.source.worker, b.source.rank)));
    rows
}

/// Compares where all sources stand with the model.
pub(crate) async fn check_states(backend: &dyn Backend, model: &Model) {
    let mut states = backend.states().await.unwrap();
    states.sort_by(|a, b| (&a.source.worker, a.source.rank).cmp(&(&b.source.worker, b.source.rank)));
    let mut expected = model.states();
    for (state, expected) in states.iter().zip(&mut expected) {
        if state.n_blocks.is_none() {
            expected.n_blocks = None;
        }
        assert_eq!(backend.state(&state.source).await.unwrap().as_ref(), Some(state));
    }
    assert_eq!(states, expected);
}

async fn batches_of_many_blocks_are_whole(backend: &dyn Backend) {
    let source = name("worker", 0);
    let keys: Vec<BlockKey> = (0..20_000).map(key).collect();
    let runs = [(Tier::Disk, keys.clone()), (Tier::Cpu, keys[..6000].to_vec())];
    let events = [
        Event::Stored { tier: Tier::Gpu, parent: None, keys: &keys },
        Event::Cleared { tier: Some(Tier::Gpu) },
        Event::Stored { tier: Tier::Gpu, parent: None, keys: &keys[..12_000] },
        Event::Removed { tier: Tier::Gpu, keys: &keys[9_000..9_001] },
    ];
    let mut model = Model::new(0);
    let batch = KeyedBatch { epoch: None, sequence: 0, replayed: false, published_s: 1.0, events: &events };
    assert_eq!(backend.apply(&source, batch).await.unwrap(), model.apply(&source, batch));
    check_lookups(backend, &model, &keys).await;
    let holding = KeyedHolding { epoch: None, next_sequence: 7, runs: &runs };
    assert_eq!(backend.replace(&source, holding).await.unwrap(), model.replace(&source, holding));
    check_lookups(backend, &model, &keys).await;
    check_lookups(backend, &model, &keys[5000..]).await;
    backend.forget(&source, &keys[8000..18_000]).await.unwrap();
    model.forget(&source, &keys[8000..18_000]);
    check_lookups(backend, &model, &keys).await;
    check_states(backend, &model).await;
    assert!(backend.lookup(&[], Walk::All).await.unwrap().is_empty());
}

async fn numbers_are_exact_beyond_doubles(backend: &dyn Backend) {
    let source = name("worker", u32::MAX);
    let mut model = Model::new(u64::MAX - 4);
    let epochs = [u64::MAX - 1, u64::MAX - 1, u64::MAX - 2, u64::MAX];
    let sequences =
        [u64::MAX - 4, u64::MAX - 3, u64::MAX - 3, u64::MAX - 2, u64::MAX - 1, u64::MAX, u64::MAX];
    for epoch in epochs {
        for sequence in sequences {
            let keys = [BlockKey(sequence)];
            let events = [Event::Stored { tier: Tier::Gpu, parent: None, keys: &keys }];
            let (epoch, published_s) = (Some(epoch), 0.0);
            let batch = KeyedBatch { epoch, sequence, replayed: false, published_s, events: &events };
            assert_eq!(backend.apply(&source, batch).await.unwrap(), model.apply(&source, batch));
            check_states(backend, &model).await;
            check_lookups(backend, &model, &sequences.map(BlockKey)).await;
        }
    }
}

async fn a_gap_closes_with_the_highest_number_that_came_early(backend: &dyn Backend) {
    let source = name("worker", 0);
    let mut model = Model::new(0);
    for sequence in [0, 5, 3, 1, 2, 3, 4, 5] {
        let batch = KeyedBatch { epoch: Some(1), sequence, replayed: false, published_s: 0.0, events: &[] };
        assert_eq!(backend.apply(&source, batch).await.unwrap(), model.apply(&source, batch));
        check_states(backend, &model).await;
    }
    assert!(!backend.state(&source).await.unwrap().unwrap().is_unsure);
}

async fn a_block_that_was_stored_twice_is_forgotten_at_once(backend: &dyn Backend) {
    let source = name("worker", 0);
    let mut model = Model::new(0);
    let keys = [key(1), key(2)];
    let stored = |tier| Event::Stored { tier, parent: None, keys: &keys };
    let events = [stored(Tier::Gpu), stored(Tier::Gpu), stored(Tier::Disk)];
    let batch =
        KeyedBatch { epoch: Some(1), sequence: 0, replayed: false, published_s: 0.0, events: &events };
    assert_eq!(backend.apply(&source, batch).await.unwrap(), model.apply(&source, batch));
    backend.forget(&source, &keys[..1]).await.unwrap();
    model.forget(&source, &keys[..1]);
    check_lookups(backend, &model, &keys).await;
    check_states(backend, &model).await;
}

async fn only_what_is_missing_is_skipped(backend: &dyn Backend) {
    let source = name("worker", 0);
    let mut model = Model::new(0);
    for sequence in 0..4 {
        let batch = KeyedBatch { epoch: Some(1), sequence, replayed: false, published_s: 0.0, events: &[] };
        assert_eq!(backend.apply(&source, batch).await.unwrap(), model.apply(&source, batch));
    }
    for next in [0, 3, 4, 6, 5, 6] {
        backend.skip_gap(&source, next).await.unwrap();
        model.skip_gap(&source, next);
        check_states(backend, &model).await;
    }
    backend.skip_gap(&name("nobody", 0), 1).await.unwrap();
    check_states(backend, &model).await;
}

async fn names_of_any_kind_are_told_apart(backend: &dyn Backend) {
    let mut model = Model::new(0);
    let long = "w".repeat(512);
    let workers =
        ["a", "A", "\0", "a\0", "http://[::1]:8000/\r\n", "\u{fc}\u{4e2d}", "s", "h", "n", "{x}", &long];
    for (at, worker) in workers.into_iter().enumerate() {
        for rank in [0, 1, 0x0a0d_0000] {
            let keys: Vec<BlockKey> = (0..=at as u64).map(key).collect();
            let events = [Event::Stored { tier: Tier::Remote, parent: None, keys: &keys }];
            let batch = KeyedBatch {
                epoch: Some(0),
                sequence: 0,
                replayed: false,
                published_s: -1.0,
                events: &events,
            };
            let source = name(worker, rank);
            assert_eq!(backend.apply(&source, batch).await.unwrap(), model.apply(&source, batch));
        }
    }
    let keys: Vec<BlockKey> = (0..20).map(key).collect();
    check_lookups(backend, &model, &keys).await;
    check_states(backend, &model).await;
    let batch = KeyedBatch { epoch: None, sequence: 0, replayed: false, published_s: 0.0, events: &[] };
    for worker in [String::new(), "w".repeat(513)] {
        assert!(backend.apply(&name(&worker, 0), batch).await.is_err());
    }
    check_states(backend, &model).await;
}
