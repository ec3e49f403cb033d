//! Measures the global KV index: ingest, lookup, removal and bytes, on one synthetic fleet.
//!
//! 16 workers; sequences of depth 16, 128 and 1024 whose first quarter comes from 100 shared prompts and
//! whose rest is their own; one in ten is on a second worker too. A sequence is one prefill event and four
//! decode events of one block. 4096 queries: half are whole sequences, a quarter diverges at half of
//! the depth and a quarter at a quarter of it. All rates count applied blocks, per second that
//! the thread was on a processor; latencies are wall time.
//!
//!     cargo run --release -p kvik-index --example index_bench [-- interleaved]
//!
//! With `interleaved`, decode events of 64 sequences come in turns, as from a batching engine.

#![expect(clippy::print_stdout, reason = "a benchmark prints its numbers")]
#![expect(clippy::unwrap_used, reason = "a benchmark may fail where it stands")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use kvik_index::holders::{
    Batch, BlockKey, Event, HolderIndex, HolderReader, IndexConfig, LookupOptions, Matches, SourceId, Tier,
    Walk,
};

const N_WORKERS: usize = 16;
const N_PROMPTS: u64 = 100;
const N_QUERIES: usize = 4096;
const N_DECODE: usize = 4;
const N_INTERLEAVED: usize = 64;

struct Workload {
    depth: usize,
    keys: Vec<BlockKey>,
    /// Worker, and where its keys begin.
    sequences: Vec<(usize, usize)>,
}

struct Feed {
    index: HolderIndex,
    sources: Vec<SourceId>,
    next: Vec<u64>,
}

fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Workload {
    fn new(depth: usize, n_per_worker: usize) -> Self {
        let n_sequences = N_WORKERS * n_per_worker;
        let mut keys = Vec::with_capacity(n_sequences * depth);
        let mut sequences = Vec::with_capacity(n_sequences + n_sequences / 10);
        for sequence in 0..n_sequences {
            let prompt = mix(sequence as u64) % N_PROMPTS;
            let first = keys.len();
            for block in 0..depth {
                let key = if block < depth / 4 {
                    mix(prompt << 32 | block as u64)
                } else {
                    mix((sequence as u64 + 1) << 40 | block as u64)
                };
                keys.push(BlockKey(key));
            }
            let worker = sequence % N_WORKERS;
            sequences.push((worker, first));
            if sequence % 10 == 0 {
                sequences.push(((worker + 1 + sequence / 10 % (N_WORKERS - 1)) % N_WORKERS, first));
            }
        }
        Self { depth, keys, sequences }
    }

    fn n_blocks(&self) -> usize {
        self.sequences.len() * self.depth
    }

    fn queries(&self) -> Vec<Vec<BlockKey>> {
        let query = |number: usize| {
            let (_, first) = self.sequences[mix(number as u64 ^ 0xabcd) as usize % self.sequences.len()];
            let mut keys = self.keys[first..first + self.depth].to_vec();
            let diverges_at = match number % 4 {
                0 | 1 => self.depth,
                2 => self.depth / 2,
                _ => self.depth / 4,
            };
            for (at, key) in keys.iter_mut().enumerate().skip(diverges_at) {
                *key = BlockKey(mix(1 << 60 | (number as u64) << 20 | at as u64));
            }
            keys
        };
        (0..N_QUERIES).map(query).collect()
    }
}

impl Feed {
    fn new() -> Self {
        let config = IndexConfig { salt: 0x5eed, ..IndexConfig::default() };
        let mut index = HolderIndex::new(config);
        let sources = (0..N_WORKERS).map(|worker| index.add_source(&format!("worker-{worker}"), 0).unwrap());
        let sources = sources.collect();
        Self { index, sources, next: vec![0; N_WORKERS] }
    }

    fn send(&mut self, worker: usize, event: Event<'_>) {
        let sequence = self.next[worker];
        self.next[worker] += 1;
        let source = self.sources[worker];
        let batch = Batch { source, epoch: Some(1), sequence, replayed: false, events: &[event] };
        let _verdict = self.index.apply(&batch);
    }

    fn store(&mut self, worker: usize, keys: &[BlockKey], parent: Option<BlockKey>) {
        self.send(worker, Event::Stored { tier: Tier::Gpu, parent, keys });
    }

    fn ingest(&mut self, work: &Workload, interleaved: bool) {
        let n_prefill = work.depth - N_DECODE;
        for group in work.sequences.chunks(if interleaved { N_INTERLEAVED } else { 1 }) {
            for (worker, first) in group {
                self.store(*worker, &work.keys[*first..first + n_prefill], None);
            }
            for at in n_prefill..work.depth {
                for (worker, first) in group {
                    self.store(*worker, &work.keys[first + at..=first + at], Some(work.keys[first + at - 1]));
                }
            }
        }
    }

    fn remove(&mut self, work: &Workload) {
        for (worker, first) in &work.sequences {
            self.send(
                *worker,
                Event::Removed { tier: Tier::Gpu, keys: &work.keys[*first..first + work.depth] },
            );
        }
    }
}

/// Seconds that this thread was on a processor, so that other load does not count.
fn cpu_s() -> f64 {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    schedstat.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1e9
}

fn rss_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Nanoseconds of each query, sorted, of one pass.
fn latencies(reader: &HolderReader, queries: &[Vec<BlockKey>], options: LookupOptions<'_>) -> Vec<u64> {
    let mut matches = Matches::default();
    let mut times: Vec<u64> = queries
        .iter()
        .map(|query| {
            let start = Instant::now();
            reader.lookup(query, options, &mut matches);
            std::hint::black_box(matches.rows().len());
            start.elapsed().as_nanos() as u64
        })
        .collect();
    times.sort_unstable();
    times
}

