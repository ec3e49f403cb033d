//! The arguments of `kvik engines`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::EXIT_CODES;
use super::services::LogForm;

#[derive(Debug, Subcommand)]
pub(crate) enum EnginesCommand {
    /// Start the engines of a file and a gateway in front of them, and watch them
    Up(EnginesUpArguments),
    /// Show what the engines do
    Status(EnginesStatusArguments),
    /// Put the engine of a model to sleep
    Sleep(EnginesModelArguments),
    /// Wake the engine of a model
    Wake(EnginesModelArguments),
    /// Let the controller read its file again
    Reload(EnginesReloadArguments),
    /// End the controller and its engines
    Stop(EnginesStopArguments),
    /// Check a file without starting anything
    Check(EnginesCheckArguments),
}

/// Each engine is a process with a log of its own. Requests for a model whose engine sleeps wait until it is awake. The first
/// Ctrl-C lets requests finish and ends the engines, a second one kills them; SIGHUP reads the file again. A controller
/// that is killed leaves its engines serving, and the next one takes them over.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct EnginesUpArguments {
    /// YAML file: `engines` in kvik's form, or `instances` in that of kvcached's controller
    #[arg(long, value_name = "FILE")]
    pub(crate) config: PathBuf,

    #[command(flatten)]
    pub(crate) state: StateArguments,

    /// Let the engines go on when the controller ends
    #[arg(long)]
    pub(crate) leave_running: bool,

    /// Which logs: a level, or directives such as `info,kvik_engines=debug` [default: info]
    #[arg(long, value_name = "DIRECTIVES")]
    pub(crate) log: Option<String>,

    /// Form of the log lines: `text` for people, `json` for machines
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub(crate) log_format: LogForm,
}

#[derive(Debug, Args)]
pub(crate) struct StateArguments {
    /// Folder of the controller's state [default: `kvik/engines` in `$XDG_RUNTIME_DIR`, or in /run]
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct EnginesStatusArguments {
    #[command(flatten)]
    pub(crate) state: StateArguments,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct EnginesModelArguments {
    /// Model or engine
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,

    #[command(flatten)]
    pub(crate) state: StateArguments,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct EnginesReloadArguments {
    #[command(flatten)]
    pub(crate) state: StateArguments,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct EnginesStopArguments {
    #[command(flatten)]
    pub(crate) state: StateArguments,

    /// Let the engines go on
    #[arg(long)]
    pub(crate) leave_running: bool,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct EnginesCheckArguments {
    /// YAML file: `engines` in kvik's form, or `instances` in that of kvcached's controller
    #[arg(long, value_name = "FILE")]
    pub(crate) config: PathBuf,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}
