//! The arguments of `kvik generate`, with their defaults and units; those of the engine serve other verbs too.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kvik_model::DeviceName;
use kvik_types::Dtype;

use super::EXIT_CODES;

/// Most threads that may be asked for; far above every machine, low enough to be started.
pub(crate) const MAX_THREADS: u64 = 1024;

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
