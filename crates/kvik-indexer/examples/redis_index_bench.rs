//! Measures a lookup of 128 blocks that 16 sources hold, on a book on a Redis server.
//!
//!     redis-server --port 7000 --save "" &
//!     cargo run --release --package kvik-indexer --example redis_index_bench -- redis://127.0.0.1:7000
//!
//! Beside it, over the same kind of connection: PING, which is the round trip alone, and a pipeline of one
//! HKEYS for each block over hashes with a JSON field for each source, which is how llm-d lays its index out.
//! The three take turns, so that other work on the machine meets them alike. Books and hashes of the bench
//! are removed.

#![expect(clippy::print_stdout, reason = "a program that prints figures")]
#![expect(clippy::unwrap_used, reason = "a measurement may fail where it stands")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_index::holders::{BlockKey, Event, SourceName, Tier, Walk};
use kvik_indexer::backend::redis::{RedisBackend, RedisClient, RedisOptions};
use kvik_indexer::backend::{Backend as _, KeyedBatch};
use redis::aio::MultiplexedConnection;

const N_SOURCES: u32 = 16;
const N_BLOCKS: u64 = 128;
const N_WARM_UPS: usize = 200;
const N_CALLS: usize = 5000;
/// Blocks of the batches whose speed is measured, and how many there are.
const BATCH_BLOCKS: u64 = 1024;
const N_BATCHES: u64 = 64;

/// Times of one kind of call.
struct Times {
    what: &'static str,
    durations: Vec<Duration>,
}

impl Times {
    fn new(what: &'static str) -> Self {
        Self { what, durations: Vec::with_capacity(N_CALLS) }
    }

    fn print(&mut self) {
        self.durations.sort_unstable();
        let at = |share: f64| {
            let place = ((self.durations.len() - 1) as f64 * share) as usize;
            self.durations[place].as_secs_f64() * 1e6
        };
        println!("| {} | {:.0} | {:.0} | {:.0} |", self.what, at(0.5), at(0.99), at(0.0));
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let url = std::env::args().nth(1).unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned());
    let second = Duration::from_secs(1);
    let options =
        RedisOptions { lookup_timeout: second, key_prefix: "kvik-bench".into(), ..RedisOptions::default() };
    let client = Arc::new(RedisClient::new(&url.parse().unwrap(), &options).unwrap());
    let backend = RedisBackend::new(client, &options, "bench", &std::process::id().to_string());
    let client = redis::Client::open(url).unwrap();
    let patient = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    let mut plain = client.get_multiplexed_async_connection_with_config(&patient).await.unwrap();

