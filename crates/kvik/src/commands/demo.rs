//! `kvik demo`: a load with and without kvik, live on the terminal, then as a table and a picture.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvik_bench::demo::{self, DemoOptions, DemoOutcome, Progress, Run, SOURCES, Tally};
use kvik_bench::interrupt::Interrupt;
use kvik_bench::machine::Machine;
use kvik_bench::report::Report;
use kvik_model::Model;
use kvik_runtime::terminal::{self, Align, Column, DIMMED, TITLE, Table};

use super::service::InvalidInput;
use super::{find_model, print_json};
use crate::cli::DemoArguments;
use crate::scratch::ScratchFolder;

/// The model that workers carry.
const BUNDLED_MODEL: &str = "kvik-tiny";
/// Medians that the line of bars shows.
const N_BARS: usize = 40;
/// From low to high.
const BARS: [char; 8] =
    ['\u{2581}', '\u{2582}', '\u{2583}', '\u{2584}', '\u{2585}', '\u{2586}', '\u{2587}', '\u{2588}'];

/// What is on the terminal while the runs go on: for each run a line of figures and a line of bars.
struct Screen {
    bars: MultiProgress,
    lines: [(ProgressBar, ProgressBar); 2],
    duration: Duration,
}

/// Makes both runs and prints what they measured.
pub(crate) fn run(arguments: &DemoArguments) -> anyhow::Result<()> {
    if let Some(gateway) = &arguments.gateway
        && !gateway.starts_with("http://")
    {
        let message = format!("read --gateway: `{gateway}`; allowed: http://HOST:PORT");
        return Err(InvalidInput::new(message).into());
    }
    let (model, model_folder) = model(arguments)?;
    let scratch = ScratchFolder::create("demo", false).context("make a folder for the tiers")?;
    let options = DemoOptions {
        program: std::env::current_exe().context("find this program")?,
        folder: scratch.path().to_owned(),
        gateway: arguments.gateway.clone(),
        model,
        model_folder,
        n_workers: arguments.workers.into(),
        n_clients: arguments.clients.into(),
        duration: Duration::from_secs(arguments.seconds.into()),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("start the runtime")?;
    let screen = Screen::new(options.duration);
    let outcome = runtime.block_on(async {
        // The children end with the dropped run.
        Interrupt::listen()?.or(demo::run(&options, |progress| screen.show(progress))).await
    });
    screen.clear();
    let outcome = outcome?;
    let path = &arguments.svg;
    std::fs::write(path, outcome.svg()).with_context(|| format!("write picture {}", path.display()))?;
    let report = Report {
        bench: "demo",
        machine: Machine::detect(),
        settings: DemoOutcome::settings(&options),
        description: String::new(),
        results: outcome.measurements(),
    };
    if arguments.json {
        return print_json(&report);
    }
    print(&outcome, arguments).context("write to standard output")
}

/// The name that requests give the model, and the folder of one that workers do not carry.
fn model(arguments: &DemoArguments) -> anyhow::Result<(String, Option<PathBuf>)> {
    let given = &arguments.model;
    if arguments.gateway.is_some() || given == BUNDLED_MODEL {
        return Ok((given.clone(), None));
    }
    // Before the workers start, which wait for it no longer than for a model on disk.
    let found = find_model(Path::new(given))?;
    Model::check_folder(&found.folder).context("open the model")?;
    let name = found.name.or_else(|| Some(found.folder.file_name()?.to_str()?.to_owned()));
    Ok((name.unwrap_or_else(|| given.clone()), Some(found.folder)))
}

fn print(outcome: &DemoOutcome, arguments: &DemoArguments) -> std::io::Result<()> {
    let mut stdout = anstream::stdout().lock();
    let mut columns = vec![Column::new("", Align::Left)];
    columns.extend(Run::ALL.map(|run| Column::new(run.name(), Align::Right)));
    let mut table = Table::new(columns);
    let mut row = |name: &str, value: &dyn Fn(&Tally) -> String| {
        table.push([name.to_owned()].into_iter().chain(Run::ALL.map(|run| value(outcome.tally(run)))));
    };
    let ms = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0} ms"));
    row("time to first token, median", &|tally| ms(tally.ttft_ms(0.5)));
    row("time to first token, 95 %", &|tally| ms(tally.ttft_ms(0.95)));
    row("requests served", &|tally| tally.samples.len().to_string());
    row("requests failed", &|tally| tally.n_failed.to_string());
    row("prompt tokens not computed", &|tally| percent(tally.tokens().hit_ratio()));
    for (idx, source) in SOURCES.iter().enumerate() {
        row(&format!("  from {source}"), &|tally| percent(tally.tokens().shares()[idx]));
    }
    table.write(&mut stdout)?;
    if let Some(killed_at) = outcome.with.killed_at {
        writeln!(
            stdout,
            "\n{DIMMED}One of {} workers was killed after {:.1} s of each run.{DIMMED:#}",
            arguments.workers,
            killed_at.as_secs_f64()
        )?;
    }
    writeln!(stdout, "\nPicture: {TITLE}{}{TITLE:#}", arguments.svg.display())?;
    stdout.flush()
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

impl Screen {
    /// Shows itself only on a terminal.
    fn new(duration: Duration) -> Self {
        let bars = MultiProgress::new();
        if !terminal::stderr_is_terminal() {
            bars.set_draw_target(ProgressDrawTarget::hidden());
        }
        let line = |template: &str, length: u64| {
            let line = bars.add(ProgressBar::new(length));
            // The built-in style is as good if the template should ever be wrong.
            if let Ok(style) = ProgressStyle::with_template(template) {
                line.set_style(style);
            }
            line
        };
        let lines = Run::ALL.map(|_| {
            (line("{prefix:<13} {bar:24} {msg}", duration.as_millis() as u64), line("              {msg}", 1))
        });
        Self { bars, lines, duration }
    }

    fn show(&self, progress: &Progress<'_>) {
        let (figures, history) = &self.lines[usize::from(progress.run == Run::With)];
        let tally = progress.tally;
        figures.set_prefix(progress.run.name());
        figures.set_position(progress.elapsed.as_millis() as u64);
        let shares: Vec<String> = SOURCES
            .iter()
            .zip(tally.tokens().shares())
            .filter(|(_, share)| 0.0 < *share)
            .map(|(source, share)| format!("{source} {}", percent(share)))
            .collect();
        figures.set_message(format!(
            "{:>4.1} s  {} served  first token {:.0} ms  hits: {}",
            progress.elapsed.as_secs_f64(),
            tally.samples.len(),
            tally.ttft_ms(0.5).unwrap_or(0.0),
            if shares.is_empty() { "none".to_owned() } else { shares.join(", ") }
        ));
        let note = tally.killed_at.map_or("", |_| "  a worker was killed");
        history.set_message(format!("{}{note}", bars_of(&tally.medians_ms(self.duration, N_BARS))));
    }

    fn clear(&self) {
        // What stays on a terminal that is gone does not matter.
        let _ = self.bars.clear();
    }
}

/// One character for each median, as high as it is beside the largest.
fn bars_of(medians: &[Option<f64>]) -> String {
    let largest = medians.iter().flatten().copied().fold(1.0, f64::max);
    let bar = |median: &Option<f64>| match median {
        None => ' ',
        Some(ms) => BARS[((ms / largest * (BARS.len() - 1) as f64).round() as usize).min(BARS.len() - 1)],
    };
    medians.iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_high_as_their_medians_and_gaps_stay_empty() {
        let text = bars_of(&[Some(1.0), None, Some(8.0)]);
        assert_eq!(text.chars().collect::<Vec<_>>(), [BARS[1], ' ', BARS[7]]);
    }
}
