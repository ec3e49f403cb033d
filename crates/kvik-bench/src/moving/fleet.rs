//! The processes of the bench, and what is done to them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use kvik_model::{DeviceName, Model};
use kvik_proto::client::{HttpClient, TlsClientConfig, http_client};
use kvik_proto::moves::{MoveAnswer, MoveRequest};
use kvik_runtime::machine::n_cores;
use serde_json::Value;

use crate::role::Role;

/// Name of the bench's model: that of its folder.
pub(super) const MODEL: &str = "kvik-tiny-16k";
/// Longest sequence of the bench's model, in tokens: the bundled model stops at half of the longest sequence that is moved.
const MAX_POSITIONS: u64 = 16_384;
/// Token blocks in each engine: all streams of the bench fit twice.
const KV_BLOCKS: &str = "8192";
/// Time for the gateway to know its workers.
const KNOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a worker to drain.
const DRAIN_TIMEOUT: Duration = Duration::from_mins(2);
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// What workers run.
#[derive(Debug, Clone)]
pub(super) struct WorkerProgram {
    /// `kvik` itself.
    pub(super) program: PathBuf,
    /// Folder of the model.
    pub(super) model: PathBuf,
    /// What the model runs on.
    pub(super) device: DeviceName,
}

/// A running fleet.
#[derive(Debug)]
pub(super) struct Fleet {
    runs: WorkerProgram,
    coordinator: String,
    /// Threads of each engine.
    pub(super) n_threads: usize,
    /// Base address of the gateway.
    pub(super) gateway: String,
    pub(super) http: HttpClient,
    workers: BTreeMap<u32, Role>,
    /// Of the workers, from the first on; the others do everything.
    roles: &'static [&'static str],
    /// Dropped after the workers, so that no worker logs a lost coordinator while it ends.
    _services: [Role; 2],
}

impl Fleet {
    /// Starts all roles with workers numbered from 1.
    ///
    /// # Errors
    /// If one of them cannot be started.
    pub(super) async fn start(runs: &WorkerProgram, n_workers: u32) -> anyhow::Result<Self> {
        Self::start_with_roles(runs, n_workers, &[]).await
    }

