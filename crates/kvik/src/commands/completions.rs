//! `kvik completions`: scripts that complete command lines in a shell.

use std::io::{self, Write};

use anyhow::Context;
use clap::CommandFactory;

use crate::cli::{Cli, CompletionsArguments, Program};

/// Prints the script of one program for one shell.
pub(crate) fn run(arguments: &CompletionsArguments) -> anyhow::Result<()> {
    let (mut command, name) = match arguments.program {
        Program::Kvik => (Cli::command(), "kvik"),
        Program::Kvctl => (kvctl::command(), "kvctl"),
    };
    // Into memory first: the generator ends the process where it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, name, &mut script);
    let mut stdout = io::stdout().lock();
    stdout.write_all(&script).and_then(|()| stdout.flush()).context("write to standard output")
}
