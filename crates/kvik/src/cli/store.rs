//! The arguments of `kvik store`, with their defaults and units.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use kvik_types::ByteSize;

use super::EXIT_CODES;
use super::services::{ServiceArguments, StoreArguments};

#[derive(Debug, Subcommand)]
pub(crate) enum StoreCommand {
    /// Serve one KV store to all engines of this machine, over a unix socket and shared memory
    Serve(Box<StoreServeArguments>),
    /// Make a block device ready for chunks; everything on it is lost
    Format(StoreFormatArguments),
}

/// A device with a file system, a partition table or another program's mark is refused, and so is one that is mounted or in
/// use. `store.nvme`, or an entry of `store.tiers`, then names the device.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct StoreFormatArguments {
    /// The device, such as /dev/nvme1n1
    #[arg(value_name = "DEVICE")]
    pub(crate) device: PathBuf,

    /// Bytes of it for chunks, such as 200GiB [default: all]
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: Option<ByteSize>,
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

    /// Address for /metrics and /health; port 0 takes a free one [default: none]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) metrics: Option<String>,

    /// Address at which other nodes read chunks of this one; port 0 takes a free one. One that other machines can reach
    /// needs `--set peer.token_file=FILE`, `peer.tls` or `peer.insecure` [default: none]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<String>,

    /// Node whose chunks are read, once for each; a name stands for all its addresses [default: none]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) peer: Vec<String>,

    /// Coordinator that lists the stores of the cluster: this one where it listens, whose chunks the others then read,
    /// and the others, whose chunks this one reads; may be repeated [default: none]
    #[arg(long, value_name = "URL")]
    pub(crate) coordinator: Vec<String>,

    /// Address at which other nodes reach this one, for the coordinator's list [default: that of --listen]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) advertise: Option<String>,

    /// Address at which LMCache's clients (`remote_url: lm://HOST:PORT`) keep their own chunks; port 0 takes a free one. One
    /// that other machines can reach needs `--set lm.insecure=true`, because the protocol knows no credentials
    /// [default: none]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) lm_listen: Option<String>,

    /// Take over from the daemon that serves at the socket, with all chunks in its memory; engines see a pause. The
    /// running daemon goes on if this one cannot serve, and ends otherwise. Memory, chunk length, keys, tenants and tokens
    /// must be those of the running daemon; disk and remote may differ
    #[arg(long)]
    pub(crate) take_over: bool,

    #[command(flatten)]
    pub(crate) store: StoreArguments,

    #[command(flatten)]
    pub(crate) service: ServiceArguments,
}
