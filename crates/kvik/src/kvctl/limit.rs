//! `kvctl limit` and `kvctl limit-percent`: what the engines of a name may hold together.

use std::io::{self, Write};

use anyhow::bail;
use kvik_memory::ledger::{LimitChange, LimitStatus};
use serde::Serialize;

use super::Answer;
use super::arguments::{LimitArguments, LimitPercentArguments};
use super::folder::{FoundGroup, MemoryFolder};
use super::size;

/// A limit that is in force.
#[derive(Debug, Serialize)]
pub(crate) struct LimitAnswer {
    ipc: String,
    device: String,
    /// `applied`, or `deferred` while more is held.
    status: &'static str,
    /// As it was asked for; `null`: as much as the device has.
    requested_bytes: Option<u64>,
    /// As it holds, in whole units of 2 MB.
    limit_bytes: Option<u64>,
    revision: u64,
    held_bytes: u64,
    over_limit_bytes: u64,
    n_members: usize,
}

/// Sets a limit.
pub(crate) fn limit(folder: &MemoryFolder, arguments: &LimitArguments) -> anyhow::Result<LimitAnswer> {
    set(&folder.find(&arguments.ipc_name)?, arguments.limit.bytes())
}

/// Sets a limit as a percentage of the device's budget; fails while the device has none.
pub(crate) fn limit_percent(
    folder: &MemoryFolder,
    arguments: &LimitPercentArguments,
) -> anyhow::Result<LimitAnswer> {
    let found = folder.find(&arguments.ipc_name)?;
    if found.budget_bytes == 0 {
        bail!(
            "{} has no budget yet, of which {} % could be taken: its first engine sets it",
            found.ledger.device(),
            arguments.percent
        );
    }
    set(&found, Some((found.budget_bytes as f64 * arguments.percent / 100.0) as u64))
}

/// Sets the limit of a group; fails where the ledger refuses it.
pub(crate) fn set(found: &FoundGroup, requested_bytes: Option<u64>) -> anyhow::Result<LimitAnswer> {
    let FoundGroup { ledger, group, .. } = found;
    let name = &group.ipc_name;
    let change = ledger.set_limit(name, requested_bytes, None)?;
    let LimitChange { status, limit_bytes, revision, held_bytes, over_limit_bytes } = change;
    let status = match status {
        LimitStatus::Applied => "applied",
        LimitStatus::Deferred => "deferred",
        LimitStatus::Rejected => bail!(
            "the limit of {name} stays at {}: {} is below its minimum of {} (kvctl policy {name} --min SIZE)",
            shown(limit_bytes),
            shown(requested_bytes),
            size::long(group.policy.min_bytes)
        ),
        LimitStatus::Stale | LimitStatus::Conflict => {
            bail!("the limit of {name} stays at {}: another process set it just now", shown(limit_bytes))
        }
        LimitStatus::Unavailable => bail!("{name} went just now: its last engine left"),
    };
    Ok(LimitAnswer {
        ipc: name.clone(),
        device: ledger.device().to_owned(),
        status,
        requested_bytes,
        limit_bytes,
        revision,
        held_bytes,
        over_limit_bytes,
        n_members: group.n_members,
    })
}

/// A limit for people.
fn shown(limit_bytes: Option<u64>) -> String {
    limit_bytes.map_or("all that the device has".to_owned(), size::long)
}

// === impl LimitAnswer ===

impl LimitAnswer {
    /// What happened, in one sentence.
    pub(crate) fn sentence(&self) -> String {
        let Self { ipc, device, limit_bytes, .. } = self;
        let bytes = limit_bytes.map_or(String::new(), |bytes| format!(" ({bytes} bytes)"));
        let rounded = if self.limit_bytes == self.requested_bytes { "" } else { ", rounded down to 2 MB" };
        let updated = format!(
            "Updated kv cache limit for {ipc} on {device} to {}{bytes}{rounded}",
            shown(*limit_bytes)
        );
        if self.over_limit_bytes == 0 {
            return updated;
        }
        let asked = match self.n_members {
            1 => "its engine was".to_owned(),
            n_members => format!("its {n_members} engines were"),
        };
        let over = size::long(self.over_limit_bytes);
        let held = size::long(self.held_bytes);
        format!(
            "{updated}; it counts for new memory: {held} is held, {over} above it, and {asked} asked to give that back"
        )
    }
}

impl Answer for LimitAnswer {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        writeln!(output, "{}", self.sentence())
    }
}
