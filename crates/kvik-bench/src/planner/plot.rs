//! Draws the time to the first token over the speed of a tier.

use super::{Cell, Speed};
use crate::plot::{Axis, Line, Plot, side_by_side};

/// The modes that are drawn: their places among all, and their names.
const DRAWN: [(usize, &str); 3] = [(0, "load all"), (1, "compute all"), (2, "planner")];

/// Colors that can be told apart without red and green.
const COLORS: [&str; 3] = ["#e69f00", "#56b4e9", "#000000"];

/// Draws a panel for each length of prompts, and in it a line for each mode; of the speeds those that are numbers.
pub(super) fn svg(cells: &[Cell]) -> String {
    let mut lengths: Vec<usize> = cells.iter().map(|cell| cell.n_tokens).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let titled = |n_tokens| (format!("prompts of {n_tokens} tokens"), panel(cells, n_tokens));
    let panels: Vec<(String, Plot)> = lengths.into_iter().map(titled).collect();
    side_by_side(&panels)
}

fn panel(cells: &[Cell], n_tokens: usize) -> Plot {
    let mut points: Vec<(f64, [f64; 3])> = cells
        .iter()
        .filter(|cell| cell.n_tokens == n_tokens)
        .filter_map(|cell| match cell.speed {
            Speed::Megabytes(speed) => {
                Some((f64::from(speed), DRAWN.map(|(mode, _)| middle(&cell.times_ms[mode]))))
            }
            Speed::Unbound | Speed::Memory => None,
        })
        .collect();
    points.sort_by(|one, other| one.0.total_cmp(&other.0));
    let speeds = points.iter().map(|(speed, _)| *speed);
    let longest = points.iter().flat_map(|(_, times)| *times).fold(1.0, f64::max);
    let step = nice_step(longest);
    let n_steps = (longest / step).ceil();
    let line = |drawn: usize| Line {
        name: DRAWN[drawn].1,
        color: COLORS[drawn],
        points: points.iter().map(|(speed, times)| (*speed, times[drawn])).collect(),
    };
    Plot {
        x: Axis {
            title: "speed of the tier",
            ends: [speeds.clone().fold(f64::INFINITY, f64::min), speeds.clone().fold(1.0, f64::max)],
            is_logarithmic: true,
            ticks: speeds.map(|speed| (speed, format!("{speed} MB/s"))).collect(),
        },
        y: Axis {
            title: "time to the first token in ms",
            ends: [0.0, n_steps * step],
            is_logarithmic: false,
            ticks: (0..=n_steps as u32)
                .map(|n| (f64::from(n) * step, (f64::from(n) * step).to_string()))
                .collect(),
        },
        lines: (0..DRAWN.len()).map(line).collect(),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_length_of_prompts_has_a_panel_with_a_line_for_each_mode() {
        let cell = |n_tokens: usize, speed: u32| Cell {
            speed: Speed::Megabytes(speed),
            n_tokens,
            times_ms: [40_000.0, 900.0, 700.0, 41_000.0]
                .map(|time| vec![time / f64::from(speed) * n_tokens as f64 / 1000.0]),
        };
        let mut cells = vec![cell(1000, 10), cell(4000, 10), cell(1000, 100), cell(4000, 100)];
        cells.push(Cell { speed: Speed::Memory, ..cell(4000, 1) });
        let drawing = svg(&cells);
        for title in ["prompts of 1000 tokens", "prompts of 4000 tokens"] {
            assert_eq!(drawing.matches(title).count(), 1, "{drawing}");
        }
        assert_eq!(drawing.matches("<polyline").count(), 6, "three lines a panel");
        assert_eq!(drawing.matches("<circle").count(), 12, "two speeds a line, without memory");
        for (_, name) in DRAWN {
            assert_eq!(drawing.matches(&format!(">{name}</text>")).count(), 2, "{name}");
        }
        assert_eq!(drawing.matches("<g ").count(), drawing.matches("</g>").count());
    }
}
