//! What clients see of streams that go to another worker: pauses, drains and rolling restarts.
//!
//! Coordinator, gateway and workers are processes of their own on loopback; the model is the bundled one with a longer
//! context. Every text is compared with that of an undisturbed run, and the bench fails if one differs.

mod copies;
mod drain;
mod fleet;
mod parts;
mod pause;
mod request;
mod rolling;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use kvik_model::DeviceName;
use tokio::runtime::Runtime;

use self::fleet::{Fleet, WorkerProgram};
use crate::interrupt::Interrupt;
use crate::report::{Baseline, Goal, Measurement};
use crate::stream::percentile;

/// Lengths of the sequences, in tokens.
const LENGTHS: [usize; 4] = [512, 2048, 4096, 8192];
/// The pause that a move should stay below, in milliseconds.
const PAUSE_GOAL_MS: f64 = 10.0;
/// How much longer a replay should pause than a move, at `RATIO_LENGTH`.
const RATIO_GOAL: f64 = 5.0;
const RATIO_LENGTH: usize = 4096;

/// What is measured.
#[derive(Debug, Clone)]
pub struct MovingBenchOptions {
    /// The program that runs the roles: `kvik` itself.
    pub program: PathBuf,
    /// Folder for the model; must be empty, and is left to its owner.
    pub folder: PathBuf,
    /// What the model runs on.
    pub device: DeviceName,
    /// Takes less time for less precise values, with short sequences only.
    pub is_quick: bool,
    /// How long all workers are restarted in turn; `None` leaves that out.
    pub rolling: Option<Duration>,
}

/// The measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Pauses of moves and of replays of sequences of this many tokens.
    Pause(usize),
    /// A worker that ends with 32 streams.
    Drain,
    /// Streams beside long prompts, on workers with and without roles.
    Parts,
    /// All workers restarted in turn.
    Rolling,
}

/// A fleet and what is measured on it.
#[derive(Debug)]
pub struct MovingBench {
    options: MovingBenchOptions,
    runs: WorkerProgram,
    fleet: Fleet,
    /// What failed requests said.
    failures: Vec<String>,
    interrupt: Interrupt,
    // Last, so that what runs on it is gone before.
    runtime: Runtime,
}

impl Kind {
    /// Its name, as it is shown while it is measured.
    pub fn name(self) -> String {
        match self {
            Self::Pause(length) => format!("pause_{length}"),
            Self::Drain => "drain_32_streams".to_owned(),
            Self::Parts => "beside_prompts".to_owned(),
            Self::Rolling => "rolling_restart".to_owned(),
        }
    }
}

impl MovingBenchOptions {
    fn lengths(&self) -> &'static [usize] {
        if self.is_quick { &LENGTHS[..1] } else { &LENGTHS }
    }

    /// Streams of a length and moves of each: fewer of short ones, whose length would change too much.
    fn moves(&self, length: usize) -> (u64, usize) {
        match (self.is_quick, length) {
            (true, _) => (1, 4),
            (false, ..1024) => (13, 8),
            (false, _) => (4, 25),
        }
    }

    /// Tokens of each output of the worker that drains.
    fn drained_tokens(&self) -> usize {
        if self.is_quick { 256 } else { 768 }
    }

    /// Long prompts beside streams, and how often they come.
    fn beside(&self) -> (parts::Load, u32) {
        if self.is_quick {
            (parts::Load { stream_tokens: 256, n_prompts: 3, prompt_tokens: 2048 }, 1)
        } else {
            (parts::Load { stream_tokens: 2048, n_prompts: 3, prompt_tokens: 4096 }, 3)
        }
    }

    fn n_replays(&self) -> u64 {
        if self.is_quick { 1 } else { 5 }
    }
}

impl MovingBench {
    /// Starts the processes.
    ///
    /// # Errors
    /// If one of them cannot be started, or a signal comes.
    pub fn try_new(options: MovingBenchOptions) -> anyhow::Result<Self> {
        let model = fleet::write_model(&options.folder).context("write a model with a longer context")?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .context("start the runtime")?;
        let runs = WorkerProgram { program: options.program.clone(), model, device: options.device };
        let (fleet, interrupt) = runtime.block_on(async {
            let mut interrupt = Interrupt::listen()?;
            let fleet = interrupt.or(Fleet::start(&runs, 2)).await?;
            anyhow::Ok((fleet, interrupt))
        })?;
        Ok(Self { options, runs, fleet, failures: Vec::new(), interrupt, runtime })
    }

