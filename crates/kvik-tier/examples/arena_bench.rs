//! Measures the arena and the tier in memory: `cargo run --release --package kvik-tier --example arena_bench`.
//!
//! Prints how long it takes to allocate and to free a slot, alone and with four threads at a time, and how
//! fast a chunk is read, beside a plain copy of as many bytes. Both copies go through a set of sources that
//! is larger than the last cache. Last comes how long a writer waits when chunks must be moved for it.

#![expect(clippy::print_stdout, reason = "it prints its measurements")]

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kvik_tier::{Arena, ArenaOptions, ChunkKey, NamespaceId, RamTier, Slot, Tier, TierExt};
use kvik_types::BlockHash;

const MIB: usize = 1 << 20;

/// Larger than the last cache of current machines.
const SOURCES_BYTES: usize = 1 << 30;

/// Slots that each thread takes before it gives them back.
const N_SLOTS: usize = 1000;
const N_ROUNDS: usize = 200;

/// How often the two copies are measured in turn; the fastest pass of each counts.
const N_PASSES: usize = 7;

fn main() -> Result<()> {
    let clock_ns = clock_overhead_ns();
    println!("a pair of clock readings takes {clock_ns} ns and is subtracted");
    for (name, slot_bytes) in [("slab, 64 KiB", 64 << 10), ("own runs of 40 MiB", 40 * MIB)] {
        for n_threads in [1, 4] {
            measure_slots(name, slot_bytes, n_threads, clock_ns)?;
        }
    }
    for n_bytes in [MIB, 8 * MIB, 32 * MIB] {
        measure_reads(n_bytes)?;
    }
    for (chunk_bytes, wanted_bytes) in [(16 << 10, 64 << 10), (MIB, 8 * MIB), (8 * MIB, 32 * MIB)] {
        measure_moves(chunk_bytes, wanted_bytes)?;
    }
    Ok(())
}

/// Prints how long it takes to allocate and to free.
fn measure_slots(name: &str, slot_bytes: usize, n_threads: usize, clock_ns: u64) -> Result<()> {
    // Slots that are too large for a slab are few: the memory that is touched stays in bounds.
    let n_slots = if slot_bytes > MIB { 8 } else { N_SLOTS };
    let capacity_bytes = (2 * n_threads * n_slots * slot_bytes) as u64;
    let arena = Arena::new(ArenaOptions::new(capacity_bytes)).context("make an arena")?;
    let barrier = Barrier::new(n_threads);
    let (mut allocate_ns, mut free_ns) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads)
            .map(|_| {
                scope.spawn(|| {
                    // Takes the memory from the kernel first, which later rounds do not.
                    let warm: Vec<Option<Slot>> = (0..n_slots).map(|_| arena.allocate(slot_bytes)).collect();
                    drop(warm);
                    barrier.wait();
                    time_rounds(&arena, slot_bytes, n_slots)
                })
            })
            .collect();
        for thread in threads {
            if let Ok((allocate, free)) = thread.join() {
                allocate_ns.extend(allocate);
                free_ns.extend(free);
            }
        }
    });
    ensure!(arena.stat().used_bytes == 0, "slots are missing");
    for (what, mut times) in [("allocate", allocate_ns), ("free", free_ns)] {
        times.sort_unstable();
        let at = |percent: usize| times[(times.len() - 1) * percent / 100].saturating_sub(clock_ns);
        println!(
            "{name:18} {n_threads} thread(s) {what:8} p50 {:5} ns   p90 {:5} ns   p99 {:6} ns",
            at(50),
            at(90),
            at(99)
        );
    }
    Ok(())
}

fn time_rounds(arena: &Arena, slot_bytes: usize, n_slots: usize) -> (Vec<u64>, Vec<u64>) {
    let (mut allocate_ns, mut free_ns) = (Vec::new(), Vec::new());
    let mut slots = Vec::with_capacity(n_slots);
    for _ in 0..N_ROUNDS {
        for _ in 0..n_slots {
            let begin = Instant::now();
            let slot = black_box(arena.allocate(slot_bytes));
            allocate_ns.push(begin.elapsed().as_nanos() as u64);
            slots.extend(slot);
        }
        for slot in slots.drain(..) {
            let begin = Instant::now();
            drop(black_box(slot));
            free_ns.push(begin.elapsed().as_nanos() as u64);
        }
    }
    (allocate_ns, free_ns)
}

