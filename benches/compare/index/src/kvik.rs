//! kvik's side.

use std::time::Instant;

use anyhow::{Result, ensure};
use kvik_index::holders::{
    Batch, BlockKey, Event, HolderIndex, IndexConfig, LookupOptions, Matches, SourceId, Tier,
};
use kvik_index::workload::{N_WORKERS, Workload};

use crate::report::cpu_s;
use crate::{Sample, live_bytes, quantiles};

/// One round.
pub fn measure(work: &Workload, queries: &[Vec<BlockKey>]) -> Result<Sample> {
    let n_blocks = work.n_blocks() as f64;
    let bytes_before = live_bytes();
    let mut index = HolderIndex::new(IndexConfig { salt: 0x5eed, ..IndexConfig::default() });
    let mut sources = Vec::new();
    for worker in 0..N_WORKERS {
        sources.push((index.add_source(&format!("worker-{worker}"), 0)?, 0));
    }

    let (start, start_cpu_s) = (Instant::now(), cpu_s());
    for run in work.stored_runs() {
        let parent = run.before.last().copied();
        send(&mut index, &mut sources[run.worker], Event::Stored { tier: Tier::Gpu, parent, keys: run.keys });
    }
    let (ingest_s, ingest_cpu_s) = (start.elapsed().as_secs_f64(), cpu_s() - start_cpu_s);
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
        send(&mut index, &mut sources[worker], Event::Removed { tier: Tier::Gpu, keys });
    }
    let removal_s = start.elapsed().as_secs_f64();
    Ok(Sample {
        ingest: n_blocks / ingest_s / 1e6,
        ingest_per_cpu: n_blocks / ingest_cpu_s / 1e6,
        lookup_p50_ns,
        lookup_p99_ns,
        bytes_per_entry: bytes as f64 / n_entries as f64,
        removal: n_blocks / removal_s / 1e6,
        checksum,
    })
}

fn send(index: &mut HolderIndex, (source, sequence): &mut (SourceId, u64), event: Event<'_>) {
    let batch =
        Batch { source: *source, epoch: Some(1), sequence: *sequence, replayed: false, events: &[event] };
    *sequence += 1;
    let _verdict = index.apply(&batch);
}
