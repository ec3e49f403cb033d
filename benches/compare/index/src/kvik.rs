//! kvik's side.

use std::time::Instant;

use anyhow::{Result, ensure};
use kvik_index::holders::{
    Batch, BlockKey, Event, HolderIndex, IndexConfig, LookupOptions, Matches, SourceId, Tier,
};

use crate::report::cpu_s;
use crate::workload::{N_WORKERS, StoredRun, Workload};
use crate::{Sample, live_bytes, quantiles};

/// Blocks of the batches that are handed over at a time; Dynamo's pool has all of them in its queues.
const GROUP_BLOCKS: usize = 1 << 19;

/// One round.
pub fn measure(work: &Workload, queries: &[Vec<BlockKey>], n_threads: usize) -> Result<Sample> {
    let n_blocks = work.n_blocks() as f64;
    let bytes_before = live_bytes();
    let (mut index, mut sources) = new_index(n_threads)?;
    let (start, start_cpu_s) = (Instant::now(), cpu_s());
    let mut verdicts = Vec::new();
    for group in work.stored_groups(GROUP_BLOCKS) {
        let events: Vec<[Event<'_>; 1]> = group.iter().map(|run| [stored(run)]).collect();
        let batches: Vec<Batch<'_>> =
            group.iter().zip(&events).map(|(run, events)| batch(&mut sources[run.worker], events)).collect();
        verdicts.clear();
        index.apply_all(&batches, &mut verdicts);
    }
    let (ingest_s, ingest_cpu_s) = (start.elapsed().as_secs_f64(), cpu_s() - start_cpu_s);
    drop(verdicts);
    let bytes = live_bytes() - bytes_before;
    let n_entries = index.stats().n_holdings;
    ensure!(n_entries + index.counters().blocks_repeated == work.n_blocks() as u64, "blocks are missing");

    let reader = index.reader();
    let mut matches = Matches::default();
    let mut checksum = 0;
    for query in queries {
        reader.lookup(query, LookupOptions::default(), &mut matches);
        checksum += matches.rows().iter().map(|row| u64::from(row.prefix_blocks())).sum::<u64>();
    }
    let [lookup_p50_ns, lookup_p99_ns] = quantiles(queries.len(), |query| {
        reader.lookup(&queries[query], LookupOptions::default(), &mut matches);
        std::hint::black_box(matches.rows().len());
    });

    let start = Instant::now();
    for (worker, keys) in work.sequences() {
        let _verdict = index.apply(&batch(&mut sources[worker], &[Event::Removed { tier: Tier::Gpu, keys }]));
    }
    let removal_s = start.elapsed().as_secs_f64();
    drop(index);

    let (mut index, mut sources) = new_index(n_threads)?;
    let start = Instant::now();
    for run in work.stored_runs() {
        let _verdict = index.apply(&batch(&mut sources[run.worker], &[stored(&run)]));
    }
    let ingest_singly_s = start.elapsed().as_secs_f64();
    Ok(Sample {
        ingest: n_blocks / ingest_s / 1e6,
        ingest_per_cpu: n_blocks / ingest_cpu_s / 1e6,
        ingest_singly: n_blocks / ingest_singly_s / 1e6,
        lookup_p50_ns,
        lookup_p99_ns,
        bytes_per_entry: bytes as f64 / n_entries as f64,
        removal: n_blocks / removal_s / 1e6,
        checksum,
    })
}

/// An index with all workers, and the numbers of their next batches.
fn new_index(n_threads: usize) -> Result<(HolderIndex, Vec<(SourceId, u64)>)> {
    let mut index = HolderIndex::new(IndexConfig { hash_seed: 0x5eed, n_threads, ..IndexConfig::default() });
    let add = |worker| Ok((index.add_source(&format!("worker-{worker}"), 0)?, 0));
    let sources = (0..N_WORKERS).map(add).collect::<Result<_>>()?;
    Ok((index, sources))
}

fn stored<'a>(run: &StoredRun<'a>) -> Event<'a> {
    Event::Stored { tier: Tier::Gpu, parent: run.before.last().copied(), keys: run.keys }
}

fn batch<'a>((source, sequence): &mut (SourceId, u64), events: &'a [Event<'a>]) -> Batch<'a> {
    *sequence += 1;
    Batch { source: *source, epoch: Some(1), sequence: *sequence - 1, replayed: false, events }
}
