//! `kvctl delete`: a name that no engine uses goes, with its policy and files.

use std::io::{self, Write};

use anyhow::bail;
use kvik_memory::ledger::Deletion;
use serde::Serialize;

use super::Answer;
use super::folder::MemoryFolder;

/// A name that is gone.
#[derive(Debug, Serialize)]
pub(crate) struct DeleteAnswer {
    ipc: String,
    device: String,
    is_deleted: bool,
}

/// Deletes a name; fails if a live engine uses it.
pub(crate) fn delete(folder: &MemoryFolder, ipc_name: &str) -> anyhow::Result<DeleteAnswer> {
    let ledger = folder.find(ipc_name)?.ledger;
    match ledger.delete_group(ipc_name)? {
        Deletion::InUse { n_members: 1 } => bail!("{ipc_name} is in use by an engine: stop it first"),
        Deletion::InUse { n_members } => {
            bail!("{ipc_name} is in use by {n_members} engines: stop them first")
        }
        // A name that is not found any more went with its last engine, as was wished.
        Deletion::Deleted | Deletion::NotFound => {}
    }
    Ok(DeleteAnswer { ipc: ipc_name.to_owned(), device: ledger.device().to_owned(), is_deleted: true })
}

impl Answer for DeleteAnswer {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        writeln!(output, "Deleted {} on {}", self.ipc, self.device)
    }
}
