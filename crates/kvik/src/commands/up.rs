//! `kvik up`: all roles in one process.
//!
//! The roles talk over loopback exactly as separate processes do; only ports and threads are chosen
//! here. The end goes the way of a request: the gateway finishes its streams, then the workers leave
//! and drain, then the coordinator closes.
//!
//! Without settings of its own the store gets a part of the free memory and a folder on disk that is removed at the
//! end, so that a first run shows the whole system.

mod first_look;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use anyhow::Context;
use kvik_coordinator::{Coordinator, CoordinatorConfig};
use kvik_gateway::{Gateway, GatewayConfig};
use kvik_model::{DeviceName, Model};
use kvik_node::{DaemonConfig, StoreDaemon};
use kvik_runtime::hub::find_model;
use kvik_runtime::machine;
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::terminal::{DIMMED, TITLE};
use kvik_tokens::Tokenizer;
use kvik_types::ByteSize;
use kvik_worker::{Running as RunningWorker, StoreConfig, Worker, WorkerConfig, WorkerError};

use super::service::{self, Flags, InvalidInput};
use crate::cli::services::UpArguments;
use crate::scratch::ScratchFolder;

/// Time for everything to end after the first signal.
const GRACE: Duration = Duration::from_secs(25);
/// Heartbeats on loopback can be quick; a worker that dies is gone within a second.
const HEARTBEAT_INTERVAL_MS: u64 = 300;
/// The part of the free memory that the ram tiers of all workers take, unless it is set.
const RAM_SHARE: u64 = 16;
/// Bounds of that part: room for a few chunks of the bundled model, and no more than a first look needs.
const RAM_BYTES: std::ops::RangeInclusive<u64> = (64 << 20)..=(1 << 30);
/// Size of the disk tiers of all workers, unless it is set.
const DISK_BYTES: u64 = 2 << 30;

/// Memory for keys and values of each worker on a GPU, unless it is set: several share the device.
const GPU_KV_MEMORY: &str = "2GiB";

/// Memory for keys and values, where the device is one that asks for it.
fn kv_memory(arguments: &UpArguments) -> Option<String> {
    let is_gpu = matches!(arguments.device, Some(DeviceName::Cuda(_)));
    arguments.kv_memory.clone().or_else(|| is_gpu.then(|| GPU_KV_MEMORY.to_owned()))
}

