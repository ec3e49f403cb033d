//! The arguments of every verb, with their defaults and units.

use std::path::{Path, PathBuf};

use clap::builder::styling::{AnsiColor, Styles};
use clap::{Args, Parser, Subcommand};
use kvik_memory::ledger::DEFAULT_DIR;

use super::cache::CacheArguments;
use super::index::IndexArguments;
use super::moves::{DrainArguments, MoveArguments, SequencesArguments};
use super::route::RouteArguments;
use super::size::{Limit, parse_limit, parse_percent, parse_seconds, parse_size};
use super::stores::StoresArguments;

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

const AFTER_HELP: &str = "\
Examples:
  kvctl list                               what every engine may have and uses
  kvctl limit vllm_a 20G                   20 GB at most, from now on
  kvctl limit-percent vllm_a 50            half of what the device's engines have
  kvctl policy vllm_b --min 4G --weight 2  before or after the engine starts
  kvctl kvtop                              a screen that follows it all
  kvctl cache health                       the tiers of a worker's KV store
  kvctl stores                             the store daemons of a cluster
  kvctl drain worker-2                     its requests go elsewhere, and it ends

Sizes: a number of bytes, or with a unit: b, k, kb, kib, m, mb, mib, g, gb, gib, t, tb, tib, in any
case, all of them powers of 1024: 2G is 2147483648. `1,024` and `1_024` are read too. Limits and
minimums are rounded down to 2 MB, in which memory is granted.

Exit codes:
  0  it was done
  1  it failed or was refused: an unknown name, no ledger, a limit below the minimum
  2  the command line is wrong";

/// Looks at the elastic KV memory of this machine and at the KV stores of workers, and governs them.
///
/// An IPC name stands for a group: all engines that were started with it, under one limit.
/// Without a verb, on a terminal, kvctl is a shell.
#[derive(Debug, Parser)]
#[command(
    name = "kvctl",
    version,
    after_help = AFTER_HELP,
    styles = STYLES,
    max_term_width = 100,
    disable_help_subcommand = true
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) common: CommonArguments,
    #[command(subcommand)]
    pub(crate) verb: Option<Verb>,
}

/// What every verb takes.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Options of every verb")]
pub struct CommonArguments {
    /// Folder of shared memory in which the engines keep their ledgers [default: /dev/shm]
    #[arg(long, value_name = "DIR", global = true)]
    pub(crate) dir: Option<PathBuf>,

    /// Only this device, such as `host0` or `GPU-<uuid>` [default: all]
    #[arg(long, value_name = "DEVICE", global = true)]
    pub(crate) device: Option<String>,

    /// Print one JSON object instead of text; sizes are in bytes
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Print the limit and the use of every IPC name
    #[command(after_help = "\
Percent is what is used of the limit: green below 50, yellow below 80, red from there on. A name
without a limit of its own is limited by what the device's engines have. Segments of kvcached
itself are listed too and marked; kvctl only reads them.")]
    List(NamesArguments),
    /// Print the list again and again, until q or Ctrl-C
    Watch(WatchArguments),
    /// Set what the engines of an IPC name may hold together, at once
    #[command(after_help = "\
If more than that is held, the limit counts for new memory, and the engines are asked to give the
rest back: parked pages at once, then what they can evict.

Examples:
  kvctl limit vllm_a 20G
  kvctl limit vllm_a 1,536MB
  kvctl limit vllm_a none       as much as the device has")]
    Limit(LimitArguments),
    /// Set a limit as a percentage of what all engines of the device may hold
    #[command(after_help = "Example: kvctl limit-percent vllm_a 37.5")]
    LimitPercent(LimitPercentArguments),
    /// Print or set what an IPC name may have: minimum, maximum, weight, priority
    #[command(after_help = "\
Without an option it prints the policy. With options it sets those and leaves the others as they
are. The name need not exist: its policy then waits for the engine and stays until `kvctl delete`.

Examples:
  kvctl policy vllm_a
  kvctl policy vllm_a --min 4G --max 20G
  kvctl policy vllm_b --weight 3 --priority 10 --device host0")]
    Policy(PolicyArguments),
    /// Delete an IPC name that no engine uses, with its policy and files
    Delete(NameArguments),
    /// Return the memory of dead engines and remove unused files
    Gc,
    /// Ask the engines of an IPC name to return the pages they keep ready
    Trim(NameArguments),
    /// Look at the KV store of a worker and govern it
    Cache(CacheArguments),
    /// Look at the global KV index of a gateway
    Index(IndexArguments),
    /// Explain how a gateway routes
    Route(RouteArguments),
    /// Print the store daemons that a coordinator lists
    Stores(StoresArguments),
    /// Print the requests that run
    Sequences(SequencesArguments),
    /// Move a running request, with its KV, to another worker
    #[command(after_help = "\
The client's stream goes on: it sees a pause of milliseconds. Only requests that came through a
gateway can move. Example: kvctl move chat-17 worker-2")]
    Move(MoveArguments),
    /// Have a worker give its requests away and end
    #[command(after_help = "\
Requests go to other workers with their KV; those with a few tokens to go end where they are. What
still runs at the deadline goes on elsewhere from its tokens, or is ended if it did not come through
a gateway. Example: kvctl drain worker-2 --deadline 270s")]
    Drain(DrainArguments),
    /// Show it all on a screen that follows it
    Kvtop(TopArguments),
    /// Read verbs from a prompt with completion and history
    #[command(after_help = "\
Every verb of kvctl is a command; `help`, `help VERB` and `exit` are too. A line that is none of
them is an error: nothing is handed to a system shell. Where standard input is not a terminal,
its lines are done one after the other, and the exit code is 1 if one of them failed.")]
    Shell(ShellArguments),
}

