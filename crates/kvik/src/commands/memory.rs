//! `kvik memory serve`: grants of a device's memory for processes that cannot link the library.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use kvik_memory::ledger::{DEFAULT_DIR, Ledger, LedgerOptions};
use kvik_memory::service::{MemoryServer, MemoryServerOptions};
use kvik_memory::vmm::Vmm;
use kvik_memory::vmm::cuda::CudaVmm;
use kvik_memory::vmm::host::{HostDevice, HostVmm};

use super::service;
use crate::cli::{EXIT_CODES, LogForm, ServiceArguments};

/// The server ends its sessions at once: a client keeps nothing without it.
const GRACE: Duration = Duration::from_secs(10);

#[derive(Debug, Subcommand)]
pub(crate) enum MemoryCommand {
    /// Give processes that cannot link libkvik grants of a device's memory, over a unix socket
    Serve(MemoryServeArguments),
}

/// A process that connects is a member of the device's ledger like any engine, until its connection ends.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct MemoryServeArguments {
    /// Socket to listen at, in a folder that only this user can enter; the folder is made if it is missing
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: PathBuf,

    /// Number of the GPU, or -1 for the host's memory
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true,
        value_parser = clap::value_parser!(i32).range(-1..))]
    pub(crate) device: i32,

    /// Group of processes that name none [default: none, they are refused]
    #[arg(long, value_name = "NAME")]
    pub(crate) ipc_name: Option<String>,

    /// Folder of the ledger
    #[arg(long, value_name = "DIR", default_value = DEFAULT_DIR)]
    pub(crate) dir: PathBuf,

    /// Bytes of the host that all engines together may hold, if there is no ledger yet
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 30)]
    pub(crate) host_bytes: u64,

    /// Part of the GPU's memory that all engines together may hold, above 0 to 1
    #[arg(long, value_name = "PART", default_value_t = 0.95)]
    pub(crate) utilization: f64,

    /// Which logs: a level, or directives such as `info,kvik_memory=debug` [default: info]
    #[arg(long, value_name = "DIRECTIVES")]
    pub(crate) log: Option<String>,

    /// Form of the logs
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub(crate) log_format: LogForm,
}

/// Serves until it is told to end.
pub(crate) fn serve(arguments: &MemoryServeArguments) -> anyhow::Result<()> {
    let common = ServiceArguments {
        config: None,
        set: Vec::new(),
        log: arguments.log.clone(),
        log_format: arguments.log_format,
    };
    service::run(&common, "info", async |shutdown| {
        shutdown.listen_for_signals(GRACE);
        let ledger = open_ledger(arguments).context("open the ledger")?;
        let (device, budget_bytes) = (ledger.device().to_owned(), ledger.budget_bytes());
        let options = MemoryServerOptions {
            socket: arguments.socket.clone(),
            default_ipc_name: arguments.ipc_name.clone(),
        };
        let server = MemoryServer::start(&options, ledger).context("start the memory service")?;
        let socket = server.socket().display().to_string();
        tracing::info!(socket, device, budget_bytes, "memory service is ready");
        shutdown.draining().await;
        // It waits for its threads.
        tokio::task::spawn_blocking(move || drop(server)).await.context("stop the memory service")
    })
}

fn open_ledger(arguments: &MemoryServeArguments) -> kvik_memory::Result<Ledger> {
    let gpu = u32::try_from(arguments.device).ok();
    let vmm: Arc<dyn Vmm> = match gpu {
        Some(ordinal) => Arc::new(CudaVmm::open(ordinal)?),
        None => Arc::new(HostVmm::open(HostDevice::new(arguments.host_bytes))?),
    };
    let ledger = Ledger::open(&LedgerOptions {
        dir: arguments.dir.clone(),
        budget_bytes: gpu.is_none().then_some(arguments.host_bytes),
        ..LedgerOptions::new(vmm.device_name())
    })?;
    if gpu.is_some() {
        ledger.reconcile(vmm.memory_info()?, arguments.utilization)?;
    }
    Ok(ledger)
}
