//! What the global KV index costs: events in, questions out, bytes, its snapshot, and whether it is exact.
//!
//! The fleet is that of [`crate::workload`], one depth after the other. A rate counts events that are applied when
//! it is taken: in groups of batches, as for an index that is behind, and one batch after the other.
//! `benches/compare/index` measures another index on the same fleet.

mod exactness;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use crate::workload::{N_WORKERS, StoredRun, Workload};
use anyhow::Context as _;
use kvik_index::holders::{
    Batch, BlockKey, Event, HolderIndex, HolderReader, IndexConfig, IndexError, LookupOptions, Matches,
    SourceId, Tier,
};
use serde_json::json;

use crate::report::{Goal, Measurement};

/// Depths in blocks, and sequences of each for every worker.
const FLEETS: [(usize, usize); 3] = [(16, 10_000), (128, 10_000), (1024, 640)];
/// Blocks of the batches that are handed over at a time.
const GROUP_BLOCKS: usize = 1 << 19;
/// Blocks that the writer beside the readers stores and removes at a time.
const PASSING_BLOCKS: usize = 64;
/// Blocks of one event of the snapshot's index.
const SNAPSHOT_RUN_BLOCKS: usize = 100;

/// The measurements, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The fleet at this place of `FLEETS`.
    Fleet(usize),
    /// Writing and reading the index as a file.
    Snapshot,
    /// Answers beside those of a plain model.
    Exactness,
}

/// Runs the measurements.
#[derive(Debug, Clone, Copy)]
pub struct IndexBench {
    /// Takes less time for less precise values.
    pub is_quick: bool,
}

/// An index with sources that count their batches.
struct Feed {
    index: HolderIndex,
    sources: Vec<(SourceId, u64)>,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Fleet(0), Self::Fleet(1), Self::Fleet(2), Self::Snapshot, Self::Exactness];

    /// Shown while it is measured.
    pub fn name(self) -> String {
        match self {
            Self::Fleet(place) => format!("depth {}", FLEETS[place].0),
            Self::Snapshot => "snapshot".to_owned(),
            Self::Exactness => "exactness".to_owned(),
        }
    }
}

impl IndexBench {
    /// What is measured, for programs.
    pub fn settings(self) -> serde_json::Value {
        let fleets =
            FLEETS.map(|(depth, n)| json!({ "depth": depth, "sequences_per_worker": self.share(n) }));
        json!({
            "workers": N_WORKERS,
            "fleets": fleets,
            "snapshot_blocks": self.snapshot_blocks(),
            "rounds": self.n_rounds(),
            "threads": IndexConfig::default().n_threads,
        })
    }

    /// What is measured, for people.
    pub fn description(self) -> String {
        format!("{N_WORKERS} workers, {} rounds; rates and times are of the wall clock", self.n_rounds())
    }

    /// Does one kind of measurement.
    pub fn measure(self, kind: Kind) -> anyhow::Result<Vec<Measurement>> {
        match kind {
            Kind::Fleet(place) => self.measure_fleet(FLEETS[place]),
            Kind::Snapshot => self.measure_snapshot(),
            Kind::Exactness => exactness::measure(),
        }
    }

