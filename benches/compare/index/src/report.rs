//! The figures of all rounds, as JSON for programs and as a table for people.

use std::fs;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::{Contender, Sample, machine};

/// Where the sides do not do the same.
const NOTES: &[&str] = &[
    "ingest: kvik takes groups of batches up with as many threads as Dynamo's pool and the one are that hands events over",
    "ingest_singly: kvik has one thread, Dynamo's pool the same as before",
    "ingest: Dynamo takes a block's own hash and its sequence hash, kvik one key; here both are the same number",
    "lookup: Dynamo gives a new hash map, kvik fills a list whose memory is used again; the plain radix tree takes a copy \
     of the query, which is counted",
    "removal: whole sequences from the first block on; kvik takes away the repetitions that it counted, Dynamo has none",
    "exactness: a block that comes back after a hole counts again in kvik, and not in Dynamo (kvik bench index)",
];

/// Clock ticks of a second in /proc, the same on every Linux that this runs on.
const TICKS_PER_S: f64 = 100.0;

/// All rounds of one depth.
pub struct Rounds {
    depth: usize,
    samples: Vec<(Contender, Sample)>,
}

/// One figure of all indexes.
pub struct Line {
    name: String,
    figure: &'static Figure,
    kvik: f64,
    /// Dynamo's default, and its plain tree if that was measured.
    dynamo: Vec<(Contender, f64)>,
}

/// How a figure is taken and what is wanted of it.
struct Figure {
    name: &'static str,
    unit: &'static str,
    is_more_better: bool,
    of: fn(&Sample) -> f64,
    /// The ratio to Dynamo's default that is wanted: at least this, or at most if less is better.
    wanted: Option<f64>,
}

const FIGURES: &[Figure] = &[
    Figure { name: "ingest", unit: "M/s", is_more_better: true, of: |it| it.ingest, wanted: Some(2.0) },
    Figure {
        name: "ingest_singly",
        unit: "M/s",
        is_more_better: true,
        of: |it| it.ingest_singly,
        wanted: None,
    },
    Figure {
        name: "ingest_per_cpu",
        unit: "M/s",
        is_more_better: true,
        of: |it| it.ingest_per_cpu,
        wanted: None,
    },
    Figure {
        name: "lookup_p50",
        unit: "ns",
        is_more_better: false,
        of: |it| it.lookup_p50_ns,
        wanted: Some(1.0),
    },
    Figure {
        name: "lookup_p99",
        unit: "ns",
        is_more_better: false,
        of: |it| it.lookup_p99_ns,
        wanted: Some(1.0),
    },
    Figure {
        name: "bytes_an_entry",
        unit: "B",
        is_more_better: false,
        of: |it| it.bytes_per_entry,
        wanted: Some(0.5),
    },
    Figure { name: "removal", unit: "M/s", is_more_better: true, of: |it| it.removal, wanted: None },
];

impl Contender {
    fn name(self) -> &'static str {
        match self {
            Self::Kvik => "kvik",
            Self::Crtc => "dynamo_crtc",
            Self::RadixTree => "dynamo_radix_tree",
        }
    }
}

impl Rounds {
    pub fn new(depth: usize) -> Self {
        Self { depth, samples: Vec::new() }
    }

    /// Adds a round.
    ///
    /// # Errors
    /// If its answers are others than those before.
    pub fn add(&mut self, contender: Contender, sample: Sample) -> Result<()> {
        if let Some((other, first)) = self.samples.first() {
            let (name, other) = (contender.name(), other.name());
            ensure!(first.checksum == sample.checksum, "{name} answers otherwise than {other}");
        }
        self.samples.push((contender, sample));
        Ok(())
    }

    pub fn lines(&self) -> Vec<Line> {
        let line = |figure: &'static Figure| {
            let dynamo = [Contender::Crtc, Contender::RadixTree];
            let dynamo = dynamo.into_iter().filter_map(|it| Some((it, self.best(it, figure)?))).collect();
            let name = format!("{}_depth_{}", figure.name, self.depth);
            Line { name, figure, kvik: self.best(Contender::Kvik, figure).unwrap_or(f64::NAN), dynamo }
        };
        FIGURES.iter().map(line).collect()
    }

    fn best(&self, contender: Contender, figure: &Figure) -> Option<f64> {
        let values = self.samples.iter().filter(|(it, _)| *it == contender).map(|(_, it)| (figure.of)(it));
        if figure.is_more_better { values.reduce(f64::max) } else { values.reduce(f64::min) }
    }
}

impl Line {
    /// Dynamo's default.
    fn baseline(&self) -> (Contender, f64) {
        self.dynamo.first().copied().unwrap_or((Contender::Crtc, f64::NAN))
    }

    fn ratio(&self) -> Option<f64> {
        Some(self.kvik / self.baseline().1).filter(|ratio| ratio.is_finite())
    }

    /// What is wanted, and whether it is reached.
    fn goal(&self) -> Option<(String, bool)> {
        let (wanted, ratio) = (self.figure.wanted?, self.ratio()?);
        if self.figure.is_more_better {
            return Some((format!("at least {wanted}"), wanted <= ratio));
        }
        Some((format!("at most {wanted}"), ratio <= wanted))
    }

    fn to_json(&self) -> Value {
        let (contender, value) = self.baseline();
        let all: serde_json::Map<String, Value> =
            self.dynamo.iter().map(|(it, value)| (it.name().to_owned(), json!(rounded(*value)))).collect();
        json!({
            "name": self.name, "value": rounded(self.kvik), "unit": self.figure.unit,
            "baseline": {"name": contender.name(), "value": rounded(value)}, "ratio": self.ratio().map(rounded),
            "is_reached": self.goal().map(|(_, is_reached)| is_reached), "all_baselines": all,
        })
    }
}

/// The report for programs.
pub fn to_json(lines: &[Line], settings: &Value, load_averages: &[String; 2]) -> Value {
    json!({
        "bench": "compare_index", "machine": machine::to_json(load_averages), "settings": settings,
        "results": lines.iter().map(Line::to_json).collect::<Vec<_>>(), "notes": NOTES,
    })
}

/// The report for people.
pub fn print_table(lines: &[Line], settings: &Value, load_averages: &[String; 2]) {
    println!("{settings}");
    println!("load average {} at the begin, {} at the end\n", load_averages[0], load_averages[1]);
    println!(
        "{:<26} {:<4} {:>9} {:>12} {:>12} {:>6}  wanted of the ratio",
        "", "unit", "kvik", "CRTC", "RadixTree", "ratio"
    );
    for line in lines {
        let value = |contender: Contender| {
            let found = line.dynamo.iter().find(|(it, _)| *it == contender);
            found.map_or_else(String::new, |(_, value)| shown(*value))
        };
        let ratio = line.ratio().map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        let goal = line.goal().map_or_else(String::new, |(goal, is_reached)| {
            format!("{goal}: {}", if is_reached { "reached" } else { "MISSED" })
        });
        let (crtc, radix) = (value(Contender::Crtc), value(Contender::RadixTree));
        let kvik = shown(line.kvik);
        println!(
            "{:<26} {:<4} {kvik:>9} {crtc:>12} {radix:>12} {ratio:>6}  {goal}",
            line.name, line.figure.unit
        );
    }
    println!();
    for note in NOTES {
        println!("- {note}");
    }
}

/// Processor time of all threads of this process.
pub fn cpu_s() -> f64 {
    let text = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name of the program may have spaces; what follows it has not.
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / TICKS_PER_S
}

fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

fn shown(value: f64) -> String {
    if value >= 1000.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}
