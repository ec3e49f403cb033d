//! What the store costs: bytes a second and time a call for each tier, the lookup of a long prompt, the proof
//! of its tokens, and what a hit saves.
//!
//! Every tier is measured beside what its medium gives without it, in turns and in one run: memory beside a
//! plain copy, a GPU beside a copy of pinned memory, the disk beside `fio`, Redis beside `redis-benchmark`. Disk and Redis are measured through
//! the checksums that every user has. A rate comes from batches, times from calls of one chunk.

mod device;
mod digest;
mod direction;
mod first_token;
mod lookup;
mod programs;
mod tiers;

use std::path::PathBuf;

use anyhow::Context as _;
use kvik_model::DeviceName;
use serde_json::json;

use self::direction::Direction;
use self::programs::RedisServer;
use self::tiers::Subject;
use crate::report::{Baseline, Goal, Measurement};

const MIB: usize = 1 << 20;

/// Lengths of the chunks that are measured.
const CHUNK_BYTES: [usize; 3] = [MIB, 8 * MIB, 32 * MIB];

/// How much is measured.
#[derive(Debug, Clone)]
pub struct StoreBenchOptions {
    /// A folder on the disk to measure.
    pub dir: PathBuf,
    /// A GPU whose KV is put and got too; none for a CPU.
    pub device: DeviceName,
    /// Takes less time for less precise values.
    pub is_quick: bool,
}

/// The measurements, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Memory.
    Ram,
    /// The memory of a GPU.
    Device,
    /// A disk.
    Nvme,
    /// A Redis server on loopback.
    Redis,
    /// The lookup of a long prompt.
    Lookup,
    /// The proof of a prompt's tokens.
    Digest,
    /// The time to the first token with and without a hit.
    FirstToken,
}

/// Runs the measurements.
#[derive(Debug)]
pub struct StoreBench {
    options: StoreBenchOptions,
    /// Ends with the bench, and takes what lies in it along.
    folder: ScratchFolder,
}

/// A folder of its own, removed at the end.
#[derive(Debug)]
struct ScratchFolder(PathBuf);

impl Kind {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Ram, Self::Device, Self::Nvme, Self::Redis, Self::Lookup, Self::Digest, Self::FirstToken];

    /// Shown while it is measured.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Device => "device",
            Self::Nvme => "nvme",
            Self::Redis => "redis",
            Self::Lookup => "lookup",
            Self::Digest => "digest",
            Self::FirstToken => "first token",
        }
    }
}

impl StoreBench {
    /// # Errors
    /// If the folder cannot be made.
    pub fn try_new(options: StoreBenchOptions) -> anyhow::Result<Self> {
        let folder = options.dir.join(format!("kvik-bench-store-{}", std::process::id()));
        std::fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        Ok(Self { options, folder: ScratchFolder(folder) })
    }

    /// What is measured, for programs.
    pub fn settings(&self) -> serde_json::Value {
        json!({
            "dir": self.options.dir.display().to_string(),
            "device": self.options.device.to_string(),
            "bytes_per_round": self.round_bytes(),
            "rounds": self.n_rounds(),
            "fio": programs::is_installed("fio"),
            "redis_server": programs::is_installed("redis-server"),
        })
    }

    /// What is measured, for people.
    pub fn description(&self) -> String {
        let (n_rounds, n_mib) = (self.n_rounds(), self.round_bytes() / MIB);
        let dir = self.options.dir.display();
        let missing = ["fio", "redis-server", "redis-benchmark"]
            .into_iter()
            .filter(|program| !programs::is_installed(program))
            .map(|program| format!("; {program} is not installed, so what needs it is left out"));
        std::iter::once(format!("{n_rounds} rounds of {n_mib} MiB a tier and length, disk at {dir}"))
            .chain(missing)
            .collect()
    }

    /// Does one kind of measurement.
    pub fn measure(&self, kind: Kind) -> anyhow::Result<Vec<Measurement>> {
        match kind {
            Kind::Ram => self.measure_tiers("ram", "memcpy", 0.9, &mut |subject, direction| {
                Ok(Some(tiers::copy_rate(subject.chunk_bytes, subject.round_bytes, direction)))
            }),
            Kind::Device => match self.options.device {
                DeviceName::Cpu => Ok(Vec::new()),
                DeviceName::Cuda(ordinal) => device::measure(ordinal, self.round_bytes(), self.n_rounds()),
            },
            Kind::Nvme => {
                let folder = &self.folder.0;
                self.measure_tiers("nvme", "fio", 0.85, &mut |subject, direction| {
                    programs::fio_rate(folder, subject.round_bytes, tiers::N_THREADS, direction)
                })
            }
            Kind::Redis => {
                if !programs::is_installed("redis-server") {
                    return Ok(Vec::new());
                }
                let server = RedisServer::start(&self.folder.0)?;
                self.measure_redis(&server)
            }
            Kind::Lookup => lookup::measure(self.options.is_quick),
            Kind::Digest => digest::measure(self.options.is_quick),
            Kind::FirstToken => first_token::measure(&self.folder.0, self.options.is_quick),
        }
    }

