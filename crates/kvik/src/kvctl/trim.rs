//! `kvctl trim`: engines are asked for the pages they keep ready.

use std::io::{self, Write};

use serde::Serialize;

use super::Answer;
use super::folder::{FoundGroup, MemoryFolder};
use super::size;

/// The engines that were asked.
#[derive(Debug, Serialize)]
pub(crate) struct TrimAnswer {
    ipc: String,
    device: String,
    n_asked: usize,
    parked_bytes: u64,
}

/// Asks the engines of a name for their parked pages.
pub(crate) fn trim(folder: &MemoryFolder, ipc_name: &str) -> anyhow::Result<TrimAnswer> {
    let FoundGroup { ledger, group, .. } = folder.find(ipc_name)?;
    let n_asked = ledger.request_trim(ipc_name)?;
    Ok(TrimAnswer {
        ipc: ipc_name.to_owned(),
        device: ledger.device().to_owned(),
        n_asked,
        parked_bytes: group.parked_bytes,
    })
}

// === impl TrimAnswer ===

impl TrimAnswer {
    /// What happened, in one sentence.
    pub(crate) fn sentence(&self) -> String {
        let Self { ipc, device, .. } = self;
        let parked = size::long(self.parked_bytes);
        match self.n_asked {
            0 => format!("{ipc} on {device} has no engine: nothing to trim"),
            1 => format!("Asked the engine of {ipc} on {device} for its parked pages, {parked}"),
            n_asked => {
                format!("Asked {n_asked} engines of {ipc} on {device} for their parked pages, {parked}")
            }
        }
    }
}

impl Answer for TrimAnswer {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        writeln!(output, "{}", self.sentence())
    }
}
