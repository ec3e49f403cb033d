//! `kvik up`: all roles in one process.
//!
//! The roles talk over loopback exactly as separate processes do; only ports and threads are chosen
//! here. The end goes the way of a request: the gateway finishes its streams, then the workers leave
//! and drain, then the coordinator closes.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use kvik_coordinator::{Coordinator, CoordinatorConfig};
use kvik_gateway::{Gateway, GatewayConfig};
use kvik_model::Model;
use kvik_runtime::shutdown::Shutdown;
use kvik_tokens::Tokenizer;
use kvik_worker::{Running as RunningWorker, Worker, WorkerConfig};

use super::service::{self, Flags};
use crate::cli::UpArguments;
use kvik_runtime::terminal::{DIMMED, TITLE};

/// Time for everything to end after the first signal.
const GRACE: Duration = Duration::from_secs(25);
/// Heartbeats on loopback can be quick; a worker that dies is gone within a second.
const HEARTBEAT_INTERVAL_MS: u64 = 300;

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
    let n_threads = (n_cores / usize::from(arguments.workers)).max(1);
    let workers = (1..=arguments.workers)
        .map(|number| {
            let flags = Flags::default()
                .with("listen", Some("127.0.0.1:0"))
                .with("id", Some(format!("worker-{number}")))
                .with("threads", Some(n_threads))
                .with("model", arguments.model.as_ref().map(|folder| folder.display().to_string()))
                .with("store", service::store_flags(&arguments.store));
            let mut config = service::load::<WorkerConfig>("worker", file, flags, &[])?.value;
            let id = config.id.clone().unwrap_or_default();
            let shared = config.store.share_of(&id, arguments.workers.into());
            config.store = shared.context("read the settings of the KV store")?;
            Ok(config)
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    service::run(common, "warn", async |shutdown| serve(gateway, coordinator, workers, shutdown).await)
}

async fn serve(
    mut gateway: GatewayConfig,
    coordinator: CoordinatorConfig,
    workers: Vec<WorkerConfig>,
    shutdown: Shutdown,
) -> anyhow::Result<()> {
    let tokenizer = match workers.first().and_then(|config| config.model.as_deref()) {
        Some(folder) => Arc::new(Tokenizer::open(folder).context("open the model's tokenizer")?),
        None => Arc::clone(Model::bundled()?.tokenizer()),
    };
    shutdown.listen_for_signals(GRACE);
    // Each role ends at its own time.
    let (gateway_end, workers_end, coordinator_end) = (Shutdown::new(), Shutdown::new(), Shutdown::new());
    let running_coordinator =
        Coordinator::start(coordinator, &coordinator_end).await.context("start the coordinator")?;
    let mut running_workers = Vec::new();
    for mut config in workers {
        config.coordinators = vec![running_coordinator.base.clone()];
        running_workers.push(Worker::start(config, &workers_end).await.context("start a worker")?);
    }
    gateway.coordinators = vec![running_coordinator.base.clone()];
    let running_gateway = Gateway::start(gateway, &gateway_end).await.context("start the gateway")?;
    let model = running_workers.first().map_or("kvik-tiny", RunningWorker::model_name);
    running_gateway.gateway().provide_tokenizer(model, tokenizer);
    greet(
        &format!("http://{}", running_gateway.address()),
        &running_coordinator.base,
        &running_workers,
        model,
    )
    .context("write to standard output")?;

    shutdown.draining().await;
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
    coordinator_end.finish().await;
    Ok(())
}

/// Says where everything is and what to try.
fn greet(gateway: &str, coordinator: &str, workers: &[RunningWorker], model: &str) -> std::io::Result<()> {
    let mut stdout = anstream::stdout().lock();
    writeln!(stdout, "{TITLE}kvik is up{TITLE:#}: {model} on {} workers\n", workers.len())?;
    writeln!(stdout, "  gateway      {gateway}")?;
    writeln!(stdout, "  coordinator  {coordinator}")?;
    for worker in workers {
        writeln!(stdout, "  {:<12} http://{}", worker.id(), worker.address())?;
    }
    writeln!(stdout, "\nTry:\n")?;
    let json = "-H 'content-type: application/json'";
    writeln!(
        stdout,
        "  curl -N {gateway}/v1/completions {json} \\\n    -d '{{\"model\":\"{model}\",\"prompt\":\"Once upon a time\",\"max_tokens\":64,\"temperature\":0,\"stream\":true}}'"
    )?;
    writeln!(
        stdout,
        "  curl {gateway}/v1/chat/completions {json} \\\n    -d '{{\"model\":\"{model}\",\"messages\":[{{\"role\":\"user\",\"content\":\"Tell me a story.\"}}]}}'"
    )?;
    writeln!(stdout, "  curl '{coordinator}/route?seq_id=alice&explain=true'")?;
    writeln!(stdout, "\n{DIMMED}Ctrl-C drains; a second one ends at once.{DIMMED:#}")?;
    stdout.flush()
}
