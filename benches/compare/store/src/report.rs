//! The figures of all rounds, as JSON for programs and as a table for people.

use serde_json::{Value, json};

use crate::hybrid::DiskIo;
use crate::machine;
use crate::sample::Sample;
use crate::workload::MIB;

/// Where the two sides do not do the same.
const NOTES: &[&str] = &[
    "put: kvik syncs its files, at every seal and at the end; foyer has no sync, so only its writes past the \
     page cache are waited for",
    "put: foyer copies every chunk to the buffers of its flushers, which take four times its memory part; \
     kvik's tier writes from where the chunks lie",
    "get: kvik's tier reads into memory of the caller; foyer gives every chunk in memory that it allocates, \
     and keeps it in its memory part, so its figures depend on the allocator",
    "retrieve: one caller, both through 64 MiB of memory; kvik's side begins with the tokens and hashes \
     them, foyer's with keys; kvik may have all of its memory under way and not half of it as by default",
    "checksums: kvik has a CRC-64 of each of 32 sections of a chunk, foyer one XXH64 of the whole",
    "foyer io_uring: its thread polls without a pause, which takes a core; the faster of its two ways of I/O \
     is the baseline of each line",
];

/// All rounds of one length of a chunk.
pub struct Rounds {
    chunk_bytes: usize,
    pub kvik: Vec<Sample>,
    pub foyer_uring: Vec<Sample>,
    pub foyer_psync: Vec<Sample>,
}

/// One figure of both projects.
pub struct Line {
    name: String,
    unit: &'static str,
    kvik: f64,
    foyer: [(DiskIo, f64); 2],
    is_more_better: bool,
}

/// A figure of all rounds of one project.
type Figure = fn(&[Sample]) -> f64;

const FIGURES: &[(&str, &str, bool, Figure)] = &[
    ("put", "GB/s", true, |samples| median(samples, |sample| sample.put_gb_per_s)),
    ("get", "GB/s", true, |samples| median(samples, |sample| sample.get_gb_per_s)),
    ("retrieve", "GB/s", true, |samples| median(samples, |sample| sample.retrieve_gb_per_s)),
    ("get_one_p50", "ms", false, |samples| quantile(samples, |sample| &sample.single_gets_ms, 0.5)),
    ("get_one_p99", "ms", false, |samples| quantile(samples, |sample| &sample.single_gets_ms, 0.99)),
    ("retrieve_one_p50", "ms", false, |samples| quantile(samples, |sample| &sample.single_retrieves_ms, 0.5)),
    ("retrieve_one_p99", "ms", false, |samples| {
        quantile(samples, |sample| &sample.single_retrieves_ms, 0.99)
    }),
    ("reopen", "ms", false, |samples| median(samples, |sample| sample.reopen_ms)),
    ("dropped", "chunks", false, |samples| sum(samples, |sample| sample.n_dropped)),
    ("lost", "chunks", false, |samples| sum(samples, |sample| sample.n_lost)),
    ("missed", "reads", false, |samples| sum(samples, |sample| sample.n_missed)),
];

impl Rounds {
    pub fn new(chunk_bytes: usize) -> Self {
        Self { chunk_bytes, kvik: Vec::new(), foyer_uring: Vec::new(), foyer_psync: Vec::new() }
    }

    pub fn lines(&self) -> Vec<Line> {
        let line = |&(name, unit, is_more_better, figure): &(&str, &'static str, bool, Figure)| Line {
            name: format!("{name}_{}mib", self.chunk_bytes / MIB),
            unit,
            kvik: figure(&self.kvik),
            foyer: [(DiskIo::Uring, figure(&self.foyer_uring)), (DiskIo::Psync, figure(&self.foyer_psync))],
            is_more_better,
        };
        FIGURES.iter().map(line).collect()
    }
}

impl Line {
    /// The better of foyer's figures.
    fn baseline(&self) -> (DiskIo, f64) {
        let [uring, psync] = self.foyer;
        let is_uring_better = if self.is_more_better { psync.1 < uring.1 } else { uring.1 < psync.1 };
        if is_uring_better { uring } else { psync }
    }

    /// kvik's figure over the baseline's; none where that is zero.
    fn ratio(&self) -> Option<f64> {
        Some(self.kvik / self.baseline().1).filter(|ratio| ratio.is_finite())
    }

    fn to_json(&self) -> Value {
        let (io, value) = self.baseline();
        let foyer: serde_json::Map<String, Value> =
            self.foyer.iter().map(|(io, value)| (io.name().to_owned(), json!(rounded(*value)))).collect();
        json!({
            "name": self.name, "value": rounded(self.kvik), "unit": self.unit,
            "baseline": {"name": io.name(), "value": rounded(value)}, "ratio": self.ratio().map(rounded),
            "all_baselines": foyer,
        })
    }
}

/// The report for programs.
pub fn to_json(lines: &[Line], settings: &Value, load_averages: &[String; 2]) -> Value {
    json!({
        "bench": "compare_store", "machine": machine::to_json(load_averages), "settings": settings,
        "results": lines.iter().map(Line::to_json).collect::<Vec<_>>(), "notes": NOTES,
    })
}

/// The report for people.
pub fn print_table(lines: &[Line], settings: &Value, load_averages: &[String; 2]) {
    println!("{settings}");
    println!("load average {} at the begin, {} at the end\n", load_averages[0], load_averages[1]);
    let [uring, psync] = [DiskIo::Uring, DiskIo::Psync].map(DiskIo::name);
    println!("{:<22} {:<7} {:>10} {uring:>15} {psync:>12} {:>8}", "", "unit", "kvik", "ratio");
    for line in lines {
        let [uring, psync] = line.foyer.map(|(_, value)| shown(value));
        let ratio = line.ratio().map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        let kvik = shown(line.kvik);
        println!("{:<22} {:<7} {kvik:>10} {uring:>15} {psync:>12} {ratio:>8}", line.name, line.unit);
    }
    println!();
    for note in NOTES {
        println!("- {note}");
    }
}

fn median(samples: &[Sample], value: fn(&Sample) -> f64) -> f64 {
    nearest_rank(samples.iter().map(value).collect(), 0.5)
}

/// Over the single reads of all rounds.
fn quantile(samples: &[Sample], values: fn(&Sample) -> &Vec<f64>, share: f64) -> f64 {
    nearest_rank(samples.iter().flat_map(values).copied().collect(), share)
}

fn sum(samples: &[Sample], value: fn(&Sample) -> usize) -> f64 {
    samples.iter().map(value).sum::<usize>() as f64
}

/// The smallest value that at least this share of all does not exceed; not a number if there are none.
fn nearest_rank(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (share * values.len() as f64).ceil().max(1.0) as usize;
    values.get(rank - 1).copied().unwrap_or(f64::NAN)
}

fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

fn shown(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}
