//! The arguments of `kvctl index`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::super::prompt::PromptArguments;

const AFTER_HELP: &str = "\
Examples:
  kvctl index stats
  kvctl index lookup --model kvik-tiny --prompt-file question.txt
  kvctl index lookup --model kvik-tiny --token-ids 1,2,3 --scorer coverage
  kvctl index dump --worker worker-0 > blocks.jsonl
  kvctl index check";

/// Looks at the global KV index of a gateway.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct IndexArguments {
    /// Base address of the gateway
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub(crate) gateway: String,

    /// PEM file of the authorities that sign the certificates [default: none, only http:// works]
    #[arg(long, value_name = "FILE")]
    pub(crate) authorities: Option<PathBuf>,

    /// File with the admin token [default: `KVIK_ADMIN_TOKEN`, then `KVIK_CLUSTER_TOKEN`, if set]
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,

    #[command(subcommand)]
    pub(crate) verb: IndexVerb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum IndexVerb {
    /// Print the workers and the blocks known of them, model by model
    Stats,
    /// Print how much of a prompt each worker has
    Lookup(LookupArguments),
    /// Print the blocks that the index has, one JSON object a line
    Dump(DumpArguments),
    /// Compare the index with what the workers say they hold; fails if they differ
    Check(CheckArguments),
}

#[derive(Debug, Args)]
pub(crate) struct LookupArguments {
    /// The model
    #[arg(long)]
    pub(crate) model: String,

    #[command(flatten)]
    pub(crate) prompt: PromptArguments,

    /// The `cache_salt` of the request [default: none]
    #[arg(long, value_name = "SALT")]
    pub(crate) cache_salt: Option<String>,

    /// Rule: `longest_prefix`, `highest_block_hit`, `coverage` or `cost`
    #[arg(long, default_value = "longest_prefix")]
    pub(crate) scorer: String,

    /// Only this worker; may be repeated [default: all that have something]
    #[arg(long, value_name = "WORKER")]
    pub(crate) worker: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct DumpArguments {
    /// Only this model [default: all]
    #[arg(long)]
    pub(crate) model: Option<String>,

    /// Only this worker [default: all]
    #[arg(long)]
    pub(crate) worker: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArguments {
    /// Only this worker [default: all workers that the coordinator knows]
    #[arg(long)]
    pub(crate) worker: Option<String>,

    /// Base address of the coordinator, which says where workers are
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8081")]
    pub(crate) coordinator: String,
}
