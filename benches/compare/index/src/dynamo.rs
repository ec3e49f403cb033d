//! Dynamo's side.

use std::time::Instant;

use anyhow::{Context, Result};
use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{RadixTree, SyncIndexer, ThreadPoolIndexer};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
};
use kvik_index::holders::BlockKey;

use crate::report::cpu_s;
use crate::workload::Workload;
use crate::{Sample, live_bytes, quantiles};

const BLOCK_TOKENS: u32 = 16;

/// One round of the concurrent compressed radix tree behind its pool.
pub fn measure_pool(
    work: &Workload,
    queries: &[Vec<BlockKey>],
    n_entries: usize,
    n_threads: usize,
) -> Result<Sample> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().context("start a runtime")?;
    let bytes_before = live_bytes();
    let pool = ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), n_threads, BLOCK_TOKENS);
    let drained = |events: Vec<RouterEvent>| -> Result<()> {
        for event in events {
            pool.enqueue_event(event).context("hand an event to the pool")?;
        }
        runtime.block_on(pool.flush_and_wait()).context("wait for the pool")
    };
    measure((work, n_entries), queries, bytes_before, drained, |query| {
        pool.backend().find_matches(query, false)
    })
}

/// One round of the plain radix tree.
pub fn measure_radix_tree(work: &Workload, queries: &[Vec<BlockKey>], n_entries: usize) -> Result<Sample> {
    let bytes_before = live_bytes();
    let tree = std::cell::RefCell::new(RadixTree::new());
    let drained = |events: Vec<RouterEvent>| -> Result<()> {
        for event in events {
            // A removal of what is gone already is an error here, which the pool only writes to its log.
            let _ = tree.borrow_mut().apply_event(event);
        }
        Ok(())
    };
    measure((work, n_entries), queries, bytes_before, drained, |query| {
        tree.borrow().find_matches(query.to_vec(), false)
    })
}

fn measure(
    (work, n_entries): (&Workload, usize),
    queries: &[Vec<BlockKey>],
    bytes_before: usize,
    drained: impl Fn(Vec<RouterEvent>) -> Result<()>,
    find: impl Fn(&[LocalBlockHash]) -> OverlapScores,
) -> Result<Sample> {
    let n_blocks = work.n_blocks() as f64;
    let events = stored(work);
    let (start, start_cpu_s) = (Instant::now(), cpu_s());
    drained(events)?;
    let (ingest_s, ingest_cpu_s) = (start.elapsed().as_secs_f64(), cpu_s() - start_cpu_s);
    let bytes = live_bytes() - bytes_before;

    let queries: Vec<Vec<LocalBlockHash>> =
        queries.iter().map(|query| query.iter().map(|key| LocalBlockHash(key.0)).collect()).collect();
    let sum = |scores: &OverlapScores| scores.scores.values().map(|score| u64::from(*score)).sum::<u64>();
    let checksum = queries.iter().map(|query| sum(&find(query))).sum();
    let [lookup_p50_ns, lookup_p99_ns] = quantiles(queries.len(), |query| {
        std::hint::black_box(find(&queries[query]).scores.len());
    });

    let events = removed(work);
    let start = Instant::now();
    drained(events)?;
    let removal_s = start.elapsed().as_secs_f64();
    Ok(Sample {
        ingest: n_blocks / ingest_s / 1e6,
        ingest_per_cpu: n_blocks / ingest_cpu_s / 1e6,
        // The pool takes events one by one in any case.
        ingest_singly: n_blocks / ingest_s / 1e6,
        lookup_p50_ns,
        lookup_p99_ns,
        bytes_per_entry: bytes as f64 / n_entries as f64,
        removal: n_blocks / removal_s / 1e6,
        checksum,
    })
}

fn stored(work: &Workload) -> Vec<RouterEvent> {
    let block = |key: &BlockKey| KvCacheStoredBlockData {
        block_hash: ExternalSequenceBlockHash(key.0),
        tokens_hash: LocalBlockHash(key.0),
        mm_extra_info: None,
    };
    let event = |(event_id, run): (u64, crate::workload::StoredRun<'_>)| {
        let data = KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: run.before.last().map(|key| ExternalSequenceBlockHash(key.0)),
            start_position: Some(run.before.len() as u32),
            blocks: run.keys.iter().map(block).collect(),
        });
        RouterEvent::new(run.worker as u64, KvCacheEvent { event_id, data, dp_rank: 0 })
    };
    (0..).zip(work.stored_runs()).map(event).collect()
}

fn removed(work: &Workload) -> Vec<RouterEvent> {
    let event = |(event_id, (worker, keys)): (u64, (usize, &[BlockKey]))| {
        let block_hashes = keys.iter().map(|key| ExternalSequenceBlockHash(key.0)).collect();
        let data = KvCacheEventData::Removed(KvCacheRemoveData { block_hashes });
        RouterEvent::new(worker as u64, KvCacheEvent { event_id, data, dp_rank: 0 })
    };
    (0..).zip(work.sequences()).map(event).collect()
}
