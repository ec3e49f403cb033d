//! What is read, as JSON with stable names.

use kvik_memory::ledger::{DeviceSnapshot, GroupSnapshot, MemberSnapshot, Policy};
use serde::Serialize;

use super::folder::{KvcachedSegment, UnreadableLedger};
use super::top::rates::{Rate, Rates};

/// A device and its groups.
#[derive(Debug, Serialize)]
pub(crate) struct DeviceReport {
    pub(crate) device: String,
    pub(crate) budget_bytes: u64,
    pub(crate) granted_bytes: u64,
    pub(crate) free_bytes: u64,
    pub(crate) groups: Vec<GroupReport>,
}

/// A group and its members.
#[derive(Debug, Serialize)]
pub(crate) struct GroupReport {
    pub(crate) ipc: String,
    /// What holds now: the group's limit, or what the device has.
    pub(crate) limit_bytes: u64,
    pub(crate) used_bytes: u64,
    pub(crate) parked_bytes: u64,
    pub(crate) held_bytes: u64,
    pub(crate) wanted_bytes: u64,
    pub(crate) entitled_bytes: u64,
    pub(crate) over_limit_bytes: u64,
    pub(crate) is_kept: bool,
    pub(crate) policy: PolicyReport,
    pub(crate) members: Vec<MemberReport>,
}

/// What a group may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct PolicyReport {
    pub(crate) min_bytes: u64,
    /// `null`: as much as the device has.
    pub(crate) max_bytes: Option<u64>,
    pub(crate) weight: u32,
    pub(crate) priority: u32,
    pub(crate) revision: u64,
}

/// An engine.
#[derive(Debug, Serialize)]
pub(crate) struct MemberReport {
    pub(crate) slot: usize,
    pub(crate) label: String,
    pub(crate) pid: u64,
    pub(crate) is_live: bool,
    pub(crate) held_bytes: u64,
    pub(crate) used_bytes: u64,
    pub(crate) parked_bytes: u64,
    pub(crate) wanted_bytes: u64,
    pub(crate) reclaim_bytes: u64,
    pub(crate) waiting_ms: u64,
    pub(crate) mapped_bytes: u64,
    pub(crate) unmapped_bytes: u64,
    pub(crate) n_waits: u64,
    pub(crate) waited_us: u64,
    pub(crate) n_denied: u64,
    pub(crate) page_file: Option<u32>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(crate) rate: Option<Rate>,
}

/// A segment of kvcached itself.
#[derive(Debug, Serialize)]
pub(crate) struct KvcachedReport {
    pub(crate) ipc: String,
    pub(crate) limit_bytes: u64,
    pub(crate) used_bytes: u64,
    pub(crate) parked_bytes: u64,
}

/// A ledger that cannot be read.
#[derive(Debug, Serialize)]
pub(crate) struct UnreadableReport {
    pub(crate) device: String,
    pub(crate) reason: String,
}

/// What a group is limited to: its maximum, or the budget if that is less.
///
/// Before the first engine has set a budget it is the maximum alone.
pub(crate) fn effective_limit_bytes(policy: &Policy, budget_bytes: u64) -> u64 {
    match policy.max_bytes {
        Some(max_bytes) if budget_bytes == 0 => max_bytes,
        max_bytes => max_bytes.unwrap_or(u64::MAX).min(budget_bytes),
    }
}

// === impl DeviceReport ===

impl DeviceReport {
    /// The device, with the rates of its members if they were measured.
    pub(crate) fn new(device: &DeviceSnapshot, rates: Option<&Rates>) -> Self {
        Self {
            device: device.device.clone(),
            budget_bytes: device.budget_bytes,
            granted_bytes: device.held_bytes,
            free_bytes: device.budget_bytes.saturating_sub(device.held_bytes),
            groups: device.groups.iter().map(|group| GroupReport::new(device, group, rates)).collect(),
        }
    }
}

// === impl GroupReport ===

impl GroupReport {
    fn new(device: &DeviceSnapshot, group: &GroupSnapshot, rates: Option<&Rates>) -> Self {
        let members = device.members.iter().filter(|member| member.ipc_name == group.ipc_name);
        Self {
            ipc: group.ipc_name.clone(),
            limit_bytes: effective_limit_bytes(&group.policy, device.budget_bytes),
            used_bytes: group.used_bytes,
            parked_bytes: group.parked_bytes,
            held_bytes: group.held_bytes,
            wanted_bytes: group.wanted_bytes,
            entitled_bytes: group.entitled_bytes,
            over_limit_bytes: group.over_limit_bytes,
            is_kept: group.is_kept,
            policy: PolicyReport::new(&group.policy, group.revision),
            members: members
                .map(|member| MemberReport::new(member, rates.map(|rates| rates.of(&device.device, member))))
                .collect(),
        }
    }

    /// How many members are dead and not reaped.
    pub(crate) fn n_dead(&self) -> usize {
        self.members.iter().filter(|member| !member.is_live).count()
    }
}

// === impl PolicyReport ===

impl PolicyReport {
    pub(crate) fn new(policy: &Policy, revision: u64) -> Self {
        let Policy { min_bytes, max_bytes, weight, priority } = *policy;
        Self { min_bytes, max_bytes, weight, priority, revision }
    }
}

// === impl MemberReport ===

impl MemberReport {
    fn new(member: &MemberSnapshot, rate: Option<Rate>) -> Self {
        Self {
            slot: member.slot,
            label: member.label.clone(),
            pid: member.pid,
            is_live: member.is_live,
            held_bytes: member.held_bytes,
            used_bytes: member.used_bytes,
            parked_bytes: member.parked_bytes,
            wanted_bytes: member.wanted_bytes,
            reclaim_bytes: member.reclaim_bytes,
            waiting_ms: member.waiting_ms,
            mapped_bytes: member.mapped_bytes,
            unmapped_bytes: member.unmapped_bytes,
            n_waits: member.n_waits,
            waited_us: member.waited_us,
            n_denied: member.n_denied,
            page_file: member.page_file,
            rate,
        }
    }
}

impl From<&KvcachedSegment> for KvcachedReport {
    fn from(segment: &KvcachedSegment) -> Self {
        let KvcachedSegment { ipc_name, limit_bytes, used_bytes, parked_bytes } = segment.clone();
        Self { ipc: ipc_name, limit_bytes, used_bytes, parked_bytes }
    }
}

impl From<&UnreadableLedger> for UnreadableReport {
    fn from(ledger: &UnreadableLedger) -> Self {
        let UnreadableLedger { device, reason } = ledger.clone();
        Self { device, reason }
    }
}
