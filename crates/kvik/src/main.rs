//! The `kvik` binary: argument parsing and wiring.
//!
//! Run under the name `kvctl` it is that program, whose parts are in the library of this crate.
//!
//! Parts: `cli` declares the arguments, `commands` has one file a verb, `scratch` makes folders for
//! data that ends with the process.
//!
//! Invariants:
//! - Standard output carries results and nothing else; messages, statistics and progress go to
//!   standard error, the last two only if that is a terminal. All of it can be read without color.
//! - Exit codes: 0 all was done, 1 the work failed, 2 the command line is wrong, 3 the input was
//!   refused. `kvik --help` prints them too.
//! - A reader that closes standard output early ends the program quietly.

#![forbid(unsafe_code)]

mod cli;
mod commands;
mod scratch;

use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use kvik_bench::eval::EvalError;
use kvik_bench::sim::TraceError;
use kvik_coordinator::CoordinatorError;
use kvik_engines::EnginesError;
use kvik_epp::EppError;
use kvik_gateway::GatewayError;
use kvik_model::ModelError;
use kvik_node::NodeError;
use kvik_runtime::hub::HubError;
use kvik_runtime::terminal;
use kvik_tokens::TokensError;
use kvik_worker::WorkerError;

use cli::bench::BenchCommand;
use cli::eval::EvalCommand;
use cli::memory::MemoryCommand;
use cli::models::ModelsCommand;
use cli::store::StoreCommand;
use cli::{Cli, Command};

/// The exit codes besides 0, which says that all was done.
mod exit {
    /// The work failed: a file could not be read, output not be written, the model gave nonsense.
    pub(crate) const FAILED: u8 = 1;
    // 2, a bad command line, is clap's.
    /// The input was refused: the prompt, an option's value or the model folder.
    pub(crate) const INVALID_INPUT: u8 = 3;
}

fn main() -> ExitCode {
    if is_kvctl() {
        return kvctl::main();
    }
    let done = match Cli::try_parse() {
        Ok(cli) => run(&cli),
        Err(error) if is_verbose_version(&error) => commands::version::run(),
        Err(error) => error.exit(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_output(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let style = terminal::ERROR;
            // If standard error is gone too, the exit code still tells.
            let _ = writeln!(anstream::stderr(), "{style}error:{style:#} failed to {}", message(&error));
            ExitCode::from(exit_code(&error))
        }
    }
}

/// Whether this was run as `kvctl`: by the program of that name, or by a link.
fn is_kvctl() -> bool {
    std::env::args_os().next().is_some_and(|name| Path::new(&name).file_name() == Some(OsStr::new("kvctl")))
}

/// Whether the command line asks for the version with all that belongs to it. The parser ends at `--version`, whatever
/// else there is.
fn is_verbose_version(error: &clap::Error) -> bool {
    error.kind() == ErrorKind::DisplayVersion && std::env::args_os().any(|argument| argument == "--verbose")
}

fn run(cli: &Cli) -> anyhow::Result<()> {
    match &cli.command {
        Command::Generate(arguments) => commands::generate::run(arguments),
        Command::Models(ModelsCommand::Inspect(arguments)) => commands::models::inspect(arguments),
        Command::Models(ModelsCommand::Make(arguments)) => commands::models::make(arguments),
        Command::Bench(BenchCommand::Engine(arguments)) => commands::bench::engine(arguments),
        Command::Bench(BenchCommand::Blend(arguments)) => commands::bench::blend(arguments),
        Command::Bench(BenchCommand::Gateway(arguments)) => commands::bench::gateway(arguments),
        Command::Bench(BenchCommand::Epp(arguments)) => commands::bench::epp(arguments),
        Command::Bench(BenchCommand::Edges(arguments)) => commands::bench::edges(arguments),
        Command::Bench(BenchCommand::Moving(arguments)) => commands::bench::moving(arguments),
        Command::Bench(BenchCommand::Sharing(arguments)) => commands::bench::sharing(arguments),
        Command::Bench(BenchCommand::Memory(arguments)) => commands::bench::memory(arguments),
        Command::Bench(BenchCommand::Store(arguments)) => commands::bench::store(arguments),
        Command::Bench(BenchCommand::Planner(arguments)) => commands::bench::planner(arguments),
        Command::Bench(BenchCommand::Codec(arguments)) => commands::bench::codec(arguments),
        Command::Bench(BenchCommand::Node(arguments)) => commands::bench::node(arguments),
        Command::Bench(BenchCommand::Index(arguments)) => commands::bench::index(arguments),
        Command::Bench(BenchCommand::Routing(arguments)) => commands::bench::routing(arguments),
        Command::Bench(BenchCommand::MemoryPeer(arguments)) => commands::bench::memory_peer(arguments),
        Command::Bench(BenchCommand::NodeClient(arguments)) => commands::bench::node_client(arguments),
        Command::Eval(EvalCommand::Notes(arguments)) => commands::eval::notes(arguments),
        Command::Up(arguments) => commands::up::run(arguments),
        Command::Demo(arguments) => commands::demo::run(arguments),
        Command::Worker(arguments) => commands::roles::worker(arguments),
        Command::Coordinator(arguments) => commands::roles::coordinator(arguments),
        Command::Gateway(arguments) => commands::roles::gateway(arguments),
        Command::Indexer(arguments) => commands::roles::indexer(arguments),
        Command::Epp(arguments) => commands::epp::run(arguments),
        Command::Engines(command) => commands::engines::run(command),
        Command::Config(arguments) => commands::config::run(arguments),
        Command::Sim(arguments) => commands::sim::run(arguments),
        Command::Top(arguments) => commands::top::run(arguments),
        Command::Memory(MemoryCommand::Serve(arguments)) => commands::memory::serve(arguments),
        Command::Completions(arguments) => commands::completions::run(arguments),
        Command::Man(arguments) => commands::man::run(arguments),
        Command::Store(StoreCommand::Serve(arguments)) => commands::store::serve(arguments),
        Command::Store(StoreCommand::Format(arguments)) => commands::store::format(arguments),
    }
}

/// The error and its causes in one line; a cause that its effect has told already is left out.
fn message(error: &anyhow::Error) -> String {
    let mut message = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !message.ends_with(&cause) {
            message.push_str(": ");
            message.push_str(&cause);
        }
    }
    message.replace('\n', " ")
}

