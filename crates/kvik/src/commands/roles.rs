//! `kvik worker`, `kvik coordinator`, `kvik gateway`, `kvik indexer`: one role a process.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use kvik_coordinator::{Coordinator, CoordinatorConfig};
use kvik_gateway::{Gateway, GatewayConfig};
use kvik_runtime::config::unused_variables;
use kvik_worker::{Worker, WorkerConfig};
use serde_json::{Value, json};

use super::service::{self, Flags};
use crate::cli::services::{CoordinatorArguments, GatewayArguments, IndexerArguments, WorkerArguments};

/// Time for a coordinator to give up its lead after the first signal.
const COORDINATOR_GRACE: Duration = Duration::from_secs(10);

/// Runs a worker until it has drained.
pub(crate) fn worker(arguments: &WorkerArguments) -> anyhow::Result<()> {
    let flags = Flags::default()
        .with("listen", arguments.listen.clone())
        .with("advertise", arguments.advertise.clone())
        .with("id", arguments.id.clone())
        .with("model", arguments.model.as_ref().map(|folder| folder.display().to_string()))
        .with("device", arguments.device.map(|device| device.to_string()))
        .with("threads", arguments.threads)
        .with("kv_blocks", arguments.kv_blocks)
        .with("kv_memory", arguments.kv_memory.clone())
        .with("store", service::store_flags(&arguments.store))
        .with_list("coordinators", &arguments.coordinator);
    let common = &arguments.service;
    let config = service::load::<WorkerConfig>("worker", common.config.as_deref(), flags, &common.set)?.value;
    service::run(common, config.memory.log_directive().unwrap_or("info"), async |shutdown| {
        let unused = unused_variables("KVCACHED_");
        if !unused.is_empty() {
            tracing::warn!(variables = ?unused, "ignored variables that have no meaning for a worker");
        }
        shutdown.listen_for_signals(Duration::from_secs(config.drain_grace_s));
        let running = Worker::start(config, &shutdown).await.context("start the worker")?;
        tracing::info!(id = running.id(), address = %running.address(), model = running.model_name(), "worker is ready");
        running.closed().await;
        // With an error, so that what supervises the process starts it again.
        running.outcome().context("run the worker")
    })
}

/// Runs a coordinator until it is told to end.
pub(crate) fn coordinator(arguments: &CoordinatorArguments) -> anyhow::Result<()> {
    let state = (!arguments.etcd.is_empty())
        .then(|| json!({"backend": "etcd", "etcd": {"endpoints": arguments.etcd}}));
    let flags = Flags::default()
        .with("listen", arguments.listen.clone())
        .with("advertise", arguments.advertise.clone())
        .with("state", state);
    let common = &arguments.service;
    let config =
        service::load::<CoordinatorConfig>("coordinator", common.config.as_deref(), flags, &common.set)?
            .value;
    service::run(common, "info", async |shutdown| {
        shutdown.listen_for_signals(COORDINATOR_GRACE);
        let running = Coordinator::start(config, &shutdown).await.context("start the coordinator")?;
        tracing::info!(address = %running.address, base = running.base, "coordinator is ready");
        shutdown.draining().await;
        Ok(())
    })
}

/// Runs a gateway until its streams have ended.
pub(crate) fn gateway(arguments: &GatewayArguments) -> anyhow::Result<()> {
    let backends: Vec<Value> = arguments.backend.iter().map(|url| json!({"url": url})).collect();
    let load = {
        let (listen, coordinators) = (arguments.listen.clone(), arguments.coordinator.clone());
        let (file, settings) = (arguments.service.config.clone(), arguments.service.set.clone());
        move || {
            let flags = Flags::default()
                .with("listen", listen.clone())
                .with("backends", (!backends.is_empty()).then(|| backends.clone()))
                .with_list("coordinators", &coordinators);
            service::load::<GatewayConfig>("gateway", file.as_deref(), flags, &settings)
                .map(|effective| effective.value)
        }
    };
    let config = load()?;
    let file = arguments.service.config.clone();
    service::run(&arguments.service, "info", async |shutdown| {
        shutdown.listen_for_signals(Duration::from_secs(config.drain_grace_s));
        let running = Gateway::start(config, &shutdown).await.context("start the gateway")?;
        let bundled = kvik_model::Model::bundled()?;
        running.gateway().provide_tokenizer(bundled.name(), Arc::clone(bundled.tokenizer()));
        running.gateway().reload_on_change(file, load);
        tracing::info!(address = %running.address(), "gateway is ready");
        shutdown.draining().await;
        running.finished().await;
        Ok(())
    })
}

/// Runs the index alone until it is told to end.
pub(crate) fn indexer(arguments: &IndexerArguments) -> anyhow::Result<()> {
    let flags = Flags::default()
        .with("listen", arguments.listen.clone())
        .with_list("coordinators", &arguments.coordinator);
    let common = &arguments.service;
    let config =
        service::load::<GatewayConfig>("gateway", common.config.as_deref(), flags, &common.set)?.value;
    service::run(common, "info", async |shutdown| {
        shutdown.listen_for_signals(Duration::from_secs(config.drain_grace_s));
        let running = Gateway::start_index(config, &shutdown).await.context("start the index")?;
        let bundled = kvik_model::Model::bundled()?;
        running.gateway().provide_tokenizer(bundled.name(), Arc::clone(bundled.tokenizer()));
        tracing::info!(address = %running.address(), "indexer is ready");
        shutdown.draining().await;
        running.finished().await;
        Ok(())
    })
}
