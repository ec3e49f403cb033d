//! What people see: colors, tables and bars.
//!
//! Styles are written through `anstream`, which drops them where the output is not a terminal or
//! `NO_COLOR` is set. Text of a model goes past it: to a pipe as it is, to a terminal without the
//! control characters that could move the cursor or change the colors.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use anstyle::{AnsiColor, Style};
use kvik_types::ByteSize;

/// The word `error:`.
pub const ERROR: Style = AnsiColor::Red.on_default().bold();
/// Titles of tables and columns.
pub const TITLE: Style = Style::new().bold();
/// What may be overlooked: statistics, ranges.
pub const DIMMED: Style = Style::new().dimmed();
/// Bars beside values.
pub const BAR: Style = AnsiColor::Cyan.on_default();

/// Width of the longest bar, in characters.
const BAR_WIDTH: usize = 16;

/// Time between two drawings of a [`ProgressLine`].
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// How the cells of a column are placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// At the left edge.
    Left,
    /// At the right edge.
    Right,
}

/// One column of a [`Table`].
#[derive(Debug, Clone, Copy)]
pub struct Column {
    /// Printed above the column; if all titles are empty, there is no title line.
    pub title: &'static str,
    /// Where its cells are placed.
    pub align: Align,
    /// How its cells look; titles have a style of their own.
    pub style: Style,
}

/// Rows of text in columns as wide as their widest cell.
#[derive(Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

/// Standard output for the text of a model.
#[derive(Debug)]
pub struct TextOutput {
    stdout: io::StdoutLock<'static>,
    is_terminal: bool,
}

/// One line on standard error that follows a number of bytes; nothing if that is not a terminal.
///
/// The line is removed at the end.
#[derive(Debug)]
pub struct ProgressLine {
    title: String,
    n_bytes: u64,
    n_done_bytes: u64,
    /// When it was drawn last.
    drawn: Option<Instant>,
    is_terminal: bool,
}

// === impl Column ===

impl Column {
    /// A column whose cells look like plain text.
    pub const fn new(title: &'static str, align: Align) -> Self {
        Self { title, align, style: Style::new() }
    }

    /// The same column with a style for its cells.
    #[must_use]
    pub const fn with_style(mut self, style: Style) -> Self {
        self.style = style;
        self
    }
}

// === impl Table ===

impl Table {
    /// A table without rows.
    pub fn new(columns: Vec<Column>) -> Self {
        Self { columns, rows: Vec::new() }
    }

    /// Appends a row; missing cells are empty, cells without a column are not printed.
    pub fn push(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Writes the table, indented by two spaces, without spaces at the ends of lines.
    pub fn write(&self, output: &mut impl Write) -> io::Result<()> {
        let widths: Vec<usize> = self
            .columns
            .iter()
            .enumerate()
            .map(|(idx, column)| {
                let cells = self.rows.iter().filter_map(|row| row.get(idx));
                cells.map(|cell| cell.chars().count()).fold(column.title.chars().count(), usize::max)
            })
            .collect();
        if self.columns.iter().any(|column| !column.title.is_empty()) {
            self.write_line(output, &widths, |idx| (self.columns[idx].title, TITLE))?;
        }
        for row in &self.rows {
            self.write_line(output, &widths, |idx| {
                (row.get(idx).map_or("", String::as_str), self.columns[idx].style)
            })?;
        }
        Ok(())
    }

    fn write_line<'a>(
        &self,
        output: &mut impl Write,
        widths: &[usize],
        cell_at: impl Fn(usize) -> (&'a str, Style),
    ) -> io::Result<()> {
        let mut n_pending_spaces = 2;
        for (idx, column) in self.columns.iter().enumerate() {
            let (cell, style) = cell_at(idx);
            let n_missing = widths[idx] - cell.chars().count();
            if column.align == Align::Right {
                n_pending_spaces += n_missing;
            }
            if !cell.is_empty() {
                write!(output, "{:n_pending_spaces$}{style}{cell}{style:#}", "")?;
                n_pending_spaces = 0;
            }
            let n_after = match column.align {
                Align::Left => n_missing,
                Align::Right => 0,
            };
            n_pending_spaces += n_after + 2;
        }
        writeln!(output)
    }
}

// === impl TextOutput ===

impl Default for TextOutput {
    fn default() -> Self {
        Self::new()
    }
}

impl TextOutput {
    /// Locks standard output.
    pub fn new() -> Self {
        let stdout = io::stdout();
        Self { is_terminal: stdout.is_terminal(), stdout: stdout.lock() }
    }

