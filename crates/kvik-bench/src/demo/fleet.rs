//! The processes of a demo: a coordinator, workers and a gateway, each a child of this process.
//!
//! Separate processes, so that one of them can be killed as a machine dies. Children end with their [`Fleet`].

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use kvik_runtime::machine::n_cores;
use serde_json::Value;

/// Time for a role to be ready; the bundled model loads in a fraction of it.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Token blocks of 16 tokens in each engine: about four of the documents.
const KV_BLOCKS: &str = "260";
/// Memory of each worker's ram tier: about four documents.
const RAM: &str = "32MiB";
/// Size of each worker's disk tier: all documents.
const NVME_BYTES: u64 = 1 << 30;

/// What the fleet has of kvik's KV features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Features {
    /// The index, KV-aware routing and a store of three tiers.
    All,
    /// None: requests are spread, and each engine has only its own prefix cache.
    None,
}

/// A running fleet.
#[derive(Debug)]
pub(super) struct Fleet {
    /// Base address of the gateway.
    pub(super) gateway: String,
    workers: Vec<Role>,
    /// Dropped after the workers, so that no worker logs a lost coordinator while it ends.
    _services: [Role; 2],
}

/// One child.
#[derive(Debug)]
struct Role {
    child: Child,
    address: String,
    log_reader: Option<JoinHandle<()>>,
}

impl Fleet {
    /// Starts all roles with `n_workers` workers that keep chunks under `folder`, and waits until requests can be served.
    pub(super) fn start(
        program: &Path,
        folder: &Path,
        n_workers: usize,
        features: Features,
    ) -> anyhow::Result<Self> {
        let role = |name: &str| {
            let mut command = Command::new(program);
            command.args([name, "--listen", "127.0.0.1:0", "--log", "info", "--log-format", "json"]);
            command
        };
        let mut command = role("coordinator");
        // A dead worker is missed within a second.
        command.args(["--set", "heartbeat_interval_ms=200", "--set", "slow_start_ms=0"]);
        let coordinator = Role::start(&mut command, "coordinator")?;
        let base = format!("http://{}", coordinator.address);
        let n_threads = (n_cores() / n_workers).max(1).to_string();
        let mut workers = Vec::with_capacity(n_workers);
        for number in 1..=n_workers {
            let id = format!("worker-{number}");
            let mut command = role("worker");
            command.args([
                "--coordinator",
                &base,
                "--id",
                &id,
                "--threads",
                &n_threads,
                "--kv-blocks",
                KV_BLOCKS,
            ]);
            if features == Features::All {
                let nvme = format!("{}:{NVME_BYTES}", folder.join(&id).display());
                let remote = format!("file://{}", folder.join("remote").display());
                command.args(["--ram", RAM, "--nvme", &nvme, "--remote", &remote]);
            }
            workers.push(Role::start(&mut command, "worker")?);
        }
        let mut command = role("gateway");
        command.args(["--coordinator", &base, "--set", "health.interval_ms=200"]);
        if features == Features::None {
            command.args(["--set", "index.enabled=false", "--set", "routing.kv_aware=false"]);
        }
        let gateway = Role::start(&mut command, "gateway")?;
        let fleet = Self {
            gateway: format!("http://{}", gateway.address),
            workers,
            _services: [gateway, coordinator],
        };
        Ok(fleet)
    }

    /// Workers that run.
    pub(super) fn n_workers(&self) -> usize {
        self.workers.len()
    }

    /// Kills the last worker as `kill -9` does.
    pub(super) fn kill_worker(&mut self) {
        self.workers.pop();
    }
}

impl Role {
    /// Starts a role and waits until its log says that it is ready.
    fn start(command: &mut Command, name: &str) -> anyhow::Result<Self> {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let child = child.with_context(|| format!("start the {name}"))?;
        let mut role = Self { child, address: String::new(), log_reader: None };
        let stderr = role.child.stderr.take().context("read the log")?;
        let (sender, lines) = mpsc::channel();
        // Reads to the end, so that the child never waits for room in the pipe.
        role.log_reader = Some(thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                // Only the lines up to the one that says ready are read.
                let _ = sender.send(line);
            }
        }));
        let ready = format!("{name} is ready");
        let mut last_line = String::new();
        loop {
            let line = match lines.recv_timeout(START_TIMEOUT) {
                Ok(line) => line,
                Err(mpsc::RecvTimeoutError::Timeout) => anyhow::bail!("start the {name}: not ready in 30 s"),
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    anyhow::bail!("start the {name}: it ended: {last_line}")
                }
            };
            let fields = serde_json::from_str::<Value>(&line).unwrap_or_default();
            let message = fields["message"].as_str().or_else(|| fields["fields"]["message"].as_str());
            if message == Some(ready.as_str()) {
                let address = fields["address"].as_str().or_else(|| fields["fields"]["address"].as_str());
                address.unwrap_or_default().clone_into(&mut role.address);
                ensure!(!role.address.is_empty(), "start the {name}: its log has no address: {line}");
                return Ok(role);
            }
            last_line = line;
        }
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.log_reader.take() {
            // A reader that panicked has nothing to say here.
            let _ = reader.join();
        }
    }
}
