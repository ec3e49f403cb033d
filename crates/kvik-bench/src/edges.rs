//! What hostile clients cost honest ones: the gateway under one attack after the other.
//!
//! Everything runs in this process on loopback: a mock worker, two gateways with their default configuration, one of them
//! with TLS, honest clients that send requests at a steady rate, and the attackers. Half of the honest requests use
//! connections that are kept open, half a connection of their own. Their times are measured without an attack first,
//! then during each attack.

mod attacks;
mod honest;

use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use kvik_gateway::{BackendConfig, Gateway, GatewayConfig, Running};
use kvik_runtime::http::{TlsServerConfig, raise_file_limit};
use kvik_runtime::shutdown::Shutdown;
use tokio::runtime::Runtime;

use self::attacks::Attackers;
use self::honest::{Honest, Served};
use crate::gateway::{mock, runtime};
use crate::report::{Goal, Measurement};

/// Honest requests a second.
const HONEST_RATE: u32 = 100;
/// Share of honest requests that must be served during an attack.
const SERVED_GOAL: f64 = 0.99;
/// Time for the gateway to let go of an attack that has ended.
const RECOVERY_TIME: Duration = Duration::from_secs(10);
/// Files that are open beside the connections of the attackers.
const OTHER_FILES: u64 = 1_500;

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub struct EdgesBenchOptions {
    /// Takes less time for less precise values, with fewer attackers.
    pub is_quick: bool,
}

/// The attacks, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attack {
    /// Clients that ask for a stream and never read it.
    StalledReaders,
    /// Clients that send the head of a request byte by byte.
    SlowHeaders,
    /// Clients that connect to the TLS listener and say nothing.
    IdleTls,
    /// Clients that send bodies up to the limit and beyond.
    GiantBodies,
    /// Clients that send the body of a request byte by byte.
    SlowBodies,
    /// As many connections as there can be, up to ten thousand.
    Connections,
    /// Random bytes, broken chunks, bad JSON, huge headers, bad UTF-8.
    Malformed,
}

/// A gateway with its clients of both kinds.
#[derive(Debug)]
pub struct EdgesBench {
    options: EdgesBenchOptions,
    honest: Honest,
    plain: Running,
    encrypted: Running,
    /// Without an attack, of each listener.
    before: [Served; 2],
    file_limit: u64,
    max_connections: usize,
    shutdown: Shutdown,
    gateway: Runtime,
    attackers: Runtime,
    _worker: Runtime,
}

impl Attack {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::StalledReaders,
        Self::SlowHeaders,
        Self::IdleTls,
        Self::GiantBodies,
        Self::SlowBodies,
        Self::Connections,
        Self::Malformed,
    ];

    /// The name, as a part of the measurements' names.
    pub fn name(self) -> &'static str {
        match self {
            Self::StalledReaders => "stalled_readers",
            Self::SlowHeaders => "slow_headers",
            Self::IdleTls => "idle_tls",
            Self::GiantBodies => "giant_bodies",
            Self::SlowBodies => "slow_bodies",
            Self::Connections => "connections",
            Self::Malformed => "malformed",
        }
    }
}

impl EdgesBenchOptions {
    /// How long honest clients send requests in each measurement.
    fn time(self) -> Duration {
        Duration::from_millis(if self.is_quick { 500 } else { 5_000 })
    }

    fn n_attackers(self, attack: Attack) -> usize {
        let n_attackers = match attack {
            Attack::StalledReaders => 1_000,
            Attack::SlowHeaders | Attack::IdleTls | Attack::SlowBodies => 2_000,
            Attack::Connections => 10_000,
            Attack::GiantBodies | Attack::Malformed => 32,
        };
        if self.is_quick { n_attackers / 10 } else { n_attackers }
    }
}

impl EdgesBench {
    /// Starts the worker, the gateways and the clients, and measures honest requests without an attack.
    ///
    /// # Errors
    /// If something cannot be started, or an honest request fails while nothing attacks.
    pub fn try_new(options: EdgesBenchOptions) -> anyhow::Result<Self> {
        let file_limit = raise_file_limit().unwrap_or(u64::MAX);
        let (worker, gateway, attackers) =
            (runtime("bench-worker")?, runtime("bench-gateway")?, runtime("bench-attack")?);
        let backend = BackendConfig {
            url: format!("http://{}", mock::start(&worker)?),
            model: Some(mock::MODEL.to_owned()),
            ..BackendConfig::default()
        };
        let config = GatewayConfig {
            listen: "127.0.0.1:0".to_owned(),
            backends: vec![backend],
            ..GatewayConfig::default()
        };
        let max_connections = config.limits.max_connections;
        let certificate = Certificate::make()?;
        let shutdown = Shutdown::new();
        let start = |config: GatewayConfig| {
            let starting = shutdown.clone();
            let start = gateway.spawn(async move { Gateway::start(config, &starting).await });
            gateway.block_on(start).context("start the gateway")?.context("start the gateway")
        };
        let encrypted = start(GatewayConfig { tls: certificate.files(), ..config.clone() })?;
        let plain = start(config)?;
        let honest = Honest::try_new(plain.address(), encrypted.address(), certificate.pem.as_bytes())?;
        let mut before = [Served::default(), Served::default()];
        for (is_encrypted, served) in [false, true].into_iter().zip(&mut before) {
            // Twice, of which the first warms up.
            honest.send(is_encrypted, HONEST_RATE, options.time() / 2)?;
            *served = honest.send(is_encrypted, HONEST_RATE, options.time())?;
            anyhow::ensure!(
                served.n_served() == served.n_sent,
                "{} of {} requests failed without an attack: {}",
                served.n_sent - served.n_served(),
                served.n_sent,
                served.failure.as_deref().unwrap_or("unknown")
            );
        }
        Ok(Self {
            options,
            honest,
            plain,
            encrypted,
            before,
            file_limit,
            max_connections,
            shutdown,
            gateway,
            attackers,
            _worker: worker,
        })
    }

