//! The arguments of `kvik eval`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use kvik_model::Selectors;

use super::EXIT_CODES;
use super::generate::KvDtype;

#[derive(Debug, Subcommand)]
pub(crate) enum EvalCommand {
    /// Ask questions over notes, with the notes computed in full or put together from segments
    Notes(EvalNotesArguments),
}

/// Every note of a prompt is a segment. An answer is right if the greedy text begins with the expected one.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct EvalNotesArguments {
    /// Questions, one JSON object a line: `prompt` and `answer`
    #[arg(long, value_name = "FILE")]
    pub(crate) file: PathBuf,

    /// Model: a folder with config.json, safetensors and tokenizer.json, or `owner/name[@revision]` of a model hub
    /// [default: the bundled kvik-tiny]
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<PathBuf>,

    /// Compute every note alone, and these of its tokens again: none, all, first:TOKENS, random:RATIO,
    /// position:RATIO, deviation:RATIO[@LAYER], attention:RATIO, or several joined by + [default: full prefill]
    #[arg(long, value_name = "SELECTOR:RATIO")]
    pub(crate) blend: Option<Selectors>,

    /// Compute every note behind this text, which is dropped afterwards [default: alone]
    #[arg(long, value_name = "TEXT", requires = "blend")]
    pub(crate) priming: Option<String>,

    /// Code the KV of the notes, and decode it again before it is used: none, lossless, fp8, int8, int4, cachegen
    /// [default: not coded]
    #[arg(long, value_name = "NAME")]
    pub(crate) codec: Option<String>,

    /// Type in which keys and values are kept
    #[arg(long, value_name = "TYPE", value_enum, default_value_t = KvDtype::F32)]
    pub(crate) kv_dtype: KvDtype,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}
