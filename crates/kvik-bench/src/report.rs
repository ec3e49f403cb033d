//! The results of a bench, as JSON for programs and as a table for people.

use std::io::{self, IsTerminal, Write};

use serde::Serialize;

use crate::machine::Machine;
use kvik_runtime::terminal::{self, Align, Column, Table, bar, grouped};

/// All that one run of a bench found.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The subject: `engine` or `gateway`.
    pub bench: &'static str,
    /// Where it ran.
    pub machine: Machine,
    /// What was measured, so that the run can be repeated.
    pub settings: serde_json::Value,
    /// The settings in words.
    #[serde(skip)]
    pub description: String,
    /// The values, in the order in which they were measured.
    pub results: Vec<Measurement>,
}

/// One value of a report.
#[derive(Debug, Clone, Serialize)]
pub struct Measurement {
    /// Words joined by underscores; the same from run to run.
    pub name: String,
    /// The median of the repeats.
    pub value: f64,
    /// Unit of the value.
    pub unit: &'static str,
    /// The lowest of the repeats.
    pub lowest: f64,
    /// The highest of the repeats.
    pub highest: f64,
    /// How often it was measured.
    pub repeats: usize,
    /// The same measurement of what it is compared with, if there is such.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baseline: Option<Baseline>,
    /// `value` over the baseline's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// What the value or the ratio should be, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub goal: Option<Goal>,
    /// Whether the goal is reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub is_reached: Option<bool>,
}

/// What a measurement is compared with.
#[derive(Debug, Clone, Serialize)]
pub struct Baseline {
    /// What was measured instead.
    pub name: &'static str,
    /// The median of the repeats, in the measurement's unit.
    pub value: f64,
}

/// What a measurement should show.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    /// The largest value.
    AtMost(f64),
    /// The smallest value.
    AtLeast(f64),
    /// The smallest ratio.
    RatioAtLeast(f64),
    /// The largest ratio.
    RatioAtMost(f64),
}

impl Measurement {
    /// The median of `repeats`; `None` if there are none.
    pub fn from_repeats(name: String, unit: &'static str, mut repeats: Vec<f64>) -> Option<Self> {
        let median = median(&mut repeats)?;
        Some(Self {
            name,
            value: rounded(median),
            unit,
            lowest: rounded(*repeats.first()?),
            highest: rounded(*repeats.last()?),
            repeats: repeats.len(),
            baseline: None,
            ratio: None,
            goal: None,
            is_reached: None,
        })
    }

    /// Adds what the value is compared with and what it should be, if that is known.
    #[must_use]
    pub fn compared_with(mut self, baseline: Baseline, goal: Option<Goal>) -> Self {
        let ratio = self.value / baseline.value;
        self.is_reached = goal.map(|goal| match goal {
            Goal::AtMost(largest) => self.value <= largest,
            Goal::AtLeast(smallest) => smallest <= self.value,
            Goal::RatioAtLeast(smallest) => smallest <= ratio,
            Goal::RatioAtMost(largest) => ratio <= largest,
        });
        self.ratio = ratio.is_finite().then_some((ratio * 1e4).round() / 1e4);
        self.baseline = Some(baseline);
        self.goal = goal;
        self
    }
}

impl Measurement {
    /// Adds what the value should be.
    #[must_use]
    pub fn wanted(mut self, goal: Goal) -> Self {
        self.is_reached = match goal {
            Goal::AtMost(largest) => Some(self.value <= largest),
            Goal::AtLeast(smallest) => Some(smallest <= self.value),
            // There is nothing that it would be a ratio of.
            Goal::RatioAtLeast(_) | Goal::RatioAtMost(_) => None,
        };
        self.goal = Some(goal);
        self
    }
}

impl Baseline {
    /// The median of `repeats`; not a number if there are none.
    pub fn new(name: &'static str, mut repeats: Vec<f64>) -> Self {
        Self { name, value: rounded(median(&mut repeats).unwrap_or(f64::NAN)) }
    }
}

impl Report {
    /// Writes the results, with a bar beside each value if standard output is a terminal.
    pub fn write_table(&self, output: &mut impl Write) -> io::Result<()> {
        let machine = &self.machine;
        let (title, dimmed) = (terminal::TITLE, terminal::DIMMED);
        writeln!(output, "{title}{}{title:#}", self.bench)?;
        writeln!(
            output,
            "  {dimmed}{}, {} cores, {}, {}{dimmed:#}",
            machine.cpu, machine.cores, machine.isa, machine.os
        )?;
        writeln!(output, "  {dimmed}{}{dimmed:#}\n", self.description)?;

        if self.results.iter().any(|result| result.baseline.is_some() || result.goal.is_some()) {
            return self.comparison().write(output);
        }
        let mut table = Table::new(vec![
            Column::new("measurement", Align::Left),
            Column::new("median", Align::Right).with_style(terminal::TITLE),
            Column::new("unit", Align::Left),
            Column::new("range", Align::Left).with_style(terminal::DIMMED),
            Column::new("", Align::Left).with_style(terminal::BAR),
        ]);
        let highest = self.results.iter().map(|result| result.value).fold(0.0, f64::max);
        let has_bars = io::stdout().is_terminal();
        for result in &self.results {
            let range = format!("{} to {}", whole(result.lowest), whole(result.highest));
            table.push([
                result.name.clone(),
                whole(result.value),
                result.unit.to_owned(),
                range,
                if has_bars { bar(result.value / highest) } else { String::new() },
            ]);
        }
        table.write(output)
    }

