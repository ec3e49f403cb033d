//! The arguments of `kvctl route`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::super::prompt::PromptArguments;

const AFTER_HELP: &str = "\
Examples:
  kvctl route explain --model kvik-tiny --prompt-file question.txt
  kvctl route explain --model m --token-ids 1,2,3 --max-tokens 100
  kvctl route explain --body request.json";

/// Explains how a gateway routes.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct RouteArguments {
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
    pub(crate) verb: RouteVerb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RouteVerb {
    /// Print where a request would go now and why; nothing is sent to a worker
    Explain(ExplainArguments),
}

#[derive(Debug, Args)]
pub(crate) struct ExplainArguments {
    /// The model [default: the only one there is]
    #[arg(long)]
    pub(crate) model: Option<String>,

    #[command(flatten)]
    pub(crate) prompt: PromptArguments,

    /// The `cache_salt` of the request [default: none]
    #[arg(long, value_name = "SALT")]
    pub(crate) cache_salt: Option<String>,

    /// The `max_tokens` of the request [default: none]
    #[arg(long, value_name = "N")]
    pub(crate) max_tokens: Option<u64>,

    /// A file with a whole request as `/v1/completions` or `/v1/chat/completions` take it, in place of the others
    #[arg(long, value_name = "FILE", conflicts_with_all =
        ["model", "prompt", "prompt_file", "token_ids", "cache_salt", "max_tokens"])]
    pub(crate) body: Option<PathBuf>,
}
