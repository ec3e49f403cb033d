//! The picture of a demo: two panels side by side.

use std::fmt::Write as _;
use std::time::Duration;

use super::tally::{SOURCES, Tally};
use super::{DemoOutcome, Run};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 380.0;
/// The panel of times: its left, right, upper and lower edge.
const TIMES: [f64; 4] = [70.0, 560.0, 60.0, 320.0];
/// The panel of sources.
const BARS: [f64; 4] = [640.0, 870.0, 60.0, 320.0];
/// Width of a bar.
const BAR: f64 = 74.0;
/// Slices of time that have a median each.
const N_SLICES: usize = 20;

/// Gray for what is compared with, and one color that stands out.
const RUN_COLORS: [&str; 2] = ["#8a8f98", "#0f766e"];
/// From near to far, and last what was computed.
const SOURCE_COLORS: [&str; SOURCES.len() + 1] = ["#0f766e", "#2ba59a", "#7cc8bf", "#c2e4df", "#e5e7eb"];

/// Draws the outcome as an SVG document.
pub(super) fn draw(outcome: &DemoOutcome) -> String {
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"#1f2937\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    draw_times(outcome, &mut text);
    draw_bars(outcome, &mut text);
    text.push_str("</svg>\n");
    text
}

// Writing to a string cannot fail, so its results are not looked at below.

fn draw_times(outcome: &DemoOutcome, text: &mut String) {
    let [left, right, top, bottom] = TIMES;
    let tallies = Run::ALL.map(|run| outcome.tally(run));
    let medians = tallies.map(|tally| tally.medians_ms(outcome.duration, N_SLICES));
    let largest = medians.iter().flatten().flatten().copied().fold(1.0, f64::max);
    let step = tick_step(largest);
    let ceiling = step * (largest / step).ceil();
    let y_of = |ms: f64| bottom - ms / ceiling * (bottom - top);
    let x_of = |time: Duration| {
        left + time.as_secs_f64() / outcome.duration.as_secs_f64().max(1e-9) * (right - left)
    };
    let _ = writeln!(
        text,
        "<text x=\"{left}\" y=\"26\" font-size=\"15\" font-weight=\"600\">Time to first token</text>\n\
         <text x=\"{left}\" y=\"44\" fill=\"#6b7280\">median of each {:.1} s, in milliseconds</text>",
        outcome.duration.as_secs_f64() / N_SLICES as f64
    );
    let mut tick = 0.0;
    while tick <= ceiling {
        let y = y_of(tick);
        let _ = writeln!(
            text,
            "<line x1=\"{left}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#e5e7eb\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{tick:.0}</text>",
            left - 8.0,
            y + 4.0
        );
        tick += step;
    }
    for seconds in (0..=outcome.duration.as_secs()).step_by(2) {
        let x = x_of(Duration::from_secs(seconds));
        let _ = writeln!(
            text,
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{seconds} s</text>",
            bottom + 20.0
        );
    }
    if let Some(killed_at) = outcome.with.killed_at {
        let x = x_of(killed_at);
        let _ = writeln!(
            text,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\" stroke=\"#dc2626\" \
             stroke-dasharray=\"4 3\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"#dc2626\">a worker is killed</text>",
            x + 6.0,
            top + 12.0
        );
    }
    for ((run, medians), color) in Run::ALL.into_iter().zip(&medians).zip(RUN_COLORS) {
        let slice = outcome.duration / N_SLICES as u32;
        let points = medians
            .iter()
            .enumerate()
            .filter_map(|(idx, median)| Some((x_of(slice * idx as u32 + slice / 2), y_of((*median)?))));
        let points: Vec<(f64, f64)> = points.collect();
        let mut path = String::new();
        for (x, y) in &points {
            let _ = write!(path, "{x:.1},{y:.1} ");
        }
        let _ = writeln!(
            text,
            "<polyline fill=\"none\" stroke-width=\"2.5\" stroke-linejoin=\"round\" stroke=\"{color}\" points=\"{path}\"/>"
        );
        if let Some((x, y)) = points.last() {
            let _ = writeln!(
                text,
                "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{color}\" font-weight=\"600\">{}</text>",
                x + 8.0,
                y + 4.0,
                run.name().trim_end_matches(" kvik")
            );
        }
    }
}

fn draw_bars(outcome: &DemoOutcome, text: &mut String) {
    let [left, right, top, bottom] = BARS;
    let _ = writeln!(
        text,
        "<text x=\"{left}\" y=\"26\" font-size=\"15\" font-weight=\"600\">Where prompt tokens came from</text>\n\
         <text x=\"{left}\" y=\"44\" fill=\"#6b7280\">share of all prompt tokens</text>"
    );
    let bar_lefts = [left, f64::midpoint(left, right) - BAR / 4.0];
    for (run, bar_left) in Run::ALL.into_iter().zip(bar_lefts) {
        let tally = outcome.tally(run);
        let mut y = bottom;
        for (share, color) in shares(tally).into_iter().zip(SOURCE_COLORS) {
            let height = share * (bottom - top);
            y -= height;
            let _ = writeln!(
                text,
                "<rect x=\"{bar_left:.1}\" y=\"{y:.1}\" width=\"{BAR}\" height=\"{height:.1}\" fill=\"{color}\"/>"
            );
        }
        let middle = bar_left + BAR / 2.0;
        let _ = writeln!(
            text,
            "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-weight=\"600\">p50 {:.0} ms</text>",
            bottom + 20.0,
            run.name(),
            bottom + 38.0,
            tally.ttft_ms(0.5).unwrap_or(0.0)
        );
    }
    let legend_left = bar_lefts[1] + BAR + 14.0;
    let names = SOURCES.into_iter().chain(["computed"]);
    for (idx, (name, color)) in names.zip(SOURCE_COLORS).enumerate() {
        let y = bottom - 10.0 - 20.0 * idx as f64;
        let _ = writeln!(
            text,
            "<rect x=\"{legend_left:.1}\" y=\"{:.1}\" width=\"10\" height=\"10\" fill=\"{color}\"/>\
             <text x=\"{:.1}\" y=\"{y:.1}\">{name}</text>",
            y - 9.0,
            legend_left + 15.0
        );
    }
}

/// The shares of all sources and, last, of what was computed.
fn shares(tally: &Tally) -> [f64; SOURCES.len() + 1] {
    let tokens = tally.tokens();
    let mut shares = [0.0; SOURCES.len() + 1];
    shares[..SOURCES.len()].copy_from_slice(&tokens.shares());
    shares[SOURCES.len()] = (1.0 - tokens.hit_ratio()).max(0.0);
    shares
}

/// A round distance of ticks that gives about five of them up to `largest`.
fn tick_step(largest: f64) -> f64 {
    let rough = (largest / 5.0).max(1e-3);
    let power = 10_f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| rough <= factor * power).unwrap_or(10.0);
    factor * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_about_five() {
        for (largest, step) in [(4.0, 1.0), (430.0, 100.0), (900.0, 200.0), (26.0, 10.0)] {
            assert!((tick_step(largest) - step).abs() < 1e-9, "{largest}");
        }
    }
}