    fn measure_fleet(self, (depth, n_per_worker): (usize, usize)) -> anyhow::Result<Vec<Measurement>> {
        let work = Workload::new(depth, self.share(n_per_worker));
        let queries = work.queries();
        let n_blocks = work.n_blocks() as f64;
        let (mut ingests, mut single_ingests, mut removals) = (Vec::new(), Vec::new(), Vec::new());
        let mut bytes = (0.0, 0.0);
        let (mut alone, mut beside) = (Quantiles::default(), Quantiles::default());
        let mut changes = Vec::new();
        for _ in 0..self.n_rounds() {
            let mut feed = Feed::try_new()?;
            let start = Instant::now();
            for run in work.stored_runs() {
                feed.store(run.worker, run.before.last().copied(), run.keys);
            }
            single_ingests.push(n_blocks / start.elapsed().as_secs_f64() / 1e6);
            drop(feed);
            let mut feed = Feed::try_new()?;
            let start = Instant::now();
            for group in work.stored_groups(GROUP_BLOCKS) {
                feed.store_all(&group);
            }
            ingests.push(n_blocks / start.elapsed().as_secs_f64() / 1e6);
            let stats = feed.index.stats();
            let n_named = stats.n_holdings + feed.index.counters().blocks_repeated;
            anyhow::ensure!(n_named == work.n_blocks() as u64, "{n_named} of {n_blocks} blocks were applied");
            bytes =
                (stats.bytes as f64 / stats.n_holdings as f64, stats.bytes as f64 / stats.n_blocks as f64);

            let reader = feed.index.reader();
            for _ in 0..self.n_passes() {
                alone.add(latencies_ns(&reader, &queries));
            }
            changes.push(beside_a_writer(&mut feed, || {
                for _ in 0..self.n_passes() {
                    beside.add(latencies_ns(&reader, &queries));
                }
            }));

            let start = Instant::now();
            for (worker, keys) in work.sequences() {
                feed.remove(worker, keys);
            }
            removals.push(n_blocks / start.elapsed().as_secs_f64() / 1e6);
            anyhow::ensure!(feed.index.stats().n_holdings == 0, "blocks were left behind");
        }
        let named = |name: &str| format!("{name}_depth_{depth}");
        Ok([
            Measurement::from_repeats(named("ingest"), "M blocks/s", ingests),
            Measurement::from_repeats(named("ingest_singly"), "M blocks/s", single_ingests),
            Measurement::from_repeats(named("lookup_p50"), "ns", alone.p50),
            Measurement::from_repeats(named("lookup_p99"), "ns", alone.p99),
            Measurement::from_repeats(named("lookup_beside_writer_p50"), "ns", beside.p50),
            Measurement::from_repeats(named("lookup_beside_writer_p99"), "ns", beside.p99),
            Measurement::from_repeats(named("changes_beside_readers"), "M blocks/s", changes),
            Measurement::from_repeats(named("removal"), "M blocks/s", removals),
            Measurement::from_repeats(named("bytes_an_entry"), "B", vec![bytes.0]),
            Measurement::from_repeats(named("bytes_a_distinct_block"), "B", vec![bytes.1]),
        ]
        .into_iter()
        .flatten()
        .collect())
    }

    fn measure_snapshot(self) -> anyhow::Result<Vec<Measurement>> {
        let n_blocks = self.snapshot_blocks();
        let mut feed = Feed::try_new()?;
        for number in 0..(n_blocks / SNAPSHOT_RUN_BLOCKS) as u64 {
            let keys = Workload::passing_run(number, SNAPSHOT_RUN_BLOCKS);
            feed.store(number as usize % N_WORKERS, None, &keys);
        }
        let (mut writes, mut loads) = (Vec::new(), Vec::new());
        let mut bytes = Vec::new();
        for _ in 0..self.n_rounds() {
            bytes.clear();
            let start = Instant::now();
            feed.index.write_snapshot(&mut bytes).context("write the snapshot")?;
            writes.push(start.elapsed().as_secs_f64() * 1e3);
        }
        drop(feed);
        for _ in 0..self.n_rounds() {
            let start = Instant::now();
            let index =
                HolderIndex::from_snapshot(IndexConfig::default(), &bytes).context("load the snapshot")?;
            loads.push(start.elapsed().as_secs_f64() * 1e3);
            let n_loaded = index.stats().n_blocks;
            anyhow::ensure!(n_loaded == n_blocks as u64, "{n_loaded} of {n_blocks} blocks were loaded");
        }
        let named = |name: &str| format!("snapshot_{name}_{n_blocks}_blocks");
        let goal = Goal::AtMost(1000.0);
        Ok([
            Measurement::from_repeats(named("write"), "ms", writes).map(|result| result.wanted(goal)),
            Measurement::from_repeats(named("load"), "ms", loads).map(|result| result.wanted(goal)),
            Measurement::from_repeats(named("size"), "MB", vec![bytes.len() as f64 / 1e6]),
        ]
        .into_iter()
        .flatten()
        .collect())
    }

    fn n_rounds(self) -> usize {
        if self.is_quick { 1 } else { 3 }
    }

    fn n_passes(self) -> usize {
        if self.is_quick { 1 } else { 5 }
    }

    fn share(self, n: usize) -> usize {
        if self.is_quick { n / 20 } else { n }
    }

