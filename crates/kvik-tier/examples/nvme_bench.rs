//! How fast chunks go to a local disk and come back, beside `fio` on the same disk.
//!
//!     cargo run --release --package kvik-tier --example nvme_bench -- /path/to/dir [GiB] [threads] [uring|positional]
//!
//! For each length of a chunk it stores so many GiB (2 if not given) in batches of 64 MiB and reads them back, on so
//! many threads (2), through the checksums that every user has and then bare. `fio`, if it is installed, then writes and reads
//! as much with `io_uring`, direct, in pieces of 1 MiB with 32 under way for each thread. The directory must have
//! room for twice that.

#![expect(clippy::print_stdout, reason = "it prints a table")]
#![expect(clippy::unwrap_used, reason = "a measurement may fail where it stands")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Instant;

use kvik_tier::nvme::IoKind;
use kvik_tier::{Checksummed, ChunkKey, GetItem, NamespaceId, NvmeOptions, NvmeTier, PutItem, Tier};
use kvik_types::BlockHash;

const MIB: usize = 1 << 20;
const BATCH_BYTES: usize = 64 * MIB;
const CHUNK_BYTES: [usize; 3] = [MIB, 8 * MIB, 32 * MIB];
const N_ROUNDS: usize = 3;

/// Memory whose start a disk takes without a copy.
struct Memory {
    bytes: Vec<u8>,
    start: usize,
}

struct Setting {
    dir: PathBuf,
    total_bytes: usize,
    n_threads: usize,
    io: IoKind,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let dir = PathBuf::from(arguments.first().expect("a directory is needed"));
    let number = |argument_idx: usize, default: usize| {
        arguments.get(argument_idx).map_or(default, |text| text.parse().unwrap())
    };
    let io = match arguments.get(3).map(String::as_str) {
        Some("positional") => IoKind::Positional,
        Some("uring") => IoKind::Uring,
        _ => IoKind::Auto,
    };
    let setting = Setting { dir, total_bytes: number(1, 2) << 30, n_threads: number(2, 2), io };
    println!(
        "{} GiB, {} threads, {:?}, median of {N_ROUNDS}, GB/s",
        setting.total_bytes >> 30,
        setting.n_threads,
        setting.io
    );
    let subjects: Vec<(usize, bool)> = [true, false]
        .into_iter()
        .flat_map(|is_checksummed| CHUNK_BYTES.map(|it| (it, is_checksummed)))
        .collect();
    // In turns, because disks that others use too have good and bad minutes.
    let mut fio_speeds = Vec::new();
    let mut speeds = vec![Vec::new(); subjects.len()];
    for _ in 0..N_ROUNDS {
        fio_speeds.extend(run_fio(&setting, "write").zip(run_fio(&setting, "read")));
        for ((chunk_bytes, is_checksummed), speeds) in subjects.iter().zip(&mut speeds) {
            speeds.push(measure(&setting, *chunk_bytes, *is_checksummed));
        }
    }
    println!("{:<14} {:>8} {:>8}", "", "put", "get");
    let fio = (!fio_speeds.is_empty()).then(|| medians(&fio_speeds));
    if let Some((write, read)) = fio {
        println!("{:<14} {write:>8.2} {read:>8.2}", "fio");
    }
    for ((chunk_bytes, is_checksummed), speeds) in subjects.iter().zip(&speeds) {
        let (put, get) = medians(speeds);
        let name = format!("{} MiB{}", chunk_bytes / MIB, if *is_checksummed { "" } else { ", bare" });
        print!("{name:<14} {put:>8.2} {get:>8.2}");
        if let Some((write, read)) = fio {
            print!("   {:.0} % and {:.0} % of fio", 100.0 * put / write, 100.0 * get / read);
        }
        println!();
    }
}

/// The median of the first and of the second numbers.
fn medians(pairs: &[(f64, f64)]) -> (f64, f64) {
    let median = |mut numbers: Vec<f64>| {
        numbers.sort_by(f64::total_cmp);
        numbers[numbers.len() / 2]
    };
    (median(pairs.iter().map(|pair| pair.0).collect()), median(pairs.iter().map(|pair| pair.1).collect()))
}

