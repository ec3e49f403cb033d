//! Draws the screen: a function of what was read, what is chosen and how large it is.

use kvik_engines::EngineStatus;
use kvik_memory::ledger::DeviceSnapshot;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

use super::engines;
use super::page_map::{Cell, PageMap};
use super::rates::{Rate, Rates};
use super::rows::{Row, rows};
use super::state::{Mode, ScreenState};
use crate::folder::Reading;
use crate::size::{compact, percent};

/// Everything that is drawn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) dir: &'a str,
    pub(crate) refresh_s: f64,
    pub(crate) reading: &'a Reading,
    pub(crate) rates: &'a Rates,
    pub(crate) state: &'a ScreenState,
    /// The pages of the selected line.
    pub(crate) pages: Option<&'a PageMap>,
    /// Those of a controller.
    pub(crate) engines: &'a [EngineStatus],
}

/// From this height on there is room for the page map.
const MIN_HEIGHT_WITH_PAGES: u16 = 20;
const MIN_NAME_WIDTH: u16 = 12;
const MAX_NAME_WIDTH: u16 = 28;
const MIN_BAR_WIDTH: u16 = 8;

const KEYS: &str = "up/down select  s sort  l limit  t trim  g gc  ? help  q quit";
const HELP: [&str; 14] = [
    "up, down   select an IPC name or an engine",
    "s          sort by name, use, limit, wait",
    "l          set the limit of the IPC name: 20G, 512mb, none",
    "t          ask its engines for their parked pages",
    "g          return the memory of dead engines",
    "q          quit",
    "",
    "bars: # used, = parked (mapped and free), - free up to the limit,",
    "      | the share when memory is scarce",
    "pages: # used, + partly used, = parked, . not mapped, x given up",
    "WAIT: how long it waits for memory now; ~ mean of past waits",
    "MAP/s, UNMAP/s: bytes mapped and unmapped in a second",
    "",
    "any key goes back",
];

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().add_modifier(Modifier::DIM);
const RED: Style = Style::new().fg(Color::Red);
const YELLOW: Style = Style::new().fg(Color::Yellow);
const CYAN: Style = Style::new().fg(Color::Cyan);

/// A column of numbers at the right of every line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Column {
    Used,
    Limit,
    Parked,
    Share,
    Map,
    Unmap,
    Wait,
}

/// The columns from left to right, with the title and the width, and how early each is given up.
const COLUMNS: [(Column, &str, u16, u8); 7] = [
    (Column::Used, "USED", 6, 0),
    (Column::Limit, "LIMIT", 6, 1),
    (Column::Parked, "PARK", 6, 3),
    (Column::Share, "SHARE", 6, 4),
    (Column::Map, "MAP/s", 6, 5),
    (Column::Unmap, "UNMAP/s", 8, 6),
    (Column::Wait, "WAIT", 7, 2),
];

