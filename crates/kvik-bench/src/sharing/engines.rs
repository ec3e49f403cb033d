//! The workers of the bench, and the memory they get.

use std::path::Path;

use anyhow::{Context as _, ensure};
use kvik_memory::ledger::{Ledger, LedgerOptions, list_devices};
use kvik_model::{BLOCK_TOKENS, DeviceName, Model, ModelConfig};

use super::{N_MODELS, SharingBenchOptions};
use crate::role::Role;

/// Bytes of a page in one layer: the smallest that elastic memory has.
const PAGE_BYTES: usize = 2 << 20;

/// How the memory is given out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Setup {
    /// A third for each worker.
    Static,
    /// All of it for all.
    Elastic,
}

/// The memory for the KV of all workers together: whole pages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Budget {
    n_pages: usize,
    n_layers: usize,
    blocks_per_page: usize,
}

/// Workers that run.
#[derive(Debug)]
pub(super) struct Engines {
    workers: Vec<Role>,
    ledger: Option<Ledger>,
    pub(super) budget_bytes: u64,
}

impl Budget {
    /// So much that `burst_tokens` are five sixths of it.
    ///
    /// # Errors
    /// If the model cannot be read, or one of its blocks is larger than a page.
    pub(super) fn new(model: Option<&Path>, device: DeviceName, burst_tokens: usize) -> anyhow::Result<Self> {
        let config = match model {
            None => Model::bundled()?.config().clone(),
            Some(folder) => {
                let path = folder.join("config.json");
                let text =
                    std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
                ModelConfig::from_json(&text)?
            }
        };
        let element_bytes = if device == DeviceName::Cpu { 4 } else { 2 };
        let block_bytes = 2 * config.n_kv_heads * config.head_dim * BLOCK_TOKENS * element_bytes;
        let blocks_per_page = PAGE_BYTES / block_bytes.max(1);
        ensure!(
            0 < blocks_per_page,
            "a block of the model has {block_bytes} bytes in a layer, more than a page"
        );
        let n_blocks = (burst_tokens * 6).div_ceil(5 * BLOCK_TOKENS);
        // A third for each must be whole pages too.
        let n_pages = n_blocks.div_ceil(blocks_per_page).next_multiple_of(N_MODELS);
        Ok(Self { n_pages, n_layers: config.n_layers, blocks_per_page })
    }

    pub(super) fn n_bytes(&self) -> usize {
        self.n_pages * self.n_layers * PAGE_BYTES
    }

    fn n_blocks(&self) -> usize {
        self.n_pages * self.blocks_per_page
    }

    pub(super) fn n_tokens(&self) -> usize {
        self.n_blocks() * BLOCK_TOKENS
    }
}

impl Engines {
    /// Starts all workers.
    ///
    /// # Errors
    /// If one of them cannot be started.
    pub(super) fn start(
        options: &SharingBenchOptions,
        budget: &Budget,
        setup: Setup,
    ) -> anyhow::Result<Self> {
        let mut workers = Vec::new();
        for number in 0..N_MODELS {
            let mut command = Role::command(&options.program, "worker");
            command.args(["--id", &format!("model-{number}"), "--device", &options.device.to_string()]);
            let mut settings = vec!["memory.wait_timeout_s=600".to_owned()];
            if options.device == DeviceName::Cpu {
                settings.push("kv_dtype=f32".to_owned());
            } else {
                settings.push("kv_dtype=bf16".to_owned());
                settings.push(format!("kernel_cache={}", options.folder.join("kernels").display()));
            }
            match setup {
                Setup::Static => settings.push(format!("kv_blocks={}", budget.n_blocks() / N_MODELS)),
                Setup::Elastic => settings.extend([
                    format!("kv_blocks={}", budget.n_blocks()),
                    format!("memory.ipc_name=model-{number}"),
                    format!("memory.dir={}", options.folder.display()),
                    format!("memory.device_bytes={}", budget.n_bytes()),
                    "memory.page_size_mb=2".to_owned(),
                ]),
            }
            for setting in &settings {
                command.args(["--set", setting]);
            }
            if let Some(model) = &options.model {
                command.arg("--model").arg(model);
            }
            workers.push(Role::start(&mut command, "worker")?);
        }
        let ledger = match setup {
            Setup::Static => None,
            Setup::Elastic => {
                let devices = list_devices(&options.folder)?;
                let device = devices.into_iter().next().context("find the ledger of the workers")?;
                Some(Ledger::open(&LedgerOptions {
                    dir: options.folder.clone(),
                    ..LedgerOptions::new(device)
                })?)
            }
        };
        Ok(Self { workers, ledger, budget_bytes: budget.n_bytes() as u64 })
    }

    /// Base address of a worker.
    pub(super) fn base(&self, model_idx: usize) -> anyhow::Result<String> {
        self.workers.get(model_idx).map(Role::base).context("a worker that does not run")
    }

    /// What the worker holds of shared memory; `None` where it has its own.
    pub(super) fn held_bytes(&self, model_idx: usize) -> Option<u64> {
        let snapshot = self.ledger.as_ref()?.snapshot().ok()?;
        let name = format!("model-{model_idx}");
        snapshot.groups.iter().find(|group| group.ipc_name == name).map(|group| group.held_bytes)
    }
}
