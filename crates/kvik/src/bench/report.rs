//! The results of a bench, as JSON for programs and as a table for people.

use std::io::{self, IsTerminal, Write};

use serde::Serialize;

use crate::machine::Machine;
use crate::terminal::{self, Align, Column, Table, bar, grouped};

/// All that one run of a bench found.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// The subject: `engine`.
    pub(crate) bench: &'static str,
    pub(crate) machine: Machine,
    /// What was measured, so that the run can be repeated.
    pub(crate) settings: serde_json::Value,
    /// The settings in words.
    #[serde(skip)]
    pub(crate) description: String,
    pub(crate) results: Vec<Measurement>,
}

/// One value of a report.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Measurement {
    /// Words joined by underscores; the same from run to run.
    pub(crate) name: String,
    /// The median of the repeats.
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    /// The lowest of the repeats.
    pub(crate) lowest: f64,
    /// The highest of the repeats.
    pub(crate) highest: f64,
    pub(crate) repeats: usize,
    /// The same measurement of what it is compared with, if there is such.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) baseline: Option<f64>,
    /// `value / baseline`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio: Option<f64>,
}

impl Measurement {
    /// The median of `repeats`; `None` if there are none.
    pub(crate) fn from_repeats(name: String, unit: &'static str, mut repeats: Vec<f64>) -> Option<Self> {
        repeats.sort_by(f64::total_cmp);
        let upper = *repeats.get(repeats.len() / 2)?;
        let lower = *repeats.get((repeats.len() - 1) / 2)?;
        Some(Self {
            name,
            value: rounded(f64::midpoint(lower, upper)),
            unit,
            lowest: rounded(*repeats.first()?),
            highest: rounded(*repeats.last()?),
            repeats: repeats.len(),
            baseline: None,
            ratio: None,
        })
    }
}

impl Report {
    /// Writes the results, with a bar beside each value if standard output is a terminal.
    pub(crate) fn write_table(&self, output: &mut impl Write) -> io::Result<()> {
        let machine = &self.machine;
        let (title, dimmed) = (terminal::TITLE, terminal::DIMMED);
        writeln!(output, "{title}{}{title:#}", self.bench)?;
        writeln!(
            output,
            "  {dimmed}{}, {} cores, {}, {}{dimmed:#}",
            machine.cpu, machine.cores, machine.isa, machine.os
        )?;
        writeln!(output, "  {dimmed}{}{dimmed:#}\n", self.description)?;

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
}

/// Small values keep a digit after the point.
fn whole(value: f64) -> String {
    if value < 100.0 { format!("{value:.1}") } else { grouped(value.round() as u64) }
}

/// To a hundredth: more digits of a speed say nothing.
fn rounded(value: f64) -> f64 {
    (value * 1e2).round() / 1e2
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
}
