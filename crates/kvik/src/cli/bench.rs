//! The arguments of `kvik bench`, with their defaults and units.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::generate::{KvDtype, MAX_THREADS};
use super::{EXIT_CODES, parse_capacity};
use kvik_bench::memory::BenchDevice;
use kvik_model::DeviceName;

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure the built-in engine: prefill and decode tokens per second
    Engine(BenchEngineArguments),
    /// Measure what the gateway costs: requests through it against requests straight to mock workers
    Gateway(BenchGatewayArguments),
    /// Measure what the endpoint picker costs, beside the gateway
    Epp(BenchEppArguments),
    /// Attack the gateway on loopback and measure what is left for honest clients
    Edges(BenchEdgesArguments),
    /// Measure what clients see of streams that go to another worker: pauses, drains, rolling restarts
    Moving(BenchMovingArguments),
    /// Measure elastic memory: blocks, pages, grants, growth, and giving memory back
    Memory(BenchMemoryArguments),
    /// Measure three models on one device under bursts in turns: shared memory beside a static split
    Sharing(BenchSharingArguments),
    /// Measure the KV store: each tier beside what its medium gives without it, lookups, and what a hit saves
    Store(BenchStoreArguments),
    /// Measure what the planner of the store gains: first tokens beside loading everything and computing everything
    Planner(BenchPlannerArguments),
    /// Measure what segments save: the first token of a prompt of documents, put together and computed
    Blend(BenchBlendArguments),
    /// Measure the codecs of KV: how much smaller, and how fast on one core
    Codec(BenchCodecArguments),
    /// Measure the store daemon: bytes in and out of it by several client processes, lookups, attaching, other nodes
    Node(BenchNodeArguments),
    /// Measure the global KV index: events, lookups, bytes, its snapshot, and whether it is exact
    Index(BenchIndexArguments),
    /// Measure ways of placing requests: a trace replayed on mock workers in virtual time
    Routing(BenchRoutingArguments),
    /// The other process of `kvik bench memory`
    #[command(hide = true)]
    MemoryPeer(BenchMemoryPeerArguments),
    /// A client process of `kvik bench node`
    #[command(hide = true)]
    NodeClient(BenchNodeClientArguments),
}

/// Every value is the median of at least three repeats after a warm-up.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchEngineArguments {
    /// Model: a folder with config.json, safetensors and tokenizer.json, or `owner/name[@revision]` of a model hub
    /// [default: the bundled kvik-tiny]
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    /// Batch sizes in sequences, 1 to 1024, separated by commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,4,16",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) batch: Vec<u32>,

    /// Prompt length of the prefill measurement, in tokens
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) prefill_tokens: u32,

    /// Tokens that each sequence decodes in one repeat
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) decode_tokens: u32,

    /// Prompt length of the decode measurement, in tokens
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) context: u32,

    /// Seconds for which each measurement is repeated, 0 to 3600
    #[arg(long, value_name = "S", default_value_t = 2, value_parser = clap::value_parser!(u64).range(..=3600))]
    pub(crate) seconds: u64,

    /// Device that the model runs on: `cpu`, or `cuda:N` for an NVIDIA GPU
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Cpu)]
    pub(crate) device: DeviceName,

    /// Type in which keys and values are kept [default: f32 on the CPU, bf16 on a GPU]
    #[arg(long, value_name = "TYPE", value_enum)]
    pub(crate) kv_dtype: Option<KvDtype>,

    /// Threads that compute on the CPU, 1 to 1024 [default: the cores this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_THREADS))]
    pub(crate) threads: Option<u64>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Clients, gateway and mock workers run in this process, on loopback. Under a minute on two cores.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchGatewayArguments {
    /// Requests over which the growth of the memory is measured, at least 1
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) requests: u32,

    /// Measure a few seconds only, less precisely, over a twentieth of the requests
    #[arg(long)]
    pub(crate) quick: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// A client that plays Envoy, picker, gateway and mock workers run in this process, on loopback. Under two minutes.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchEppArguments {
    /// Measure a few seconds only, less precisely
    #[arg(long)]
    pub(crate) quick: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Mock worker, gateway, honest clients and attackers run in this process, on loopback, one attack after the other.
/// Under a minute. Opens up to ten thousand connections, as many as the limit of open files allows.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchEdgesArguments {
    /// Measure a few seconds only, less precisely, with a tenth of the attackers
    #[arg(long)]
    pub(crate) quick: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Starts a coordinator, a gateway and workers as processes on loopback, moves and drains running streams, and compares
/// every text with that of an undisturbed run. Takes some minutes and 3 GiB of memory; with --quick half a minute.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchMovingArguments {
    /// Also restart all workers of a service in turn for so many seconds, 1 to 3600, under a constant load [default: off]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) rolling: Option<u64>,

    /// Device that the workers run on: `cpu`, or `cuda:N` for an NVIDIA GPU
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Cpu)]
    pub(crate) device: DeviceName,

    /// Measure sequences of 512 tokens only, less precisely
    #[arg(long)]
    pub(crate) quick: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Uses a ledger of its own, so engines that run on the device are not asked for memory. On a GPU it takes
