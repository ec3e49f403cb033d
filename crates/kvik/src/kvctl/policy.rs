//! `kvctl policy`: what a name may have, before or after its engine starts.

use std::io::{self, Write};

use anyhow::bail;
use kvik_memory::ledger::{Ledger, LedgerOptions, Policy};
use serde::Serialize;

use super::Answer;
use super::arguments::PolicyArguments;
use super::folder::MemoryFolder;
use super::report::PolicyReport;
use super::size;

/// The policy of a name.
#[derive(Debug, Serialize)]
pub(crate) struct PolicyAnswer {
    ipc: String,
    device: String,
    is_changed: bool,
    #[serde(flatten)]
    policy: PolicyReport,
    over_limit_bytes: u64,
}

/// Prints the policy of a name, or sets what was given and leaves the rest.
pub(crate) fn policy(folder: &MemoryFolder, arguments: &PolicyArguments) -> anyhow::Result<PolicyAnswer> {
    let ipc_name = &arguments.ipc_name;
    if !arguments.is_change() {
        let ledger = folder.find(ipc_name)?.ledger;
        return answer(&ledger, ipc_name, false);
    }
    let (ledger, before) = ledger_for(folder, ipc_name)?;
    let policy = Policy {
        min_bytes: arguments.min.unwrap_or(before.min_bytes),
        max_bytes: arguments.max.map_or(before.max_bytes, super::size::Limit::bytes),
        weight: arguments.weight.unwrap_or(before.weight),
        priority: arguments.priority.unwrap_or(before.priority),
    };
    ledger.set_policy(ipc_name, &policy)?;
    answer(&ledger, ipc_name, true)
}

/// The ledger in which the name is or will be, made if the device was named, and the policy so far.
fn ledger_for(folder: &MemoryFolder, ipc_name: &str) -> anyhow::Result<(Ledger, Policy)> {
    let dir = folder.dir();
    if let Some(device) = folder.device() {
        let options = LedgerOptions { dir: dir.to_owned(), ..LedgerOptions::new(device) };
        let ledger = Ledger::open(&options)?;
        let groups = ledger.snapshot()?.groups;
        let group = groups.into_iter().find(|group| group.ipc_name == ipc_name);
        return Ok((ledger, group.map(|group| group.policy).unwrap_or_default()));
    }
    if let Some(found) = folder.find_if_any(ipc_name)? {
        return Ok((found.ledger, found.group.policy));
    }
    match folder.devices()?.as_slice() {
        [] => bail!(
            "no ledger in {}: name the device whose memory {ipc_name} will use with --device, such as host0 or GPU-<uuid>",
            dir.display()
        ),
        [device] => match Ledger::open_existing(dir, device)? {
            Some(ledger) => Ok((ledger, Policy::default())),
            None => bail!("the ledger of {device} in {} went just now", dir.display()),
        },
        devices => {
            bail!(
                "{ipc_name} is new and there are several devices: choose one of {} with --device",
                devices.join(", ")
            )
        }
    }
}

/// The policy as the ledger has it, rounded and in force.
fn answer(ledger: &Ledger, ipc_name: &str, is_changed: bool) -> anyhow::Result<PolicyAnswer> {
    let groups = ledger.snapshot()?.groups;
    let Some(group) = groups.into_iter().find(|group| group.ipc_name == ipc_name) else {
        bail!("{ipc_name} went just now: its last engine left");
    };
    Ok(PolicyAnswer {
        ipc: group.ipc_name,
        device: ledger.device().to_owned(),
        is_changed,
        policy: PolicyReport::new(&group.policy, group.revision),
        over_limit_bytes: group.over_limit_bytes,
    })
}

impl Answer for PolicyAnswer {
    fn write_text(&self, output: &mut dyn Write) -> io::Result<()> {
        let PolicyReport { min_bytes, max_bytes, weight, priority, .. } = self.policy;
        let max = max_bytes.map_or("none".to_owned(), size::long);
        writeln!(output, "{} on {}", self.ipc, self.device)?;
        for (field, value) in [
            ("min", size::long(min_bytes)),
            ("max", max),
            ("weight", weight.to_string()),
            ("priority", priority.to_string()),
        ] {
            writeln!(output, "  {field:<9} {value}")?;
        }
        if self.over_limit_bytes > 0 {
            let over = size::long(self.over_limit_bytes);
            writeln!(output, "  {over} above the maximum is held; its engines were asked to give that back")?;
        }
        Ok(())
    }
}