    /// The measurements, in their order.
    pub fn kinds(&self) -> Vec<Kind> {
        let pauses = self.options.lengths().iter().map(|length| Kind::Pause(*length));
        let rolling = self.options.rolling.map(|_| Kind::Rolling);
        pauses.chain([Kind::Drain, Kind::Parts]).chain(rolling).collect()
    }

    /// What is measured, for programs.
    pub fn settings(&self) -> serde_json::Value {
        let lengths: serde_json::Map<String, serde_json::Value> = self
            .options
            .lengths()
            .iter()
            .map(|length| {
                let (n_streams, n_moves) = self.options.moves(*length);
                (length.to_string(), serde_json::json!({"streams": n_streams, "moves_per_stream": n_moves}))
            })
            .collect();
        serde_json::json!({
            "model": fleet::MODEL,
            "device": self.options.device.to_string(),
            "threads_per_worker": self.fleet.n_threads,
            "lengths": lengths,
            "replays_per_length": self.options.n_replays(),
            "drained_streams": drain::N_STREAMS,
            "streams_beside_prompts": parts::N_STREAMS,
            "prompts_beside_streams": self.options.beside().0.n_prompts,
            "tokens_of_prompts_beside_streams": self.options.beside().0.prompt_tokens,
            "failures": self.failures,
            "rolling_seconds": self.options.rolling.map(|duration| duration.as_secs_f64()),
        })
    }

    /// What is measured, for people.
    pub fn description(&self) -> String {
        let (device, n_threads) = (self.options.device, self.fleet.n_threads);
        let kv_dtype = if device == DeviceName::Cpu { "f32" } else { "bf16" };
        let failures: Vec<String> = self.failures.iter().map(|failure| format!("\n  {failure}")).collect();
        format!(
            "2 workers on {device} with {n_threads} threads each, coordinator and gateway as processes on loopback; \
            kvik-tiny with a context of 16k tokens, KV in {kv_dtype}{}",
            failures.concat()
        )
    }

    /// Does one measurement.
    ///
    /// # Errors
    /// If a text differs from that of its undisturbed run, a process does not do what it should, or a signal has come.
    pub fn measure(&mut self, kind: Kind) -> anyhow::Result<Vec<Measurement>> {
        let rows = match kind {
            Kind::Pause(length) => self.pauses(length)?,
            Kind::Drain => self.drain()?,
            Kind::Parts => self.parts()?,
            Kind::Rolling => self.rolling()?,
        };
        Ok(rows.into_iter().flatten().collect())
    }

    fn pauses(&mut self, length: usize) -> anyhow::Result<Vec<Option<Measurement>>> {
        let (n_streams, n_moves) = self.options.moves(length);
        let moves = pause::moves(&self.fleet, length, n_streams, n_moves);
        let moves = self.runtime.block_on(self.interrupt.or(moves))?;
        let replays = pause::replays(&mut self.fleet, length, self.options.n_replays());
        let replays = self.runtime.block_on(self.interrupt.or(replays))?;
        // On a fast device outputs may end before they are moved: there is nothing to report of moves then.
        let has_moved = !moves.pauses_ms.is_empty();
        let p99 = has_moved.then(|| percentile(&moves.pauses_ms, 0.99));
        let row = |name: &str, values: Vec<f64>| {
            Measurement::from_repeats(format!("{name}_{length}"), "ms", values)
        };
        let replay = Baseline::new("by replay", replays.clone());
        let by_move = Baseline::new("by move", moves.pauses_ms.clone());
        let goal = (length == RATIO_LENGTH).then_some(Goal::RatioAtLeast(RATIO_GOAL));
        let mut rows = vec![
            row("pause_p50_ms", moves.pauses_ms).map(|row| row.compared_with(replay, None)),
            row("pause_p99_ms", p99.into_iter().collect()).map(|row| row.wanted(Goal::AtMost(PAUSE_GOAL_MS))),
            row("replay_pause_p50_ms", replays)
                .map(|row| if has_moved { row.compared_with(by_move, goal) } else { row }),
        ];
        if Some(&length) == self.options.lengths().last() {
            rows.push(copy_speed(&moves.copies)?);
        }
        Ok(rows)
    }

