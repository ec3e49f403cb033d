//! What tools do with a ledger: look at it, set policies and limits, clean up.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::checked::{bytes, now_ms};
use super::handle::Ledger;
use super::ipc;
use super::layout::{GROUP_KEPT, LEDGER_MAGIC, NOTICE_TRIM};
use super::name::{LEDGER_PREFIX, check_device_name, check_ipc_name, is_ipc_name, load_name};
use super::policy::Policy;
use super::segment::{self, segment_error};
use crate::geometry::UNIT_BYTES;
use crate::vmm::MemoryInfo;
use crate::{MemoryError, Result};

/// A ledger at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSnapshot {
    /// The device.
    pub device: String,
    /// What all members together may hold.
    pub budget_bytes: u64,
    /// What counts as held by all members, dead ones included until they are reaped.
    pub held_bytes: u64,
    /// The groups, in the order of the ledger.
    pub groups: Vec<GroupSnapshot>,
    /// The members, in the order of their slots.
    pub members: Vec<MemberSnapshot>,
}

/// A group at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSnapshot {
    /// Its IPC name.
    pub ipc_name: String,
    /// Whether it stays without members, because an operator made it.
    pub is_kept: bool,
    /// What it may have.
    pub policy: Policy,
    /// The revision of its limit.
    pub revision: u64,
    /// How many members it has.
    pub n_members: usize,
    /// What they hold.
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
}

/// A member at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberSnapshot {
    /// Its slot.
    pub slot: usize,
    /// Its group; empty if the slot names none.
    pub ipc_name: String,
    /// What it calls itself.
    pub label: String,
    /// Whether its process lives.
    pub is_live: bool,
    /// Its process, in its own namespace.
    pub pid: u64,
    /// How often the slot was taken.
    pub generation: u64,
    /// What it holds.
    pub held_bytes: u64,
    /// What it is claiming this instant.
    pub pending_bytes: u64,
    /// How much is in use.
    pub used_bytes: u64,
    /// How much is mapped and free.
    pub parked_bytes: u64,
    /// What it waits for.
    pub wanted_bytes: u64,
    /// For how long, in milliseconds.
    pub waiting_ms: u64,
    /// What it is asked to give back.
    pub reclaim_bytes: u64,
    /// Bytes mapped since it joined; two snapshots make a rate.
    pub mapped_bytes: u64,
    /// Bytes unmapped since it joined.
    pub unmapped_bytes: u64,
    /// Waits that ended.
    pub n_waits: u64,
    /// Time spent in them.
    pub waited_us: u64,
    /// Claims that were denied.
    pub n_denied: u64,
    /// The number of its page file.
    pub page_file: Option<u32>,
}

/// What came of a new limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitChange {
    /// Whether it holds.
    pub status: LimitStatus,
    /// The limit that is in force now; `None` is all that the device has.
    pub limit_bytes: Option<u64>,
    /// Its revision.
    pub revision: u64,
    /// What the group holds.
    pub held_bytes: u64,
    /// How much of that is above the limit; its members are asked for it.
    pub over_limit_bytes: u64,
}

/// Whether a new limit holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitStatus {
    /// It holds.
    Applied,
    /// It holds for new claims; more is held, and has been asked for.
    Deferred,
    /// A newer revision is in force; nothing changed.
    Stale,
    /// The same revision was set to another limit; nothing changed.
    Conflict,
    /// The limit is below the guaranteed minimum; nothing changed.
    Rejected,
    /// There is no such group.
    Unavailable,
}

/// What came of deleting a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deletion {
    /// It is gone, with its files.
    Deleted,
    /// It has live members; nothing changed.
    InUse {
        /// How many.
        n_members: usize,
    },
    /// There is no such group.
    NotFound,
}

/// What a cleanup did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cleanup {
    /// Dead members whose grants went back.
    pub n_reaped: usize,
    /// Files that were removed.
    pub removed: Vec<PathBuf>,
}