/// Stores and reads everything once; returns GB/s of both.
fn measure(setting: &Setting, chunk_bytes: usize, is_checksummed: bool) -> (f64, f64) {
    let dir = setting.dir.join("nvme_bench");
    let options = NvmeOptions { io: setting.io, ..NvmeOptions::new(&dir, 2 * setting.total_bytes as u64) };
    // A measurement that was interrupted leaves its chunks, and they are not to be found present.
    let _ = std::fs::remove_dir_all(&dir);
    let tier = NvmeTier::open(&options).unwrap();
    let tier: Box<dyn Tier> = if is_checksummed { Box::new(Checksummed::new(tier)) } else { Box::new(tier) };
    let mut memories: Vec<Memory> = (0..setting.n_threads).map(|_| Memory::new(BATCH_BYTES)).collect();
    let n_of_thread = setting.total_bytes / chunk_bytes / setting.n_threads;
    let n_in_batch = BATCH_BYTES / chunk_bytes;
    let mut speed = |is_put: bool| {
        let begin = Instant::now();
        thread::scope(|scope| {
            for (thread_idx, memory) in memories.iter_mut().enumerate() {
                let tier = &*tier;
                scope.spawn(move || {
                    let first = thread_idx * n_of_thread;
                    for batch_idx in 0..n_of_thread / n_in_batch {
                        let first = first + batch_idx * n_in_batch;
                        let keys: Vec<ChunkKey> = (first..first + n_in_batch).map(key).collect();
                        if is_put {
                            put(tier, &keys, memory, chunk_bytes);
                        } else {
                            get(tier, &keys, memory, chunk_bytes);
                        }
                    }
                });
            }
        });
        if is_put {
            tier.flush().unwrap();
        }
        setting.total_bytes as f64 / 1e9 / begin.elapsed().as_secs_f64()
    };
    let speeds = (speed(true), speed(false));
    drop(tier);
    std::fs::remove_dir_all(&dir).unwrap();
    speeds
}

fn put(tier: &dyn Tier, keys: &[ChunkKey], memory: &Memory, chunk_bytes: usize) {
    let parts: Vec<[&[u8]; 1]> =
        memory.bytes[memory.start..].chunks_exact(chunk_bytes).map(|bytes| [bytes]).collect();
    let mut batch: Vec<PutItem<'_>> = keys
        .iter()
        .zip(&parts)
        .map(|(key, parts)| PutItem::with_sections(*key, parts, chunk_bytes / 32))
        .collect();
    tier.put(&mut batch);
    assert!(batch.iter().all(|item| item.outcome.is_present()), "{:?}", batch[0].outcome);
}

fn get(tier: &dyn Tier, keys: &[ChunkKey], memory: &mut Memory, chunk_bytes: usize) {
    let mut batch: Vec<GetItem<'_>> = keys
        .iter()
        .zip(memory.bytes[memory.start..].chunks_exact_mut(chunk_bytes))
        .map(|(key, buffer)| GetItem::whole(*key, buffer))
        .collect();
    tier.get(&mut batch);
    assert!(batch.iter().all(|item| item.outcome.is_hit()), "{:?}", batch[0].outcome);
}

/// GB/s of fio; none if it is not there.
fn run_fio(setting: &Setting, direction: &str) -> Option<f64> {
    let output = Command::new("fio")
        .args([
            "--name=kvik",
            "--direct=1",
            "--ioengine=io_uring",
            "--bs=1m",
            "--iodepth=32",
            "--group_reporting",
        ])
        .args(["--fdatasync=256", "--output-format=terse", "--unlink=0"])
        .arg(format!("--rw={direction}"))
        .arg(format!("--numjobs={}", setting.n_threads))
        .arg(format!("--size={}", setting.total_bytes / setting.n_threads))
        .arg(format!("--directory={}", make(&setting.dir).display()))
        .output()
        .ok()?;
    let line = String::from_utf8(output.stdout).ok()?;
    // Fields of the terse format: 7 is the bandwidth of reads, 48 of writes, in KiB/s.
    let field = if direction == "read" { 6 } else { 47 };
    let kib_per_s: f64 = line.lines().last()?.split(';').nth(field)?.parse().ok()?;
    if direction == "read" {
        for thread_idx in 0..setting.n_threads {
            let _ = std::fs::remove_file(setting.dir.join(format!("kvik.{thread_idx}.0")));
        }
    }
    Some(kib_per_s * 1024.0 / 1e9)
}

fn make(dir: &Path) -> &Path {
    std::fs::create_dir_all(dir).unwrap();
    dir
}

fn key(chunk_idx: usize) -> ChunkKey {
    let mut chunk = [0; 16];
    chunk[..8].copy_from_slice(&(chunk_idx as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    ChunkKey { namespace: NamespaceId(BlockHash([1; 16])), chunk: BlockHash(chunk), rank: 0 }
}

impl Memory {
    fn new(n_bytes: usize) -> Self {
        let bytes: Vec<u8> = (0..n_bytes + 4096)
            .map(|at| (at as u64).wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes()[7])
            .collect();
        let start = bytes.as_ptr().addr().next_multiple_of(4096) - bytes.as_ptr().addr();
        Self { bytes, start }
    }
}