/// Prints how fast whole chunks are read, beside a plain copy.
fn measure_reads(n_bytes: usize) -> Result<()> {
    let n_chunks = SOURCES_BYTES / n_bytes;
    let sources: Vec<Vec<u8>> = (0..n_chunks).map(|number| vec![number as u8 | 1; n_bytes]).collect();
    let arena = Arena::new(ArenaOptions::new((SOURCES_BYTES + 64 * MIB) as u64)).context("make an arena")?;
    let tier = RamTier::new(arena);
    for (number, source) in sources.iter().enumerate() {
        ensure!(tier.put_one(key(number), source).is_present(), "the arena is too small");
    }
    let mut target = vec![1; n_bytes];
    let (mut copy_time, mut get_time) = (Duration::MAX, Duration::MAX);
    for _ in 0..N_PASSES {
        let begin = Instant::now();
        for source in &sources {
            target.copy_from_slice(black_box(source));
            black_box(&mut target);
        }
        copy_time = copy_time.min(begin.elapsed());
        let begin = Instant::now();
        for number in 0..n_chunks {
            ensure!(tier.get_one(key(number), &mut target).is_hit(), "a chunk is missing");
            black_box(&mut target);
        }
        get_time = get_time.min(begin.elapsed());
    }
    let rate = |time: Duration| (n_chunks * n_bytes) as f64 / time.as_secs_f64() / 1e9;
    println!(
        "read {:2} MiB: copy {:5.2} GB/s   get {:5.2} GB/s   {:3.0} %",
        n_bytes / MIB,
        rate(copy_time),
        rate(get_time),
        100.0 * rate(get_time) / rate(copy_time)
    );
    Ok(())
}

/// Prints how long it takes to get memory out of pieces that are too small: every fourth chunk is deleted.
fn measure_moves(chunk_bytes: usize, wanted_bytes: usize) -> Result<()> {
    let tier = RamTier::new(Arena::new(ArenaOptions::new(SOURCES_BYTES as u64)).context("make an arena")?);
    let chunk = vec![1; chunk_bytes];
    let n_chunks = SOURCES_BYTES / chunk_bytes;
    for number in 0..n_chunks {
        ensure!(tier.put_one(key(number), &chunk).is_present(), "chunk {number} of {n_chunks} does not fit");
    }
    for number in (0..n_chunks).step_by(4) {
        tier.delete(&[key(number)]).context("delete a chunk")?;
    }
    let n_bytes_before = tier.arena().stat().moved_bytes;
    let mut slots = Vec::new();
    let mut times = Vec::new();
    for _ in 0..5 {
        let begin = Instant::now();
        slots.extend(tier.reserve(wanted_bytes));
        times.push(begin.elapsed());
    }
    ensure!(slots.len() == times.len(), "there was room for {} of {}", slots.len(), times.len());
    times.sort_unstable();
    println!(
        "reserve {:5} KiB among {n_chunks:5} chunks of {:4} KiB: median {:?}, slowest {:?}, moved {} MiB",
        wanted_bytes >> 10,
        chunk_bytes >> 10,
        times[times.len() / 2],
        times[times.len() - 1],
        (tier.arena().stat().moved_bytes - n_bytes_before) / MIB as u64
    );
    Ok(())
}

fn key(number: usize) -> ChunkKey {
    let bits = (number as u128).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    ChunkKey { namespace: NamespaceId(BlockHash([1; 16])), chunk: BlockHash(bits.to_be_bytes()), rank: 0 }
}

/// The median time between two readings of the clock.
fn clock_overhead_ns() -> u64 {
    let mut times: Vec<u64> = (0..10_001)
        .map(|_| {
            let begin = Instant::now();
            black_box(begin).elapsed().as_nanos() as u64
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}
