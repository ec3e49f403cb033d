//! Measures a Redis tier, plain and with checksums, beside `redis-benchmark` on the same server and with the
//! same sizes.
//!
//!     redis-server --port 7000 --save "" &
//!     cargo run --release --package kvik-tier --example redis_bench -- 127.0.0.1 7000
//!
//! Both use as many connections and as many keys, so the server has the same to do. Every figure is the best
//! of the rounds, which take turns, because other work on the machine can only make them worse. What is
//! compared is not quite the same: `redis-benchmark` throws away what it reads, and a tier has it in memory.

#![expect(clippy::print_stdout, reason = "a program that prints figures")]
#![expect(clippy::unwrap_used, reason = "a measurement may fail where it stands")]

use std::process::Command;
use std::time::Instant;

use kvik_tier::{
    Checksummed, ChunkKey, GetItem, NamespaceId, PutItem, PutOutcome, RedisOptions, RedisTier, RedisUrl, Tier,
};
use kvik_types::BlockHash;

const N_ROUNDS: usize = 5;
/// Bytes of one measurement.
const TOTAL_BYTES: usize = 256 << 20;
/// Bytes of one call, and of all keys.
const BATCH_BYTES: usize = 64 << 20;

/// MiB a second.
#[derive(Default, Clone, Copy)]
struct Figures {
    set: f64,
    get: f64,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let host = arguments.next().unwrap_or_else(|| "127.0.0.1".to_owned());
    let port = arguments.next().unwrap_or_else(|| "6379".to_owned());
    println!("| MiB | connections | what | redis-benchmark MiB/s | plain | share | checksummed | share |");
    println!("|---|---|---|---|---|---|---|---|");
    for mib in [1, 8, 32] {
        for n_connections in [1, 4] {
            let [mut reference, mut plain, mut checksummed] = [Figures::default(); 3];
            for _ in 0..N_ROUNDS {
                reference.keep_best(run_redis_benchmark(&host, &port, mib << 20, n_connections));
                plain.keep_best(run_tier(&open(&host, &port, n_connections), mib << 20));
                let tier = Checksummed::new(open(&host, &port, n_connections));
                checksummed.keep_best(run_tier(&tier, mib << 20));
            }
            for (what, figure_of) in [("SET", (|it| it.set) as fn(Figures) -> f64), ("GET", |it| it.get)] {
                let [reference, plain, checksummed] = [reference, plain, checksummed].map(figure_of);
                let [plain_share, share] = [plain, checksummed].map(|own| 100.0 * own / reference);
                println!(
                    "| {mib} | {n_connections} | {what} | {reference:.0} | {plain:.0} | {plain_share:.0} % \
                     | {checksummed:.0} | {share:.0} % |"
                );
            }
        }
    }
}

fn open(host: &str, port: &str, n_connections: usize) -> RedisTier {
    let url: RedisUrl = format!("redis://{host}:{port}").parse().unwrap();
    RedisTier::open(&url, &RedisOptions { n_connections, ..RedisOptions::default() }).unwrap()
}

fn run_tier(tier: &impl Tier, chunk_bytes: usize) -> Figures {
    let keys: Vec<ChunkKey> = (0..BATCH_BYTES / chunk_bytes).map(key).collect();
    let chunk = vec![b'x'; chunk_bytes];
    let parts = [chunk.as_slice()];
    let mut buffers: Vec<Vec<u8>> = keys.iter().map(|_| vec![1; chunk_bytes]).collect();
    let (mut put_s, mut get_s) = (0.0, 0.0);
    for _ in 0..TOTAL_BYTES / BATCH_BYTES {
        tier.delete(&keys).unwrap();
        let mut batch: Vec<PutItem<'_>> = keys.iter().map(|key| PutItem::new(*key, &parts)).collect();
        let begin = Instant::now();
        tier.put(&mut batch);
        put_s += begin.elapsed().as_secs_f64();
        assert!(batch.iter().all(|item| matches!(item.outcome, PutOutcome::Stored)));
        let mut batch: Vec<GetItem<'_>> =
            keys.iter().zip(&mut buffers).map(|(key, buffer)| GetItem::whole(*key, buffer)).collect();
        let begin = Instant::now();
        tier.get(&mut batch);
        get_s += begin.elapsed().as_secs_f64();
        assert!(batch.iter().all(|item| item.outcome.is_hit()));
    }
    tier.delete(&keys).unwrap();
    let total_mib = (TOTAL_BYTES >> 20) as f64;
    Figures { set: total_mib / put_s, get: total_mib / get_s }
}

fn run_redis_benchmark(host: &str, port: &str, value_bytes: usize, n_connections: usize) -> Figures {
    let n_requests = TOTAL_BYTES / value_bytes;
    let output = Command::new("redis-benchmark")
        .args(["-h", host, "-p", port, "-t", "set,get", "--csv"])
        .args(["-d", &value_bytes.to_string(), "-n", &n_requests.to_string()])
        .args(["-r", &(BATCH_BYTES / value_bytes).to_string()])
        .args(["-c", &n_connections.to_string()])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let value_mib = value_bytes as f64 / f64::from(1 << 20);
    let figure_of = |test: &str| {
        let line = text.lines().find(|line| line.starts_with(&format!("\"{test}\""))).unwrap();
        line.split(',').nth(1).unwrap().trim_matches('"').parse::<f64>().unwrap() * value_mib
    };
    Figures { set: figure_of("SET"), get: figure_of("GET") }
}

fn key(chunk_idx: usize) -> ChunkKey {
    let chunk = BlockHash((chunk_idx as u128).to_le_bytes());
    ChunkKey { namespace: NamespaceId(BlockHash([7; 16])), chunk, rank: 0 }
}

impl Figures {
    fn keep_best(&mut self, other: Self) {
        self.set = self.set.max(other.set);
        self.get = self.get.max(other.get);
    }
}
