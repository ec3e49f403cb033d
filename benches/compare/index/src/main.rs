//! kvik's global KV index beside dynamo-kv-router's: same events, same queries, same run.
//!
//! `cargo run --release --manifest-path benches/compare/index/Cargo.toml -- [--json]`
//!
//! The fleet is that of `kvik_bench::workload`: 16 workers with sequences of 16, 128 and 1024 blocks. From Dynamo
//! come its default, the concurrent compressed radix tree behind a pool of event threads, and its plain radix
//! tree on one thread. All apply the same events in the same order and answer the same queries.
//!
//! `ingest` is drained: from the first event to the moment at which the last one is applied, by the wall clock. kvik gets
//! groups of batches there, as for an index that is behind, and takes them up with as many threads as Dynamo's pool and
//! its caller are; `ingest_singly` is one batch after the other on one thread.
//! `ingest_per_cpu` counts the processor time of all threads instead, so other load on the machine matters less. Dynamo takes
//! events that own their memory; making them is not counted, freeing them is. `lookup` is one query at a time on the
//! calling thread, timed with two reads of the clock. `bytes` is what an allocator counts as live after the
//! ingest less what was live before it, for each pair of block and worker that the index knows.
//!
//! Rounds alternate and begin with another index each, and the best of all rounds counts for each, so that
//! a busy machine matters less. What the indexes answer is compared before it is timed.

mod dynamo;
mod kvik;
#[path = "../../machine.rs"]
mod machine;
mod report;
// Not the crate around it, which brings all of kvik.
#[path = "../../../../crates/kvik-bench/src/workload.rs"]
#[expect(dead_code, reason = "kvik's own bench needs more of it")]
mod workload;

use std::alloc::System;

use anyhow::{Result, ensure};
use clap::Parser;
use serde_json::json;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

use crate::report::{Line, Rounds};
use crate::workload::Workload;

/// Depths in blocks, and sequences of each for every worker.
const FLEETS: [(usize, usize); 3] = [(16, 10_000), (128, 10_000), (1024, 640)];
/// Passes over the queries in a round.
const N_PASSES: usize = 5;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

#[derive(Parser)]
#[command(about = "Compares kvik's index with dynamo-kv-router's")]
struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// How often everything is measured.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Only the fleet of this depth.
    #[arg(long)]
    depth: Option<usize>,
    /// Threads of Dynamo's pool; kvik takes one more, as many as the pool and its caller are.
    #[arg(long, default_value_t = 2)]
    event_threads: usize,
    /// Leave the plain radix tree out.
    #[arg(long)]
    no_radix_tree: bool,
    /// Divide the number of sequences by this.
    #[arg(long, default_value_t = 1)]
    part: usize,
}

/// What one round finds out about one index.
pub struct Sample {
    /// Millions of blocks a second.
    pub ingest: f64,
    /// Millions of blocks in a second of processor time.
    pub ingest_per_cpu: f64,
    /// Millions of blocks a second if each batch is handed over by itself.
    pub ingest_singly: f64,
    pub lookup_p50_ns: f64,
    pub lookup_p99_ns: f64,
    pub bytes_per_entry: f64,
    /// Millions of blocks a second.
    pub removal: f64,
    /// A sum over the answers to all queries.
    pub checksum: u64,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contender {
    Kvik,
    /// The concurrent compressed radix tree, Dynamo's default.
    Crtc,
    RadixTree,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let is_sound = arguments.rounds > 0 && arguments.part > 0 && arguments.event_threads > 0;
    ensure!(is_sound, "--rounds, --part and --event-threads are at least 1");
    let load_at_begin = machine::load_average();
    let mut lines: Vec<Line> = Vec::new();
    for (depth, n_per_worker) in FLEETS {
        if arguments.depth.is_none_or(|wanted| wanted == depth) {
            let work = Workload::new(depth, n_per_worker / arguments.part);
            lines.extend(measure(&work, &arguments)?.lines());
        }
    }
    let load_averages = [load_at_begin, machine::load_average()];
    let settings = json!({
        "workers": workload::N_WORKERS, "dynamo_kv_router": "1.6.1", "event_threads": arguments.event_threads,
        "kvik_threads": arguments.event_threads + 1,
        "rounds": arguments.rounds, "passes": N_PASSES, "part": arguments.part,
    });
    if arguments.json {
        println!("{}", report::to_json(&lines, &settings, &load_averages));
    } else {
        report::print_table(&lines, &settings, &load_averages);
    }
    Ok(())
}

fn measure(work: &Workload, arguments: &Arguments) -> Result<Rounds> {
    let queries = work.queries();
    let n_entries = n_entries(work);
    let mut contenders = vec![Contender::Kvik, Contender::Crtc];
    if !arguments.no_radix_tree {
        contenders.push(Contender::RadixTree);
    }
    let mut rounds = Rounds::new(work.depth());
    for _ in 0..arguments.rounds {
        for contender in contenders.clone() {
            let sample = match contender {
                Contender::Kvik => kvik::measure(work, &queries, arguments.event_threads + 1)?,
                Contender::Crtc => dynamo::measure_pool(work, &queries, n_entries, arguments.event_threads)?,
                Contender::RadixTree => dynamo::measure_radix_tree(work, &queries, n_entries)?,
            };
            rounds.add(contender, sample)?;
        }
        contenders.rotate_left(1);
    }
    Ok(rounds)
}

/// The distinct pairs of block and worker.
fn n_entries(work: &Workload) -> usize {
    let pairs = work.sequences().flat_map(|(worker, keys)| keys.iter().map(move |key| (key.0, worker as u8)));
    let mut pairs: Vec<(u64, u8)> = pairs.collect();
    pairs.sort_unstable();
    pairs.dedup();
    pairs.len()
}

/// Bytes that are allocated now.
pub fn live_bytes() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

/// The quantiles of the times of one query each, the best of some passes.
pub fn quantiles(n_queries: usize, mut ask: impl FnMut(usize)) -> [f64; 2] {
    let mut best = [f64::INFINITY; 2];
    for _ in 0..N_PASSES {
        let mut times_ns: Vec<u64> = (0..n_queries)
            .map(|query| {
                let start = std::time::Instant::now();
                ask(query);
                start.elapsed().as_nanos() as u64
            })
            .collect();
        times_ns.sort_unstable();
        for (best, percent) in best.iter_mut().zip([50, 99]) {
            *best = best.min(times_ns[n_queries * percent / 100] as f64);
        }
    }
    best
}
