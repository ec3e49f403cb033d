//! Draws hit ratios over the capacity.

use std::fmt::Write as _;

use super::Report;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 130.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 60.0;

/// Colors that can be told apart without red and green, in order of the contenders.
const COLORS: [&str; 8] =
    ["#0072b2", "#e69f00", "#56b4e9", "#cc79a7", "#999999", "#8c6d31", "#d55e00", "#000000"];

/// The smallest distance of two labels at the right edge.
const LABEL_STEP: f64 = 15.0;

/// A point is a capacity (on a logarithmic axis) and a percentage.
struct Scale {
    low: f64,
    high: f64,
    top_percent: f64,
}

impl Scale {
    fn x(&self, capacity_blocks: usize) -> f64 {
        let position = ((capacity_blocks.max(1) as f64).ln() - self.low) / (self.high - self.low);
        LEFT + position * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, percent: f64) -> f64 {
        HEIGHT - BOTTOM - percent / self.top_percent * (HEIGHT - TOP - BOTTOM)
    }
}

/// Draws the report: a line for each contender, its name at its end.
pub(super) fn svg(report: &Report) -> String {
    let mut capacities: Vec<usize> = report.outcomes.iter().map(|outcome| outcome.capacity_blocks).collect();
    capacities.sort_unstable();
    capacities.dedup();
    let ends = [capacities.first(), capacities.last()].map(|end| (*end.unwrap_or(&1)).max(1) as f64);
    let best = report.outcomes.iter().map(super::Outcome::hit_percent).fold(0.0, f64::max);
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| best / step <= 8.0).unwrap_or(20.0);
    let scale = Scale {
        low: ends[0].ln(),
        // One capacity alone still needs an axis.
        high: if ends[1] > ends[0] { ends[1].ln() } else { ends[0].ln() + 1.0 },
        top_percent: ((best / step).ceil() * step).max(step),
    };

    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    draw_axes(&mut text, &scale, &capacities, step);
    draw_lines(&mut text, &scale, report);
    text.push_str("</svg>\n");
    text
}

fn draw_axes(text: &mut String, scale: &Scale, capacities: &[usize], step: f64) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let mut percent = 0.0;
    while percent <= scale.top_percent + 1e-9 {
        let y = scale.y(percent);
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{percent} %</text>",
            LEFT - 8.0,
            y + 4.0,
        );
        percent += step;
    }
    for &capacity in capacities {
        let x = scale.x(capacity);
        let _ = writeln!(
            text,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{bottom}\" y2=\"{:.1}\" stroke=\"black\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{capacity}</text>",
            bottom + 5.0,
            bottom + 20.0,
        );
    }
    let _ = writeln!(
        text,
        "<path d=\"M{LEFT} {TOP} V{bottom} H{right}\" fill=\"none\" stroke=\"black\"/>\n\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">capacity in blocks</text>\n\
         <text transform=\"translate(18 {:.1}) rotate(-90)\" text-anchor=\"middle\">block hit ratio</text>",
        f64::midpoint(LEFT, right),
        HEIGHT - 15.0,
        f64::midpoint(TOP, bottom),
    );
}

fn draw_lines(text: &mut String, scale: &Scale, report: &Report) {
    let mut labels = Vec::new();
    for (contender, color) in report.contenders().into_iter().zip(COLORS.into_iter().cycle()) {
        let mut points: Vec<(usize, f64)> =
            report.of(contender).map(|outcome| (outcome.capacity_blocks, outcome.hit_percent())).collect();
        points.sort_by_key(|(capacity, _)| *capacity);
        let _ = write!(text, "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"{color}\" points=\"");
        for &(capacity, percent) in &points {
            let _ = write!(text, "{:.1},{:.1} ", scale.x(capacity), scale.y(percent));
        }
        text.push_str("\"/>\n");
        for &(capacity, percent) in &points {
            let (x, y) = (scale.x(capacity), scale.y(percent));
            let _ = writeln!(text, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{color}\"/>");
        }
        if let Some(&(capacity, percent)) = points.last() {
            labels.push((scale.y(percent), scale.x(capacity), contender.name(), color));
        }
    }
    // From the lowest line up, each label at least a step above the one before.
    labels.sort_by(|left, right| right.0.total_cmp(&left.0));
    let mut ceiling = HEIGHT;
    for (y, x, name, color) in labels {
        let y = y.min(ceiling - LABEL_STEP);
        ceiling = y;
        let _ =
            writeln!(text, "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{color}\">{name}</text>", x + 10.0, y + 4.0);
    }
}
