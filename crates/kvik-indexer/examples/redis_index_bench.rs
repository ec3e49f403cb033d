//! Measures a lookup of 128 blocks that 16 sources hold, on a book on a Redis server.
//!
//!     redis-server --port 7000 --save "" &
//!     cargo run --release --package kvik-indexer --example redis_index_bench -- redis://127.0.0.1:7000
//!
//! Beside it, over the same kind of connection: PING, which is the round trip alone, and a pipeline of one
//! HKEYS for each block over hashes with a JSON field for each source, which is how llm-d lays its index out.
//! Each is measured by itself, and then all in turns, where each finds the caches as the others left them. Books and
//! hashes of the bench are removed.

#![expect(clippy::print_stdout, reason = "a program that prints figures")]
#![expect(clippy::unwrap_used, reason = "a measurement may fail where it stands")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_index::holders::{BlockKey, Event, SourceName, Tier, Walk};
use kvik_indexer::backend::redis::{RedisBackend, RedisClient, RedisOptions};
use kvik_indexer::backend::{Backend as _, KeyedBatch, Row};
use redis::aio::MultiplexedConnection;

const N_SOURCES: u32 = 16;
const N_BLOCKS: u64 = 128;
const N_WARM_UPS: usize = 200;
const N_CALLS: usize = 5000;
/// Blocks of the batches whose speed is measured, and how many there are.
const BATCH_BLOCKS: u64 = 1024;
const N_BATCHES: u64 = 64;

/// What is measured.
#[derive(Debug, Clone, Copy)]
enum Call {
    Ping,
    Lookup,
    Stairs,
    All,
    Hashes,
}

impl Call {
    const EACH: [Self; 5] = [Self::Ping, Self::Lookup, Self::Stairs, Self::All, Self::Hashes];

    fn what(self) -> &'static str {
        match self {
            Self::Ping => "PING",
            Self::Lookup => "kvik: one script, all sources have all blocks",
            Self::Stairs => "kvik: one script, a source ends at every eighth block",
            Self::All => "kvik: one script, walk over all blocks",
            Self::Hashes => "pipeline of 128 HKEYS",
        }
    }
}

/// The server and what is asked of it.
struct Bench {
    backend: RedisBackend,
    plain: MultiplexedConnection,
    keys: Vec<BlockKey>,
    uneven: Vec<BlockKey>,
}

impl Bench {
    /// Makes a call, and looks at what it gives.
    async fn time(&mut self, call: Call) -> Duration {
        let begin = Instant::now();
        match call {
            Call::Ping => {
                let () = redis::cmd("PING").exec_async(&mut self.plain).await.unwrap();
                begin.elapsed()
            }
            Call::Lookup => {
                let rows = self.backend.lookup(&self.keys, Walk::Prefix).await.unwrap();
                let time = begin.elapsed();
                let is_whole = |row: &Row| row.prefix_in[0] == N_BLOCKS as u32;
                assert!(rows.len() == N_SOURCES as usize && rows.iter().all(is_whole));
                time
            }
            Call::Stairs => {
                let rows = self.backend.lookup(&self.uneven, Walk::Prefix).await.unwrap();
                let time = begin.elapsed();
                assert_eq!(rows.iter().map(|row| row.prefix_in[0]).sum::<u32>(), 8 * 16 * 17 / 2);
                time
            }
            Call::All => {
                let rows = self.backend.lookup(&self.keys, Walk::All).await.unwrap();
                let time = begin.elapsed();
                assert!(rows.iter().all(|row| row.highest_block == N_BLOCKS as u32));
                time
            }
            Call::Hashes => {
                let mut pipeline = redis::pipe();
                for key in &self.keys {
                    pipeline.cmd("HKEYS").arg(key.0.to_string());
                }
                let fields: Vec<Vec<String>> = pipeline.query_async(&mut self.plain).await.unwrap();
                let time = begin.elapsed();
                assert!(fields.iter().all(|fields| fields.len() == N_SOURCES as usize));
                time
            }
        }
    }
}

fn print_table(title: &str, times: &mut [(Call, Vec<Duration>)]) {
    println!("| {title} | p50 us | p99 us | least us |");
    println!("|---|---|---|---|");
    for (call, durations) in times {
        durations.sort_unstable();
        let at = |share: f64| {
            let place = ((durations.len() - 1) as f64 * share) as usize;
            durations[place].as_secs_f64() * 1e6
        };
        println!("| {} | {:.0} | {:.0} | {:.0} |", call.what(), at(0.5), at(0.99), at(0.0));
    }
    println!();
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

    let mut bench = Bench { backend, plain, keys, uneven };
    let (mut alone, mut in_turns) =
        (Call::EACH.map(|call| (call, Vec::new())), Call::EACH.map(|call| (call, Vec::new())));
    for (call, times) in &mut alone {
        for round in 0..N_WARM_UPS + N_CALLS {
            let time = bench.time(*call).await;
            times.extend((round >= N_WARM_UPS).then_some(time));
        }
    }
    for round in 0..N_WARM_UPS + N_CALLS {
        for (call, times) in &mut in_turns {
            let time = bench.time(*call).await;
            times.extend((round >= N_WARM_UPS).then_some(time));
        }
    }
    println!("{N_BLOCKS} blocks, {N_SOURCES} sources, {N_CALLS} calls of each kind");
    println!();
    print_table("one kind after the other", &mut alone);
    print_table("in turns", &mut in_turns);
    let Bench { backend, mut plain, keys, .. } = bench;

    let begin = Instant::now();
    for at in 0..N_BATCHES {
        let keys: Vec<BlockKey> =
            (0..BATCH_BLOCKS).map(|block| BlockKey(1 << 63 | at << 32 | block)).collect();
        let events = [Event::Stored { tier: Tier::Gpu, parent: None, keys: &keys }];
        apply(&backend, &source(0), 2 + at, &events).await;
    }
    let n_blocks_per_s = (N_BATCHES * BATCH_BLOCKS) as f64 / begin.elapsed().as_secs_f64();
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
