//! The arguments of `kvik up` and of the services that it runs, with their defaults and units.
//!
//! An argument is a short form of a field of the configuration: one that is not given leaves the field to the file and the
//! environment.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kvik_model::DeviceName;

use super::EXIT_CODES;
use super::roles::{WorkerRoles, parse_roles};

/// Options of every service. Each field of the configuration can be set in the file, by
/// `KVIK_ROLE_FIELD` in the environment, or by --set; `kvik config` lists all of them.
#[derive(Debug, Args)]
pub(crate) struct ServiceArguments {
    /// YAML file with a section for each role [default: none]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Set a field of the role's configuration, such as `--set retry.max_attempts=3`
    #[arg(long, value_name = "FIELD=VALUE")]
    pub(crate) set: Vec<String>,

    /// Which logs: a level, or directives such as `info,kvik_gateway=debug` [default: info; up: warn]
    #[arg(long, value_name = "DIRECTIVES")]
    pub(crate) log: Option<String>,

    /// Form of the log lines: `text` for people, `json` for machines
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub(crate) log_format: LogForm,
}

/// The form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogForm {
    Text,
    Json,
}

/// Where KV is kept beyond the engine's own memory.
#[derive(Debug, Args)]
#[command(next_help_heading = "KV store")]
pub(crate) struct StoreArguments {
    /// Memory for KV of earlier prompts, such as `2GiB` [default: none; 256MiB with --nvme or --remote;
    /// up and store serve: a share of the free memory]
    #[arg(long, value_name = "SIZE")]
    pub(crate) ram: Option<String>,

    /// Folder and size for KV on a local disk, such as `/var/cache/kvik:20GiB` [default: none; up: a
    /// folder of its own]
    #[arg(long, value_name = "DIR:SIZE")]
    pub(crate) nvme: Option<String>,

    /// Remote store for KV: redis://, rediss://, redis+cluster://, s3://, gs://, az://, file://, lm://, plugin:// or
    /// mooncakestore:// [default: none]
    #[arg(long, value_name = "URL")]
    pub(crate) remote: Option<String>,
}

/// Everything runs on loopback in this process. Unless set, the KV store has a sixteenth of the free memory (64 MiB to
/// 1 GiB) and 2 GiB of disk in a folder of its own. The first Ctrl-C drains, a second one ends at once.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct UpArguments {
    /// Number of workers
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) workers: u16,

    /// Workers by role, such as `prefill=1,decode=1`: some compute long prompts, others generate
    #[arg(long, value_name = "ROLE=N,...", conflicts_with = "workers", value_parser = parse_roles)]
    pub(crate) roles: Option<WorkerRoles>,

    /// Model: a folder, or `owner/name[@revision]` of a model hub [default: the bundled kvik-tiny]
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    /// Device that all workers run on: `cpu`, or `cuda:N` for an NVIDIA GPU [default: cpu]
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceName>,

    /// Memory for keys and values of each worker on a GPU, such as `40GiB` [default: 2GiB]
    #[arg(long, value_name = "SIZE", requires = "device")]
    pub(crate) kv_memory: Option<String>,

    /// Port of the gateway; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    pub(crate) port: u16,

    /// Keep the folder of the disk tier at exit, where `up` made it
    #[arg(long)]
    pub(crate) keep: bool,

    /// Give all workers one KV store, that of a store daemon, instead of a share of it each
    #[arg(long)]
    pub(crate) shared_store: bool,

    #[command(flatten)]
    pub(crate) store: StoreArguments,

    #[command(flatten)]
    pub(crate) service: ServiceArguments,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct WorkerArguments {
    /// Address to listen on [default: 127.0.0.1:8082]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<String>,

    /// Base address that others reach it at, such as `http://worker-0:8082` [default: the one listened on]
    #[arg(long, value_name = "URL")]
    pub(crate) advertise: Option<String>,

    /// Name of the worker [default: host name and port]
    #[arg(long, value_name = "NAME")]
    pub(crate) id: Option<String>,

    /// Model: a folder, or `owner/name[@revision]` of a model hub [default: the bundled kvik-tiny]
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    /// Coordinator to register with; may be repeated [default: none]
    #[arg(long, value_name = "URL")]
    pub(crate) coordinator: Vec<String>,

    /// Device that the model runs on: `cpu`, or `cuda:N` for an NVIDIA GPU [default: cpu]
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<DeviceName>,

    /// Threads that compute on the CPU [default: the number of cores]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,

    /// Blocks of 16 tokens for keys and values [default: 1024 on the CPU]
    #[arg(long, value_name = "N")]
    pub(crate) kv_blocks: Option<usize>,

    /// Memory for keys and values on a GPU: a size such as `40GiB`, or the share of the device that the worker uses in all
    /// [default: 0.9]
    #[arg(long, value_name = "SIZE", conflicts_with = "kv_blocks")]
    pub(crate) kv_memory: Option<String>,

    #[command(flatten)]
    pub(crate) store: StoreArguments,

    #[command(flatten)]
    pub(crate) service: ServiceArguments,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct CoordinatorArguments {
    /// Address to listen on [default: 127.0.0.1:8081]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<String>,

    /// Base address that the other coordinators reach it at [default: the one listened on]
    #[arg(long, value_name = "URL")]
    pub(crate) advertise: Option<String>,

    /// Keep the state in etcd at this address; may be repeated [default: in memory]
    #[arg(long, value_name = "URL")]
    pub(crate) etcd: Vec<String>,

    #[command(flatten)]
    pub(crate) service: ServiceArguments,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct GatewayArguments {
    /// Address to listen on [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<String>,

    /// Coordinator to learn workers from; may be repeated [default: none]
    #[arg(long, value_name = "URL")]
    pub(crate) coordinator: Vec<String>,

    /// Engine that speaks the `OpenAI` API, such as vLLM; may be repeated [default: none]
    #[arg(long, value_name = "URL")]
    pub(crate) backend: Vec<String>,

    #[command(flatten)]
    pub(crate) service: ServiceArguments,
}

/// Settings are those of the section `gateway` that concern the index: `listen`, `tls`, `coordinators`, `api_keys`, `index`.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct IndexerArguments {
    /// Address to listen on [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<String>,

    /// Coordinator to learn workers from; may be repeated [default: none]
    #[arg(long, value_name = "URL")]
    pub(crate) coordinator: Vec<String>,

    #[command(flatten)]
    pub(crate) service: ServiceArguments,
}

/// Settings of the sections `epp` (`--set`) and `gateway`: how requests are placed, the index, and where `/metrics` is.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct EppArguments {
    /// Address for data planes, gRPC [default: 127.0.0.1:9002]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<String>,

    /// Address for `/metrics`, `/ready` and `/route/explain`, HTTP [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) http_listen: Option<String>,

    /// `InferencePool` whose pods are the engines [default: none]
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pub(crate) pool: Option<String>,

    /// Coordinator to learn workers from; may be repeated [default: none]
    #[arg(long, value_name = "URL")]
    pub(crate) coordinator: Vec<String>,

    /// Engine that speaks the `OpenAI` API, by its IP and port; may be repeated [default: none]
    #[arg(long, value_name = "URL")]
    pub(crate) backend: Vec<String>,

    #[command(flatten)]
    pub(crate) service: ServiceArguments,
}
