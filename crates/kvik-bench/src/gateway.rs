//! What the gateway costs: requests straight to mock workers against requests through it.
//!
//! Everything runs in this process on loopback, each role on threads of its own and no more of them
//! than its share of the cores, as if it had a machine to itself: two mock workers, a gateway with its
//! default configuration and both as static backends, a relay of bytes for comparison, and one
//! thread of clients. Each measurement is warmed up, then its two sides take
//! turns, round by round, and the medians of the rounds are reported. No log is written.

pub(crate) mod load;
pub(crate) mod mock;
mod relay;
pub(crate) mod usage;

use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use kvik_gateway::{BackendConfig, Gateway, GatewayConfig};
use kvik_runtime::shutdown::Shutdown;
use tokio::runtime::{Builder, Runtime};

use self::load::{Load, Target, Until, prompts, stream_request};
use self::mock::Pace;
use crate::report::{Baseline, Goal, Measurement};

const SMALL_BYTES: usize = 800;
const LARGE_BYTES: usize = 220_000;
const LARGE_CONCURRENCY: usize = 20;
/// Requests at a time while the memory is watched.
const MEMORY_CONCURRENCY: usize = 16;
const N_WORKERS: usize = 2;
/// Roles that work at the same time: clients, gateway or relay, workers, and room for the system.
const N_ROLES: usize = 4;
/// Names of threads; the system cuts them after 15 bytes.
const GATEWAY_THREADS: &str = "bench-gateway";
const RELAY_THREADS: &str = "bench-relay";

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub struct GatewayBenchOptions {
    /// Requests over which the memory is watched.
    pub memory_requests: usize,
    /// Takes less time for less precise values.
    pub is_quick: bool,
}

/// The measurements, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Time added to a short request.
    AddedTime,
    /// Rate of long requests.
    LargeRate,
    /// CPU time of a chunk of streams whose chunks come as fast as they are taken.
    ChunkTime,
    /// CPU time of a chunk of streams whose chunks come one at a time.
    PacedChunkTime,
    /// Growth of the memory.
    Memory,
}

/// A gateway, its workers and its clients.
#[derive(Debug)]
pub struct GatewayBench {
    options: GatewayBenchOptions,
    load: Load,
    direct: Target,
    through: Target,
    relayed: Target,
    shutdown: Shutdown,
    gateway: Runtime,
    /// Dropped last: nothing uses them then.
    _others: [Runtime; 2],
}

// === impl Kind ===

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::AddedTime, Self::LargeRate, Self::ChunkTime, Self::PacedChunkTime, Self::Memory];
}

// === impl GatewayBenchOptions ===

impl GatewayBenchOptions {
    fn rounds(self) -> usize {
        if self.is_quick { 3 } else { 7 }
    }

    fn requests_per_round(self) -> usize {
        if self.is_quick { 200 } else { 2_000 }
    }

    fn time_per_round(self) -> Duration {
        Duration::from_millis(if self.is_quick { 200 } else { 1_000 })
    }

    /// Streams of a round and the chunks of each.
    fn streams(self, pace: Pace) -> (usize, usize) {
        match (pace, self.is_quick) {
            (Pace::Saturated, true) => (32, 500),
            (Pace::Saturated, false) => (64, 2_000),
            (Pace::Steps, true) => (8, 50),
            (Pace::Steps, false) => (32, 250),
        }
    }
}

// === impl GatewayBench ===

impl GatewayBench {
    /// Starts the workers, the gateway and the clients.
    pub fn try_new(options: GatewayBenchOptions) -> anyhow::Result<Self> {
        let (workers, relays) = (runtime("bench-worker")?, runtime(RELAY_THREADS)?);
        let gateway = runtime(GATEWAY_THREADS)?;
        let addresses = (0..N_WORKERS).map(|_| mock::start(&workers)).collect::<anyhow::Result<Vec<_>>>()?;
        let relay = relay::start(&relays, addresses[0])?;
        let backend = |address| BackendConfig {
            url: format!("http://{address}"),
            model: Some(mock::MODEL.to_owned()),
            ..BackendConfig::default()
        };
        let config = GatewayConfig {
            listen: "127.0.0.1:0".to_owned(),
            backends: addresses.iter().map(backend).collect(),
            ..GatewayConfig::default()
        };
        let shutdown = Shutdown::new();
        // On the gateway's own threads, so that all it does is counted there.
        let starting = shutdown.clone();
        let start = gateway.spawn(async move { Gateway::start(config, &starting).await });
        let running = gateway.block_on(start).context("start the gateway")?.context("start the gateway")?;
        Ok(Self {
            options,
            load: Load::try_new().context("start the clients")?,
            direct: Target::new(&addresses)?,
            through: Target::new(&[running.address()])?,
            relayed: Target::new(&[relay])?,
            shutdown,
            gateway,
            _others: [workers, relays],
        })
    }