/// Runs the whole service until a signal has drained it.
pub(crate) fn run(arguments: &UpArguments) -> anyhow::Result<()> {
    let common = &arguments.service;
    let file = common.config.as_deref();
    let gateway_flags = Flags::default().with("listen", Some(format!("127.0.0.1:{}", arguments.port)));
    let gateway = service::load::<GatewayConfig>("gateway", file, gateway_flags, &common.set)?.value;
    let coordinator_flags = Flags::default()
        .with("listen", Some("127.0.0.1:0"))
        .with("heartbeat_interval_ms", Some(HEARTBEAT_INTERVAL_MS));
    let coordinator = service::load::<CoordinatorConfig>("coordinator", file, coordinator_flags, &[])?.value;
    let n_cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let roles = arguments.roles.as_ref().map(|roles| roles.0.as_slice());
    let n_workers = roles.map_or(usize::from(arguments.workers), <[_]>::len);
    let n_threads = (n_cores / n_workers).max(1);
    let has_settings = has_store_settings(arguments, file)?;
    let scratch = if has_settings && !arguments.shared_store {
        None
    } else {
        Some(ScratchFolder::create("up", arguments.keep).context("make a folder for the store")?)
    };
    let daemon = match &scratch {
        Some(scratch) if arguments.shared_store => Some(daemon_config(arguments, file, scratch)?),
        _ => None,
    };
    let workers = (1..=n_workers)
        .map(|number| {
            let role = roles.and_then(|roles| roles.get(number - 1)).map(|role| role.as_str());
            let flags = Flags::default()
                .with("listen", Some("127.0.0.1:0"))
                .with("id", Some(format!("worker-{number}")))
                .with("threads", Some(n_threads))
                .with("device", arguments.device.map(|device| device.to_string()))
                .with("kv_memory", kv_memory(arguments))
                .with("role", role)
                .with("model", arguments.model.as_ref().map(|folder| folder.display().to_string()))
                .with("store", service::store_flags(&arguments.store).filter(|_| daemon.is_none()));
            let mut config = service::load::<WorkerConfig>("worker", file, flags, &[])?.value;
            if let Some(daemon) = &daemon {
                config.store = StoreConfig { daemon: Some(daemon.socket.clone()), ..StoreConfig::default() };
                return Ok(config);
            }
            if let Some(scratch) = &scratch {
                config.store.ram = default_ram_bytes().to_string();
                config.store.nvme = Some(format!("{}:{DISK_BYTES}", scratch.path().display()));
            }
            let id = config.id.clone().unwrap_or_default();
            let shared = config.store.share_of(&id, n_workers as u64);
            config.store = shared.context("read the settings of the KV store")?;
            Ok(config)
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let store = scratch.as_ref().map(|scratch| {
        if let Some(daemon) = &daemon {
            return shared_store_line(daemon);
        }
        let end = if arguments.keep { "kept at exit" } else { "removed at exit; --keep keeps it" };
        format!(
            "{} of memory, {} of disk in {} ({end})",
            ByteSize(default_ram_bytes()),
            ByteSize(DISK_BYTES),
            scratch.path().display()
        )
    });
    let is_bundled = arguments.model.is_none() && workers.iter().all(|worker| worker.model.is_none());
    service::run(common, "warn", async |shutdown| {
        serve(gateway, coordinator, daemon, workers, store.as_deref(), is_bundled, shutdown).await
    })
}

/// The configuration of the store daemon, from the section `store` and the flags of tiers.
fn daemon_config(
    arguments: &UpArguments,
    file: Option<&Path>,
    scratch: &ScratchFolder,
) -> anyhow::Result<DaemonConfig> {
    let worker = service::load::<WorkerConfig>("worker", file, Flags::default(), &[])?.value;
    if worker.store != StoreConfig::default() {
        let message = "read the settings of the KV store: `worker.store` is set beside --shared-store; allowed: \
            `store.tiers`, which the workers share";
        return Err(InvalidInput::new(message.to_owned()).into());
    }
    let flags = Flags::default().with("tiers", service::store_flags(&arguments.store));
    let mut config = service::load::<DaemonConfig>("store", file, flags, &[])?.value;
    if config.tiers == StoreConfig::default() && config.tenants.is_empty() {
        config.tiers.ram = default_ram_bytes().to_string();
        config.tiers.nvme = Some(format!("{}:{DISK_BYTES}", scratch.path().join("nvme").display()));
    }
    config.socket = scratch.path().join("run/store.sock");
    Ok(config)
}

fn shared_store_line(daemon: &DaemonConfig) -> String {
    let tiers = [
        Some(format!(
            "{} of memory",
            daemon
                .tiers
                .ram
                .parse()
                .map_or_else(|_| daemon.tiers.ram.clone(), |size: ByteSize| size.to_string())
        )),
        daemon.tiers.nvme.as_ref().map(|nvme| format!("disk {nvme}")),
        daemon.tiers.remote.as_ref().map(|remote| format!("remote {remote}")),
    ];
    let tiers: Vec<String> = tiers.into_iter().flatten().collect();
    format!("shared by all workers at {}: {}", daemon.socket.display(), tiers.join(", "))
}

/// Whether flags, the file or the environment say where KV is kept.
fn has_store_settings(arguments: &UpArguments, file: Option<&Path>) -> anyhow::Result<bool> {
    let config = service::load::<WorkerConfig>("worker", file, Flags::default(), &[])?.value;
    Ok(service::store_flags(&arguments.store).is_some() || config.store != StoreConfig::default())
}

fn default_ram_bytes() -> u64 {
    let n_free_bytes =
        machine::available_memory_bytes().unwrap_or(0).min(kvik_memory::machine::memory_bytes());
    (n_free_bytes / RAM_SHARE).clamp(*RAM_BYTES.start(), *RAM_BYTES.end())
}

async fn serve(
    mut gateway: GatewayConfig,
    coordinator: CoordinatorConfig,
    daemon: Option<DaemonConfig>,
    workers: Vec<WorkerConfig>,
    store: Option<&str>,
    is_bundled: bool,
    shutdown: Shutdown,
) -> anyhow::Result<()> {
    shutdown.listen_for_signals(GRACE);
    let tokenizer = match workers.first() {
        Some(WorkerConfig { model: Some(model), hub, .. }) => {
            // Once, before all workers ask for it.
            let (model, hub, stopping) = (model.clone(), hub.clone(), shutdown.clone());
            let finding = tokio::task::spawn_blocking(move || find_model(&model, &hub, &stopping));
            let folder = finding.await.context("find the model")?.context("find the model")?.folder;
            Arc::new(Tokenizer::open(&folder).context("open the model's tokenizer")?)
        }
        _ => Arc::clone(Model::bundled()?.tokenizer()),
    };
    // Each role ends at its own time.
    let (gateway_end, workers_end, coordinator_end) = (Shutdown::new(), Shutdown::new(), Shutdown::new());
    let running_coordinator =
        Coordinator::start(coordinator, &coordinator_end).await.context("start the coordinator")?;
    let daemon_end = Shutdown::new();
    let running_daemon = match daemon {
        Some(config) => {
            Some(StoreDaemon::start(config, &daemon_end).await.context("start the store daemon")?)
        }
        None => None,
    };
    let mut running_workers = Vec::new();
    for mut config in workers {
        config.coordinators = vec![running_coordinator.base.clone()];
        running_workers.push(Worker::start(config, &workers_end).await.context("start a worker")?);
    }
    gateway.coordinators = vec![running_coordinator.base.clone()];
    let has_page = gateway.ui.enabled;
    let running_gateway = Gateway::start(gateway, &gateway_end).await.context("start the gateway")?;
    let model = running_workers.first().map_or("kvik-tiny", RunningWorker::model_name);
    running_gateway.gateway().provide_tokenizer(model, tokenizer);
    let base = format!("http://{}", running_gateway.address());
    greet(&base, &running_coordinator.base, &running_workers, model, store, has_page)
        .context("write to standard output")?;
    if is_bundled {
        tokio::select! {
            // What cannot be shown is no reason to end the service.
            outcome = first_look::show(&base, model) => outcome.unwrap_or_else(|error| {
                tracing::warn!(error = format!("{error:#}"), "the sample prompt failed");
            }),
            () = shutdown.draining() => {}
        }
    }

    let failure = tokio::select! {
        () = shutdown.draining() => None,
        error = first_failure(&running_workers) => Some(error),
    };
    let draining = async {
        gateway_end.drain();
        running_gateway.finished().await;
        workers_end.drain();
        for worker in &running_workers {
            worker.closed().await;
        }
    };
    tokio::select! {
        () = draining => {}
        () = shutdown.stopping() => {}
    }
    gateway_end.finish().await;
    workers_end.finish().await;
    if let Some(daemon) = running_daemon {
        daemon.finish().await;
    }
    daemon_end.finish().await;
    coordinator_end.finish().await;
    failure.map_or(Ok(()), |error| Err(error).context("run a worker"))
}

/// Waits until the engine of a worker has failed and the worker has ended; for ever if none fails.
async fn first_failure(workers: &[RunningWorker]) -> WorkerError {
    let mut closing: Vec<_> = workers.iter().map(|worker| (worker, Box::pin(worker.closed()))).collect();
    std::future::poll_fn(|context| {
        let mut failure = None;
        closing.retain_mut(|(worker, closed)| {
            let is_open = closed.as_mut().poll(context).is_pending();
            if !is_open {
                failure = failure.take().or(worker.outcome().err());
            }
            is_open
        });
        failure.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

/// Says where everything is and what to try.
fn greet(
    gateway: &str,
    coordinator: &str,
    workers: &[RunningWorker],
    model: &str,
    store: Option<&str>,
    has_page: bool,
) -> std::io::Result<()> {
    let mut stdout = anstream::stdout().lock();
    writeln!(stdout, "{TITLE}kvik is up{TITLE:#}: {model} on {} workers\n", workers.len())?;
    writeln!(stdout, "  gateway      {gateway}")?;
    if has_page {
        writeln!(stdout, "  page         {gateway}/ui")?;
    }
    writeln!(stdout, "  coordinator  {coordinator}")?;
    for worker in workers {
        writeln!(stdout, "  {:<12} http://{}", worker.id(), worker.address())?;
    }
    if let Some(store) = store {
        writeln!(stdout, "  store        {store}")?;
    }
    let json = "-H 'content-type: application/json'";
    writeln!(stdout, "\n{TITLE}Try{TITLE:#}")?;
    writeln!(stdout, "\n  {DIMMED}# a story, token by token{DIMMED:#}")?;
    writeln!(
        stdout,
        "  curl -N {gateway}/v1/completions {json} \\\n    -d '{{\"model\":\"{model}\",\"prompt\":\"Once upon a time\",\"max_tokens\":64,\"stream\":true}}'"
    )?;
    writeln!(
        stdout,
        "\n  {DIMMED}# one prompt twice: the second answer is computed from stored KV, see cached_tokens_by_tier{DIMMED:#}"
    )?;
    writeln!(
        stdout,
        "  for i in 1 2; do curl -s -w '\\n%{{time_total}} s\\n' {gateway}/v1/completions {json} \\\n    -d \"{{\\\"model\\\":\\\"{model}\\\",\\\"prompt\\\":\\\"$(seq -s ' ' 600)\\\",\\\"max_tokens\\\":1}}\"; done"
    )?;
    writeln!(stdout, "\n  {DIMMED}# which worker has how much of a prompt; where KV lives{DIMMED:#}")?;
    writeln!(
        stdout,
        "  curl {gateway}/v1/score {json} -d \"{{\\\"model\\\":\\\"{model}\\\",\\\"prompt\\\":\\\"$(seq -s ' ' 600)\\\"}}\""
    )?;
    writeln!(stdout, "\n  {DIMMED}# twenty seconds of load, with a picture at the end{DIMMED:#}")?;
    writeln!(stdout, "  kvik demo --gateway {gateway}")?;
    writeln!(stdout, "\n{DIMMED}Ctrl-C drains; a second one ends at once.{DIMMED:#}")?;
    stdout.flush()
}