    fn snapshot_blocks(self) -> usize {
        if self.is_quick { 500_000 } else { 10_000_000 }
    }
}

/// The quantiles of several passes over the queries.
#[derive(Debug, Default)]
struct Quantiles {
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Quantiles {
    fn add(&mut self, mut times_ns: Vec<u64>) {
        times_ns.sort_unstable();
        let at = |percent: usize| times_ns.get(times_ns.len() * percent / 100).map(|&time| time as f64);
        self.p50.extend(at(50));
        self.p99.extend(at(99));
    }
}

impl Feed {
    fn try_new() -> Result<Self, IndexError> {
        let mut index = HolderIndex::new(IndexConfig { hash_seed: 0x5eed, ..IndexConfig::default() });
        let sources = (0..N_WORKERS)
            .map(|worker| Ok((index.add_source(&format!("worker-{worker}"), 0)?, 0)))
            .collect::<Result<Vec<_>, IndexError>>()?;
        Ok(Self { index, sources })
    }

    fn store(&mut self, worker: usize, parent: Option<BlockKey>, keys: &[BlockKey]) {
        self.send(worker, Event::Stored { tier: Tier::Gpu, parent, keys });
    }

    fn store_all(&mut self, runs: &[StoredRun<'_>]) {
        let mut events = Vec::with_capacity(runs.len());
        for run in runs {
            let parent = run.before.last().copied();
            events.push([Event::Stored { tier: Tier::Gpu, parent, keys: run.keys }]);
        }
        let mut batches = Vec::with_capacity(runs.len());
        for (run, events) in runs.iter().zip(&events) {
            let (source, sequence) = self.sources[run.worker];
            self.sources[run.worker].1 += 1;
            batches.push(Batch { source, epoch: Some(1), sequence, replayed: false, events });
        }
        // The numbers are without gaps, so each batch is the one that is due.
        self.index.apply_all(&batches, &mut Vec::with_capacity(runs.len()));
    }

    fn remove(&mut self, worker: usize, keys: &[BlockKey]) {
        self.send(worker, Event::Removed { tier: Tier::Gpu, keys });
    }

    fn send(&mut self, worker: usize, event: Event<'_>) {
        let (source, sequence) = self.sources[worker];
        self.sources[worker].1 += 1;
        let batch = Batch { source, epoch: Some(1), sequence, replayed: false, events: &[event] };
        // The numbers are without gaps, so each batch is the one that is due.
        let _verdict = self.index.apply(&batch);
    }
}

/// Asks every query once.
fn latencies_ns(reader: &HolderReader, queries: &[Vec<BlockKey>]) -> Vec<u64> {
    let mut matches = Matches::default();
    let ask = |query: &Vec<BlockKey>| {
        let start = Instant::now();
        reader.lookup(query, LookupOptions::default(), &mut matches);
        std::hint::black_box(matches.rows().len());
        start.elapsed().as_nanos() as u64
    };
    queries.iter().map(ask).collect()
}

/// Runs `read` while blocks come and go at every worker; gives the millions of changes in a second.
fn beside_a_writer(feed: &mut Feed, read: impl FnOnce()) -> f64 {
    let (is_over, n_changes) = (AtomicBool::new(false), AtomicU64::new(0));
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut number = 0_u64;
            // Relaxed on both: a change more or less does not matter.
            while !is_over.load(Ordering::Relaxed) {
                let keys = Workload::passing_run(number, PASSING_BLOCKS);
                let worker = number as usize % N_WORKERS;
                feed.store(worker, None, &keys);
                feed.remove(worker, &keys);
                number += 1;
                n_changes.fetch_add(2 * PASSING_BLOCKS as u64, Ordering::Relaxed);
            }
        });
        read();
        is_over.store(true, Ordering::Relaxed);
    });
    n_changes.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64() / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quick_run_measures_everything() {
        let bench = IndexBench { is_quick: true };
        let names: Vec<String> = [Kind::Fleet(0), Kind::Exactness]
            .into_iter()
            .flat_map(|kind| bench.measure(kind).unwrap())
            .map(|result| result.name)
            .collect();
        for name in ["ingest_depth_16", "lookup_p99_depth_16", "bytes_an_entry_depth_16", "exact_hole"] {
            assert!(names.iter().any(|found| found == name), "{name} is not in {names:?}");
        }
    }
}
