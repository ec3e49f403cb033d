//! Many runs side by side.

use std::fmt::Write as _;

use serde::{Serialize, Serializer};

use crate::policy::PolicyKind;

use super::{Trace, optimum, plot, simulate};

/// Who was measured.
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
    /// Who was measured.
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
        plot::svg(self)
    }
}
