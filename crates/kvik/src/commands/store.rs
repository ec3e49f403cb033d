//! `kvik store serve`: one store for the engines of a machine.

use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use kvik_node::{DaemonConfig, StoreDaemon};
use kvik_runtime::machine;
use kvik_types::ByteSize;

use super::service::{self, Flags};
use crate::cli::{EXIT_CODES, ServiceArguments};

/// The part of the free memory that the daemon takes where nothing is said.
const RAM_SHARE: u64 = 4;

#[derive(Debug, Subcommand)]
pub(crate) enum StoreCommand {
    /// Serve one KV store to all engines of this machine, over a unix socket and shared memory
    Serve(StoreServeArguments),
}

/// Engines attach at the socket, name the chunks they want and copy the bytes themselves out of shared memory. A worker
/// uses it with `--set store.daemon=PATH`. The first Ctrl-C ends all sessions and writes to disk what waits for it.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct StoreServeArguments {
    /// Socket at which engines attach, in a folder that only this user can enter; the folder is made if it is missing
    /// [default: /run/kvik/store.sock]
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<String>,

    /// Memory for chunks, such as `20GiB` [default: a quarter of the free memory; 256MiB with --nvme or --remote]
    #[arg(long, value_name = "SIZE")]
    pub(crate) ram: Option<String>,

    /// Folder and size for chunks on a local disk, such as `/var/cache/kvik:200GiB` [default: none]
    #[arg(long, value_name = "DIR:SIZE")]
    pub(crate) nvme: Option<String>,

    /// Remote store for chunks: redis://, rediss://, redis+cluster://, s3://, gs://, az:// or file:// [default: none]
    #[arg(long, value_name = "URL")]
    pub(crate) remote: Option<String>,

    /// Address for /metrics and /health; port 0 takes a free one [default: none]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) metrics: Option<String>,

    #[command(flatten)]
    pub(crate) service: ServiceArguments,
}

/// Serves until it is told to end.
pub(crate) fn serve(arguments: &StoreServeArguments) -> anyhow::Result<()> {
    let tiers = Flags::default()
        .with("ram", arguments.ram.clone())
        .with("nvme", arguments.nvme.clone())
        .with("remote", arguments.remote.clone());
    let flags = Flags::default()
        .with("socket", arguments.socket.clone())
        .with("metrics", arguments.metrics.clone())
        .with("tiers", tiers.into_value());
    let common = &arguments.service;
    let mut config =
        service::load::<DaemonConfig>("store", common.config.as_deref(), flags, &common.set)?.value;
    if config.tenants.is_empty() && config.tiers.resolve()?.is_none() {
        config.tiers.ram = (machine::available_memory_bytes().unwrap_or(0) / RAM_SHARE).to_string();
    }
    service::run(common, "info", async |shutdown| {
        shutdown.listen_for_signals(Duration::from_secs(config.drain_grace_s));
        let daemon = StoreDaemon::start(config, &shutdown).await.context("start the store daemon")?;
        for tenant in daemon.server().tenants() {
            let ram = ByteSize(tenant.store.arena().stat().capacity_bytes);
            tracing::info!(tenant = tenant.name, %ram, "store is open");
        }
        let socket = daemon.socket().display();
        let metrics = daemon.metrics_address().map(tracing::field::display);
        tracing::info!(%socket, metrics, "store daemon is ready");
        shutdown.draining().await;
        daemon.finish().await;
        Ok(())
    })
}