    /// The results beside what they are compared with; values of many units, so there are no bars.
    fn comparison(&self) -> Table {
        let mut table = Table::new(vec![
            Column::new("measurement", Align::Left),
            Column::new("median", Align::Right).with_style(terminal::TITLE),
            Column::new("unit", Align::Left),
            Column::new("range", Align::Left).with_style(terminal::DIMMED),
            Column::new("baseline", Align::Left),
            Column::new("ratio", Align::Right),
            Column::new("goal", Align::Left),
        ]);
        for result in &self.results {
            let baseline = result.baseline.as_ref();
            let goal = result.goal.map(|goal| match goal {
                Goal::AtMost(largest) => format!("at most {}", shown(largest, result.unit)),
                Goal::AtLeast(smallest) => format!("at least {}", shown(smallest, result.unit)),
                Goal::RatioAtLeast(smallest) => format!("ratio at least {smallest:.2}"),
                Goal::RatioAtMost(largest) => format!("ratio at most {largest:.2}"),
            });
            let word = if result.is_reached == Some(true) { "reached" } else { "missed" };
            table.push([
                result.name.clone(),
                shown(result.value, result.unit),
                result.unit.to_owned(),
                format!("{} to {}", shown(result.lowest, result.unit), shown(result.highest, result.unit)),
                baseline.map_or_else(String::new, |known| format!("{} {}", whole(known.value), known.name)),
                result.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}")),
                goal.map_or_else(String::new, |goal| format!("{goal}: {word}")),
            ]);
        }
        table
    }
}

/// The median of `values`, which are sorted; `None` if there are none.
fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    let lower = *values.get((values.len() - 1) / 2)?;
    Some(f64::midpoint(lower, upper))
}

/// Shares and ratios keep three digits after the point, whatever their size.
fn shown(value: f64, unit: &str) -> String {
    if matches!(unit, "ratio" | "share") { format!("{value:.3}") } else { whole(value) }
}

/// Small values keep a digit after the point.
fn whole(value: f64) -> String {
    if value.abs() < 100.0 {
        return format!("{value:.1}");
    }
    let sign = if value < 0.0 { "-" } else { "" };
    format!("{sign}{}", grouped(value.abs().round() as u64))
}

/// To a hundredth: more digits of a speed say nothing. Small values, such as shares, keep four digits.
fn rounded(value: f64) -> f64 {
    let scale = if value.abs() < 10.0 { 1e4 } else { 1e2 };
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_is_the_median_and_the_range_is_kept() {
        let of = |repeats: &[f64]| Measurement::from_repeats("x".to_owned(), "s", repeats.to_vec());
        let texts = |repeats: &[f64]| {
            let result = of(repeats).unwrap();
            [result.lowest, result.value, result.highest].map(|value| value.to_string())
        };
        assert_eq!(texts(&[3.0, 1.0, 2.0]), ["1", "2", "3"]);
        assert_eq!(texts(&[4.0, 1.0]), ["1", "2.5", "4"]);
        assert!(of(&[]).is_none());
    }

    #[test]
    fn values_below_zero_are_grouped_too() {
        assert_eq!([-1_847_296.0, -1.25, 99.0, 1000.0].map(whole), ["-1,847,296", "-1.2", "99.0", "1,000"]);
    }

    #[test]
    fn a_comparison_says_whether_its_goal_is_reached() {
        let compared = |value: f64, goal: Goal| {
            let result = Measurement::from_repeats("x".to_owned(), "s", vec![value]).unwrap();
            result.compared_with(Baseline::new("direct", vec![10.0, 30.0]), Some(goal))
        };
        let slow = compared(15.0, Goal::RatioAtLeast(0.8));
        assert_eq!((slow.ratio, slow.is_reached), (Some(0.75), Some(false)));
        assert_eq!(compared(16.0, Goal::RatioAtLeast(0.8)).is_reached, Some(true));
        assert_eq!(compared(60.0, Goal::AtMost(60.0)).is_reached, Some(true));
        assert_eq!(compared(-1.0, Goal::AtMost(0.0)).is_reached, Some(true));
    }

    #[test]
    fn a_share_just_below_its_goal_misses_it() {
        let share = |value: f64| {
            let result = Measurement::from_repeats("x".to_owned(), "share", vec![value]).unwrap();
            result.wanted(Goal::AtLeast(0.99)).is_reached
        };
        assert_eq!([0.985, 0.9899, 0.99, 1.0].map(share), [Some(false), Some(false), Some(true), Some(true)]);
    }
}
