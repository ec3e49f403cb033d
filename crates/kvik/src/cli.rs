//! The arguments of every command, with their defaults and units.

pub(crate) mod bench;
pub(crate) mod engines;
pub(crate) mod eval;
pub(crate) mod roles;
pub(crate) mod store;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Args, Parser, Subcommand, ValueEnum};
use kvik_model::DeviceName;
use kvik_store::policy::PolicyKind;
use kvik_types::Dtype;

use crate::commands::memory::MemoryCommand;
use bench::BenchCommand;
use engines::EnginesCommand;
use eval::EvalCommand;
use roles::{WorkerRoles, parse_roles};
use store::StoreCommand;

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0  all was done
  1  the work failed
  2  the command line is wrong
  3  the input was refused: the prompt, an option's value or the model folder";

/// Most threads that may be asked for; far above every machine, low enough to be started.
const MAX_THREADS: u64 = 1024;

/// The KV cache platform for large language models, with a built-in engine.
#[derive(Debug, Parser)]
#[command(
    name = "kvik",
    version,
    after_help = EXIT_CODES,
    styles = STYLES,
    max_term_width = 100,
    disable_help_subcommand = true
)]
pub(crate) struct Cli {
    /// With --version: also print commit, target, profile, compiler and features of the build
    #[arg(long, requires = "version")]
    pub(crate) verbose: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Continue a prompt with a model, on this machine's CPU
    Generate(Box<GenerateArguments>),
    /// Look at models
    #[command(subcommand)]
    Models(ModelsCommand),
    /// Measure speed
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Measure answers
    #[command(subcommand)]
    Eval(EvalCommand),
    /// Run the whole service in one process: gateway, coordinator and workers
    Up(UpArguments),
    /// Measure a load with and without kvik's routing and store, and draw the result
    Demo(DemoArguments),
    /// Run a worker: the built-in engine behind HTTP
    Worker(WorkerArguments),
    /// Run a coordinator: the list of workers
    Coordinator(CoordinatorArguments),
    /// Run a gateway: the address that clients talk to
    Gateway(GatewayArguments),
    /// Run the KV index alone: which worker has how much of a prompt
    Indexer(IndexerArguments),
    /// Run an endpoint picker: Envoy and other data planes ask it which worker takes a request
    Epp(EppArguments),
    /// Run the engines of many models behind one gateway, some awake and some asleep
    #[command(subcommand)]
    Engines(EnginesCommand),
    /// Keep KV for all engines of this machine
    #[command(subcommand)]
    Store(StoreCommand),
    /// Print the effective configuration of every role and where each value comes from
    Config(ConfigArguments),
    /// Replay a recorded load through eviction policies: what would a cache have found of it?
    Sim(SimArguments),
    /// Show what engines use of this machine's elastic memory, on a screen that follows it
    Top(TopScreenArguments),
    /// Share the elastic memory of this machine
    #[command(subcommand)]
    Memory(MemoryCommand),
    /// Print a script that completes command lines in a shell
    Completions(CompletionsArguments),
    /// Write manual pages
    Man(ManArguments),
}

/// `kvik completions bash > /usr/share/bash-completion/completions/kvik`, or where your shell looks for them.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct CompletionsArguments {
    /// The shell
    #[arg(value_name = "SHELL")]
    pub(crate) shell: clap_complete::Shell,

    /// The program whose command lines are completed
    #[arg(long, value_name = "PROGRAM", value_enum, default_value_t = Program::Kvik)]
    pub(crate) program: Program,
}

/// The programs of this package.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Program {
    Kvik,
    Kvctl,
}

/// A page for each command of kvik and kvctl, such as `kvik-gateway.1`; `man -l FILE` shows one.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct ManArguments {
    /// Folder to write to; it is made if it is missing
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
}

/// What is replayed.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct SimArguments {
    /// Requests in Mooncake's format, one JSON object a line: `timestamp` in ms, `input_length` and
    /// `output_length` in tokens, `hash_ids` of blocks of 512 tokens
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: PathBuf,

    /// Policies: lru, lfu, fifo, s3fifo, arc, cost, kvik; the optimum is always shown beside them
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "lru,s3fifo,kvik")]
    pub(crate) policy: Vec<PolicyKind>,

    /// Sizes of the cache, in blocks, at least 1
    #[arg(long, value_name = "BLOCKS", value_delimiter = ',', required = true, value_parser = parse_capacity)]
    pub(crate) capacity: Vec<usize>,

    /// Also draw the hit ratios over the capacity
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_capacity(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(capacity) if capacity > 0 => Ok(capacity),
        _ => Err("allowed: whole numbers of blocks, at least 1".to_owned()),
    }
}

/// The screen of `kvctl kvtop`.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct TopScreenArguments {
    #[command(flatten)]
    pub(crate) top: kvctl::top::TopArguments,

    #[command(flatten)]
    pub(crate) common: kvctl::CommonArguments,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ModelsCommand {
    /// Print a model's architecture, sizes and KV bytes per token
    Inspect(InspectArguments),
    /// Make a folder of a model with random weights, for measurements on a GPU
    Make(MakeArguments),
}

/// The folder has no weights: they are made on the device when the model is loaded. Texts mean nothing.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct MakeArguments {
    /// Whose numbers the model has
    #[arg(long, value_name = "SHAPE", value_enum)]
    pub(crate) shape: ModelShape,

    /// Folder that is made; it must not exist
    #[arg(long, value_name = "DIR")]
    pub(crate) random: PathBuf,

    /// Seed of the weights
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
}