/// Where the parts of a line are.
#[derive(Debug)]
struct Grid {
    name_width: u16,
    bar_width: u16,
    columns: Vec<(Column, &'static str, u16)>,
}

/// What a line of the table says.
#[derive(Debug, Default)]
struct Line {
    name: String,
    name_style: Style,
    used_bytes: u64,
    parked_bytes: u64,
    scale_bytes: u64,
    /// Where the mark of the share is.
    share_bytes: Option<u64>,
    limit: String,
    is_over_limit: bool,
    rate: Rate,
    wait: String,
}

/// Draws everything into `area` of `buffer`.
pub(crate) fn draw(view: &View<'_>, area: Rect, buffer: &mut Buffer) {
    let area = area.intersection(buffer.area);
    if area.is_empty() {
        return;
    }
    let [title, body, status] = split(area);
    draw_title(view, title, buffer);
    draw_status(view, status, buffer);
    if view.state.mode == Mode::Help {
        for (text, y) in HELP.iter().zip(body.top()..body.bottom()) {
            put(buffer, body.x, y, body.width, text, Style::new());
        }
        return;
    }
    let pages_height = match view.pages {
        Some(_) if area.height >= MIN_HEIGHT_WITH_PAGES => area.height / 4,
        _ => 0,
    };
    // A third of the screen at most: memory is what it is about.
    let engines_height = match view.engines.len() {
        0 => 0,
        n_engines => (n_engines as u16).saturating_add(1).min(area.height / 3),
    };
    let table_height = body.height.saturating_sub(pages_height + engines_height);
    let table = Rect { height: table_height, ..body };
    draw_table(view, table, buffer);
    let engines = Rect { y: body.bottom() - engines_height.min(body.height), height: engines_height, ..body };
    draw_engines(view, engines, buffer);
    if let Some(pages) = view.pages.filter(|_| pages_height > 0) {
        let panel = Rect { y: table.bottom(), height: pages_height, ..body };
        draw_pages(view, pages, panel, buffer);
    }
}

/// Title, body and status line; a small area has the body alone.
fn split(area: Rect) -> [Rect; 3] {
    if area.height < 4 {
        return [Rect { height: 0, ..area }, area, Rect { height: 0, ..area }];
    }
    [
        Rect { height: 1, ..area },
        Rect { y: area.y + 1, height: area.height - 2, ..area },
        Rect { y: area.bottom() - 1, height: 1, ..area },
    ]
}

fn draw_title(view: &View<'_>, area: Rect, buffer: &mut Buffer) {
    if area.is_empty() {
        return;
    }
    let text = format!("kvtop  {}", view.dir);
    let right = format!("sort: {}  every {} s", view.state.sort_by.name(), view.refresh_s);
    put(buffer, area.x, area.y, area.width, &text, BOLD);
    let n_free = usize::from(area.width).saturating_sub(text.chars().count() + 2);
    if right.len() <= n_free {
        put(buffer, area.right() - right.len() as u16, area.y, area.width, &right, DIM);
    }
}

fn draw_status(view: &View<'_>, area: Rect, buffer: &mut Buffer) {
    if area.is_empty() {
        return;
    }
    let (text, style) = match (&view.state.mode, &view.state.message) {
        (Mode::LimitPrompt { group, input }, _) => {
            (format!("limit of {} (such as 20G; none; Esc): {input}_", group.ipc_name), BOLD)
        }
        (_, Some(message)) => (message.text.clone(), if message.is_error { RED } else { BOLD }),
        _ => (KEYS.to_owned(), DIM),
    };
    // The end of a prompt is where one types.
    let n_over = text.chars().count().saturating_sub(usize::from(area.width));
    let is_prompt = matches!(view.state.mode, Mode::LimitPrompt { .. });
    let shown: String = text.chars().skip(if is_prompt { n_over } else { 0 }).collect();
    put(buffer, area.x, area.y, area.width, &shown, style);
}

fn draw_table(view: &View<'_>, area: Rect, buffer: &mut Buffer) {
    let rows = rows(view.reading, view.rates, view.state.sort_by);
    if rows.is_empty() {
        let text = format!("no ledger in {}: no engine has started there yet", view.dir);
        put(buffer, area.x, area.y, area.width, &text, Style::new());
        return;
    }
    let grid = Grid::new(area.width);
    let mut area = area;
    if area.height > 1 {
        grid.draw_titles(area, buffer);
        area = Rect { y: area.y + 1, height: area.height - 1, ..area };
    }
    let selected = rows.iter().position(|row| row.key().is_some() && row.key() == view.state.selected);
    let height = usize::from(area.height);
    // The selected line is in sight, with the lines above it as long as they fit.
    let first = selected.map_or(0, |selected| (selected + 1).saturating_sub(height));
    for (index, row) in rows.iter().enumerate().skip(first).take(height) {
        let y = area.y + (index - first) as u16;
        let line_area = Rect { y, height: 1, ..area };
        match row {
            Row::Device(device) => draw_device(device, line_area, buffer),
            Row::Unreadable(ledger) => {
                put(buffer, area.x, y, area.width, &format!("{}: {}", ledger.device, ledger.reason), RED);
            }
            row => grid.draw_line(&Line::of(row), line_area, buffer),
        }
        if Some(index) == selected {
            put(buffer, area.x, y, 1, ">", BOLD);
            buffer.set_style(line_area, Style::new().add_modifier(Modifier::REVERSED));
        }
    }
}

fn draw_device(device: &DeviceSnapshot, area: Rect, buffer: &mut Buffer) {
    let free_bytes = device.budget_bytes.saturating_sub(device.held_bytes);
    let [budget, granted, free] = [device.budget_bytes, device.held_bytes, free_bytes].map(compact);
    let text = format!("{}  budget {budget}  granted {granted}  free {free}", device.device);
    put(buffer, area.x, area.y, area.width, &text, BOLD);
    let n_taken = text.chars().count() as u16 + 1;
    let width = area.width.saturating_sub(n_taken);
    if width >= MIN_BAR_WIDTH {
        let bar = Bar { used_bytes: device.held_bytes, scale_bytes: device.budget_bytes, ..Bar::default() };
        bar.draw(area.x + n_taken, area.y, width, buffer);
    }
}

fn draw_engines(view: &View<'_>, area: Rect, buffer: &mut Buffer) {
    if area.is_empty() {
        return;
    }
    let width = usize::from(area.width);
    put(buffer, area.x, area.y, area.width, &engines::title(width), DIM);
    let lines = engines::lines(view.engines, width);
    let n_shown = usize::from(area.height - 1);
    for (line, y) in lines.iter().take(n_shown).zip(area.y + 1..area.bottom()) {
        let style = match (line.is_failed, line.is_asleep) {
            (true, _) => RED,
            (_, true) => DIM,
            _ => Style::new(),
        };
        put(buffer, area.x, y, area.width, &line.text, style);
    }
}

fn draw_pages(view: &View<'_>, pages: &PageMap, area: Rect, buffer: &mut Buffer) {
    let counts = pages.counts();
    let n_cells = usize::from(area.width) * usize::from(area.height.saturating_sub(1));
    let name = view.state.selected.as_ref().map_or("", |selected| selected.ipc_name.as_str());
    let title = format!(
        "pages of {name}: {} used, {} parked, {} given up of {}; {} each, {} a cell",
        counts.n_used,
        counts.n_parked,
        counts.n_quarantined,
        pages.n_pages(),
        compact(pages.page_cost_bytes()),
        pages.pages_per_cell(n_cells)
    );
    put(buffer, area.x, area.y, area.width, &title, BOLD);
    for (index, cell) in pages.cells(n_cells).enumerate().take(n_cells) {
        let x = area.x + (index % usize::from(area.width)) as u16;
        let y = area.y + 1 + (index / usize::from(area.width)) as u16;
        let style = match cell {
            Cell::Unmapped => DIM,
            Cell::Parked => CYAN,
            Cell::Used => Style::new(),
            Cell::PartlyUsed => YELLOW,
            Cell::Quarantined => RED,
        };
        put(buffer, x, y, 1, cell.symbol(), style);
    }
}

/// Writes as much of `text` as fits in `width` columns.
fn put(buffer: &mut Buffer, x: u16, y: u16, width: u16, text: &str, style: Style) {
    if buffer.area.contains((x, y).into()) {
        let width = width.min(buffer.area.right() - x);
        buffer.set_stringn(x, y, text, usize::from(width), style);
    }
}

/// A duration in at most five characters.
fn short_duration(ms: f64) -> String {
    match ms {
        ms if ms < 999.5 => format!("{ms:.0}ms"),
        ms if ms < 99_950.0 => format!("{:.1}s", ms / 1e3),
        ms if ms < 6e6 => format!("{:.0}m", ms / 6e4),
        ms => format!("{:.0}h", (ms / 3.6e6).min(9999.0)),
    }
}

// === impl Line ===

impl Line {
    fn of(row: &Row<'_>) -> Self {
        match row {
            Row::Group { group, limit_bytes, rate, waiting_ms, .. } => Self {
                name: format!(" {}", group.ipc_name),
                used_bytes: group.used_bytes,
                parked_bytes: group.parked_bytes,
                scale_bytes: *limit_bytes,
                share_bytes: Some(group.entitled_bytes),
                limit: compact(*limit_bytes),
                is_over_limit: group.over_limit_bytes > 0,
                rate: *rate,
                wait: if *waiting_ms > 0 { short_duration(*waiting_ms as f64) } else { String::new() },
                ..Self::default()
            },
            Row::Member { member, limit_bytes, rate, .. } => Self {
                name: if member.is_live {
                    format!("  {} {}", member.pid, member.label)
                } else {
                    format!("  dead {} {}", member.pid, member.label)
                },
                name_style: if member.is_live { DIM } else { RED },
                used_bytes: member.used_bytes,
                parked_bytes: member.parked_bytes,
                scale_bytes: *limit_bytes,
                rate: *rate,
                wait: match (member.waiting_ms, member.n_waits) {
                    (0, 0) => String::new(),
                    (0, n_waits) => {
                        format!("~{}", short_duration(member.waited_us as f64 / 1e3 / n_waits as f64))
                    }
                    (waiting_ms, _) => short_duration(waiting_ms as f64),
                },
                ..Self::default()
            },
            Row::Kvcached(segment) => Self {
                name: format!(" {} (kvcached)", segment.ipc_name),
                used_bytes: segment.used_bytes,
                parked_bytes: segment.parked_bytes,
                scale_bytes: segment.limit_bytes,
                limit: compact(segment.limit_bytes),
                ..Self::default()
            },
            Row::Device(_) | Row::Unreadable(_) => Self::default(),
        }
    }

