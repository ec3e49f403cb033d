//! Draws the time to the first token over the speed of a tier.

use super::{Cell, MODES, Speed};
use crate::plot::{Axis, Line, Plot};

const NAMES: [&str; 3] = ["load all", "compute all", "planner"];

/// Colors that can be told apart without red and green.
const COLORS: [&str; 3] = ["#e69f00", "#56b4e9", "#000000"];

/// Draws a line for each mode at the longest prompt; of the speeds those that are numbers.
pub(super) fn svg(cells: &[Cell]) -> String {
    let n_tokens = cells.iter().map(|cell| cell.n_tokens).max().unwrap_or(0);
    let points: Vec<(f64, [f64; 3])> = cells
        .iter()
        .filter(|cell| cell.n_tokens == n_tokens)
        .filter_map(|cell| match cell.speed {
            Speed::Megabytes(speed) => {
                Some((f64::from(speed), cell.times_ms.each_ref().map(|times| middle(times))))
            }
            Speed::Unbound | Speed::Memory => None,
        })
        .collect();
    let speeds = points.iter().map(|(speed, _)| *speed);
    let longest = points.iter().flat_map(|(_, times)| *times).fold(1.0, f64::max);
    let step = nice_step(longest);
    let n_steps = (longest / step).ceil();
    let line = |mode: usize| Line {
        name: NAMES[mode],
        color: COLORS[mode],
        points: points.iter().map(|(speed, times)| (*speed, times[mode])).collect(),
    };
    let plot = Plot {
        x: Axis {
            title: "speed of the tier",
            ends: [speeds.clone().fold(f64::INFINITY, f64::min), speeds.clone().fold(1.0, f64::max)],
            is_logarithmic: true,
            ticks: speeds.map(|speed| (speed, format!("{speed} MB/s"))).collect(),
        },
        y: Axis {
            title: "time to the first token",
            ends: [0.0, n_steps * step],
            is_logarithmic: false,
            ticks: (0..=n_steps as u32)
                .map(|n| (f64::from(n) * step, format!("{} ms", f64::from(n) * step)))
                .collect(),
        },
        lines: (0..MODES.len()).map(line).collect(),
    };
    plot.svg()
}

/// A step of which about five reach `longest`.
fn nice_step(longest: f64) -> f64 {
    let power = 10_f64.powf((longest / 5.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    steps.into_iter().find(|step| longest <= 5.0 * step).unwrap_or(10.0 * power)
}

fn middle(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}
