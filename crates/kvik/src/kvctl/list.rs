//! `kvctl list`: limit and use of every name.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use kvik_engines::EngineStatus;
use serde::Serialize;

use super::Answer;
use super::folder::{MemoryFolder, Reading};
use super::report::{DeviceReport, GroupReport, KvcachedReport, UnreadableReport};
use super::size;
use super::top::rates::Rates;

const NAME_WIDTH: usize = 24;

/// Everything in the folder.
#[derive(Debug, Serialize)]
pub(crate) struct ListAnswer {
    dir: String,
    devices: Vec<DeviceReport>,
    kvcached: Vec<KvcachedReport>,
    unreadable: Vec<UnreadableReport>,
    /// Those of a controller, where there is one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    engines: Vec<EngineStatus>,
}

struct Line<'a> {
    name: &'a str,
    limit_bytes: u64,
    used_bytes: u64,
    notes: String,
}

/// Reads the folder; fails if one of `names` does not exist.
pub(crate) fn list(folder: &MemoryFolder, names: &[String]) -> anyhow::Result<ListAnswer> {
    let mut reading = folder.read()?;
    reading.check_names(names)?;
    reading.keep(names);
    Ok(ListAnswer::new(folder, &reading, None))
}

// === impl ListAnswer ===

impl ListAnswer {
    pub(crate) fn new(folder: &MemoryFolder, reading: &Reading, rates: Option<&Rates>) -> Self {
        Self {
            dir: folder.dir().display().to_string(),
            devices: reading.devices.iter().map(|device| DeviceReport::new(device, rates)).collect(),
            kvcached: reading.kvcached.iter().map(KvcachedReport::from).collect(),
            unreadable: reading.unreadable.iter().map(UnreadableReport::from).collect(),
            engines: Vec::new(),
        }
    }

    /// The same with the engines of a controller.
    pub(crate) fn with_engines(self, engines: Vec<EngineStatus>) -> Self {
        Self { engines, ..self }
    }

    fn lines(&self) -> Vec<Line<'_>> {
        let groups = self.devices.iter().flat_map(|device| {
            device.groups.iter().map(|group| Line {
                name: &group.ipc,
                limit_bytes: group.limit_bytes,
                used_bytes: group.used_bytes,
                notes: self.notes(device, group),
            })
        });
        let segments = self.kvcached.iter().map(|segment| Line {
            name: &segment.ipc,
            limit_bytes: segment.limit_bytes,
            used_bytes: segment.used_bytes,
            notes: "of kvcached, read only".to_owned(),
        });
        groups.chain(segments).collect()
    }

    /// What the columns do not say about a group; empty if all is as usual.
    fn notes(&self, device: &DeviceReport, group: &GroupReport) -> String {
        let mut notes = Vec::new();
        if self.devices.len() > 1 {
            notes.push(format!("on {}", device.device));
        }
        if group.members.is_empty() {
            notes.push("no engine".to_owned());
        }
        match group.n_dead() {
            0 => {}
            n_dead => notes.push(format!("{n_dead} dead (kvctl gc)")),
        }
        if group.over_limit_bytes > 0 {
            notes.push(format!("{} above the limit", size::long(group.over_limit_bytes)));
        }
        if group.wanted_bytes > 0 {
            notes.push(format!("waits for {}", size::long(group.wanted_bytes)));
        }
        notes.join(", ")
    }
}

impl Answer for ListAnswer {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        let lines = self.lines();
        if lines.is_empty() {
            return writeln!(output, "no engine and no policy in {}", self.dir);
        }
        let width = lines.iter().map(|line| line.name.chars().count()).fold(NAME_WIDTH, usize::max);
        writeln!(output, "{:<width$} {:>12} {:>12} {:>6}", "IPC", "Limit", "Used", "%")?;
        for Line { name, limit_bytes, used_bytes, notes } in lines {
            let percent = size::percent(used_bytes, limit_bytes);
            let style = percent_style(percent);
            // Half a tenth goes up, which formatting alone would round to even.
            let percent =
                percent.map_or("-".to_owned(), |percent| format!("{:.1}%", (percent * 10.0).round() / 10.0));
            let (limit, used) = (size::long(limit_bytes), size::long(used_bytes));
            write!(output, "{name:<width$} {limit:>12} {used:>12} {style}{percent:>6}{style:#}")?;
            let gap = if notes.is_empty() { "" } else { "  " };
            writeln!(output, "{gap}{notes}")?;
        }
        Ok(())
    }

    fn warnings(&self) -> Vec<String> {
        let warning = |ledger: &UnreadableReport| format!("ledger of {}: {}", ledger.device, ledger.reason);
        self.unreadable.iter().map(warning).collect()
    }
}

fn percent_style(percent: Option<f64>) -> Style {
    let color = match percent {
        Some(percent) if percent < 50.0 => AnsiColor::Green,
        Some(percent) if percent < 80.0 => AnsiColor::Yellow,
        _ => AnsiColor::Red,
    };
    color.on_default()
}
