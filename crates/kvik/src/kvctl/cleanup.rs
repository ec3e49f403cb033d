//! `kvctl gc`: returns the memory of dead engines and removes unused files.

use std::io::{self, Write};

use kvik_memory::ledger::{self, Cleanup, Ledger};
use serde::Serialize;

use super::Answer;
use super::folder::MemoryFolder;
use super::report::UnreadableReport;

/// What was cleaned up.
#[derive(Debug, Serialize)]
pub(crate) struct CleanupAnswer {
    dir: String,
    n_reaped: usize,
    removed: Vec<String>,
    /// Ledgers that were left alone.
    unreadable: Vec<UnreadableReport>,
}

/// Cleans up the folder, or the ledger of the one device that was asked for.
pub(crate) fn clean_up(folder: &MemoryFolder) -> anyhow::Result<CleanupAnswer> {
    let unreadable = folder.read()?.unreadable.iter().map(UnreadableReport::from).collect();
    let Cleanup { n_reaped, removed } = match folder.device() {
        None => ledger::clean_up(folder.dir())?,
        Some(device) => match Ledger::open_existing(folder.dir(), device)? {
            Some(ledger) => ledger.clean_up()?,
            None => Cleanup::default(),
        },
    };
    Ok(CleanupAnswer {
        dir: folder.dir().display().to_string(),
        n_reaped,
        removed: removed.iter().map(|path| path.display().to_string()).collect(),
        unreadable,
    })
}

// === impl CleanupAnswer ===

impl CleanupAnswer {
    /// What happened, in one sentence.
    pub(crate) fn sentence(&self) -> String {
        let engines = if self.n_reaped == 1 { "engine" } else { "engines" };
        let files = if self.removed.len() == 1 { "file" } else { "files" };
        format!("Reaped {} dead {engines}, removed {} {files}", self.n_reaped, self.removed.len())
    }
}

impl Answer for CleanupAnswer {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        writeln!(output, "{}", self.sentence())?;
        self.removed.iter().try_for_each(|path| writeln!(output, "  {path}"))
    }

    fn warnings(&self) -> Vec<String> {
        let left_alone = |ledger: &UnreadableReport| {
            format!("left the ledger of {} alone: {}", ledger.device, ledger.reason)
        };
        self.unreadable.iter().map(left_alone).collect()
    }
}
