//! `kvik demo`: what routing by KV and a store of several tiers change, measured in half a minute.
//!
//! The same conversations over shared documents, more than fits into the engines, are sent twice by the same number of
//! clients: first without kvik's KV features, then with them. Half way through each run one worker is killed and the
//! load goes on. A gateway that already runs is measured the same way, except that no worker of it is killed, and that
//! the first run forbids reuse by a cache salt for each request.

mod client;
mod fleet;
mod picture;
mod tally;
mod workload;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::report::{Baseline, Measurement};

pub use client::wait_until_ready;
use client::{Load, Reuse};
use fleet::{Features, Fleet};
pub use tally::{SOURCES, Sample, Tally, Tokens};

/// How often the run is shown, and its clock looked at.
const TICK: Duration = Duration::from_millis(100);

/// What is run.
#[derive(Debug, Clone)]
pub struct DemoOptions {
    /// The program that runs the roles: `kvik` itself.
    pub program: PathBuf,
    /// Folder for the chunks of the workers; must be empty, and is left to its owner.
    pub folder: PathBuf,
    /// A gateway that runs already; `None` starts a fleet for each run.
    pub gateway: Option<String>,
    /// The model that requests name.
    pub model: String,
    /// Folder of the model that the workers of the demo's own fleet run; `None`: the bundled one.
    pub model_folder: Option<PathBuf>,
    /// Workers of the demo's own fleet, at least 2: one of them is killed.
    pub n_workers: usize,
    /// Conversations at a time.
    pub n_clients: u64,
    /// Length of each of the two runs.
    pub duration: Duration,
}

/// Which of the two runs it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Run {
    /// Without kvik's KV features.
    Without,
    /// With all of them.
    With,
}

/// What is shown while a run goes on.
#[derive(Debug)]
pub struct Progress<'a> {
    /// The run.
    pub run: Run,
    /// Time since its start, at most its length.
    pub elapsed: Duration,
    /// What was measured so far.
    pub tally: &'a Tally,
}

/// What both runs measured.
#[derive(Debug, Clone)]
pub struct DemoOutcome {
    /// The run without kvik's KV features.
    pub without: Tally,
    /// The run with them.
    pub with: Tally,
    duration: Duration,
}

impl Run {
    /// Both, in the order in which they are run.
    pub const ALL: [Self; 2] = [Self::Without, Self::With];

    /// Its name in tables and pictures.
    pub fn name(self) -> &'static str {
        match self {
            Self::Without => "without kvik",
            Self::With => "with kvik",
        }
    }
}

/// Makes both runs; `show` is called several times a second.
///
/// # Errors
/// If a process cannot be started, or no request of a run was answered.
pub async fn run(options: &DemoOptions, mut show: impl FnMut(&Progress<'_>)) -> anyhow::Result<DemoOutcome> {
    let without =
        measure(options, Run::Without, &mut show).await.context("run without kvik's KV features")?;
    let with = measure(options, Run::With, &mut show).await.context("run with kvik's KV features")?;
    Ok(DemoOutcome { without, with, duration: options.duration })
}

async fn measure(
    options: &DemoOptions,
    run: Run,
    show: &mut impl FnMut(&Progress<'_>),
) -> anyhow::Result<Tally> {
    let mut fleet = if options.gateway.is_some() {
        None
    } else {
        let features = if run == Run::With { Features::All } else { Features::None };
        Some(Fleet::start(options, features)?)
    };
    let gateway = match (&options.gateway, &fleet) {
        (Some(gateway), _) => gateway.trim_end_matches('/').to_owned(),
        (None, Some(fleet)) => fleet.gateway.clone(),
        (None, None) => anyhow::bail!("start a fleet: there is no gateway"),
    };
    let reuse = match (run, &fleet) {
        (Run::With, _) => Reuse::Allowed,
        (Run::Without, Some(_)) => Reuse::Spread,
        (Run::Without, None) => Reuse::Forbidden,
    };
    wait_until_ready(&gateway).await?;
    let load = Load {
        gateway,
        model: options.model.clone(),
        n_clients: options.n_clients,
        duration: options.duration,
        reuse,
    };
    let tally = Arc::new(Mutex::new(Tally::default()));
    let start = Instant::now();
    let clients = {
        let tally = Arc::clone(&tally);
        tokio::spawn(async move { load.run(start, &tally).await })
    };
    loop {
        let elapsed = start.elapsed();
        let is_time_to_kill = options.duration / 2 <= elapsed && tally.lock().killed_at.is_none();
        if let Some(fleet) = fleet.as_mut().filter(|fleet| is_time_to_kill && 1 < fleet.n_workers()) {
            fleet.kill_worker();
            tally.lock().killed_at = Some(start.elapsed());
        }
        show(&Progress { run, elapsed: elapsed.min(options.duration), tally: &tally.lock() });
        if clients.is_finished() {
            break;
        }
        tokio::time::sleep(TICK).await;
    }
    clients.await.context("run the clients")??;
    let tally = tally.lock().clone();
    anyhow::ensure!(!tally.samples.is_empty(), "no request was answered, {} failed", tally.n_failed);
    Ok(tally)
}

impl DemoOutcome {
    /// The tally of a run.
    pub fn tally(&self, run: Run) -> &Tally {
        match run {
            Run::Without => &self.without,
            Run::With => &self.with,
        }
    }

    /// The measurements of the run with kvik beside those of the run without.
    pub fn measurements(&self) -> Vec<Measurement> {
        let [without, with] = [&self.without, &self.with];
        let row = |name: &str, unit, value: &dyn Fn(&Tally) -> f64| {
            Measurement::from_repeats(name.to_owned(), unit, vec![value(with)])
                .map(|row| row.compared_with(Baseline::new(Run::Without.name(), vec![value(without)]), None))
        };
        let mut rows = vec![
            row("ttft_p50", "ms", &|tally| tally.ttft_ms(0.5).unwrap_or(f64::NAN)),
            row("ttft_p95", "ms", &|tally| tally.ttft_ms(0.95).unwrap_or(f64::NAN)),
            row("requests_served", "requests", &|tally| tally.samples.len() as f64),
            row("requests_failed", "requests", &|tally| tally.n_failed as f64),
            row("hit_ratio", "ratio", &|tally| tally.tokens().hit_ratio()),
        ];
        for (idx, source) in SOURCES.iter().enumerate() {
            rows.push(row(&format!("hit_ratio_{source}"), "ratio", &|tally| tally.tokens().shares()[idx]));
        }
        rows.into_iter().flatten().collect()
    }

    /// What was run, for a report.
    pub fn settings(options: &DemoOptions) -> Value {
        json!({
            "gateway": options.gateway,
            "workers": options.gateway.is_none().then_some(options.n_workers),
            "clients": options.n_clients,
            "seconds_a_run": options.duration.as_secs_f64(),
        })
    }

    /// Both runs as an SVG document: time to first token over time, and where prompt tokens came from.
    pub fn svg(&self) -> String {
        picture::draw(self)
    }
}
