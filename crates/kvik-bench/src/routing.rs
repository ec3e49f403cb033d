//! What a way of placing requests is worth: time to the first token and tokens found, on mock workers.
//!
//! A trace is replayed in virtual time at some loads; see [`crate::replay`]. A load is a part of the saturation
//! of the best policy: the rate at which the prompts keep all workers busy from the first arrival to the last.

mod plot;

use std::io::{self, Write};

use crate::replay::{
    NamedAffinity, Policy, ReplayConfig, ReplayOutcome, ReplayRequest, named_affinity, run, saturation,
};
use crate::sim::{TOKENS_PER_BLOCK, Trace};
use anyhow::Context as _;
use serde_json::json;

use crate::report::{Baseline, Goal, Measurement};
use kvik_runtime::terminal::{self, Align, Column, Table};

/// Load at which named conversations are replayed: one for which fleets are planned.
const AFFINITY_LOAD: f64 = 0.7;

/// What is measured.
#[derive(Debug, Clone)]
pub struct RoutingBenchOptions {
    /// Where the trace comes from, in words.
    pub trace_name: String,
    /// Blocks that a worker can keep.
    pub cache_blocks: usize,
    /// Room above the mean load that the ring gives a worker.
    pub load_factor: f64,
    /// Parts of the saturation.
    pub loads: Vec<f64>,
}

/// Runs the replays.
#[derive(Debug)]
pub struct RoutingBench {
    options: RoutingBenchOptions,
    config: ReplayConfig,
    requests: Vec<ReplayRequest>,
    /// Of each policy in its order, as multiples of the trace's own speed.
    saturations: Vec<f64>,
}

/// What one policy came to at one load.
#[derive(Debug)]
pub struct Cell {
    /// The load as a part of the saturation.
    pub load: f64,
    /// How requests were placed.
    pub policy: Policy,
    /// The figures.
    pub outcome: ReplayOutcome,
}

/// A figure of an outcome.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) is_better_if_less: bool,
    pub(crate) of: fn(&ReplayOutcome) -> f64,
}

/// The figures that are reported.
pub(crate) const FIGURES: [Figure; 3] = [
    Figure {
        name: "ttft_mean",
        unit: "ms",
        is_better_if_less: true,
        of: |outcome| outcome.ttft_mean_s * 1e3,
    },
    Figure { name: "ttft_p99", unit: "ms", is_better_if_less: true, of: |outcome| outcome.ttft_p99_s * 1e3 },
    Figure { name: "hit", unit: "%", is_better_if_less: false, of: ReplayOutcome::hit_percent },
];

impl RoutingBench {
    /// Takes the requests of a trace and finds where each policy saturates.
    ///
    /// # Errors
    /// If the trace has no two arrivals at different times.
    pub fn try_new(
        options: RoutingBenchOptions,
        trace: &Trace,
        mut found: impl FnMut(Policy),
    ) -> anyhow::Result<Self> {
        let requests: Vec<ReplayRequest> = trace
            .requests()
            .iter()
            .map(|request| ReplayRequest {
                arrival_us: request.timestamp * 1000,
                prompt_tokens: request.input_length,
                output_tokens: u64::from(request.output_length),
                blocks: request.hash_ids.clone(),
            })
            .collect();
        anyhow::ensure!(
            requests.last().is_some_and(|request| request.arrival_us > 0),
            "a trace needs arrivals at different times"
        );
        let config = ReplayConfig {
            block_tokens: TOKENS_PER_BLOCK,
            cache_blocks: options.cache_blocks,
            load_factor: options.load_factor,
            ..ReplayConfig::default()
        };
        let mut saturations = Vec::new();
        for policy in Policy::ALL {
            saturations.push(saturation(&requests, policy, &config).context("find the saturation")?);
            found(policy);
        }
        Ok(Self { options, config, requests, saturations })
    }

    /// Replays the trace at every load with every policy.
    pub fn measure(&self, mut measured: impl FnMut(Policy)) -> anyhow::Result<Vec<Cell>> {
        let mut cells = Vec::new();
        for &load in &self.options.loads {
            for policy in Policy::ALL {
                let outcome = run(&self.requests, policy, load * self.best_saturation(), &self.config)
                    .context("replay the trace")?;
                cells.push(Cell { load, policy, outcome });
                measured(policy);
            }
        }
        Ok(cells)
    }

