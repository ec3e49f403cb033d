//! The arguments of every command, with their defaults and units: here those of the program and of its short verbs.

pub(crate) mod bench;
pub(crate) mod engines;
pub(crate) mod eval;
pub(crate) mod generate;
pub(crate) mod memory;
pub(crate) mod models;
pub(crate) mod roles;
pub(crate) mod services;
pub(crate) mod store;

use std::path::PathBuf;

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Args, Parser, Subcommand, ValueEnum};
use kvik_store::policy::PolicyKind;

use bench::BenchCommand;
use engines::EnginesCommand;
use eval::EvalCommand;
use generate::GenerateArguments;
use memory::MemoryCommand;
use models::ModelsCommand;
use services::{
    CoordinatorArguments, EppArguments, GatewayArguments, IndexerArguments, UpArguments, WorkerArguments,
};
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
    pub(crate) top: kvctl::TopArguments,

    #[command(flatten)]
    pub(crate) common: kvctl::CommonArguments,
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
pub(crate) struct ConfigArguments {
    /// YAML file with a section for each role [default: none]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