    fn cell(&self, column: Column) -> String {
        let rate = |bytes_per_s: f64| {
            if bytes_per_s < 1.0 { "-".to_owned() } else { compact(bytes_per_s as u64) }
        };
        match column {
            Column::Used => compact(self.used_bytes),
            Column::Limit => self.limit.clone(),
            Column::Parked => compact(self.parked_bytes),
            Column::Share => self.share_bytes.map_or(String::new(), compact),
            Column::Map => rate(self.rate.map_bytes_per_s),
            Column::Unmap => rate(self.rate.unmap_bytes_per_s),
            Column::Wait => self.wait.clone(),
        }
    }
}

// === impl Grid ===

impl Grid {
    /// Gives up columns until name and bar have their room.
    fn new(width: u16) -> Self {
        let mut columns = COLUMNS.to_vec();
        let total = |columns: &[(Column, &str, u16, u8)]| columns.iter().map(|column| column.2).sum::<u16>();
        while !columns.is_empty() && total(&columns) + MIN_NAME_WIDTH + MIN_BAR_WIDTH > width {
            let last = columns.iter().map(|column| column.3).max();
            columns.retain(|column| Some(column.3) != last);
        }
        let n_left = width.saturating_sub(total(&columns));
        let name_width = (n_left / 5 * 3).clamp(MIN_NAME_WIDTH, MAX_NAME_WIDTH).min(n_left);
        let bar_width = n_left - name_width;
        Self {
            name_width,
            bar_width,
            columns: columns.into_iter().map(|(column, title, width, _)| (column, title, width)).collect(),
        }
    }