    /// What is measured, for programs.
    pub fn settings(&self) -> serde_json::Value {
        let (n_streams, n_chunks) = self.options.streams(Pace::Saturated);
        let (n_paced_streams, n_paced_chunks) = self.options.streams(Pace::Steps);
        serde_json::json!({
            "workers": N_WORKERS,
            "threads_per_role": threads_per_role(),
            "rounds": self.options.rounds(),
            "requests_per_round": self.options.requests_per_round(),
            "rate_seconds_per_round": self.options.time_per_round().as_secs_f64(),
            "streams": n_streams,
            "chunks_per_stream": n_chunks,
            "paced_streams": n_paced_streams,
            "chunks_per_paced_stream": n_paced_chunks,
            "memory_requests": self.options.memory_requests,
            "log": "off",
        })
    }

    /// What is measured, for people.
    pub fn description(&self) -> String {
        let rounds = self.options.rounds();
        let threads = threads_per_role();
        format!(
            "{N_WORKERS} mock workers in this process, loopback, {threads} threads a role, no log; medians of {rounds} rounds"
        )
    }

    /// The name of a measurement.
    pub fn name(&self, kind: Kind) -> String {
        match kind {
            Kind::AddedTime => "added_p50_concurrency_1".to_owned(),
            Kind::LargeRate => "rate_220kB_concurrency_20".to_owned(),
            Kind::ChunkTime => "cpu_per_chunk".to_owned(),
            Kind::PacedChunkTime => "cpu_per_chunk_paced_2ms".to_owned(),
            Kind::Memory => match self.options.memory_requests {
                thousands if thousands % 1000 == 0 => format!("memory_growth_{}k", thousands / 1000),
                requests => format!("memory_growth_{requests}"),
            },
        }
    }

    /// Does a measurement.
    pub fn measure(&self, kind: Kind) -> anyhow::Result<Vec<Measurement>> {
        let results = match kind {
            Kind::AddedTime => vec![self.added_time()?],
            Kind::LargeRate => vec![self.large_rate()?],
            Kind::ChunkTime => vec![self.chunk_time(Pace::Saturated)?.0],
            Kind::PacedChunkTime => self.paced_chunk_time()?.into(),
            Kind::Memory => vec![self.memory()?],
        };
        Ok(results.into_iter().flatten().collect())
    }

    /// Ends the gateway.
    pub fn finish(self) {
        self.gateway.block_on(self.shutdown.finish());
    }

    /// The median time of a request through the gateway less that of one to a worker.
    fn added_time(&self) -> anyhow::Result<Option<Measurement>> {
        let bodies = prompts(SMALL_BYTES);
        let n_requests = self.options.requests_per_round();
        let median = |target: &Target| self.load.median_us(target, &bodies, n_requests);
        let rounds = self.rounds(&self.direct, &self.through, median)?;
        let added = rounds.iter().map(|(direct, through)| through - direct).collect();
        let direct = rounds.iter().map(|(direct, _)| *direct).collect();
        let name = self.name(Kind::AddedTime);
        Ok(Measurement::from_repeats(name, "us", added).map(|result| {
            result.compared_with(Baseline::new("direct_p50", direct), Some(Goal::AtMost(60.0)))
        }))
    }

    fn large_rate(&self) -> anyhow::Result<Option<Measurement>> {
        let bodies = prompts(LARGE_BYTES);
        let until = Until::Elapsed(self.options.time_per_round());
        let rate = |target: &Target| self.load.rate(target, &bodies, LARGE_CONCURRENCY, until);
        let (direct, through) = self.rounds(&self.direct, &self.through, rate)?.into_iter().unzip();
        let name = self.name(Kind::LargeRate);
        Ok(Measurement::from_repeats(name, "requests/s", through).map(|result| {
            result.compared_with(Baseline::new("direct", direct), Some(Goal::RatioAtLeast(0.8)))
        }))
    }