    fn drain(&mut self) -> anyhow::Result<Vec<Option<Measurement>>> {
        let drained = drain::drain(&mut self.fleet, self.options.drained_tokens());
        let drained = self.runtime.block_on(self.interrupt.or(drained))?;
        let row = |name: &str, unit, value| Measurement::from_repeats(name.to_owned(), unit, vec![value]);
        let rows = vec![
            row("drain_32_streams_ms", "ms", drained.took.as_secs_f64() * 1e3),
            row("drain_moved_requests", "requests", drained.n_moved),
            row("drain_failed_requests", "requests", drained.failures.len() as f64)
                .map(|row| row.wanted(Goal::AtMost(0.0))),
        ];
        self.failures.extend(drained.failures);
        Ok(rows)
    }

    fn parts(&mut self) -> anyhow::Result<Vec<Option<Measurement>>> {
        let (runs, load) = (&self.runs, self.options.beside());
        let (runtime, interrupt) = (&self.runtime, &mut self.interrupt);
        let mut run = |roles| runtime.block_on(interrupt.or(run_beside(runs, roles, load)));
        let (parted, mixed) = (run(&["prefill", "decode"])?, run(&[])?);
        let texts = |runs: &[parts::Beside]| runs.iter().map(|run| run.texts.clone()).collect::<Vec<_>>();
        ensure!(texts(&parted) == texts(&mixed), "workers with roles gave another text than workers without");
        let row = |name: &str, of: fn(&parts::Beside) -> f64| {
            let mixed = Baseline::new("two mixed workers", mixed.iter().map(of).collect());
            let parted = parted.iter().map(of).collect();
            let row = Measurement::from_repeats(format!("beside_prompts_{name}"), "ms", parted);
            row.map(|row| row.compared_with(mixed, None))
        };
        let moved = parted.iter().map(|run| run.n_moved).collect();
        Ok(vec![
            row("gap_p50_ms", |run| percentile(&run.gaps_ms, 0.5)),
            row("gap_p99_ms", |run| percentile(&run.gaps_ms, 0.99)),
            row("first_token_p50_ms", |run| percentile(&run.first_token_ms, 0.5)),
            Measurement::from_repeats("beside_prompts_moved_requests".to_owned(), "requests", moved),
        ])
    }

    fn rolling(&mut self) -> anyhow::Result<Vec<Option<Measurement>>> {
        let Some(duration) = self.options.rolling else { return Ok(Vec::new()) };
        let rolled = roll(&self.runs, duration);
        let rolled = self.runtime.block_on(self.interrupt.or(rolled))?;
        let row = |name: &str, unit, value| Measurement::from_repeats(name.to_owned(), unit, vec![value]);
        let rows = vec![
            row("rolling_restart_failed_requests", "requests", rolled.failures.len() as f64)
                .map(|row| row.wanted(Goal::AtMost(0.0))),
            row("rolling_restart_served_requests", "requests", rolled.n_served as f64),
            row("rolling_restarts", "restarts", rolled.n_restarts as f64),
        ];
        self.failures.extend(rolled.failures);
        Ok(rows)
    }
}

/// The speed at which KV moves, beside what loopback gives without it.
fn copy_speed(copies: &[(u64, Duration)]) -> anyhow::Result<Option<Measurement>> {
    let mut loopback = Vec::new();
    for (n_bytes, _) in copies {
        loopback.push(copies::loopback_gb_s(*n_bytes as usize)?);
    }
    let speed = |(n_bytes, took): &(u64, Duration)| *n_bytes as f64 / 1e9 / took.as_secs_f64();
    let speeds = copies.iter().map(speed).collect();
    let row = Measurement::from_repeats("moved_gb_s".to_owned(), "GB/s", speeds);
    Ok(row.map(|row| row.compared_with(Baseline::new("loopback TCP", loopback), None)))
}

/// Runs a load on a fleet of its own, some times.
async fn run_beside(
    runs: &WorkerProgram,
    roles: &'static [&'static str],
    (load, n_runs): (parts::Load, u32),
) -> anyhow::Result<Vec<parts::Beside>> {
    let fleet = Fleet::start_with_roles(runs, 2, roles).await?;
    let mut measured = Vec::new();
    for number in 0..n_runs {
        measured.push(parts::run(&fleet, load, &format!("run-{number}")).await?);
    }
    Ok(measured)
}

async fn roll(runs: &WorkerProgram, duration: Duration) -> anyhow::Result<rolling::Rolled> {
    let mut fleet = Fleet::start(runs, rolling::N_WORKERS).await?;
    rolling::rolling(&mut fleet, duration).await
}
