//! Load on one tier.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use kvik_tier::{
    Arena, ArenaOptions, Checksummed, ChunkKey, Commitment, GetItem, Lease, NamespaceId, NvmeOptions,
    NvmeTier, PutItem, RamTier, RedisOptions, RedisTier, Slot, Tier,
};
use kvik_types::BlockHash;

use super::MIB;
use super::direction::Direction;
use super::programs::{N_CONNECTIONS, RedisServer};

/// Threads that read and write a lower tier, as many as a store reads one with; `fio` has as many.
pub(super) const N_THREADS: usize = 2;

/// Bytes of one call when a rate is measured.
const BATCH_BYTES: usize = 64 * MIB;

/// Calls of one chunk whose times are taken, a round.
const N_TIMED: usize = 32;

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Subject {
    pub(super) chunk_bytes: usize,
    /// Bytes that are written and read in a round.
    pub(super) round_bytes: usize,
}

/// A rate in GB/s and the times of single calls in milliseconds, for each direction.
pub(super) type Round = [(f64, Vec<f64>); 2];

/// Opens a tier with room for the round and its single calls.
pub(super) fn open(
    tier: &str,
    folder: &Path,
    server: Option<&RedisServer>,
    subject: Subject,
) -> anyhow::Result<Box<dyn Tier>> {
    let room_bytes = subject.round_bytes + 2 * N_TIMED * subject.chunk_bytes;
    Ok(match (tier, server) {
        ("ram", _) => {
            // The plain copy goes to memory that the kernel has given already, so this does too.
            let room_bytes = (room_bytes + room_bytes / 4) as u64;
            let options = ArenaOptions { commitment: Commitment::AtStart, ..ArenaOptions::new(room_bytes) };
            Box::new(RamTier::new(Arena::new(options)?))
        }
        ("nvme", _) => {
            let options = NvmeOptions::new(folder.join("nvme"), 2 * room_bytes as u64);
            Box::new(Checksummed::new(NvmeTier::open(&options)?))
        }
        (_, Some(server)) => {
            let options = RedisOptions { n_connections: N_CONNECTIONS, ..RedisOptions::default() };
            Box::new(Checksummed::new(RedisTier::open(&server.url()?, &options)?))
        }
        (other, None) => anyhow::bail!("there is no tier {other} to measure"),
    })
}

/// Removes what a tier has left in the folder.
pub(super) fn remove(tier: &str, folder: &Path) -> anyhow::Result<()> {
    if tier == "nvme" {
        std::fs::remove_dir_all(folder.join("nvme")).context("remove the segments")?;
    }
    Ok(())
}

/// Writes and reads a round in batches, then some chunks one by one, and removes them all.
pub(super) fn run_round(tier: &dyn Tier, subject: Subject, n_threads: usize) -> anyhow::Result<Round> {
    let n_chunks = subject.round_bytes / subject.chunk_bytes;
    let keys: Vec<ChunkKey> = (0..n_chunks).map(key).collect();
    let mut buffers: Vec<Buffers> =
        (0..n_threads).map(|_| Buffers::new(subject.chunk_bytes)).collect::<anyhow::Result<_>>()?;
    let mut rates = Vec::new();
    for direction in Direction::ALL {
        let begin = Instant::now();
        let outcomes: Vec<anyhow::Result<()>> = std::thread::scope(|scope| {
            let share = keys.len().div_ceil(n_threads);
            let threads: Vec<_> = keys
                .chunks(share)
                .zip(&mut buffers)
                .map(|(keys, buffers)| scope.spawn(move || buffers.run(tier, keys, direction)))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Ok(()))).collect()
        });
        outcomes.into_iter().collect::<anyhow::Result<()>>()?;
        if direction == Direction::Put {
            tier.flush()?;
        }
        rates.push(subject.round_bytes as f64 / 1e9 / begin.elapsed().as_secs_f64());
    }
    let [put_ms, get_ms] = time_single_calls(tier, subject, n_chunks)?;
    tier.delete(&keys)?;
    Ok([(rates[0], put_ms), (rates[1], get_ms)])
}