    /// What is measured, for programs.
    pub fn settings(&self) -> serde_json::Value {
        let attackers: serde_json::Map<String, serde_json::Value> = Attack::ALL
            .map(|attack| (attack.name().to_owned(), self.n_attackers(attack).into()))
            .into_iter()
            .collect();
        serde_json::json!({
            "honest_requests_per_second": HONEST_RATE,
            "seconds_per_attack": self.options.time().as_secs_f64(),
            "attackers": attackers,
            "file_limit": self.file_limit,
            "max_connections": self.max_connections,
            "log": "off",
        })
    }

    /// What is measured, for people.
    pub fn description(&self) -> String {
        let seconds = self.options.time().as_secs_f64();
        format!(
            "1 mock worker and the gateway in this process, loopback, default limits, no log; \
            {HONEST_RATE} honest requests/s, {seconds} s an attack"
        )
    }

    /// The times of honest requests without an attack.
    pub fn before(&self) -> Vec<Measurement> {
        let names = ["p99_before", "p99_before_tls"];
        let rows = names.into_iter().zip(&self.before);
        rows.filter_map(|(name, served)| {
            Measurement::from_repeats(name.to_owned(), "ms", vec![served.p99_ms()?])
        })
        .collect()
    }

    /// Attacks, and measures honest requests meanwhile.
    ///
    /// # Errors
    /// If the attackers cannot connect at all, or the gateway does not recover from the attack.
    pub fn measure(&self, attack: Attack) -> anyhow::Result<Vec<Measurement>> {
        let is_encrypted = attack == Attack::IdleTls;
        let target = if is_encrypted { self.encrypted.address() } else { self.plain.address() };
        let n_attackers = self.n_attackers(attack);
        let attackers = Attackers::start(&self.attackers, attack, target, n_attackers)?;
        let during = self.honest.send(is_encrypted, HONEST_RATE, self.options.time())?;
        let n_opened = attackers.stop(&self.attackers);
        self.wait_until_recovered(target)?;

        let name = attack.name();
        let share = during.n_served() as f64 / during.n_sent as f64;
        let mut results: Vec<Option<Measurement>> = Vec::new();
        results.push(
            Measurement::from_repeats(format!("served_share_during_{name}"), "share", vec![share])
                .map(|result| result.wanted(Goal::AtLeast(SERVED_GOAL))),
        );
        let before = self.before[usize::from(is_encrypted)].p99_ms();
        if let (Some(before), Some(during)) = (before, during.p99_ms()) {
            let ratio = vec![during / before];
            results.push(Measurement::from_repeats(format!("p99_ratio_during_{name}"), "ratio", ratio));
        }
        if attack == Attack::Connections {
            let opened = vec![n_opened as f64];
            results.push(Measurement::from_repeats("connections_opened".to_owned(), "connections", opened));
        }
        Ok(results.into_iter().flatten().collect())
    }

    /// Ends the gateways.
    pub fn finish(self) {
        self.gateway.block_on(self.shutdown.finish());
    }

    /// As many as asked for and as there can be: each connection has both its ends in this process.
    fn n_attackers(&self, attack: Attack) -> usize {
        let n_files = usize::try_from(self.file_limit.saturating_sub(OTHER_FILES)).unwrap_or(usize::MAX);
        let fits = (n_files / 2).max(n_files.saturating_sub(self.max_connections));
        self.options.n_attackers(attack).min(fits)
    }

    /// Waits until no request is left of the attack.
    fn wait_until_recovered(&self, target: SocketAddr) -> anyhow::Result<()> {
        let running = if target == self.plain.address() { &self.plain } else { &self.encrypted };
        let is_idle = || {
            let gateway = running.gateway();
            gateway.n_waiting() == 0 && gateway.workers().iter().all(|worker| worker.outstanding_tokens == 0)
        };
        self.gateway.block_on(async {
            let waiting = async {
                while !is_idle() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            tokio::time::timeout(RECOVERY_TIME, waiting)
                .await
                .context("wait for the end of the attack's requests")
        })
    }
}

/// A certificate that signs itself, as files that go with it.
struct Certificate {
    folder: PathBuf,
    pem: String,
}

impl Certificate {
    fn make() -> anyhow::Result<Self> {
        let signed =
            rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).context("make a certificate")?;
        let folder = std::env::temp_dir().join(format!("kvik-bench-edges-{}", std::process::id()));
        let mut builder = std::fs::DirBuilder::new();
        builder.mode(0o700).create(&folder).with_context(|| format!("create {}", folder.display()))?;
        let certificate = Self { folder, pem: signed.cert.pem() };
        for (name, text) in
            [("certificate.pem", &certificate.pem), ("key.pem", &signed.signing_key.serialize_pem())]
        {
            std::fs::write(certificate.folder.join(name), text).with_context(|| format!("write {name}"))?;
        }
        Ok(certificate)
    }

    fn files(&self) -> TlsServerConfig {
        TlsServerConfig {
            certificate: Some(self.folder.join("certificate.pem")),
            key: Some(self.folder.join("key.pem")),
            client_authorities: None,
        }
    }
}

impl Drop for Certificate {
    fn drop(&mut self) {
        // What is left behind in the folder for temporary files is harmless.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