    /// As [`Fleet::start`]; the first workers have these roles.
    ///
    /// # Errors
    /// As there.
    pub(super) async fn start_with_roles(
        runs: &WorkerProgram,
        n_workers: u32,
        roles: &'static [&'static str],
    ) -> anyhow::Result<Self> {
        let program = &runs.program;
        let mut command = Role::command(program, "coordinator");
        // A dead worker is missed within a second, and one that comes back gets its share at once.
        command.args(["--set", "heartbeat_interval_ms=200", "--set", "slow_start_ms=0"]);
        let coordinator = Role::start(&mut command, "coordinator")?;
        let mut command = Role::command(program, "gateway");
        command.args(["--coordinator", &coordinator.base(), "--set", "health.interval_ms=200"]);
        let gateway = Role::start(&mut command, "gateway")?;
        let mut fleet = Self {
            runs: runs.clone(),
            coordinator: coordinator.base(),
            // Sources and destinations compute side by side.
            n_threads: (n_cores() / 2).max(1),
            gateway: gateway.base(),
            http: http_client(&TlsClientConfig::default())?,
            workers: BTreeMap::new(),
            roles,
            _services: [gateway, coordinator],
        };
        for number in 1..=n_workers {
            fleet.start_worker(number).await?;
        }
        Ok(fleet)
    }

    /// Starts the worker with this number and waits until the gateway knows it.
    pub(super) async fn start_worker(&mut self, number: u32) -> anyhow::Result<()> {
        let mut command = Role::command(&self.runs.program, "worker");
        command.args([
            "--coordinator",
            &self.coordinator,
            "--id",
            &worker_id(number),
            "--kv-blocks",
            KV_BLOCKS,
        ]);
        command.args(["--threads", &self.n_threads.to_string(), "--set", "drain_grace_s=60"]);
        if let Some(role) = self.roles.get(number.saturating_sub(1) as usize) {
            command.args(["--set", &format!("role={role}")]);
        }
        command.args(["--device", &self.runs.device.to_string()]).arg("--model").arg(&self.runs.model);
        self.workers.insert(number, Role::start(&mut command, "worker")?);
        self.wait_for_workers(self.workers.len() as u64).await
    }

    /// Ends the worker with this number as `kill -9` does.
    pub(super) fn kill_worker(&mut self, number: u32) {
        self.workers.remove(&number);
    }

    /// Ends the worker with this number by SIGTERM; the time until it has ended.
    pub(super) async fn drain_worker(&mut self, number: u32) -> anyhow::Result<Duration> {
        let mut worker = self.workers.remove(&number).context("drain a worker that does not run")?;
        let begin = Instant::now();
        worker.terminate()?;
        let status = worker.ended(DRAIN_TIMEOUT).await?;
        ensure!(status.success(), "worker {number} ended with {status}");
        Ok(begin.elapsed())
    }

    /// The number of the worker with this name.
    pub(super) fn number_of(&self, worker: &str) -> anyhow::Result<u32> {
        let number = self.workers.keys().find(|number| worker_id(**number) == worker);
        number.copied().with_context(|| format!("the answer came from `{worker}`, which does not run"))
    }

    /// Another worker than this one.
    pub(super) fn other_than(&self, number: u32) -> anyhow::Result<u32> {
        self.workers.keys().copied().find(|other| *other != number).context("there is one worker")
    }

    /// Numbers of the running workers.
    pub(super) fn numbers(&self) -> Vec<u32> {
        self.workers.keys().copied().collect()
    }

    /// Moves a sequence from one worker to another; what was copied while it ran, `None` if it has ended.
    pub(super) async fn move_sequence(
        &self,
        seq_id: &str,
        from: u32,
        to: u32,
    ) -> anyhow::Result<Option<MoveAnswer>> {
        let base =
            |number| self.workers.get(&number).map(Role::base).context("move between workers that run");
        let body = serde_json::to_vec(&MoveRequest { to: base(to)? })?;
        let request = Request::post(format!("{}/sequences/{seq_id}/move", base(from)?))
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))?;
        let response = self.http.request(request).await.context("ask a worker to move a sequence")?;
        let status = response.status().as_u16();
        let text = response.into_body().collect().await?.to_bytes();
        // Not found and conflict: the output has ended meanwhile.
        ensure!(
            matches!(status, 200 | 404 | 409),
            "the worker answered {status}: {}",
            String::from_utf8_lossy(&text)
        );
        if status != 200 {
            return Ok(None);
        }
        Ok(Some(serde_json::from_slice(&text).context("read the answer of a worker")?))
    }

    /// Answers of the gateway that went on elsewhere with this outcome.
    pub(super) async fn n_continued(&self, outcome: &str) -> anyhow::Result<f64> {
        let text = self.get("/metrics").await?;
        let label = format!("outcome=\"{outcome}\"");
        let lines = text.lines().filter(|line| line.starts_with("kvik_gateway_continued_total{"));
        let counted = lines.filter(|line| line.contains(&label));
        Ok(counted.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
    }

    async fn wait_for_workers(&self, n_workers: u64) -> anyhow::Result<()> {
        let begin = Instant::now();
        loop {
            let ready = self.get("/ready").await.unwrap_or_default();
            let ready = serde_json::from_str::<Value>(&ready).unwrap_or_default();
            if ready["usable_backends"] == n_workers {
                return Ok(());
            }
            ensure!(
                begin.elapsed() < KNOWN_TIMEOUT,
                "the gateway does not know {n_workers} workers: {ready}"
            );
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    async fn get(&self, path: &str) -> anyhow::Result<String> {
        let request = Request::get(format!("{}{path}", self.gateway)).body(Full::default())?;
        let body = self.http.request(request).await?.into_body().collect().await?.to_bytes();
        Ok(String::from_utf8_lossy(&body).into_owned())
    }
}

fn worker_id(number: u32) -> String {
    format!("worker-{number}")
}

/// Writes the bundled model with a longer context into `folder`; the model's own folder.
///
/// Its positions are rotations, which are defined for all of them; what it says so far out is of no use but to be compared.
///
/// # Errors
/// If the files cannot be written.
pub(super) fn write_model(folder: &Path) -> anyhow::Result<PathBuf> {
    let model = folder.join(MODEL);
    std::fs::create_dir(&model).with_context(|| format!("create {}", model.display()))?;
    Model::write_bundled(&model)?;
    let path = model.join("config.json");
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let mut config: Value = serde_json::from_str(&text)?;
    config["max_position_embeddings"] = MAX_POSITIONS.into();
    std::fs::write(&path, config.to_string()).with_context(|| format!("write {}", path.display()))?;
    Ok(model)
}