/// The times of calls of one chunk, in milliseconds.
fn time_single_calls(tier: &dyn Tier, subject: Subject, first: usize) -> anyhow::Result<[Vec<f64>; 2]> {
    let mut buffers = Buffers::new(subject.chunk_bytes)?;
    let keys: Vec<ChunkKey> = (first..first + N_TIMED).map(key).collect();
    let mut times = [Vec::new(), Vec::new()];
    for (place, direction) in Direction::ALL.into_iter().enumerate() {
        for key in &keys {
            let begin = Instant::now();
            buffers.run(tier, std::slice::from_ref(key), direction)?;
            times[place].push(begin.elapsed().as_secs_f64() * 1e3);
        }
    }
    tier.delete(&keys)?;
    Ok(times)
}

/// The rate of a plain copy between two sets of memory, larger than the caches, in GB/s.
pub(super) fn copy_rate(chunk_bytes: usize, round_bytes: usize, direction: Direction) -> f64 {
    let sources: Vec<Vec<u8>> =
        (0..round_bytes / chunk_bytes).map(|number| vec![number as u8 | 1; chunk_bytes]).collect();
    let mut targets: Vec<Vec<u8>> = match direction {
        // A tier that stores fills new memory with each chunk; one that reads fills the same buffers.
        Direction::Put => sources.iter().map(|_| vec![1; chunk_bytes]).collect(),
        Direction::Get => (0..batch_len(chunk_bytes)).map(|_| vec![1; chunk_bytes]).collect(),
    };
    let n_targets = targets.len();
    let begin = Instant::now();
    for (number, source) in sources.iter().enumerate() {
        targets[number % n_targets].copy_from_slice(std::hint::black_box(source));
        std::hint::black_box(&mut targets);
    }
    round_bytes as f64 / 1e9 / begin.elapsed().as_secs_f64()
}

/// Chunks of one call when a rate is measured.
fn batch_len(chunk_bytes: usize) -> usize {
    (BATCH_BYTES / chunk_bytes).max(1)
}

/// Memory for one batch, as a store has it: in an arena, so that a disk takes it without a copy.
struct Buffers {
    sources: Vec<Lease>,
    targets: Vec<Slot>,
}

impl Buffers {
    fn new(chunk_bytes: usize) -> anyhow::Result<Self> {
        let n_chunks = batch_len(chunk_bytes);
        let arena = Arena::new(ArenaOptions::new((3 * n_chunks * chunk_bytes) as u64))?;
        let slot = |number: usize| {
            let mut slot = arena.allocate(chunk_bytes).context("take memory for a chunk")?;
            for (place, byte) in slot.iter_mut().enumerate() {
                *byte = (place * 31 + number) as u8;
            }
            Ok(slot)
        };
        let sources = (0..n_chunks).map(|number| slot(number).map(Slot::freeze));
        Ok(Self {
            sources: sources.collect::<anyhow::Result<_>>()?,
            targets: (0..n_chunks).map(slot).collect::<anyhow::Result<_>>()?,
        })
    }

    /// Puts or gets all keys, a batch at a time.
    fn run(&mut self, tier: &dyn Tier, keys: &[ChunkKey], direction: Direction) -> anyhow::Result<()> {
        for keys in keys.chunks(self.sources.len()) {
            match direction {
                Direction::Put => {
                    let parts: Vec<[&[u8]; 1]> = self.sources.iter().map(|lease| [&**lease]).collect();
                    let mut batch: Vec<PutItem<'_>> =
                        keys.iter().zip(&parts).map(|(key, parts)| PutItem::new(*key, parts)).collect();
                    tier.put(&mut batch);
                    let failed = batch.iter().find(|item| !item.outcome.is_present());
                    ensure!(failed.is_none(), "put a chunk: {:?}", failed.map(|item| &item.outcome));
                }
                Direction::Get => {
                    let mut batch: Vec<GetItem<'_>> = keys
                        .iter()
                        .zip(&mut self.targets)
                        .map(|(key, slot)| GetItem::whole(*key, slot))
                        .collect();
                    tier.get(&mut batch);
                    let failed = batch.iter().find(|item| !item.outcome.is_hit());
                    ensure!(failed.is_none(), "get a chunk: {:?}", failed.map(|item| &item.outcome));
                }
            }
        }
        Ok(())
    }
}

fn key(number: usize) -> ChunkKey {
    let bits = (number as u128 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    ChunkKey { namespace: NamespaceId(BlockHash([3; 16])), chunk: BlockHash(bits.to_be_bytes()), rank: 0 }
}