    /// Writes a part of the text so that it is seen at once.
    pub fn write_text(&mut self, text: &str) -> io::Result<()> {
        let text = if self.is_terminal { without_controls(text) } else { Cow::Borrowed(text) };
        self.stdout.write_all(text.as_bytes())?;
        self.stdout.flush()
    }
}

// === impl ProgressLine ===

impl ProgressLine {
    /// A line for work of `n_bytes`.
    pub fn new(title: &str, n_bytes: u64) -> Self {
        let title = without_controls(title).into_owned();
        Self { title, n_bytes, n_done_bytes: 0, drawn: None, is_terminal: stderr_is_terminal() }
    }

    /// Counts bytes that are done.
    pub fn advance(&mut self, n_bytes: u64) {
        self.n_done_bytes = self.n_done_bytes.saturating_add(n_bytes);
        if self.is_terminal && self.drawn.is_none_or(|drawn| PROGRESS_INTERVAL <= drawn.elapsed()) {
            self.drawn = Some(Instant::now());
            Self::write(&self.text());
        }
    }

    /// Counts bytes that must be done again.
    pub fn retract(&mut self, n_bytes: u64) {
        self.n_done_bytes = self.n_done_bytes.saturating_sub(n_bytes);
    }

    fn text(&self) -> String {
        let share = self.n_done_bytes as f64 / self.n_bytes.max(1) as f64;
        let (done, all) = (ByteSize(self.n_done_bytes), ByteSize(self.n_bytes));
        format!("{}  {:<BAR_WIDTH$}  {done} of {all}", self.title, bar(share))
    }

    /// Puts a text in the place of the line.
    fn write(text: &str) {
        let mut stderr = io::stderr().lock();
        // A terminal that is gone has no reader.
        let _ = write!(stderr, "\r{text}\x1b[K").and_then(|()| stderr.flush());
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if self.drawn.is_some() {
            Self::write("");
        }
    }
}

/// Whether messages beside the results have a reader.
pub fn stderr_is_terminal() -> bool {
    io::stderr().is_terminal()
}

/// A bar as long as `share`, from 0 to 1, of the longest one; in eighths of a character.
pub fn bar(share: f64) -> String {
    let n_eighths = (share.clamp(0.0, 1.0) * (BAR_WIDTH * 8) as f64).round() as u32;
    let mut bar = "\u{2588}".repeat((n_eighths / 8) as usize);
    if !n_eighths.is_multiple_of(8) {
        // The blocks go down in eighths from the full one.
        bar.extend(char::from_u32(0x2590 - n_eighths % 8));
    }
    bar
}

/// A whole number in groups of three digits.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() * 4 / 3);
    for (idx, digit) in digits.chars().enumerate() {
        if 0 < idx && (digits.len() - idx).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

fn without_controls(text: &str) -> Cow<'_, str> {
    let is_harmful = |character: char| character.is_control() && character != '\n' && character != '\t';
    if text.contains(is_harmful) {
        Cow::Owned(text.replace(is_harmful, "\u{fffd}"))
    } else {
        Cow::Borrowed(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_aligns_its_columns_and_ends_lines_at_the_last_character() {
        let mut table = Table::new(vec![
            Column::new("name", Align::Left),
            Column::new("value", Align::Right),
            Column::new("", Align::Left),
        ]);
        table.push(["a".to_owned(), "1".to_owned(), "x".to_owned()]);
        table.push(["longer".to_owned(), "123456".to_owned()]);
        table.push([String::new(), "7".to_owned()]);
        let mut bytes = Vec::new();
        table.write(&mut anstream::StripStream::new(&mut bytes)).unwrap();
        insta::assert_snapshot!(String::from_utf8(bytes).unwrap(), @r"
          name     value
          a            1  x
          longer  123456
                       7
        ");
    }

    #[test]
    fn bars_grow_in_eighths_and_stay_within_their_width() {
        assert_eq!(bar(0.0), "");
        assert_eq!(bar(1.0 / 128.0), "\u{258f}");
        assert_eq!(bar(7.0 / 128.0), "\u{2589}");
        assert_eq!(bar(9.0 / 128.0), "\u{2588}\u{258f}");
        assert_eq!(bar(7.0).chars().count(), BAR_WIDTH);
        assert_eq!(bar(f64::NAN), "");
    }

    #[test]
    fn a_line_of_progress_tells_what_is_done_of_how_much() {
        let mut line = ProgressLine::new("fetching", 4 << 20);
        line.is_terminal = false;
        line.advance(3 << 20);
        line.retract(1 << 20);
        let bar = "\u{2588}".repeat(8);
        assert_eq!(line.text(), format!("fetching  {bar}          2.0 MiB of 4.0 MiB"));
    }

    #[test]
    fn numbers_are_grouped_by_thousands() {
        let texts: Vec<String> = [0, 999, 1000, 7_345_408].into_iter().map(grouped).collect();
        assert_eq!(texts, ["0", "999", "1,000", "7,345,408"]);
    }

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        assert_eq!(without_controls("a\tb\n"), "a\tb\n");
        assert_eq!(without_controls("\u{1b}[2J\r"), "\u{fffd}[2J\u{fffd}");
    }
}