fn rate(reader: &HolderReader, queries: &[Vec<BlockKey>], n_rounds: usize) -> f64 {
    let mut matches = Matches::default();
    let start_s = cpu_s();
    for _ in 0..n_rounds {
        for query in queries {
            reader.lookup(query, LookupOptions::default(), &mut matches);
            std::hint::black_box(matches.rows().len());
        }
    }
    (n_rounds * queries.len()) as f64 / (cpu_s() - start_s)
}

fn report_latency(name: &str, reader: &HolderReader, queries: &[Vec<BlockKey>], options: LookupOptions<'_>) {
    let passes: Vec<Vec<u64>> = (0..9).map(|_| latencies(reader, queries, options)).collect();
    let best =
        |of: usize| passes.iter().map(|times| times[times.len() * of / 100]).min().unwrap() as f64 / 1e3;
    println!("  {name:<34} p50 {:6.2} us   p99 {:6.2} us", best(50), best(99));
}

fn measure(depth: usize, n_per_worker: usize, interleaved: bool) {
    let work = Workload::new(depth, n_per_worker);
    let queries = work.queries();
    let n_blocks = work.n_blocks() as f64;
    println!("depth {depth}: {} M (block, worker) entries", n_blocks / 1e6);
    let rss_before = rss_bytes();
    let mut feed = Feed::new();
    let start_s = cpu_s();
    feed.ingest(&work, interleaved);
    let ingest_s = cpu_s() - start_s;
    let rss_bytes_taken = rss_bytes().saturating_sub(rss_before) as f64;
    let stats = feed.index.stats();
    assert_eq!(stats.n_holdings + feed.index.counters().blocks_repeated, work.n_blocks() as u64);
    println!("  ingest {:26.1} M blocks/s", n_blocks / ingest_s / 1e6);
    println!(
        "  bytes per entry: counted {:.1}, RSS {:.1}; per distinct block: counted {:.1}",
        stats.bytes as f64 / stats.n_holdings as f64,
        rss_bytes_taken / stats.n_holdings as f64,
        stats.bytes as f64 / stats.n_blocks as f64,
    );
    let reader = feed.index.reader();
    report_latency("find", &reader, &queries, LookupOptions::default());
    let all = LookupOptions { walk: Walk::All, ..LookupOptions::default() };
    report_latency("find, every block", &reader, &queries, all);
    let n_rounds = (1_000_000 / depth / 40).max(3);
    let best = (0..3).map(|_| rate(&reader, &queries, n_rounds)).fold(0.0, f64::max);
    println!("  1 reader {:24.0} k queries/s", best / 1e3);

    let stop = AtomicBool::new(false);
    let n_written = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Decode blocks come and go at every worker while readers read.
            let mut number = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                let keys: Vec<BlockKey> =
                    (0..64).map(|at| BlockKey(mix(1 << 61 | number << 8 | at))).collect();
                let worker = number as usize % N_WORKERS;
                feed.store(worker, &keys, None);
                feed.send(worker, Event::Removed { tier: Tier::Gpu, keys: &keys });
                number += 1;
                n_written.fetch_add(128, Ordering::Relaxed);
            }
        });
        let start = Instant::now();
        report_latency("find, beside a writer", &reader, &queries, LookupOptions::default());
        let best = (0..3).map(|_| rate(&reader, &queries, n_rounds)).fold(0.0, f64::max);
        let written = n_written.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64();
        println!(
            "  1 reader beside a writer {:8.0} k queries/s, {:.1} M block changes/s",
            best / 1e3,
            written / 1e6
        );
        stop.store(true, Ordering::Relaxed);
    });

    let start_s = cpu_s();
    feed.remove(&work);
    println!("  removal {:25.1} M blocks/s", n_blocks / (cpu_s() - start_s) / 1e6);
    while feed.index.maintain(1 << 20) {}
    println!("  empty again: {:.2} MB", feed.index.stats().bytes as f64 / 1e6);
}

fn measure_snapshot() {
    let n_blocks = 10_000_000_u64;
    let mut feed = Feed::new();
    for run in 0..n_blocks / 100 {
        let keys: Vec<BlockKey> = (0..100).map(|at| BlockKey(mix(run << 8 | at))).collect();
        feed.store(run as usize % N_WORKERS, &keys, None);
    }
    let mut bytes = Vec::new();
    let start_s = cpu_s();
    feed.index.write_snapshot(&mut bytes).unwrap();
    println!(
        "snapshot of 10 M blocks: {} MB, written in {:.2} s",
        bytes.len() / 1_000_000,
        cpu_s() - start_s
    );
    drop(feed);
    let load = |_| {
        let start_s = cpu_s();
        let index = HolderIndex::from_snapshot(IndexConfig::default(), &bytes).unwrap();
        assert_eq!(index.stats().n_blocks, n_blocks);
        cpu_s() - start_s
    };
    let best_s = (0..3).map(load).fold(f64::INFINITY, f64::min);
    println!("  loaded in {best_s:.2} s");
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let interleaved = arguments.iter().any(|argument| argument == "interleaved");
    for (depth, n_per_worker) in [(16, 10_000), (128, 10_000), (1024, 640)] {
        if arguments.len() < 2
            || interleaved
            || arguments.iter().any(|argument| *argument == depth.to_string())
        {
            measure(depth, n_per_worker, interleaved);
        }
    }
    if arguments.len() < 2 || arguments.iter().any(|argument| argument == "snapshot") {
        measure_snapshot();
    }
}
