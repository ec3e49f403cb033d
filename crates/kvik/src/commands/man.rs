//! `kvik man`: a manual page for each command of `kvik` and `kvctl`.

use anyhow::Context;
use clap::CommandFactory;

use crate::cli::{Cli, ManArguments};

/// Writes the pages into a folder, which is made if it is missing.
pub(crate) fn run(arguments: &ManArguments) -> anyhow::Result<()> {
    let folder = &arguments.folder;
    let context = || format!("write manual pages to {}", folder.display());
    std::fs::create_dir_all(folder).with_context(context)?;
    for command in [Cli::command(), kvctl::command()] {
        clap_mangen::generate_to(command, folder).with_context(context)?;
    }
    Ok(())
}