    /// Replays named conversations at 70 % load.
    pub fn affinity(&self) -> anyhow::Result<NamedAffinity> {
        named_affinity(AFFINITY_LOAD, &self.config).context("replay named conversations")
    }

    /// What is measured, for programs.
    pub fn settings(&self) -> serde_json::Value {
        let config = &self.config;
        let saturations: serde_json::Map<String, serde_json::Value> = Policy::ALL
            .into_iter()
            .zip(&self.saturations)
            .map(|(policy, speed)| (policy.name().to_owned(), json!(speed * self.rate())))
            .collect();
        json!({
            "trace": self.options.trace_name,
            "requests": self.requests.len(),
            "workers": config.n_workers,
            "cache_blocks": config.cache_blocks,
            "block_tokens": config.block_tokens,
            "prefill_tokens_per_s": config.prefill_tokens_per_s,
            "prefill_fixed_ms": config.prefill_fixed_us as f64 / 1e3,
            "decode_token_ms": config.decode_token_us as f64 / 1e3,
            "event_delay_ms": config.event_delay_us as f64 / 1e3,
            "load_factor": config.load_factor,
            "kv_load_factor": config.kv_load_factor,
            "saturation_requests_per_s": saturations,
        })
    }

    /// What is measured, for people.
    pub fn description(&self) -> String {
        format!(
            "{}: {} requests on {} mock workers of {} blocks; saturation {:.1} requests/s",
            self.options.trace_name,
            self.requests.len(),
            self.config.n_workers,
            self.config.cache_blocks,
            self.best_saturation() * self.rate(),
        )
    }

    fn best_saturation(&self) -> f64 {
        self.saturations.iter().copied().fold(0.0, f64::max)
    }

    /// Requests a second at the trace's own speed.
    fn rate(&self) -> f64 {
        let last_us = self.requests.last().map_or(0, |request| request.arrival_us);
        self.requests.len() as f64 / (last_us as f64 / 1e6)
    }
}

/// How well named conversations stay with their owners, as measurements.
pub fn affinity_measurements(affinity: &NamedAffinity) -> Vec<Measurement> {
    let rows = [
        ("seq_affinity_owner_share", 100.0 * affinity.owner_share, Goal::RatioAtLeast(1.0), 99.0),
        (
            "seq_affinity_max_load_over_bound",
            100.0 * affinity.max_load_over_bound,
            Goal::AtMost(100.0),
            100.0,
        ),
    ];
    let measured = rows.into_iter().filter_map(|(name, value, goal, wanted)| {
        let result = Measurement::from_repeats(name.to_owned(), "%", vec![value])?;
        Some(result.compared_with(Baseline::new("wanted", vec![wanted]), Some(goal)))
    });
    measured.collect()
}

/// Writes the line below the table.
pub fn write_affinity(affinity: &NamedAffinity, output: &mut impl Write) -> io::Result<()> {
    writeln!(
        output,
        "\n  {} turns of named conversations at {:.0} % load: {:.2} % on the owner, at most {:.0} % of a bound and one request",
        affinity.n_turns,
        100.0 * affinity.load,
        100.0 * affinity.owner_share,
        100.0 * affinity.max_load_over_bound,
    )
}

/// The figures as measurements; those of the choice by KV beside the best of the others.
pub fn measurements(cells: &[Cell]) -> Vec<Measurement> {
    let mut results = Vec::new();
    for cell in cells {
        for figure in FIGURES {
            let percent = (cell.load * 100.0).round();
            let name = format!("{}_{}_at_{percent}", figure.name, cell.policy.name());
            let value = (figure.of)(&cell.outcome);
            let result = Measurement::from_repeats(name, figure.unit, vec![value]);
            results.extend(result.map(|result| match best_other(cells, cell, figure) {
                Some(other) if cell.policy == Policy::Kv => {
                    let baseline = (figure.of)(&other.outcome);
                    let goal = if figure.is_better_if_less {
                        Goal::AtMost(baseline)
                    } else {
                        Goal::RatioAtLeast(1.0)
                    };
                    result.compared_with(Baseline::new(other.policy.name(), vec![baseline]), Some(goal))
                }
                _ => result,
            }));
        }
    }
    results
}

