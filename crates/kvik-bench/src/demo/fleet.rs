//! The processes of a demo: a coordinator, workers and a gateway, each a child of this process.
//!
//! Separate processes, so that one of them can be killed as a machine dies. Children end with their [`Fleet`].

use kvik_runtime::machine::n_cores;
use serde_json::json;

use super::DemoOptions;
use crate::role::Role;

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

impl Fleet {
    /// Starts all roles, with workers that keep chunks under the demo's folder, and waits until requests can be served.
    pub(super) fn start(options: &DemoOptions, features: Features) -> anyhow::Result<Self> {
        let (folder, n_workers) = (&options.folder, options.n_workers);
        let role = |name: &str| Role::command(&options.program, name);
        let mut command = role("coordinator");
        // A dead worker is missed within a second.
        command.args(["--set", "heartbeat_interval_ms=200", "--set", "slow_start_ms=0"]);
        let coordinator = Role::start(&mut command, "coordinator")?;
        let base = coordinator.base();
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
            if let Some(model) = &options.model_folder {
                let name = json!(options.model);
                command.arg("--model").arg(model).args(["--set", &format!("served_model_name={name}")]);
            }
            if features == Features::All {
                let nvme = format!("{}:{NVME_BYTES}", folder.join(&id).display());
                let remote = format!("file://{}", folder.join("remote").display());
                command.args(["--ram", RAM, "--nvme", &nvme, "--remote", &remote]);
            }
            workers.push(Role::start(&mut command, "worker")?);
        }
        let mut command = role("gateway");
        command.args(["--coordinator", &base, "--set", "health.interval_ms=200"]);
        if let Some(model) = &options.model_folder {
            // By its name, which may have dots.
            let tokenizers = json!({ &options.model: model });
            command.args(["--set", &format!("index.tokenizers.models={tokenizers}")]);
        }
        if features == Features::None {
            command.args(["--set", "index.enabled=false", "--set", "routing.kv_aware=false"]);
        }
        let gateway = Role::start(&mut command, "gateway")?;
        let fleet = Self { gateway: gateway.base(), workers, _services: [gateway, coordinator] };
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
