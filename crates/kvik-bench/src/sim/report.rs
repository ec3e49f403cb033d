//! Many runs side by side.

use std::fmt::Write as _;

use serde::{Serialize, Serializer};

use kvik_store::policy::PolicyKind;

use super::{Trace, optimum, simulate};
use crate::plot::{Axis, Line, Plot};

/// Colors that can be told apart without red and green, in order of the contenders.
const COLORS: [&str; 8] =
    ["#0072b2", "#e69f00", "#56b4e9", "#cc79a7", "#999999", "#8c6d31", "#d55e00", "#000000"];

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Contender {
    /// A policy.
    Policy(PolicyKind),
    /// A cache that knows the future.
    Optimum,
}

/// What one run of a trace at one capacity came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// What was measured.
    pub contender: Contender,
    /// Size of the cache.
    pub capacity_blocks: usize,
    /// Blocks of all requests.
    pub n_blocks: u64,
    /// Those of them that were found.
    pub n_hit_blocks: u64,
    /// Blocks that were written into the cache; unknown for the optimum.
    pub n_stored_blocks: Option<u64>,
}

/// The outcomes of a trace for some policies and the optimum at some capacities.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// How many requests were replayed.
    pub n_requests: usize,
    /// Blocks of all requests.
    pub n_blocks: u64,
    /// By capacity, then by contender; the optimum is last.
    pub outcomes: Vec<Outcome>,
}

impl Contender {
    /// The policy's name, or `optimum`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Policy(kind) => kind.name(),
            Self::Optimum => "optimum",
        }
    }
}

impl Serialize for Contender {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl Outcome {
    /// Blocks found of a hundred asked for.
    pub fn hit_percent(&self) -> f64 {
        100.0 * self.n_hit_blocks as f64 / self.n_blocks.max(1) as f64
    }
}

impl Report {
    /// Replays the trace for every policy and the optimum at every capacity.
    pub fn run(trace: &Trace, kinds: &[PolicyKind], capacities_blocks: &[usize]) -> Self {
        let mut outcomes = Vec::new();
        for &capacity_blocks in capacities_blocks {
            outcomes.extend(kinds.iter().map(|&kind| simulate(trace, kind, capacity_blocks)));
            outcomes.push(optimum(trace, capacity_blocks));
        }
        Self { n_requests: trace.requests().len(), n_blocks: trace.n_blocks(), outcomes }
    }

    /// The contenders in order.
    pub fn contenders(&self) -> Vec<Contender> {
        let mut contenders = Vec::new();
        for outcome in &self.outcomes {
            if !contenders.contains(&outcome.contender) {
                contenders.push(outcome.contender);
            }
        }
        contenders
    }

    /// The outcomes of one contender, in order of the capacities.
    pub fn of(&self, contender: Contender) -> impl Iterator<Item = &Outcome> {
        self.outcomes.iter().filter(move |outcome| outcome.contender == contender)
    }

    /// A table of block hit ratios in percent: a row for each capacity, a column for each contender.
    pub fn table(&self) -> String {
        let contenders = self.contenders();
        let mut text = format!("{:>15}", "capacity");
        for contender in &contenders {
            // Writing to a string cannot fail.
            let _ = write!(text, " {:>8}", contender.name());
        }
        let Some(&first) = contenders.first() else { return text };
        for row in self.of(first) {
            let _ = write!(text, "\n{:>8} blocks", row.capacity_blocks);
            for &contender in &contenders {
                let cell = self.of(contender).find(|other| other.capacity_blocks == row.capacity_blocks);
                let _ = write!(text, " {:>6.2} %", cell.map_or(f64::NAN, Outcome::hit_percent));
            }
        }
        text.push('\n');
        text
    }

    /// The hit ratios over the capacity as an SVG document.
    pub fn svg(&self) -> String {
        let mut capacities: Vec<usize> =
            self.outcomes.iter().map(|outcome| outcome.capacity_blocks.max(1)).collect();
        capacities.sort_unstable();
        capacities.dedup();
        let best = self.outcomes.iter().map(Outcome::hit_percent).fold(0.0, f64::max);
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| best / step <= 8.0).unwrap_or(20.0);
        let n_steps = (best / step).ceil().max(1.0);
        let percents = (0..=n_steps as u32).map(|number| f64::from(number) * step);
        let line = |(contender, color): (Contender, &'static str)| {
            let points = self.of(contender);
            let points = points.map(|outcome| (outcome.capacity_blocks as f64, outcome.hit_percent()));
            let mut points: Vec<(f64, f64)> = points.collect();
            points.sort_by(|left, right| left.0.total_cmp(&right.0));
            Line { name: contender.name(), color, points }
        };
        let plot = Plot {
            x: Axis {
                title: "capacity in blocks",
                ends: [capacities.first(), capacities.last()].map(|end| *end.unwrap_or(&1) as f64),
                is_logarithmic: true,
                ticks: capacities.iter().map(|capacity| (*capacity as f64, capacity.to_string())).collect(),
            },
            y: Axis {
                title: "block hit ratio",
                ends: [0.0, n_steps * step],
                is_logarithmic: false,
                ticks: percents.map(|percent| (percent, format!("{percent} %"))).collect(),
            },
            lines: self.contenders().into_iter().zip(COLORS.into_iter().cycle()).map(line).collect(),
        };
        plot.svg()
    }
}