fn exit_code(error: &anyhow::Error) -> u8 {
    if is_refused_setting(error) || error.is::<commands::service::InvalidInput>() {
        return exit::INVALID_INPUT;
    }
    if let Some(error) = error.downcast_ref::<TraceError>() {
        return if matches!(error, TraceError::Io { .. }) { exit::FAILED } else { exit::INVALID_INPUT };
    }
    if let Some(error) = error.downcast_ref::<EvalError>() {
        // A file that is not text was read well, and is the wrong file.
        let is_failed = matches!(error, EvalError::Io(error) if error.kind() != io::ErrorKind::InvalidData);
        return if is_failed { exit::FAILED } else { exit::INVALID_INPUT };
    }
    let of_worker = error.downcast_ref::<WorkerError>().and_then(|error| match error {
        WorkerError::Model(error) => Some(error),
        _ => None,
    });
    match error.downcast_ref::<ModelError>().or(of_worker) {
        None
        | Some(
            ModelError::Io { .. }
            | ModelError::NotFinite { .. }
            | ModelError::DeviceLost { .. }
            | ModelError::Tokens(TokensError::Io { .. }),
        ) => exit::FAILED,
        Some(_) => exit::INVALID_INPUT,
    }
}

/// Whether a role refused a setting that only its start can judge.
fn is_refused_setting(error: &anyhow::Error) -> bool {
    let is_worker = error.downcast_ref().is_some_and(|error| match error {
        WorkerError::InvalidConfig { .. } => true,
        WorkerError::Hub(error) => error.is_refused_input(),
        WorkerError::Node(error) => error.is_refused_setting(),
        WorkerError::Runtime(error) => error.is_refused_setting(),
        _ => false,
    });
    is_worker
        || error.downcast_ref().is_some_and(HubError::is_refused_input)
        || error.downcast_ref().is_some_and(NodeError::is_refused_setting)
        || error.downcast_ref().is_some_and(EnginesError::is_refused_setting)
        || error.downcast_ref().is_some_and(EppError::is_refused_setting)
        || error.downcast_ref().is_some_and(|error| match error {
            GatewayError::InvalidConfig { .. } => true,
            GatewayError::Runtime(error) => error.is_refused_setting(),
            _ => false,
        })
        || error.downcast_ref().is_some_and(|error| match error {
            CoordinatorError::InvalidConfig { .. } => true,
            CoordinatorError::Runtime(error) => error.is_refused_setting(),
            _ => false,
        })
}

fn is_closed_output(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
