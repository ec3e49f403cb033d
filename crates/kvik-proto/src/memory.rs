//! Memory that engines of one machine share, as a worker there reports it.
//!
//! | call | body | answer |
//! |---|---|---|
//! | `GET /memory` | none | [`MemoryReport`] |
//! | `POST /memory/policy` | [`PolicyRequest`] | [`PolicyResponse`] |
//! | `POST /memory/trim` | [`TrimRequest`] | [`TrimResponse`] |

use serde::{Deserialize, Serialize};

/// The devices of a machine whose memory engines share.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// By name.
    pub devices: Vec<DeviceMemory>,
    /// Ledgers that cannot be read, by device, and why.
    pub unreadable: Vec<UnreadableLedger>,
}

/// A ledger that cannot be read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnreadableLedger {
    /// The device.
    pub device: String,
    /// Why not.
    pub reason: String,
}

/// The memory of a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// The device.
    pub device: String,
    /// What all engines together may hold.
    pub budget_bytes: u64,
    /// What they hold.
    pub granted_bytes: u64,
    /// What is left.
    pub free_bytes: u64,
    /// The groups, in the order of the ledger.
    pub groups: Vec<GroupMemory>,
}

/// What a group holds and may hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupMemory {
    /// Its IPC name.
    pub ipc: String,
    /// What holds now: its own limit, or what the device has.
    pub limit_bytes: u64,
    /// What its engines hold.
    pub held_bytes: u64,
    /// How much of it is in use.
    pub used_bytes: u64,
    /// How much of it is mapped and free.
    pub parked_bytes: u64,
    /// What they wait for.
    pub wanted_bytes: u64,
    /// What the group is entitled to by what all groups use and want now.
    pub entitled_bytes: u64,
    /// What is held above the limit.
    pub over_limit_bytes: u64,
    /// What it may have.
    pub policy: GroupPolicy,
    /// Its engines.
    pub members: Vec<MemberMemory>,
}

/// What a group may have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupPolicy {
    /// What it gets before weights count.
    pub min_bytes: u64,
    /// What it may hold at most; `null`: as much as the device has.
    #[serde(deserialize_with = "Option::deserialize")]
    pub max_bytes: Option<u64>,
    /// Its weight when memory is scarce.
    pub weight: u32,
    /// Higher is served first.
    pub priority: u32,
}

/// What an engine holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberMemory {
    /// What it calls itself.
    pub label: String,
    /// Its process.
    pub pid: u64,
    /// Whether that lives.
    pub is_live: bool,
    /// What it holds.
    pub held_bytes: u64,
    /// How much of it is in use.
    pub used_bytes: u64,
}

/// Changes what a group may have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyRequest {
    /// The device.
    pub device: String,
    /// The group; it must exist.
    pub ipc: String,
    /// What it may have from now on, every field given.
    pub policy: GroupPolicy,
}

/// What a group may have now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyResponse {
    /// As it is in force, sizes rounded down to 2 MiB.
    pub policy: GroupPolicy,
    /// What is held above the limit; its engines were asked to give it back.
    pub over_limit_bytes: u64,
}

/// Asks the engines of a group for the memory that they hold and do not use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrimRequest {
    /// The device.
    pub device: String,
    /// The group.
    pub ipc: String,
}

/// Engines that were asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrimResponse {
    /// How many.
    pub engines: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_not_given_does_not_become_none() {
        let read = |limit: &str| {
            serde_json::from_str::<GroupPolicy>(&format!(
                r#"{{"min_bytes":0,"weight":1,"priority":0{limit}}}"#
            ))
        };
        assert!(read("").unwrap_err().to_string().contains("max_bytes"));
        assert_eq!(read(r#","max_bytes":null"#).unwrap().max_bytes, None);
        assert_eq!(read(r#","max_bytes":8"#).unwrap().max_bytes, Some(8));
    }
}