#[derive(Debug, Args)]
pub(crate) struct NamesArguments {
    /// Only these IPC names [default: all]
    #[arg(value_name = "IPC")]
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct NameArguments {
    /// The IPC name
    #[arg(value_name = "IPC")]
    pub(crate) ipc_name: String,
}

#[derive(Debug, Args)]
pub(crate) struct WatchArguments {
    /// Seconds between two looks, 0.1 to 3600
    #[arg(short = 'n', long, value_name = "SECS", default_value = "1", value_parser = parse_seconds)]
    pub(crate) interval: f64,

    /// Stop after this many looks [default: never]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,

    /// Only these IPC names [default: all]
    #[arg(value_name = "IPC")]
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct LimitArguments {
    /// The IPC name
    #[arg(value_name = "IPC")]
    pub(crate) ipc_name: String,

    /// The limit, such as `20G`; `none`: as much as the device has
    #[arg(value_name = "SIZE", value_parser = parse_limit)]
    pub(crate) limit: Limit,
}

#[derive(Debug, Args)]
pub(crate) struct LimitPercentArguments {
    /// The IPC name
    #[arg(value_name = "IPC")]
    pub(crate) ipc_name: String,

    /// Percent of the device's budget, 0 to 100
    #[arg(value_name = "PCT", value_parser = parse_percent)]
    pub(crate) percent: f64,
}

#[derive(Debug, Args)]
pub(crate) struct PolicyArguments {
    /// The IPC name
    #[arg(value_name = "IPC")]
    pub(crate) ipc_name: String,

    /// What it gets before weights count, when it asks [new: 0]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) min: Option<u64>,

    /// What it may hold at most; `none`: as much as the device has [new: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_limit)]
    pub(crate) max: Option<Limit>,

    /// Its share against others when memory is scarce, 1 to 4294967295 [new: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) weight: Option<u32>,

    /// Higher is served first among waiting groups, 0 to 4294967295 [new: 0]
    #[arg(long, value_name = "N")]
    pub(crate) priority: Option<u32>,
}

/// What `kvtop` takes besides the options of every verb.
#[derive(Debug, Args)]
#[command(after_help = "\
Keys: up and down select, s sorts, l sets a limit, t trims, g cleans up, ? explains, q quits.
With --json it measures for one refresh, prints one object with the rates of every engine and ends.

Examples:
  kvctl kvtop
  kvctl kvtop -r 0.5 vllm_a vllm_b
  kvctl kvtop --json --device host0")]
pub struct TopArguments {
    /// Seconds between two looks, 0.1 to 3600
    #[arg(short, long, value_name = "SECS", default_value = "1", value_parser = parse_seconds)]
    pub(crate) refresh: f64,

    /// State folder of a controller, whose engines are shown too [default: that of `kvik engines`]
    #[arg(long, value_name = "DIR")]
    pub(crate) engines: Option<PathBuf>,

    /// Only these IPC names [default: all]
    #[arg(value_name = "IPC")]
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ShellArguments {
    /// File of the lines that were entered [default: `~/.kvctl_history`]
    #[arg(long, value_name = "FILE")]
    pub(crate) history: Option<PathBuf>,
}

// === impl CommonArguments ===

impl CommonArguments {
    /// The folder that was chosen, or the default.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.as_deref().unwrap_or(Path::new(DEFAULT_DIR))
    }

    /// These arguments, with those of `base` where these say nothing.
    pub(crate) fn over(self, base: &Self) -> Self {
        Self {
            dir: self.dir.or_else(|| base.dir.clone()),
            device: self.device.or_else(|| base.device.clone()),
            json: self.json || base.json,
        }
    }
}

// === impl PolicyArguments ===

impl PolicyArguments {
    /// Whether anything is to be set.
    pub(crate) fn is_change(&self) -> bool {
        self.min.is_some() || self.max.is_some() || self.weight.is_some() || self.priority.is_some()
    }
}
