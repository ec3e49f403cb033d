//! Draws the time to the first token over the load.

use crate::plot::{Axis, Line, Plot};
use crate::replay::Policy;

use super::Cell;

/// Colors that can be told apart without red and green, in order of the policies.
const COLORS: [&str; 5] = ["#999999", "#e69f00", "#56b4e9", "#0072b2", "#d55e00"];

/// Draws a line for each policy, its name at its end.
pub(super) fn svg(cells: &[Cell]) -> String {
    let range = |of: fn(&Cell) -> f64| {
        let values = cells.iter().map(of);
        [values.clone().fold(f64::INFINITY, f64::min), values.fold(0.0, f64::max)]
    };
    let seconds = range(|cell| cell.outcome.ttft_mean_s.max(1e-3));
    let first_decade = seconds[0].min(1e6).log10().floor() as i32;
    let last_decade = (seconds[1].max(1e-3).log10().ceil() as i32).max(first_decade + 1);
    let decades = (first_decade..=last_decade).map(|decade| 10_f64.powi(decade));
    let loads = cells.iter().filter(|cell| cell.policy == Policy::Kv).map(|cell| cell.load);
    let line = |(policy, color): (Policy, &'static str)| {
        let points = cells.iter().filter(|cell| cell.policy == policy);
        let points = points.map(|cell| (cell.load, cell.outcome.ttft_mean_s)).collect();
        Line { name: policy.name(), color, points }
    };
    let plot = Plot {
        x: Axis {
            title: "load, of saturation",
            ends: range(|cell| cell.load),
            is_logarithmic: false,
            ticks: loads.map(|load| (load, format!("{:.0} %", load * 100.0))).collect(),
        },
        y: Axis {
            title: "mean TTFT",
            ends: [first_decade, last_decade].map(|decade| 10_f64.powi(decade)),
            is_logarithmic: true,
            ticks: decades.map(|seconds| (seconds, format!("{seconds} s"))).collect(),
        },
        lines: Policy::ALL.into_iter().zip(COLORS).map(line).collect(),
    };
    plot.svg()
}
