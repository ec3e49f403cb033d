//! `kvik memory serve`: grants of a device's memory for processes that cannot link the library.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use kvik_memory::ledger::{Ledger, LedgerOptions};
use kvik_memory::service::{MemoryServer, MemoryServerOptions};
use kvik_memory::vmm::Vmm;
use kvik_memory::vmm::cuda::CudaVmm;
use kvik_memory::vmm::host::{HostDevice, HostVmm};

use super::service;
use crate::cli::memory::MemoryServeArguments;
use crate::cli::services::ServiceArguments;

/// The server ends its sessions at once: a client keeps nothing without it.
const GRACE: Duration = Duration::from_secs(10);

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