/// Models whose numbers are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModelShape {
    /// 1.2 billion parameters, 16 layers
    #[value(name = "llama-3.2-1b")]
    Llama32With1B,
    /// 3.2 billion parameters, 28 layers
    #[value(name = "llama-3.2-3b")]
    Llama32With3B,
    /// 8 billion parameters, 32 layers
    #[value(name = "llama-3-8b")]
    Llama3With8B,
}

/// Text is streamed to standard output as it is made. Statistics go to standard error if that is a terminal.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct GenerateArguments {
    /// Model: a folder with config.json, safetensors and tokenizer.json, or `owner/name[@revision]` of a model hub
    /// [default: the bundled kvik-tiny]
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    /// Text to continue; `-` reads standard input, less one line break at its end
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: OsString,

    /// Take the prompt as a user's message and render it with the model's chat template
    #[arg(long)]
    pub(crate) chat: bool,

    /// System message before the prompt [default: none]
    #[arg(long, value_name = "TEXT", requires = "chat", allow_hyphen_values = true)]
    pub(crate) system: Option<OsString>,

    /// Print one JSON object at the end instead of streaming text
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) sampling: SamplingArguments,

    #[command(flatten)]
    pub(crate) engine: EngineArguments,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArguments {
    /// Most tokens to make, at least 1
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) max_tokens: u32,

    /// Randomness, 0 to 100; 0: the most likely token, always the same text
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) temperature: f32,

    /// Consider only the K most likely tokens; 0: all
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub(crate) top_k: u32,

    /// Consider only the likeliest tokens that sum up to P, above 0 to 1
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) top_p: f32,

    /// Consider only tokens at least P times as likely as the likeliest, 0 to 1
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) min_p: f32,

    /// Divide the logits of tokens seen in prompt or output, above 0 to 100; 1: off
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) repetition_penalty: f32,

    /// Subtract from the logits of tokens in the output, -2 to 2
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) presence_penalty: f32,

    /// Like --presence-penalty, but once for each occurrence, -2 to 2
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) frequency_penalty: f32,

    /// Seed of the random choices [default: a random one, which is reported]
    #[arg(long, value_name = "S")]
    pub(crate) seed: Option<u64>,

    /// End the output before this text; may be given up to 64 times [default: none]
    #[arg(long, value_name = "STR", allow_hyphen_values = true)]
    pub(crate) stop: Vec<OsString>,

    /// Report the N most likely tokens at each step, 0 to 1024; needs --json [default: none]
    #[arg(long, value_name = "N", requires = "json")]
    pub(crate) logprobs: Option<u32>,

    /// Number of independent outputs, 1 to 128
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) n: u32,

    /// Go on after the model's end tokens
    #[arg(long)]
    pub(crate) ignore_eos: bool,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineArguments {
    /// Device that the model runs on: `cpu`, or `cuda:N` for an NVIDIA GPU
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Cpu)]
    pub(crate) device: DeviceName,

    /// Type in which keys and values are kept [default: f32 on the CPU, bf16 on a GPU]
    #[arg(long, value_name = "TYPE", value_enum)]
    pub(crate) kv_dtype: Option<KvDtype>,

    /// Threads that compute, 1 to 1024 [default: the cores this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_THREADS))]
    pub(crate) threads: Option<u64>,

    /// Blocks for keys and values, 16 tokens each [default: what this run needs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) kv_blocks: Option<u32>,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct InspectArguments {
    /// Model: a folder with config.json, safetensors and tokenizer.json, or `owner/name[@revision]` of a model hub
    /// [default: the bundled kvik-tiny]
    #[arg(value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// The types in which the engine can keep keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvDtype {
    F32,
    F16,
    Bf16,
}

impl KvDtype {
    /// Every type, in the order in which they are listed to users.
    pub(crate) const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];
}

impl From<KvDtype> for Dtype {
    fn from(kv_dtype: KvDtype) -> Self {
        match kv_dtype {
            KvDtype::F32 => Self::F32,
            KvDtype::F16 => Self::F16,
            KvDtype::Bf16 => Self::BF16,
        }
    }
}

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

/// Conversations over shared documents, more than the engines can hold, are sent twice: without kvik's routing and store,
/// then with them. Each run starts its own coordinator, gateway and workers, and kills a worker half way. With --gateway
/// a running gateway is measured instead, against the same requests without any reuse, and no worker is killed.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct DemoArguments {
    /// Base address of a running gateway, such as `http://127.0.0.1:8080` [default: start a fleet]
    #[arg(long, value_name = "URL")]
    pub(crate) gateway: Option<String>,

    /// Model that requests name; without --gateway also a folder or `owner/name[@revision]` of a model hub, which the workers run
    #[arg(long, value_name = "NAME", default_value = "kvik-tiny")]
    pub(crate) model: String,

    /// Workers of the fleet, 2 to 16
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(2..=16))]
    pub(crate) workers: u16,

    /// Conversations at a time, 1 to 256
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) clients: u16,

    /// Length of each of the two runs in seconds, 1 to 600
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=600))]
    pub(crate) seconds: u16,

    /// Where the picture goes
    #[arg(long, value_name = "FILE", default_value = "kvik-demo.svg")]
    pub(crate) svg: PathBuf,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
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

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct ConfigArguments {
    /// YAML file with a section for each role [default: none]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