/// The devices that have a ledger in `dir`, sorted; files of others are passed over.
pub fn list_devices(dir: &Path) -> Result<Vec<String>> {
    let mut devices = Vec::new();
    for name in file_names(dir)? {
        let Some(device) = name.strip_prefix(LEDGER_PREFIX) else { continue };
        let path = dir.join(&name);
        let is_ledger = segment::open(&path)
            .ok()
            .flatten()
            .and_then(|file| segment::first_words::<1>(&file, &path).ok())
            .is_some_and(|words| words[0] == LEDGER_MAGIC);
        if is_ledger && check_device_name(device).is_ok() {
            devices.push(device.to_owned());
        }
    }
    devices.sort();
    Ok(devices)
}

/// Cleans up the ledgers and files in `dir`: reaps dead members, removes unused files.
///
/// Files that are not ours, or that cannot be proved unused, are left alone.
pub fn clean_up(dir: &Path) -> Result<Cleanup> {
    let mut cleanup = Cleanup::default();
    for device in list_devices(dir)? {
        match Ledger::open_existing(dir, &device) {
            Ok(Some(ledger)) => {
                let done = ledger.clean_up()?;
                cleanup.n_reaped += done.n_reaped;
                cleanup.removed.extend(done.removed);
            }
            Ok(None) => {}
            Err(MemoryError::ForeignSegment { path, reason }) => {
                tracing::warn!(path = %path.display(), reason, "left a ledger of another version alone");
            }
            Err(error) => return Err(error),
        }
    }
    for name in file_names(dir)? {
        if is_ipc_name(&name) && ipc::is_ipc_file(&dir.join(&name)).unwrap_or(false) {
            cleanup.removed.extend(ipc::remove_unused(dir, &name)?);
        }
    }
    Ok(cleanup)
}

