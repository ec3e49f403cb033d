//! `kvik top`: the screen of `kvctl kvtop`.

use anyhow::Context as _;

use crate::cli::TopScreenArguments;

/// Shows the elastic memory of this machine.
pub(crate) fn run(arguments: &TopScreenArguments) -> anyhow::Result<()> {
    kvctl::top::run(&arguments.common, &arguments.top).context("show the memory")
}