    fn measure_redis(&self, server: &RedisServer) -> anyhow::Result<Vec<Measurement>> {
        self.measure_with("redis", "redis-benchmark", 0.85, Some(server), &mut |subject, direction| {
            server.benchmark_rate(subject.chunk_bytes, subject.round_bytes, direction)
        })
    }

    fn measure_tiers(
        &self,
        tier: &'static str,
        baseline: &'static str,
        smallest_ratio: f64,
        reference: Reference<'_>,
    ) -> anyhow::Result<Vec<Measurement>> {
        self.measure_with(tier, baseline, smallest_ratio, None, reference)
    }

    fn measure_with(
        &self,
        tier: &'static str,
        baseline: &'static str,
        smallest_ratio: f64,
        server: Option<&RedisServer>,
        reference: Reference<'_>,
    ) -> anyhow::Result<Vec<Measurement>> {
        // A copy has one thread; a lower tier is asked by several, so that one checks what another reads.
        let n_threads = if tier == "ram" { 1 } else { tiers::N_THREADS };
        let mut results = Vec::new();
        for chunk_bytes in CHUNK_BYTES {
            let subject = Subject { chunk_bytes, round_bytes: self.round_bytes() };
            let mut rates = [Vec::new(), Vec::new()];
            let mut references = [Vec::new(), Vec::new()];
            let mut times = [Vec::new(), Vec::new()];
            for _ in 0..self.n_rounds() {
                for (place, direction) in Direction::ALL.into_iter().enumerate() {
                    references[place].extend(reference(subject, direction)?);
                }
                let target = tiers::open(tier, &self.folder.0, server, subject)?;
                let round = tiers::run_round(target.as_ref(), subject, n_threads)?;
                for (place, (rate, round_times)) in round.into_iter().enumerate() {
                    rates[place].push(rate);
                    times[place].extend(round_times);
                }
                drop(target);
                tiers::remove(tier, &self.folder.0)?;
            }
            for (place, direction) in Direction::ALL.into_iter().enumerate() {
                let name = format!("{tier}_{direction}_{}mib", chunk_bytes / MIB);
                let rates = std::mem::take(&mut rates[place]);
                let references = std::mem::take(&mut references[place]);
                // A put into memory is compared too, but only reads have a goal there.
                let has_goal = tier != "ram" || direction == Direction::Get;
                let goal = has_goal.then_some(Goal::RatioAtLeast(smallest_ratio));
                results.extend(Measurement::from_repeats(name.clone(), "GB/s", rates).map(|result| {
                    if references.is_empty() {
                        return result;
                    }
                    result.compared_with(Baseline::new(baseline, references), goal)
                }));
                results.extend(quantiles(&name, std::mem::take(&mut times[place])));
            }
        }
        Ok(results)
    }

    fn n_rounds(&self) -> usize {
        if self.options.is_quick { 1 } else { 5 }
    }

    fn round_bytes(&self) -> usize {
        if self.options.is_quick { 128 * MIB } else { 512 * MIB }
    }
}

/// The rate of what a tier is compared with, in GB/s; none where it is not installed.
type Reference<'a> = &'a mut dyn FnMut(Subject, Direction) -> anyhow::Result<Option<f64>>;

/// The median and the 99th percentile of times in milliseconds.
fn quantiles(name: &str, mut times_ms: Vec<f64>) -> Vec<Measurement> {
    times_ms.sort_by(f64::total_cmp);
    [("p50", 0.5), ("p99", 0.99)]
        .into_iter()
        .filter_map(|(quantile, share)| {
            let place = ((times_ms.len().checked_sub(1)?) as f64 * share).round() as usize;
            Measurement::from_repeats(format!("{name}_{quantile}"), "ms", vec![times_ms[place]])
        })
        .collect()
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        // It is in a folder of scratch data; what is left there does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
