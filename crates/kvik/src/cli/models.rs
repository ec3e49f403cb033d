//! The arguments of `kvik models`, with their defaults and units.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::EXIT_CODES;

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