/// Writes a row for each load and policy.
pub fn write_table(cells: &[Cell], description: &str, output: &mut impl Write) -> io::Result<()> {
    let (title, dimmed) = (terminal::TITLE, terminal::DIMMED);
    writeln!(output, "{title}routing{title:#}\n  {dimmed}{description}{dimmed:#}\n")?;
    let mut table = Table::new(vec![
        Column::new("load", Align::Right),
        Column::new("policy", Align::Left),
        Column::new("mean TTFT", Align::Right),
        Column::new("p99 TTFT", Align::Right),
        Column::new("tokens found", Align::Right),
        Column::new("best in", Align::Left).with_style(terminal::DIMMED),
    ]);
    for cell in cells {
        let is_best = |figure: &&Figure| {
            let (value, sign) =
                ((figure.of)(&cell.outcome), if figure.is_better_if_less { 1.0 } else { -1.0 });
            let beside = cells.iter().filter(|other| other.load.total_cmp(&cell.load).is_eq());
            beside.map(|other| (figure.of)(&other.outcome)).all(|other| value * sign <= other * sign)
        };
        let best_in: Vec<&str> = FIGURES.iter().filter(is_best).map(|figure| figure.name).collect();
        table.push([
            format!("{:.0} %", cell.load * 100.0),
            cell.policy.name().to_owned(),
            format!("{:.2} s", cell.outcome.ttft_mean_s),
            format!("{:.2} s", cell.outcome.ttft_p99_s),
            format!("{:.1} %", cell.outcome.hit_percent()),
            best_in.join(", "),
        ]);
    }
    table.write(output)
}

/// The mean time to the first token over the load as an SVG document.
pub fn svg(cells: &[Cell]) -> String {
    plot::svg(cells)
}

/// The other policy that is the best in a figure at the load of `cell`.
fn best_other<'a>(cells: &'a [Cell], cell: &Cell, figure: Figure) -> Option<&'a Cell> {
    let sign = if figure.is_better_if_less { 1.0 } else { -1.0 };
    cells
        .iter()
        .filter(|other| other.load.total_cmp(&cell.load).is_eq() && other.policy != cell.policy)
        .min_by(|left, right| {
            (sign * (figure.of)(&left.outcome)).total_cmp(&(sign * (figure.of)(&right.outcome)))
        })
}

#[cfg(test)]
mod tests {
    use crate::sim::synthetic::Chats;

    use super::*;

    fn options() -> RoutingBenchOptions {
        let trace_name = "chats".to_owned();
        RoutingBenchOptions { trace_name, cache_blocks: 500, load_factor: 0.25, loads: vec![0.5, 0.9] }
    }

    fn bench() -> RoutingBench {
        let chats = Chats { n_requests: 600, rate: 3.0, think_s: 20.0, next_turn: 0.8, seed: 1 };
        RoutingBench::try_new(options(), &chats.trace().unwrap(), |_| {}).unwrap()
    }

    #[test]
    fn the_choice_by_kv_is_compared_with_the_best_of_the_others() {
        let bench = bench();
        let cells = bench.measure(|_| {}).unwrap();
        let results = measurements(&cells);
        assert_eq!(results.len(), 2 * Policy::ALL.len() * FIGURES.len());
        let compared: Vec<_> = results.iter().filter(|result| result.baseline.is_some()).collect();
        assert_eq!(compared.len(), 2 * FIGURES.len());
        for result in compared {
            assert!(result.name.contains("_kv_at_"), "{}", result.name);
            assert_eq!(result.is_reached, Some(true), "{result:?}");
        }
    }

    #[test]
    fn the_table_has_a_row_and_the_plot_a_line_for_each_policy() {
        let cells = bench().measure(|_| {}).unwrap();
        let mut table = Vec::new();
        write_table(&cells, "chats", &mut table).unwrap();
        let table = String::from_utf8(table).unwrap();
        let drawing = svg(&cells);
        for policy in Policy::ALL {
            assert_eq!(table.matches(&format!(" {} ", policy.name())).count(), 2, "{table}");
            assert!(drawing.contains(&format!(">{}</text>", policy.name())));
        }
        assert_eq!(drawing.matches("<polyline").count(), Policy::ALL.len());
    }

    #[test]
    fn a_trace_of_one_moment_is_refused() {
        let chats = Chats { n_requests: 1, rate: 1.0, think_s: 1.0, next_turn: 0.0, seed: 1 };
        assert!(RoutingBench::try_new(options(), &chats.trace().unwrap(), |_| {}).is_err());
    }
}
