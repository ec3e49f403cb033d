//! The arguments of `kvctl cache`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::super::prompt::PromptArguments;

const AFTER_HELP: &str = "\
Examples:
  kvctl cache health
  kvctl cache lookup --prompt-file question.txt
  kvctl cache explain --prompt-file question.txt
  kvctl cache prefetch --prompt 'Once upon a time' --wait
  kvctl cache move --prompt-file question.txt --from ram --to nvme
  kvctl cache move --prompt-file question.txt --to-worker http://node-2:8082
  kvctl cache clear --all --tier redis
  kvctl cache compress --codec cachegen --idle-s 86400 --wait
  kvctl cache add manual.txt faq.txt
  kvctl cache --all-nodes --dry-run clear --prompt-file question.txt
  kvctl --json cache stats";

/// Looks at the KV store of a worker and governs it.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CacheArguments {
    /// Base address of the worker
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8082")]
    pub(crate) worker: String,

    /// PEM file of the authorities that sign the worker's certificate [default: none, only http:// works]
    #[arg(long, value_name = "FILE")]
    pub(crate) authorities: Option<PathBuf>,

    /// File with the worker's admin token [default: `KVIK_ADMIN_TOKEN`, then `KVIK_CLUSTER_TOKEN`, if set]
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) fleet: FleetArguments,

    #[command(subcommand)]
    pub(crate) verb: CacheVerb,
}

#[derive(Debug, Args)]
pub(crate) struct FleetArguments {
    /// Do it on every worker that the coordinator lists: lookup, prefetch, pin, unpin, move between tiers, clear, health
    /// and stats
    #[arg(long, conflicts_with = "worker")]
    pub(crate) all_nodes: bool,

    /// Base address of the coordinator, with --all-nodes
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8081")]
    pub(crate) coordinator: String,

    /// Only print which workers it would be done on, and what they have of the prompt
    #[arg(long, requires = "all_nodes")]
    pub(crate) dry_run: bool,

    /// File that notes on which workers it is done: a second run with the same file leaves those out [default: none]
    #[arg(long, value_name = "FILE", requires = "all_nodes")]
    pub(crate) journal: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CacheVerb {
    /// Print how much of a prompt the store has, by tier
    Lookup(PromptArguments),
    /// Print whether the KV of a prompt would be loaded or computed now, and why
    Explain(PromptArguments),
    /// Load the KV of a prompt from lower tiers into memory
    Prefetch(PrefetchArguments),
    /// Print where a prefetch stands
    PrefetchStatus(IdArguments),
    /// End a prefetch: what was not begun is not loaded
    Cancel(IdArguments),
    /// Keep the KV of a prompt in memory until it is unpinned
    Pin(PromptArguments),
    /// Take one pin away
    Unpin(PromptArguments),
    /// Put the KV of a prompt into another tier, or onto another worker
    Move(MoveArguments),
    /// Remove KV from the tiers of the worker's store: the chunks of a prompt that no other stored prompt shares, or all of the
    /// model
    Clear(ClearArguments),
    /// Code chunks of a tier that were not used for long by a stronger codec, in the background
    Compress(CompressArguments),
    /// Write the KV of a prompt to a safetensors file
    Retrieve(RetrieveArguments),
    /// Store what `retrieve` has written, also of another worker with the same model
    Store(StoreArguments),
    /// Compute texts as segments and keep them, for prompts that name them
    Add(AddArguments),
    /// Print the state of every tier
    Health,
    /// Print the counts of the store since the worker's start
    Stats,
}

#[derive(Debug, Args)]
pub(crate) struct PrefetchArguments {
    #[command(flatten)]
    pub(crate) prompt: PromptArguments,

    /// Only from this tier [default: from all]
    #[arg(long, value_name = "TIER")]
    pub(crate) tier: Option<String>,

    /// Return when all that can be loaded is there
    #[arg(long)]
    pub(crate) wait: bool,
}

#[derive(Debug, Args)]
pub(crate) struct IdArguments {
    /// The prefetch, as `kvctl cache prefetch` named it
    #[arg(value_name = "ID")]
    pub(crate) id: String,
}

#[derive(Debug, Args)]
pub(crate) struct MoveArguments {
    #[command(flatten)]
    pub(crate) prompt: PromptArguments,

    /// Name of the tier that has it, such as ram or nvme
    #[arg(long, value_name = "TIER", requires = "to", required_unless_present = "to_worker")]
    pub(crate) from: Option<String>,

    /// Name of the tier that shall have it
    #[arg(long, value_name = "TIER", requires = "from", required_unless_present = "to_worker")]
    pub(crate) to: Option<String>,

    /// Base address of another worker with the same model that shall have it
    #[arg(long, value_name = "URL", conflicts_with_all = ["from", "to"])]
    pub(crate) to_worker: Option<String>,

    /// Keep it where it is too
    #[arg(long)]
    pub(crate) copy: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ClearArguments {
    #[command(flatten)]
    pub(crate) prompt: PromptArguments,

    /// Remove all KV of the worker's model, whatever its prompt
    #[arg(long, conflicts_with_all = ["prompt", "prompt_file", "token_ids"])]
    pub(crate) all: bool,

    /// Remove it from this tier alone, such as ram or nvme; may be repeated [default: from all; a remote tier loses every chunk
    /// of the prompt, for all workers that share it]
    #[arg(long, value_name = "TIER")]
    pub(crate) tier: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CompressArguments {
    /// Name of the tier, a disk with a codec
    #[arg(long, value_name = "TIER", default_value = "nvme")]
    pub(crate) tier: String,

    /// The codec; a lossy one only where `store.allow_lossy` names it [default: that of the tier]
    #[arg(long, value_name = "CODEC")]
    pub(crate) codec: Option<String>,

    /// Seconds for which a chunk was not used
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    pub(crate) idle_s: u64,

    /// Bytes a second that are read from the tier for it
    #[arg(long, value_name = "BYTES", default_value_t = 32 << 20, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) bytes_per_s: u64,

    /// Return when it has ended
    #[arg(long)]
    pub(crate) wait: bool,

    /// Begin nothing, and print how far it has come
    #[arg(long, conflicts_with_all = ["cancel", "wait"])]
    pub(crate) status: bool,

    /// Begin nothing, and end what is under way
    #[arg(long)]
    pub(crate) cancel: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RetrieveArguments {
    #[command(flatten)]
    pub(crate) prompt: PromptArguments,

    /// Only this layer, from 0 [default: all]
    #[arg(long, value_name = "N")]
    pub(crate) layer: Option<usize>,

    /// Only what this tier has [default: all]
    #[arg(long, value_name = "TIER")]
    pub(crate) tier: Option<String>,

    /// File to write; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct StoreArguments {
    /// File that `retrieve` has written, with all layers
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,

    /// Only into this tier [default: memory, and below as usual]
    #[arg(long, value_name = "TIER")]
    pub(crate) tier: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct AddArguments {
    /// Text files, each of them one segment; `-` is standard input
    #[arg(value_name = "FILE", required = true)]
    pub(crate) files: Vec<PathBuf>,

    /// Cut each file where a line is empty: every part is a segment of its own, with the line breaks behind it
    #[arg(long)]
    pub(crate) paragraphs: bool,

    /// Salt of the requests that will use them [default: none]
    #[arg(long, value_name = "TEXT")]
    pub(crate) cache_salt: Option<String>,
}
