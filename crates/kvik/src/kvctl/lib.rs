//! `kvctl`: looks at the elastic memory of a machine, at the KV stores of workers and at the global KV index, and
//! governs them.
//!
//! Parts: `arguments` declares the command line, one file a verb does it, `folder` reads the ledgers,
//! `report` is what is seen as JSON, `cache` talks to the store of a worker, `index` to the index of a gateway, `route` to its routing,
//! `stores` asks a coordinator, `moves` moves running requests, `size` reads and writes sizes, `shell` is the prompt and [`top`] the
//! screen of `kvctl kvtop` and `kvik top`.
//!
//! # Invariants
//!
//! * A verb returns its answer; what is printed, and whether as text or as JSON, is decided in one place.
//! * Exit codes: 0 done, 1 failed or refused, 2 the command line is wrong. Nothing is printed on
//!   standard output by a verb that failed.
//! * No line is ever handed to a system shell.

#![forbid(unsafe_code)]

mod arguments;
mod cache;
mod cleanup;
mod delete;
mod folder;
mod index;
mod limit;
mod list;
mod moves;
mod policy;
mod prompt;
mod report;
mod route;
mod shell;
mod size;
mod stores;
#[cfg(test)]
mod tests;
pub mod top;
mod trim;
mod watch;

use std::io::{self, IsTerminal as _, Write};
use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use serde::Serialize;

use arguments::{Cli, Verb};
pub use arguments::{CommonArguments, TopArguments};
use folder::MemoryFolder;

const ERROR: Style = AnsiColor::Red.on_default().bold();
const WARNING: Style = AnsiColor::Yellow.on_default().bold();

/// The work failed or was refused; 2, a bad command line, is clap's.
const EXIT_FAILED: u8 = 1;

/// What a verb has to say: an object for machines, text for people.
trait Answer: Serialize {
    /// Writes the text, whose styles are dropped where they are not wanted.
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()>;

    /// What went past the verb without stopping it.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The command line of `kvctl`, for what describes it.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs `kvctl` with the arguments of the process.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let Some(verb) = &cli.verb else {
        if io::stdin().is_terminal() {
            return finish(shell::run(&cli.common, None));
        }
        let message = "a verb is needed where standard input is not a terminal";
        Cli::command().error(clap::error::ErrorKind::MissingSubcommand, message).exit()
    };
    finish(run(verb, &cli.common))
}

/// Does one verb and prints its answer.
fn run(verb: &Verb, common: &CommonArguments) -> anyhow::Result<()> {
    let folder = MemoryFolder::new(common);
    let is_json = common.json;
    match verb {
        Verb::List(arguments) => print(&list::list(&folder, &arguments.names)?, is_json),
        Verb::Watch(arguments) => watch::watch(&folder, arguments, is_json),
        Verb::Limit(arguments) => print(&limit::limit(&folder, arguments)?, is_json),
        Verb::LimitPercent(arguments) => print(&limit::limit_percent(&folder, arguments)?, is_json),
        Verb::Policy(arguments) => print(&policy::policy(&folder, arguments)?, is_json),
        Verb::Delete(arguments) => print(&delete::delete(&folder, &arguments.ipc_name)?, is_json),
        Verb::Gc => print(&cleanup::clean_up(&folder)?, is_json),
        Verb::Trim(arguments) => print(&trim::trim(&folder, &arguments.ipc_name)?, is_json),
        Verb::Cache(arguments) => cache::run(arguments, is_json),
        Verb::Index(arguments) => index::run(arguments, is_json),
        Verb::Route(arguments) => route::run(arguments, is_json),
        Verb::Stores(arguments) => print(&stores::stores(arguments)?, is_json),
        Verb::Sequences(arguments) => print(&moves::sequences(arguments)?, is_json),
        Verb::Move(arguments) => print(&moves::relocate(arguments)?, is_json),
        Verb::Drain(arguments) => print(&moves::drain(arguments, is_json)?, is_json),
        Verb::Kvtop(arguments) => top::run(common, arguments),
        Verb::Shell(arguments) => shell::run(common, arguments.history.as_deref()),
    }
}

fn finish(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_output(&error) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&error);
            ExitCode::from(EXIT_FAILED)
        }
    }
}

fn print_error(error: &anyhow::Error) {
    // If standard error is gone too, the exit code still tells.
    let _ = writeln!(anstream::stderr(), "{ERROR}error:{ERROR:#} {}", message(error));
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

fn is_closed_output(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Prints an answer: JSON on one line, or text.
fn print<A: Answer>(answer: &A, is_json: bool) -> anyhow::Result<()> {
    if is_json {
        let mut text = serde_json::to_string(answer).context("write JSON")?;
        text.push('\n');
        // Not through `anstream`: JSON has no styles, and its bytes must arrive as they are.
        let mut stdout = io::stdout().lock();
        return Ok(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())?);
    }
    let mut stdout = anstream::stdout().lock();
    answer.write_text(&mut stdout)?;
    stdout.flush()?;
    for warning in answer.warnings() {
        writeln!(anstream::stderr(), "{WARNING}warning:{WARNING:#} {warning}")?;
    }
    Ok(())
}
