//! Draws the time to the first token over the load.

use std::fmt::Write as _;

use kvik_index::replay::Policy;

use super::Cell;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 60.0;
/// The smallest distance of two labels at the right edge.
const LABEL_STEP: f64 = 15.0;

/// Colors that can be told apart without red and green, in order of the policies.
const COLORS: [&str; 5] = ["#999999", "#e69f00", "#56b4e9", "#0072b2", "#d55e00"];

/// A point is a load and a number of seconds (on a logarithmic axis).
struct Scale {
    loads: [f64; 2],
    decades: [f64; 2],
}

impl Scale {
    fn x(&self, load: f64) -> f64 {
        let [low, high] = self.loads;
        LEFT + (load - low) / (high - low).max(f64::EPSILON) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, seconds: f64) -> f64 {
        let [low, high] = self.decades;
        HEIGHT - BOTTOM - (seconds.max(1e-6).log10() - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
    }
}

/// Draws a line for each policy, its name at its end.
pub(super) fn svg(cells: &[Cell]) -> String {
    let range = |of: fn(&Cell) -> f64| {
        let values = cells.iter().map(of);
        [values.clone().fold(f64::INFINITY, f64::min), values.fold(0.0, f64::max)]
    };
    let seconds = range(|cell| cell.outcome.ttft_mean_s.max(1e-3));
    let low = seconds[0].min(1e6).log10().floor();
    let scale = Scale {
        loads: range(|cell| cell.load),
        decades: [low, seconds[1].max(1e-3).log10().ceil().max(low + 1.0)],
    };
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    draw_axes(&mut text, &scale, cells);
    draw_lines(&mut text, &scale, cells);
    text.push_str("</svg>\n");
    text
}

fn draw_axes(text: &mut String, scale: &Scale, cells: &[Cell]) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for decade in scale.decades[0] as i32..=scale.decades[1] as i32 {
        let seconds = 10_f64.powi(decade);
        let y = scale.y(seconds);
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{seconds} s</text>",
            LEFT - 8.0,
            y + 4.0,
        );
    }
    for cell in cells.iter().filter(|cell| cell.policy == Policy::Kv) {
        let x = scale.x(cell.load);
        let _ = writeln!(
            text,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{bottom}\" y2=\"{:.1}\" stroke=\"black\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{:.0} %</text>",
            bottom + 5.0,
            bottom + 20.0,
            cell.load * 100.0,
        );
    }
    let _ = writeln!(
        text,
        "<path d=\"M{LEFT} {TOP} V{bottom} H{right}\" fill=\"none\" stroke=\"black\"/>\n\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">load, of saturation</text>\n\
         <text transform=\"translate(18 {:.1}) rotate(-90)\" text-anchor=\"middle\">mean TTFT</text>",
        f64::midpoint(LEFT, right),
        HEIGHT - 15.0,
        f64::midpoint(TOP, bottom),
    );
}

fn draw_lines(text: &mut String, scale: &Scale, cells: &[Cell]) {
    let mut labels = Vec::new();
    for (policy, color) in Policy::ALL.into_iter().zip(COLORS) {
        let points = cells.iter().filter(|cell| cell.policy == policy);
        let points: Vec<(f64, f64)> =
            points.map(|cell| (scale.x(cell.load), scale.y(cell.outcome.ttft_mean_s))).collect();
        let _ = write!(text, "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"{color}\" points=\"");
        for (x, y) in &points {
            let _ = write!(text, "{x:.1},{y:.1} ");
        }
        text.push_str("\"/>\n");
        for (x, y) in &points {
            let _ = writeln!(text, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{color}\"/>");
        }
        labels.extend(points.last().map(|&(x, y)| (x, y, policy.name(), color)));
    }
    // From the lowest line up, each label at least a step above the one before.
    labels.sort_by(|left, right| right.1.total_cmp(&left.1));
    let mut ceiling = HEIGHT;
    for (x, y, name, color) in labels {
        let y = y.min(ceiling - LABEL_STEP);
        ceiling = y;
        let _ =
            writeln!(text, "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{color}\">{name}</text>", x + 10.0, y + 4.0);
    }
}