fn file_names(dir: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(dir).map_err(|error| segment_error("list", dir, error))?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

// === impl Ledger ===

impl Ledger {
    /// Looks at everything, each word once.
    pub fn snapshot(&self) -> Result<DeviceSnapshot> {
        self.check_life()?;
        let layout = self.layout();
        let entitled = layout.situation().group_entitlements(usize::MAX, 0);
        let mut members = Vec::new();
        for (index, slot) in layout.taken_slots() {
            let word = |word: &AtomicU64| word.load(Ordering::SeqCst);
            let grant = slot.grant();
            let group = layout.group_at(word(&slot.group));
            let is_waiting = word(&slot.wait_ticket) != 0;
            members.push(MemberSnapshot {
                slot: index,
                ipc_name: group.and_then(super::layout::GroupLayout::name_if_used).unwrap_or_default(),
                label: load_name(&slot.label),
                is_live: self.is_live(index)?,
                pid: word(&slot.pid),
                generation: word(&slot.generation),
                held_bytes: bytes(grant.confirmed.into()),
                pending_bytes: bytes(grant.pending.into()),
                used_bytes: word(&slot.used_bytes),
                parked_bytes: word(&slot.parked_bytes),
                wanted_bytes: if is_waiting { bytes(word(&slot.wanted_units)) } else { 0 },
                waiting_ms: match word(&slot.counters.wait_started_ms) {
                    0 => 0,
                    started_ms => now_ms().saturating_sub(started_ms),
                },
                reclaim_bytes: bytes(word(&slot.reclaim_units)),
                mapped_bytes: word(&slot.counters.mapped_bytes),
                unmapped_bytes: word(&slot.counters.unmapped_bytes),
                n_waits: word(&slot.counters.n_waits),
                waited_us: word(&slot.counters.waited_us),
                n_denied: word(&slot.counters.n_denied),
                page_file: slot.page_file.load(Ordering::SeqCst).checked_sub(1),
            });
        }
        let groups = layout
            .groups
            .iter()
            .zip(entitled)
            .filter_map(|(group, entitled_units)| {
                let ipc_name = group.name_if_used()?;
                let own = members.iter().filter(|member| member.ipc_name == ipc_name);
                let sum =
                    |field: fn(&MemberSnapshot) -> u64| own.clone().map(field).fold(0, u64::saturating_add);
                let policy = Policy::load(group);
                let held_bytes = sum(|member| member.held_bytes.saturating_add(member.pending_bytes));
                Some(GroupSnapshot {
                    is_kept: group.state.load(Ordering::Acquire) == GROUP_KEPT,
                    revision: group.revision.load(Ordering::SeqCst),
                    n_members: own.clone().count(),
                    held_bytes,
                    used_bytes: sum(|member| member.used_bytes),
                    parked_bytes: sum(|member| member.parked_bytes),
                    wanted_bytes: sum(|member| member.wanted_bytes),
                    entitled_bytes: bytes(entitled_units),
                    over_limit_bytes: held_bytes.saturating_sub(policy.max_bytes.unwrap_or(u64::MAX)),
                    policy,
                    ipc_name,
                })
            })
            .collect();
        Ok(DeviceSnapshot {
            device: self.device().to_owned(),
            budget_bytes: self.budget_bytes(),
            held_bytes: bytes(layout.device_held_units()),
            groups,
            members,
        })
    }

    /// Sets the policy of a group, which is made if there is none and then stays without members.
    ///
    /// It holds from the next claim on; members are woken, and asked for what they hold above it.
    pub fn set_policy(&self, ipc_name: &str, policy: &Policy) -> Result<()> {
        check_ipc_name(ipc_name)?;
        policy.check()?;
        let exclusive = self.exclusive()?;
        let index = self.find_or_make_group(&exclusive, ipc_name, policy, GROUP_KEPT)?;
        let group = &self.layout().groups[index];
        policy.store(group);
        group.revision.fetch_add(1, Ordering::SeqCst);
        group.state.store(GROUP_KEPT, Ordering::SeqCst);
        self.layout().announce_limit(Some(index));
        Ok(())
    }

    /// Sets the limit of a group that exists; `None` is all that the device has.
    ///
    /// A `revision` makes it safe to repeat and to reorder: an older one changes nothing. Without one
    /// the change is the newest.
    pub fn set_limit(
        &self,
        ipc_name: &str,
        limit_bytes: Option<u64>,
        revision: Option<u64>,
    ) -> Result<LimitChange> {
        check_ipc_name(ipc_name)?;
        let _exclusive = self.exclusive()?;
        let Some(index) = self.layout().find_group(ipc_name) else {
            return Ok(LimitChange {
                status: LimitStatus::Unavailable,
                limit_bytes: None,
                revision: 0,
                held_bytes: 0,
                over_limit_bytes: 0,
            });
        };
        let group = &self.layout().groups[index];
        let before = Policy::load(group);
        let current_revision = group.revision.load(Ordering::SeqCst);
        let revision = revision.unwrap_or_else(|| current_revision.saturating_add(1));
        let limit_bytes = limit_bytes.map(|limit_bytes| limit_bytes / UNIT_BYTES * UNIT_BYTES);
        let refusal = if revision < current_revision {
            Some(LimitStatus::Stale)
        } else if revision == current_revision && current_revision != 0 && limit_bytes != before.max_bytes {
            Some(LimitStatus::Conflict)
        } else if limit_bytes.is_some_and(|limit_bytes| limit_bytes < before.min_bytes) {
            Some(LimitStatus::Rejected)
        } else {
            None
        };
        if refusal.is_none() {
            Policy { max_bytes: limit_bytes, ..before }.store(group);
            group.revision.store(revision, Ordering::SeqCst);
            self.layout().announce_limit(Some(index));
        }
        let limit_bytes = Policy::load(group).max_bytes;
        let held_bytes = bytes(self.layout().group_held_units(index));
        let over_limit_bytes = held_bytes.saturating_sub(limit_bytes.unwrap_or(u64::MAX));
        let held = if over_limit_bytes > 0 { LimitStatus::Deferred } else { LimitStatus::Applied };
        Ok(LimitChange {
            status: refusal.unwrap_or(held),
            limit_bytes,
            revision: group.revision.load(Ordering::SeqCst),
            held_bytes,
            over_limit_bytes,
        })
    }

    /// Deletes a group without live members, with its policy and files.
    pub fn delete_group(&self, ipc_name: &str) -> Result<Deletion> {
        check_ipc_name(ipc_name)?;
        let exclusive = self.exclusive()?;
        self.reap_exclusive(&exclusive)?;
        let Some(index) = self.layout().find_group(ipc_name) else { return Ok(Deletion::NotFound) };
        let n_members = self.layout().members_of(index).count();
        if n_members > 0 {
            return Ok(Deletion::InUse { n_members });
        }
        self.layout().groups[index].state.store(super::layout::GROUP_OPEN, Ordering::SeqCst);
        self.collect_groups(&exclusive)?;
        Ok(Deletion::Deleted)
    }

    /// Asks the members of a group for their parked pages; says how many were asked.
    pub fn request_trim(&self, ipc_name: &str) -> Result<usize> {
        check_ipc_name(ipc_name)?;
        self.check_life()?;
        let Some(index) = self.layout().find_group(ipc_name) else { return Ok(0) };
        let members = self.layout().members_of(index);
        Ok(members.map(|(_, slot)| slot.notify(NOTICE_TRIM)).count())
    }

    /// Reaps dead members and removes unused files, the ledger itself if it is empty.
    pub fn clean_up(&self) -> Result<Cleanup> {
        let exclusive = self.exclusive()?;
        let n_reaped = self.reap_exclusive(&exclusive)?;
        let mut removed = self.collect_groups(&exclusive)?;
        removed.extend(self.remove_if_empty(&exclusive)?);
        Ok(Cleanup { n_reaped, removed })
    }

    /// Sets what all members together may hold; it holds from the next claim on.
    pub fn set_budget_bytes(&self, budget_bytes: u64) -> Result<()> {
        self.check_life()?;
        let budget_units = budget_bytes / UNIT_BYTES;
        if self.layout().header.budget_units.swap(budget_units, Ordering::SeqCst) != budget_units {
            self.layout().announce_limit(None);
        }
        Ok(())
    }

    /// Sets the budget by what the device has: `utilization` of its memory, less what others than the
    /// members of this ledger use. Returns the budget.
    ///
    /// Memory that is granted and not yet mapped is not counted as another's.
    pub fn reconcile(&self, memory: MemoryInfo, utilization: f64) -> Result<u64> {
        if !(0.0..=1.0).contains(&utilization) {
            return Err(MemoryError::Invalid {
                field: "utilization",
                value: utilization.to_string(),
                allowed: "0 to 1".to_owned(),
            });
        }
        let mapped_bytes = self.layout().taken_slots().fold(0_u64, |sum, (_, slot)| {
            let used_bytes = slot.used_bytes.load(Ordering::Relaxed);
            let mapped_bytes = used_bytes.saturating_add(slot.parked_bytes.load(Ordering::Relaxed));
            sum.saturating_add(mapped_bytes.min(bytes(slot.grant().held_units())))
        });
        let taken_bytes = memory.total_bytes.saturating_sub(memory.free_bytes);
        let foreign_bytes = taken_bytes.saturating_sub(mapped_bytes);
        let usable_bytes = (memory.total_bytes as f64 * utilization) as u64;
        let budget_bytes = usable_bytes.saturating_sub(foreign_bytes) / UNIT_BYTES * UNIT_BYTES;
        self.set_budget_bytes(budget_bytes)?;
        Ok(budget_bytes)
    }
}
