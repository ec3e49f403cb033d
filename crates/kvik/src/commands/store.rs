//! `kvik store serve`: one store for the engines of a machine; `kvik store format`: a device for its chunks.

use std::io::{self, Write as _};
use std::time::Duration;

use anyhow::Context as _;
use kvik_node::{DaemonConfig, StoreDaemon, format_device};
use kvik_runtime::machine;
use kvik_types::ByteSize;

use super::service::{self, Flags, InvalidInput};
use crate::cli::store::{StoreFormatArguments, StoreServeArguments};

/// The part of the free memory that the daemon takes where nothing is said.
const RAM_SHARE: u64 = 4;

/// Serves until a signal ends it.
pub(crate) fn serve(arguments: &StoreServeArguments) -> anyhow::Result<()> {
    let flags = Flags::default()
        .with("socket", arguments.socket.clone())
        .with("metrics", arguments.metrics.clone())
        .with(
            "peer",
            Flags::default()
                .with("listen", arguments.listen.clone())
                .with_list("nodes", &arguments.peer)
                .with_list("coordinators", &arguments.coordinator)
                .with("advertise", arguments.advertise.clone())
                .into_value(),
        )
        .with("lm", Flags::default().with("listen", arguments.lm_listen.clone()).into_value())
        .with("tiers", service::store_flags(&arguments.store));
    let common = &arguments.service;
    let mut config =
        service::load::<DaemonConfig>("store", common.config.as_deref(), flags, &common.set)?.value;
    let refused = |error| InvalidInput::new(format!("read the configuration: {error}"));
    // A daemon that takes over has the memory of the running one where nothing is said.
    let is_ram_chosen = !arguments.take_over && config.tenants.is_empty();
    if config.tiers.resolve().map_err(refused)?.is_none() && is_ram_chosen {
        config.tiers.ram = (machine::available_memory_bytes().unwrap_or(0) / RAM_SHARE).to_string();
    }
    service::run(common, "info", async |shutdown| {
        shutdown.listen_for_signals(Duration::from_secs(config.drain_grace_s));
        let daemon = if arguments.take_over {
            StoreDaemon::take_over(config, &shutdown).await.context("take over from the store daemon")?
        } else {
            StoreDaemon::start(config, &shutdown).await.context("start the store daemon")?
        };
        for tenant in &*daemon.server().tenants() {
            let ram = ByteSize(tenant.store.arena().stat().capacity_bytes);
            tracing::info!(tenant = tenant.name, %ram, "store is open");
        }
        let socket = daemon.socket().display();
        let metrics = daemon.metrics_address().map(tracing::field::display);
        let peers = daemon.peer_address().map(tracing::field::display);
        let lm = daemon.lm_address().map(tracing::field::display);
        tracing::info!(%socket, metrics, peers, lm, "store daemon is ready");
        shutdown.draining().await;
        daemon.finish().await;
        Ok(())
    })
}

/// Makes a block device ready for chunks.
pub(crate) fn format(arguments: &StoreFormatArguments) -> anyhow::Result<()> {
    let StoreFormatArguments { device, size } = arguments;
    let n_bytes = format_device(device, size.map(ByteSize::bytes))
        .map_err(|error| InvalidInput::new(format!("format a device: {error}")))?;
    writeln!(io::stdout().lock(), "{}: {} for chunks", device.display(), ByteSize(n_bytes))?;
    Ok(())
}
