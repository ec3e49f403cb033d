//! The lines of the screen: devices, their groups in order, and the members below them.

use kvik_memory::ledger::{DeviceSnapshot, GroupSnapshot, MemberSnapshot};

use super::rates::{Rate, Rates};
use crate::folder::{KvcachedSegment, Reading, UnreadableLedger};
use crate::report::effective_limit_bytes;

/// By what groups are ordered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum SortBy {
    #[default]
    Name,
    Used,
    Limit,
    Wait,
}

/// Which line is selected, in words that outlive a reading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowKey {
    pub(crate) device: String,
    pub(crate) ipc_name: String,
    /// The member; `None` is the group.
    pub(crate) slot: Option<usize>,
}

/// One line.
#[derive(Debug)]
pub(crate) enum Row<'a> {
    Device(&'a DeviceSnapshot),
    Group {
        device: &'a DeviceSnapshot,
        group: &'a GroupSnapshot,
        limit_bytes: u64,
        rate: Rate,
        waiting_ms: u64,
    },
    Member {
        device: &'a DeviceSnapshot,
        member: &'a MemberSnapshot,
        limit_bytes: u64,
        rate: Rate,
    },
    Kvcached(&'a KvcachedSegment),
    Unreadable(&'a UnreadableLedger),
}

/// The lines of a reading, in order.
pub(crate) fn rows<'a>(reading: &'a Reading, rates: &Rates, sort_by: SortBy) -> Vec<Row<'a>> {
    let mut rows = Vec::new();
    for device in &reading.devices {
        rows.push(Row::Device(device));
        let mut groups: Vec<&GroupSnapshot> = device.groups.iter().collect();
        groups.sort_by(|left, right| left.ipc_name.cmp(&right.ipc_name));
        match sort_by {
            SortBy::Name => {}
            SortBy::Used => groups.sort_by_key(|group| std::cmp::Reverse(group.used_bytes)),
            SortBy::Limit => groups.sort_by_key(|group| {
                std::cmp::Reverse(effective_limit_bytes(&group.policy, device.budget_bytes))
            }),
            SortBy::Wait => groups.sort_by_key(|group| std::cmp::Reverse(waiting_ms(device, group))),
        }
        for group in groups {
            let limit_bytes = effective_limit_bytes(&group.policy, device.budget_bytes);
            let mut rate = Rate::default();
            for member in members_of(device, &group.ipc_name) {
                rate += rates.of(&device.device, member);
            }
            rows.push(Row::Group { device, group, limit_bytes, rate, waiting_ms: waiting_ms(device, group) });
            rows.extend(members_of(device, &group.ipc_name).map(|member| Row::Member {
                device,
                member,
                limit_bytes,
                rate: rates.of(&device.device, member),
            }));
        }
        // A slot whose group cannot be told still holds memory.
        let is_known = |name: &str| device.groups.iter().any(|group| group.ipc_name == name);
        rows.extend(device.members.iter().filter(|member| !is_known(&member.ipc_name)).map(|member| {
            Row::Member {
                device,
                member,
                limit_bytes: device.budget_bytes,
                rate: rates.of(&device.device, member),
            }
        }));
    }
    rows.extend(reading.kvcached.iter().map(Row::Kvcached));
    rows.extend(reading.unreadable.iter().map(Row::Unreadable));
    rows
}

fn members_of<'a>(device: &'a DeviceSnapshot, ipc_name: &'a str) -> impl Iterator<Item = &'a MemberSnapshot> {
    device.members.iter().filter(move |member| member.ipc_name == ipc_name)
}

fn waiting_ms(device: &DeviceSnapshot, group: &GroupSnapshot) -> u64 {
    members_of(device, &group.ipc_name).map(|member| member.waiting_ms).max().unwrap_or(0)
}

// === impl SortBy ===

impl SortBy {
    pub(crate) fn next(self) -> Self {
        match self {
            Self::Name => Self::Used,
            Self::Used => Self::Limit,
            Self::Limit => Self::Wait,
            Self::Wait => Self::Name,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Used => "used",
            Self::Limit => "limit",
            Self::Wait => "wait",
        }
    }
}

// === impl Row ===

impl Row<'_> {
    /// The key of a line that can be selected.
    pub(crate) fn key(&self) -> Option<RowKey> {
        let key = |device: &DeviceSnapshot, ipc_name: &str, slot| RowKey {
            device: device.device.clone(),
            ipc_name: ipc_name.to_owned(),
            slot,
        };
        match self {
            Row::Group { device, group, .. } => Some(key(device, &group.ipc_name, None)),
            Row::Member { device, member, .. } => Some(key(device, &member.ipc_name, Some(member.slot))),
            Row::Device(_) | Row::Kvcached(_) | Row::Unreadable(_) => None,
        }
    }
}
