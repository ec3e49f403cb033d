//! The slots of members: taken by the living, reaped from the dead.

use std::sync::atomic::Ordering;

use super::{Exclusive, Ledger};
use crate::ledger::checked::now_ms;
use crate::ledger::layout::{GroupLayout, N_SLOTS, SlotLayout};
use crate::ledger::liveness::{LockFile, LockKind, ProcessIdentity};
use crate::ledger::{page_states, segment, steps};
use crate::{MemoryError, Result};

/// Bytes `0..N_SLOTS` of the lock file belong to the owners of the slots. These belong to the process that writes a
/// slot that it does not own: a joiner before it does, a reaper afterwards.
const FIRST_WRITER_BYTE: usize = N_SLOTS;

/// How often a reap in passing looks at pids: only a child that kept its parent's locks makes that needed.
const PIDS_CHECKED_EVERY_MS: u64 = 100;

/// What a look for the dead goes by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Evidence {
    Locks,
    LocksAndPids,
}

impl Ledger {
    /// Makes the dead ones' slots free and returns their grants; says how many.
    pub fn reap(&self) -> Result<usize> {
        self.check_life()?;
        let n_reaped = self.reap_with(&self.shared.lock.lock(), Evidence::LocksAndPids)?;
        if n_reaped > 0
            && let Ok(exclusive) = self.exclusive()
        {
            self.collect_groups(&exclusive)?;
        }
        Ok(n_reaped)
    }

    /// As [`reap`](Self::reap) without waiting for a lock.
    pub(in crate::ledger) fn reap_in_passing(&self) -> usize {
        let Some(lock) = self.shared.lock.try_lock() else { return 0 };
        let now = now_ms();
        // The kernel answers for a lock in a fraction of a microsecond, /proc for a pid in twenty.
        let is_due =
            now.saturating_sub(self.shared.pids_checked_ms.load(Ordering::Relaxed)) >= PIDS_CHECKED_EVERY_MS;
        let evidence = if is_due {
            self.shared.pids_checked_ms.store(now, Ordering::Relaxed);
            Evidence::LocksAndPids
        } else {
            Evidence::Locks
        };
        self.reap_with(&lock, evidence).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot reap");
            0
        })
    }

    /// As [`reap`](Self::reap) for a caller that has the right already.
    pub(in crate::ledger) fn reap_exclusive(&self, exclusive: &Exclusive<'_>) -> Result<usize> {
        self.reap_with(&exclusive.lock, Evidence::LocksAndPids)
    }

    fn reap_with(&self, lock: &LockFile, evidence: Evidence) -> Result<usize> {
        let mut n_reaped = 0;
        for (index, slot) in self.layout().taken_slots() {
            if Self::is_dead_hint(lock, index, slot, evidence)? && self.reap_slot(lock, index, slot)? {
                n_reaped += 1;
            }
        }
        if n_reaped > 0 {
            self.layout().announce_capacity();
        }
        Ok(n_reaped)
    }

    /// Whether a slot's owner looks dead; decides nothing.
    fn is_dead_hint(lock: &LockFile, index: usize, slot: &SlotLayout, evidence: Evidence) -> Result<bool> {
        let is_gone = || evidence == Evidence::LocksAndPids && slot.identity().is_gone();
        Ok(!lock.is_locked_by_other(index)? || is_gone())
    }

    fn reap_slot(&self, lock: &LockFile, index: usize, slot: &SlotLayout) -> Result<bool> {
        // With the writer's byte no process joins here, so what the slot says about its owner stays true.
        if !lock.try_lock(FIRST_WRITER_BYTE + index, 1, LockKind::Exclusive)? {
            return Ok(false);
        }
        let has_no_owner = lock.try_lock(index, 1, LockKind::Exclusive)?;
        let is_dead = slot.is_taken() && (has_no_owner || slot.identity().is_gone());
        if is_dead {
            self.clear_slot(slot);
            tracing::info!(device = self.device(), slot = index, "reaped a dead engine");
        }
        if has_no_owner {
            lock.unlock(index, 1);
        }
        lock.unlock(FIRST_WRITER_BYTE + index, 1);
        Ok(is_dead)
    }

    /// Removes the page file of a slot and makes it free.
    ///
    /// The caller owns the slot, or has proved its owner dead and keeps all others out.
    pub(in crate::ledger) fn clear_slot(&self, slot: &SlotLayout) {
        let number = slot.page_file.load(Ordering::Acquire);
        let group = self.layout().group_at(slot.group.load(Ordering::Acquire));
        if number != 0
            && let Some(name) = group.and_then(GroupLayout::name_if_used)
        {
            let path = page_states::page_file_path(self.dir(), &name, number - 1);
            if page_states::is_page_file(&path) {
                // A page file that stays is removed with the others of its group.
                let _ = segment::unlink(&path);
            }
        }
        steps::step();
        slot.clear();
    }

    /// Takes a free slot for `owner`, whose locks on it last as long as `owner`.
    pub(in crate::ledger) fn take_slot(&self, owner: &LockFile) -> Result<usize> {
        for (index, slot) in self.layout().slots.iter().enumerate() {
            if !owner.try_lock(index, 1, LockKind::Exclusive)? {
                continue;
            }
            if !owner.try_lock(FIRST_WRITER_BYTE + index, 1, LockKind::Exclusive)? {
                owner.unlock(index, 1);
                continue;
            }
            if slot.is_taken() {
                self.clear_slot(slot);
            }
            steps::step();
            self.layout().header.n_slots_used.fetch_max(index as u64 + 1, Ordering::SeqCst);
            return Ok(index);
        }
        Err(MemoryError::NoSlot { device: self.device().to_owned(), n_slots: N_SLOTS })
    }

    /// Ends the writing of a slot that [`take_slot`](Self::take_slot) took.
    pub(in crate::ledger) fn slot_written(owner: &LockFile, index: usize) {
        owner.unlock(FIRST_WRITER_BYTE + index, 1);
    }

    /// Whether the owner of `index` is alive.
    pub(in crate::ledger) fn is_live(&self, index: usize) -> Result<bool> {
        let lock = self.shared.lock.lock();
        Ok(!Self::is_dead_hint(&lock, index, &self.layout().slots[index], Evidence::LocksAndPids)?)
    }
}

impl SlotLayout {
    /// The owner of the slot, as it wrote itself.
    pub(in crate::ledger) fn identity(&self) -> ProcessIdentity {
        ProcessIdentity {
            pid: self.pid.load(Ordering::Acquire),
            started_ticks: self.pid_started_ticks.load(Ordering::Acquire),
            namespace: self.pid_namespace.load(Ordering::Acquire),
        }
    }
}
