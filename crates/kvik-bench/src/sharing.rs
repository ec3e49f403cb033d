//! Several engines on one device, under load that moves between them: memory that is shared against memory that is split.
//!
//! Three workers are processes of their own with a model each. Bursts of requests go to them in turns, each burst needs
//! five sixths of the memory, and the two other workers get a small request meanwhile. The same load runs on workers
//! that have a third of the memory each, and on workers that share all of it. Texts must not differ.

mod engines;
mod load;

use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use kvik_model::DeviceName;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use self::engines::{Budget, Engines, Setup};
use self::load::{Load, Outcome};
use crate::interrupt::Interrupt;
use crate::report::{Baseline, Goal, Measurement};
use crate::stream::percentile;

/// Models on the device.
const N_MODELS: usize = 3;

/// What is measured.
#[derive(Debug, Clone)]
pub struct SharingBenchOptions {
    /// The program that runs the workers: `kvik` itself.
    pub program: PathBuf,
    /// Folder for the ledger of the shared memory; must be empty, and is left to its owner.
    pub folder: PathBuf,
    /// Folder of the model that every worker runs; `None`: the bundled one.
    pub model: Option<PathBuf>,
    /// Where it runs.
    pub device: DeviceName,
    /// Takes less time, with shorter requests and a burst for each model.
    pub is_quick: bool,
}

/// The load, and the memory it is measured on.
#[derive(Debug)]
pub struct SharingBench {
    options: SharingBenchOptions,
    load: Load,
    budget: Budget,
    interrupt: Interrupt,
    // Last, so that what runs on it is gone before.
    runtime: Runtime,
}

impl SharingBench {
    /// Reads the model's numbers; starts nothing yet.
    ///
    /// # Errors
    /// If the model cannot be read.
    pub fn try_new(options: SharingBenchOptions) -> anyhow::Result<Self> {
        let load = Load::new(options.is_quick);
        let budget = Budget::new(options.model.as_deref(), options.device, load.burst_tokens())?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .context("start the runtime")?;
        let interrupt = runtime.block_on(async { Interrupt::listen() })?;
        Ok(Self { options, load, budget, interrupt, runtime })
    }

    /// The ways to give out the memory, in the order in which they are measured.
    pub fn n_steps(&self) -> usize {
        2
    }

    /// Runs the load on split and on shared memory; `on_step` receives what is measured next.
    ///
    /// # Errors
    /// If a request fails, a text depends on how the memory is given out, or a signal has come.
    pub fn measure(&mut self, mut on_step: impl FnMut(&'static str)) -> anyhow::Result<Vec<Measurement>> {
        on_step("static_split");
        let split = self.run(Setup::Static)?;
        on_step("elastic");
        let shared = self.run(Setup::Elastic)?;
        ensure!(split.texts == shared.texts, "a text depends on how the memory is given out");
        let ttft = |outcome: &Outcome, share| vec![percentile(&outcome.burst_ttft_ms, share)];
        let speed = |outcome: &Outcome| vec![outcome.tokens_per_s()];
        let idle = |outcome: &Outcome| vec![percentile(&outcome.idle_ttft_ms, 0.99)];
        let row = |name: &str, unit, values| Measurement::from_repeats(name.to_owned(), unit, values);
        let against = |name: &str, unit, of: &dyn Fn(&Outcome) -> Vec<f64>, goal| {
            let baseline = Baseline::new("static split", of(&split));
            row(name, unit, of(&shared)).map(|row| row.compared_with(baseline, goal))
        };
        let rows = [
            against(
                "elastic_ttft_p99_ms",
                "ms",
                &|outcome| ttft(outcome, 0.99),
                Some(Goal::RatioAtMost(0.5)),
            ),
            row("static_ttft_p99_ms", "ms", ttft(&split, 0.99)),
            against("elastic_ttft_p50_ms", "ms", &|outcome| ttft(outcome, 0.5), None),
            against("elastic_tokens_per_s", "tokens/s", &speed, Some(Goal::RatioAtLeast(1.0))),
            against("elastic_idle_ttft_p99_ms", "ms", &idle, None),
            row("elastic_peak_share", "of the budget", vec![shared.peak_share]),
            row("elastic_beyond_a_third_ms", "ms", vec![percentile(&shared.beyond_third_ms, 1.0)]),
        ];
        Ok(rows.into_iter().flatten().collect())
    }

    /// What is measured, for programs.
    pub fn settings(&self) -> Value {
        json!({
            "model": self.options.model.as_ref().map_or("kvik-tiny".into(), |model| model.display().to_string()),
            "device": self.options.device.to_string(),
            "models": N_MODELS,
            "budget_bytes": self.budget.n_bytes(),
            "budget_tokens": self.budget.n_tokens(),
            "bursts": self.load.n_bursts,
            "requests_per_burst": self.load.n_requests,
            "prompt_tokens": self.load.prompt_tokens,
            "output_tokens": self.load.output_tokens,
        })
    }

    /// What is measured, for people.
    pub fn description(&self) -> String {
        let load = &self.load;
        format!(
            "{N_MODELS} workers on {}, {} tokens of KV for all; {} bursts in turns of {} requests with {} + {} tokens, \
             each five sixths of the memory",
            self.options.device,
            self.budget.n_tokens(),
            load.n_bursts,
            load.n_requests,
            load.prompt_tokens,
            load.output_tokens,
        )
    }

    fn run(&mut self, setup: Setup) -> anyhow::Result<Outcome> {
        let Self { options, load, budget, interrupt, runtime } = self;
        runtime.block_on(async {
            let engines = Engines::start(options, budget, setup)?;
            interrupt.or(load.run(&engines)).await
        })
    }
}
