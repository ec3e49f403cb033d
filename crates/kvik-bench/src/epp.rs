//! What the endpoint picker costs, beside the gateway: requests whose engine a data plane asks for, and requests through the gateway.
//!
//! Everything runs in this process on loopback, each role on threads of its own: two mock workers, a gateway and a picker with their default
//! configurations and both workers as static backends, and one thread of clients. The picker's client says what Envoy says in full-duplex
//! mode: head, body in pieces, then the answer of the engine, which it makes up. So a request through the gateway includes the way to a mock
//! worker, and one of the picker does not: that is the data plane's work. The two sides take turns, round by round, and the medians of
//! the rounds are reported. No log is written.

mod data_plane;

use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use kvik_epp::{Epp, EppConfig};
use kvik_gateway::{BackendConfig, Gateway, GatewayConfig};
use kvik_runtime::shutdown::Shutdown;
use tokio::runtime::Runtime;

use self::data_plane::DataPlane;
use crate::gateway::load::{Load, Target, Until, prompts};
use crate::gateway::usage::thread_cpu_time;
use crate::gateway::{mock, runtime};
use crate::report::{Baseline, Measurement};

/// Requests at a time.
const CONCURRENCY: usize = 20;
const N_WORKERS: usize = 2;
/// Names of threads; the system cuts them after 15 bytes.
const GATEWAY_THREADS: &str = "bench-gateway";
const EPP_THREADS: &str = "bench-epp";

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub struct EppBenchOptions {
    /// Takes less time for less precise values.
    pub is_quick: bool,
}

/// Bodies that are measured, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// 2 kB, a short conversation.
    Small,
    /// 220 kB, a long prompt.
    Large,
}

/// A picker, a gateway, their workers and their clients.
#[derive(Debug)]
pub struct EppBench {
    options: EppBenchOptions,
    load: Load,
    data_plane: DataPlane,
    through_gateway: Target,
    shutdown: Shutdown,
    gateway: Runtime,
    epp: Runtime,
    /// Dropped last: nothing uses them then.
    _workers: Runtime,
}

impl Size {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Small, Self::Large];

    /// In names of measurements.
    pub fn name(self) -> &'static str {
        match self {
            Self::Small => "2kB",
            Self::Large => "220kB",
        }
    }

    fn n_bytes(self) -> usize {
        match self {
            Self::Small => 2_000,
            Self::Large => 220_000,
        }
    }
}

impl EppBenchOptions {
    fn rounds(self) -> usize {
        if self.is_quick { 3 } else { 7 }
    }

    fn time_per_round(self) -> Duration {
        Duration::from_millis(if self.is_quick { 200 } else { 2_000 })
    }
}

impl EppBench {
    /// Starts the workers, the gateway, the picker and the clients.
    pub fn try_new(options: EppBenchOptions) -> anyhow::Result<Self> {
        let (workers, gateway, epp) =
            (runtime("bench-worker")?, runtime(GATEWAY_THREADS)?, runtime(EPP_THREADS)?);
        let addresses = (0..N_WORKERS).map(|_| mock::start(&workers)).collect::<anyhow::Result<Vec<_>>>()?;
        let backend = |address| BackendConfig {
            url: format!("http://{address}"),
            model: Some(mock::MODEL.to_owned()),
            ..BackendConfig::default()
        };
        let gateway_config = GatewayConfig {
            listen: "127.0.0.1:0".to_owned(),
            backends: addresses.iter().map(backend).collect(),
            ..GatewayConfig::default()
        };
        let epp_config = EppConfig { listen: "127.0.0.1:0".to_owned(), ..EppConfig::default() };
        let shutdown = Shutdown::new();
        // Each on its own threads, so that all it does is counted there.
        let (starting, config) = (shutdown.clone(), gateway_config.clone());
        let start = gateway.spawn(async move { Gateway::start(config, &starting).await });
        let running = gateway.block_on(start).context("start the gateway")?.context("start the gateway")?;
        let starting = shutdown.clone();
        let start = epp.spawn(async move { Epp::start(epp_config, gateway_config, &starting).await });
        let picker = epp.block_on(start).context("start the picker")?.context("start the picker")?;
        Ok(Self {
            options,
            load: Load::try_new().context("start the clients")?,
            data_plane: DataPlane::connect(picker.address()).context("start the data plane")?,
            through_gateway: Target::new(&[running.address()])?,
            shutdown,
            gateway,
            epp,
            _workers: workers,
        })
    }

    /// What is measured, for programs.
    pub fn settings(&self) -> serde_json::Value {
        serde_json::json!({
            "workers": N_WORKERS,
            "concurrency": CONCURRENCY,
            "rounds": self.options.rounds(),
            "seconds_per_round": self.options.time_per_round().as_secs_f64(),
            "piece_bytes": data_plane::PIECE_BYTES,
            "log": "off",
        })
    }

    /// What is measured, for people.
    pub fn description(&self) -> String {
        let rounds = self.options.rounds();
        format!(
            "{N_WORKERS} mock workers in this process, loopback, {CONCURRENCY} requests at a time, no log; medians of {rounds} rounds"
        )
    }

    /// Measures rate and CPU time with bodies of a size.
    pub fn measure(&self, size: Size) -> anyhow::Result<Vec<Measurement>> {
        let bodies = prompts(size.n_bytes());
        let (mut rates, mut times) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
        for round in 0..=self.options.rounds() {
            let (gateway_rate, gateway_us) = self.through_gateway(&bodies)?;
            let (epp_rate, epp_us) = self.through_epp(&bodies)?;
            // The first round warms up.
            if 0 < round {
                rates.0.push(epp_rate);
                rates.1.push(gateway_rate);
                times.0.push(epp_us);
                times.1.push(gateway_us);
            }
        }
        let rate =
            Measurement::from_repeats(format!("rate_{}_concurrency_20", size.name()), "requests/s", rates.0)
                .map(|result| result.compared_with(Baseline::new("gateway", rates.1), None));
        let time = Measurement::from_repeats(format!("cpu_per_request_{}", size.name()), "us", times.0)
            .map(|result| result.compared_with(Baseline::new("gateway", times.1), None));
        Ok([rate, time].into_iter().flatten().collect())
    }

    /// Ends gateway and picker.
    pub fn finish(self) {
        self.gateway.block_on(self.shutdown.finish());
        drop(self.epp);
    }

    /// Requests a second, and microseconds of the gateway's threads for each.
    fn through_gateway(&self, bodies: &[Bytes]) -> anyhow::Result<(f64, f64)> {
        let until = Until::Elapsed(self.options.time_per_round());
        let started = std::time::Instant::now();
        let before = thread_cpu_time(GATEWAY_THREADS)?;
        let rate = self.load.rate(&self.through_gateway, bodies, CONCURRENCY, until)?;
        let n_requests = rate * started.elapsed().as_secs_f64();
        let used = thread_cpu_time(GATEWAY_THREADS)?.saturating_sub(before);
        Ok((rate, used.as_secs_f64() * 1e6 / n_requests))
    }

    /// The same of the picker.
    fn through_epp(&self, bodies: &[Bytes]) -> anyhow::Result<(f64, f64)> {
        let started = std::time::Instant::now();
        let before = thread_cpu_time(EPP_THREADS)?;
        let rate = self.data_plane.rate(bodies, CONCURRENCY, self.options.time_per_round())?;
        let n_requests = rate * started.elapsed().as_secs_f64();
        let used = thread_cpu_time(EPP_THREADS)?.saturating_sub(before);
        Ok((rate, used.as_secs_f64() * 1e6 / n_requests))
    }
}