    let keys: Vec<BlockKey> =
        (1..=N_BLOCKS).map(|block| BlockKey(block.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect();
    let source = |rank| SourceName { worker: "http://10.0.0.1:8000".into(), rank };
    for rank in 0..N_SOURCES {
        apply(&backend, &source(rank), 0, &[Event::Stored { tier: Tier::Gpu, parent: None, keys: &keys }])
            .await;
    }
    // A book whose sources end at different blocks, so that neighbors differ.
    let uneven: Vec<BlockKey> = keys.iter().map(|key| BlockKey(key.0 ^ 1)).collect();
    for rank in 0..N_SOURCES {
        let n_blocks = 8 * (rank as usize + 1);
        let event = Event::Stored { tier: Tier::Gpu, parent: None, keys: &uneven[..n_blocks] };
        apply(&backend, &source(rank), 1, &[event]).await;
    }
    fill_hashes(&mut plain, &keys).await;

    let [mut ping, mut lookup, mut stairs, mut all, mut hashes] = [
        "PING",
        "kvik: one script, all sources have all blocks",
        "kvik: one script, a source ends at every eighth block",
        "kvik: one script, walk over all blocks",
        "pipeline of 128 HKEYS",
    ]
    .map(Times::new);
    for round in 0..N_WARM_UPS + N_CALLS {
        let begin = Instant::now();
        let () = redis::cmd("PING").exec_async(&mut plain).await.unwrap();
        let ping_time = begin.elapsed();
        let begin = Instant::now();
        let rows = backend.lookup(&keys, Walk::Prefix).await.unwrap();
        let lookup_time = begin.elapsed();
        assert!(
            rows.len() == N_SOURCES as usize && rows.iter().all(|row| row.prefix_in[0] == N_BLOCKS as u32)
        );
        let begin = Instant::now();
        let rows = backend.lookup(&uneven, Walk::Prefix).await.unwrap();
        let stairs_time = begin.elapsed();
        assert_eq!(rows.iter().map(|row| row.prefix_in[0]).sum::<u32>(), 8 * 16 * 17 / 2);
        let begin = Instant::now();
        let rows = backend.lookup(&keys, Walk::All).await.unwrap();
        let all_time = begin.elapsed();
        assert!(rows.iter().all(|row| row.highest_block == N_BLOCKS as u32));
        let begin = Instant::now();
        let mut pipeline = redis::pipe();
        for key in &keys {
            pipeline.cmd("HKEYS").arg(key.0.to_string());
        }
        let fields: Vec<Vec<String>> = pipeline.query_async(&mut plain).await.unwrap();
        let hashes_time = begin.elapsed();
        assert!(fields.iter().all(|fields| fields.len() == N_SOURCES as usize));
        if round >= N_WARM_UPS {
            ping.durations.push(ping_time);
            lookup.durations.push(lookup_time);
            stairs.durations.push(stairs_time);
            all.durations.push(all_time);
            hashes.durations.push(hashes_time);
        }
    }
    println!("{N_BLOCKS} blocks, {N_SOURCES} sources, {N_CALLS} calls of each kind");
    println!();
    println!("| what | p50 us | p99 us | least us |");
    println!("|---|---|---|---|");
    for times in [&mut ping, &mut lookup, &mut stairs, &mut all, &mut hashes] {
        times.print();
    }

    let begin = Instant::now();
    for at in 0..N_BATCHES {
        let keys: Vec<BlockKey> =
            (0..BATCH_BLOCKS).map(|block| BlockKey(1 << 63 | at << 32 | block)).collect();
        let events = [Event::Stored { tier: Tier::Gpu, parent: None, keys: &keys }];
        apply(&backend, &source(0), 2 + at, &events).await;
    }
    let n_blocks_per_s = (N_BATCHES * BATCH_BLOCKS) as f64 / begin.elapsed().as_secs_f64();
    println!();
    println!("stored in batches of {BATCH_BLOCKS} blocks: {n_blocks_per_s:.0} blocks/s");
    let script = "for _, name in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', name) end";
    let mut clean = redis::cmd("EVAL");
    clean.arg(script).arg(0).arg("kvik-bench:*");
    clean.exec_async(&mut plain).await.unwrap();
    let mut clean = redis::cmd("DEL");
    for key in &keys {
        clean.arg(key.0.to_string());
    }
    clean.exec_async(&mut plain).await.unwrap();
}

async fn apply(backend: &RedisBackend, source: &SourceName, sequence: u64, events: &[Event<'_>]) {
    let batch = KeyedBatch { epoch: Some(1), sequence, replayed: false, published_s: 0.0, events };
    backend.apply(source, batch).await.unwrap();
}

/// The same blocks and sources as one hash a block.
async fn fill_hashes(connection: &mut MultiplexedConnection, keys: &[BlockKey]) {
    for key in keys {
        let mut command = redis::cmd("HSET");
        command.arg(key.0.to_string());
        for rank in 0..N_SOURCES {
            let entry = format!("{{\"PodIdentifier\":\"10.0.0.1:8000-{rank}\",\"DeviceTier\":\"gpu\"}}");
            command.arg(entry).arg("");
        }
        command.exec_async(connection).await.unwrap();
    }
}