    /// CPU time of the gateway's threads over the chunks that pass, and that of a relay of bytes for
    /// each round; what a stream costs at its beginning and end is in both.
    fn chunk_time(&self, pace: Pace) -> anyhow::Result<(Option<Measurement>, Vec<f64>)> {
        let (n_streams, n_chunks) = self.options.streams(pace);
        let body: Bytes = stream_request(n_chunks, pace);
        let measure = |target: &Target, threads: &str| {
            let before = usage::thread_cpu_time(threads)?;
            self.load.stream(target, &body, n_streams, mock::stream_bytes(n_chunks))?;
            let used = usage::thread_cpu_time(threads)?.saturating_sub(before);
            anyhow::Ok(used.as_secs_f64() * 1e6 / (n_streams * n_chunks) as f64)
        };
        let (mut relayed, mut through) = (Vec::new(), Vec::new());
        for round in 0..=self.options.rounds() {
            let values = (measure(&self.relayed, RELAY_THREADS)?, measure(&self.through, GATEWAY_THREADS)?);
            if 0 < round {
                relayed.push(values.0);
                through.push(values.1);
            }
        }
        let above = through.iter().zip(&relayed).map(|(through, relayed)| through - relayed).collect();
        let (kind, goal) = match pace {
            Pace::Saturated => (Kind::ChunkTime, Some(Goal::AtMost(3.0))),
            // Mostly the operating system's: a read, a write and a wake-up for each chunk.
            Pace::Steps => (Kind::PacedChunkTime, None),
        };
        let result = Measurement::from_repeats(self.name(kind), "us", through)
            .map(|result| result.compared_with(Baseline::new("byte_relay", relayed), goal));
        Ok((result, above))
    }

    /// CPU time of paced chunks, and the part of it that a relay of bytes does not need.
    fn paced_chunk_time(&self) -> anyhow::Result<[Option<Measurement>; 2]> {
        let (result, above) = self.chunk_time(Pace::Steps)?;
        let name = format!("{}_above_relay", self.name(Kind::PacedChunkTime));
        let baseline = result.as_ref().and_then(|result| result.baseline.clone());
        let above = Measurement::from_repeats(name, "us", above).map(|above| match baseline {
            Some(baseline) => above.compared_with(baseline, None),
            None => above,
        });
        Ok([result, above])
    }

    /// Growth of the whole process, mock workers and clients included.
    fn memory(&self) -> anyhow::Result<Option<Measurement>> {
        let bodies = prompts(SMALL_BYTES);
        let n_requests = self.options.memory_requests;
        let send = |n_requests: usize| {
            self.load.rate(&self.through, &bodies, MEMORY_CONCURRENCY, Until::Requests(n_requests))
        };
        send(n_requests.div_ceil(10))?;
        let before = usage::resident_bytes()? as f64;
        send(n_requests)?;
        let growth = usage::resident_bytes()? as f64 - before;
        let goal = Some(Goal::AtMost(f64::from(16 << 20)));
        let name = self.name(Kind::Memory);
        Ok(Measurement::from_repeats(name, "bytes", vec![growth])
            .map(|result| result.compared_with(Baseline::new("resident_before", vec![before]), goal)))
    }

    /// Both sides in turn, the first round not counted.
    fn rounds(
        &self,
        left: &Target,
        right: &Target,
        measure: impl Fn(&Target) -> anyhow::Result<f64>,
    ) -> anyhow::Result<Vec<(f64, f64)>> {
        let mut rounds = Vec::new();
        for round in 0..=self.options.rounds() {
            let values = (measure(left)?, measure(right)?);
            if 0 < round {
                rounds.push(values);
            }
        }
        Ok(rounds)
    }
}

/// Threads of a role: with more, the roles would compete for cores, and a rate through the gateway would
/// say how the system shares them.
fn threads_per_role() -> usize {
    let n_cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (n_cores / N_ROLES).max(1)
}

/// A runtime like that of a service, with threads that can be told from others.
pub(crate) fn runtime(name: &str) -> anyhow::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(threads_per_role())
        .enable_all()
        .thread_name(name)
        .build()
        .context("start a runtime")
}
