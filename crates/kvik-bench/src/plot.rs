//! Draws lines over two axes as an SVG document.

use std::fmt::Write as _;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 70.0;
/// Room for the names at the ends of the lines.
const RIGHT: f64 = 150.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 60.0;
/// The smallest distance of two names at the right edge.
const NAME_STEP: f64 = 15.0;

/// Lines, each with its name at its end.
#[derive(Debug, Clone, PartialEq)]
pub struct Plot {
    /// The axis along which points are joined.
    pub x: Axis,
    /// The other axis.
    pub y: Axis,
    /// The lines, the later ones over the earlier ones.
    pub lines: Vec<Line>,
}

/// An axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Axis {
    /// What it counts.
    pub title: &'static str,
    /// Its ends, of which the first is lower; on a logarithmic axis above 0.
    pub ends: [f64; 2],
    /// Whether equal distances are equal ratios.
    pub is_logarithmic: bool,
    /// Values that are named, and how.
    pub ticks: Vec<(f64, String)>,
}

/// A line.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// What stands at its end.
    pub name: &'static str,
    /// A color of SVG.
    pub color: &'static str,
    /// Its points as x and y, in order of x.
    pub points: Vec<(f64, f64)>,
}

/// A document of several plots in a row, each below its title.
pub fn side_by_side(panels: &[(String, Plot)]) -> String {
    document(WIDTH * panels.len() as f64, |text| {
        for (idx, (title, plot)) in panels.iter().enumerate() {
            let middle = f64::midpoint(LEFT, WIDTH - RIGHT);
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "<g transform=\"translate({:.1} 0)\">\n\
                 <text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-weight=\"bold\">{title}</text>",
                idx as f64 * WIDTH,
                TOP - 12.0,
            );
            plot.draw(text);
            text.push_str("</g>\n");
        }
    })
}

/// A document of this width with what `draw` writes.
fn document(width: f64, draw: impl FnOnce(&mut String)) -> String {
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    draw(&mut text);
    text.push_str("</svg>\n");
    text
}

impl Axis {
    /// Where a value lies, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let [low, high] = self.ends;
        // A value of 0 has no place on a logarithmic axis.
        let scaled = |value: f64| if self.is_logarithmic { value.max(f64::MIN_POSITIVE).ln() } else { value };
        // One value alone still needs an axis.
        (scaled(value) - scaled(low)) / (scaled(high) - scaled(low)).max(f64::EPSILON)
    }
}

impl Plot {
    /// The document.
    pub fn svg(&self) -> String {
        document(WIDTH, |text| self.draw(text))
    }

    fn draw(&self, text: &mut String) {
        self.draw_axes(text);
        self.draw_lines(text);
    }

    fn x(&self, value: f64) -> f64 {
        LEFT + self.x.place(value) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - self.y.place(value) * (HEIGHT - TOP - BOTTOM)
    }

    fn draw_axes(&self, text: &mut String) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for (value, name) in &self.y.ticks {
            let y = self.y(*value);
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>",
                LEFT - 8.0,
                y + 4.0,
            );
        }
        for (value, name) in &self.x.ticks {
            let x = self.x(*value);
            let _ = writeln!(
                text,
                "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{bottom}\" y2=\"{:.1}\" stroke=\"black\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{name}</text>",
                bottom + 5.0,
                bottom + 20.0,
            );
        }
        let _ = writeln!(
            text,
            "<path d=\"M{LEFT} {TOP} V{bottom} H{right}\" fill=\"none\" stroke=\"black\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
             <text transform=\"translate(18 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            f64::midpoint(LEFT, right),
            HEIGHT - 15.0,
            self.x.title,
            f64::midpoint(TOP, bottom),
            self.y.title,
        );
    }

    fn draw_lines(&self, text: &mut String) {
        let mut names = Vec::new();
        for Line { name, color, points } in &self.lines {
            let points: Vec<(f64, f64)> = points.iter().map(|(x, y)| (self.x(*x), self.y(*y))).collect();
            let _ = write!(text, "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"{color}\" points=\"");
            for (x, y) in &points {
                let _ = write!(text, "{x:.1},{y:.1} ");
            }
            text.push_str("\"/>\n");
            for (x, y) in &points {
                let _ = writeln!(text, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{color}\"/>");
            }
            names.extend(points.last().map(|&(x, y)| (x, y, name, color)));
        }
        // From the lowest line up, each name at least a step above the one before.
        names.sort_by(|left, right| right.1.total_cmp(&left.1));
        let mut ceiling = HEIGHT;
        for (x, y, name, color) in names {
            let y = y.min(ceiling - NAME_STEP);
            ceiling = y;
            let (x, y) = (x + 10.0, y + 4.0);
            let _ = writeln!(text, "<text x=\"{x:.1}\" y=\"{y:.1}\" fill=\"{color}\">{name}</text>");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(ends: [f64; 2], is_logarithmic: bool) -> Axis {
        Axis { title: "t", ends, is_logarithmic, ticks: Vec::new() }
    }

    #[test]
    fn values_lie_by_difference_or_by_ratio_and_one_alone_at_the_low_end() {
        let is_at = |axis: &Axis, value: f64, place: f64| (axis.place(value) - place).abs() < 1e-9;
        assert!(is_at(&axis([0.0, 8.0], false), 2.0, 0.25));
        assert!(is_at(&axis([1.0, 16.0], true), 2.0, 0.25));
        for is_logarithmic in [false, true] {
            assert!(is_at(&axis([3.0, 3.0], is_logarithmic), 3.0, 0.0));
        }
    }

    #[test]
    fn names_of_lines_that_end_together_do_not_lie_on_each_other() {
        let line = |name| Line { name, color: "black", points: vec![(0.0, 1.0), (1.0, 0.5)] };
        let lines = vec![line("one"), line("two"), line("three")];
        let drawing = Plot { x: axis([0.0, 1.0], false), y: axis([0.0, 1.0], false), lines }.svg();
        let mut heights: Vec<f64> = Vec::new();
        for line in drawing.lines().filter(|line| line.contains("fill=\"black\">")) {
            let (_, height) = line.split_once(" y=\"").unwrap();
            heights.push(height.split('"').next().unwrap().parse().unwrap());
        }
        assert_eq!(heights.len(), 3, "{drawing}");
        assert!(heights.windows(2).all(|pair| pair[0] - pair[1] >= NAME_STEP), "{heights:?}");
    }
}