/// 40 GiB for some seconds; on the host it takes addresses and hardly any memory.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchMemoryArguments {
    /// Memory to measure: `host`, or `cuda:` and the number of a GPU, which must have 40 GiB free
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub(crate) device: BenchDevice,

    /// Measure a second only, less precisely, with at most 1 GiB of growth
    #[arg(long)]
    pub(crate) quick: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Starts three workers as processes, first with a third of the memory each, then with all of it shared, and sends both the same
/// bursts. Texts must be equal. Takes some minutes on a CPU; with --quick half a minute.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchSharingArguments {
    /// Model that all workers run: a folder, or `owner/name[@revision]` of a model hub [default: the bundled kvik-tiny]
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    /// Device that the models run on: `cpu`, or `cuda:N` for an NVIDIA GPU
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Cpu)]
    pub(crate) device: DeviceName,

    /// Send a burst to each model only, with shorter requests
    #[arg(long)]
    pub(crate) quick: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Compares the disk with fio and Redis with redis-benchmark where these are installed. Takes some minutes, 3 GiB
/// of the disk and 3 GiB of memory; with --quick half a minute and less than 1 GiB.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchStoreArguments {
    /// Folder on the disk to measure; a folder of its own in there is removed at the end
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub(crate) dir: PathBuf,

    /// GPU whose KV is put and got too, `cuda:N`; `cpu` for none
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Cpu)]
    pub(crate) device: DeviceName,

    /// Measure one round of less, less precisely
    #[arg(long)]
    pub(crate) quick: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Speeds of a tier from 10 MB/s to memory, and prompts of 1000 and 4000 tokens. Takes about five minutes and 4 GiB of the
/// disk; with --quick some seconds.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchPlannerArguments {
    /// Folder on the disk to keep chunks in; a folder of its own in there is removed at the end
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub(crate) dir: PathBuf,

    /// Also draw the time to the first token over the speed, a panel for each length of prompts
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,

    /// Measure two speeds and one length, less precisely
    #[arg(long)]
    pub(crate) quick: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Two models: the bundled one, and one of 80 million parameters with random weights. Takes a few minutes and 5 GiB of the
/// disk; with --quick one minute.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchBlendArguments {
    /// Folder on the disk to read segments from; a folder of its own in there is removed at the end
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub(crate) dir: PathBuf,

    /// Measure two prompts of each kind, less precisely
    #[arg(long)]
    pub(crate) quick: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Codes and decodes chunks of the bundled model and made ones of the shape of Llama 3 8B, on one core. Takes half a minute
/// and 200 MiB of memory; with --quick some seconds.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchCodecArguments {
    /// Measure three rounds of two layers, less precisely
    #[arg(long)]
    pub(crate) quick: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// 16 workers with sequences of 16, 128 and 1024 blocks, on one thread and beside a writer. Takes some minutes and
/// 1 GiB of memory; with --quick some seconds.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchIndexArguments {
    /// Measure one round of a twentieth of the sequences, less precisely
    #[arg(long)]
    pub(crate) quick: bool,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Nothing is measured on this machine: equal arguments give equal figures. Takes less than a minute.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchRoutingArguments {
    /// Requests in Mooncake's format, as for `kvik sim` [default: generated conversations]
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,

    /// Blocks of 512 tokens that each of the 8 workers can keep, at least 1
    #[arg(long, value_name = "BLOCKS", default_value_t = 3000, value_parser = parse_capacity)]
    pub(crate) cache_blocks: usize,

    /// Room above the mean load that the ring gives a worker, as `routing.ring.load_factor` of the gateway
    #[arg(long, value_name = "X", default_value_t = 0.25)]
    pub(crate) load_factor: f64,

    /// Loads in percent of the saturation of the best policy, 1 to 200, separated by commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "25,50,75,90,100",
          value_parser = clap::value_parser!(u32).range(1..=200))]
    pub(crate) load: Vec<u32>,

    /// Also draw the mean time to the first token over the load
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Starts a store daemon and up to four client processes. Takes a minute and 7 GiB of memory; with --quick some seconds
/// and 2 GiB.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct BenchNodeArguments {
    /// Measure two rounds of less, less precisely
    #[arg(long)]
    pub(crate) quick: bool,

    /// Threads that copy an engine's blocks, for the rows `store_256mib` and `retrieve_256mib`
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) threads: u16,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BenchNodeClientArguments {
    /// Socket of the daemon
    pub(crate) socket: PathBuf,

    /// Number of the client
    pub(crate) number: u32,

    /// Chunks in a round
    pub(crate) n_chunks: usize,
}

#[derive(Debug, Args)]
pub(crate) struct BenchMemoryPeerArguments {
    /// Folder of the ledger
    pub(crate) folder: PathBuf,

    /// Device of the ledger
    pub(crate) device: String,
}
