//! The arguments of `kvik memory`, with their defaults and units.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use kvik_memory::ledger::DEFAULT_DIR;

use super::EXIT_CODES;
use super::services::LogForm;

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