    fn draw_titles(&self, area: Rect, buffer: &mut Buffer) {
        put(buffer, area.x, area.y, self.name_width, " IPC/engine", DIM);
        let mut x = area.x + self.name_width + self.bar_width;
        for (_, title, width) in &self.columns {
            put(buffer, x, area.y, *width, &format!("{title:>0$}", usize::from(*width)), DIM);
            x += width;
        }
    }

    fn draw_line(&self, line: &Line, area: Rect, buffer: &mut Buffer) {
        let name_style = if line.is_over_limit { RED } else { line.name_style };
        // One column stays free between the name and what follows.
        put(buffer, area.x, area.y, self.name_width.saturating_sub(1), &line.name, name_style);
        let bar = Bar {
            used_bytes: line.used_bytes,
            parked_bytes: line.parked_bytes,
            scale_bytes: line.scale_bytes,
            share_bytes: line.share_bytes,
        };
        bar.draw(area.x + self.name_width, area.y, self.bar_width, buffer);
        let mut x = area.x + self.name_width + self.bar_width;
        for (column, _, width) in &self.columns {
            let style = match column {
                Column::Limit if line.is_over_limit => RED,
                Column::Wait if !line.wait.starts_with('~') => YELLOW,
                _ => Style::new(),
            };
            let cell = format!("{:>1$}", line.cell(*column), usize::from(*width));
            put(buffer, x, area.y, *width, &cell, style);
            x += width;
        }
    }
}

/// How full something is.
#[derive(Debug, Default)]
#[expect(clippy::struct_field_names, reason = "the unit is in every name of a quantity")]
struct Bar {
    used_bytes: u64,
    parked_bytes: u64,
    scale_bytes: u64,
    share_bytes: Option<u64>,
}

// === impl Bar ===

impl Bar {
    fn draw(&self, x: u16, y: u16, width: u16, buffer: &mut Buffer) {
        let Some(n_cells) = width.checked_sub(2).filter(|&n_cells| n_cells > 0) else { return };
        let cells_of = |n_bytes: u64| match percent(n_bytes, self.scale_bytes) {
            Some(percent) => (percent / 100.0 * f64::from(n_cells)).round().min(f64::from(n_cells)) as u16,
            None if n_bytes > 0 => n_cells,
            None => 0,
        };
        let used_end = cells_of(self.used_bytes);
        let mapped_end = cells_of(self.used_bytes.saturating_add(self.parked_bytes));
        let share = self.share_bytes.map(cells_of).filter(|&share| share > 0).map(|share| share - 1);
        let used_style = match percent(self.used_bytes, self.scale_bytes) {
            Some(percent) if percent < 50.0 => Style::new().fg(Color::Green),
            Some(percent) if percent < 80.0 => YELLOW,
            _ => RED,
        };
        put(buffer, x, y, 1, "[", DIM);
        for cell in 0..n_cells {
            let (symbol, style) = match cell {
                cell if Some(cell) == share => ("|", BOLD),
                cell if cell < used_end => ("#", used_style),
                cell if cell < mapped_end => ("=", CYAN),
                _ => ("-", DIM),
            };
            put(buffer, x + 1 + cell, y, 1, symbol, style);
        }
        put(buffer, x + 1 + n_cells, y, 1, "]", DIM);
    }
}
