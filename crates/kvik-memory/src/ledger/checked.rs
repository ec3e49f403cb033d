//! What a ledger's words mean: reading them with checks, and waking waiters.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use rustix::thread::futex::{self, Timespec};

use super::claim::{self, Grant, GrantTable};
use super::layout::{
    GROUP_FREE, GroupLayout, LedgerLayout, N_SLOTS, NOTICE_CAPACITY, NOTICE_LIMIT, SLOT_FREE, SlotLayout,
};
use super::name::{is_ipc_name, load_name};
use super::share::{GroupShare, MemberShare, Situation, Wait};
use crate::geometry::UNIT_BYTES;

/// How long a denied claim keeps its place in the queue without being tried again.
///
/// A process that is stopped while it waits delays others for no longer than this.
pub(super) const WAIT_COUNTS_MS: u64 = 1000;

/// Milliseconds on the clock that all processes of a machine share.
pub(super) fn now_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, which `now` is.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000
}

/// Sleeps until `event` is not `seen` any more, it is woken, or `timeout` is over.
pub(super) fn sleep_on(event: &AtomicU32, seen: u32, timeout: Duration) {
    let timeout =
        Timespec { tv_sec: timeout.as_secs().min(3600) as i64, tv_nsec: timeout.subsec_nanos().into() };
    // Woken, changed, interrupted or late: the caller looks again in every case.
    let _ = futex::wait(event, futex::Flags::empty(), seen, Some(&timeout));
}

/// Advances `event` and wakes all its sleepers.
pub(super) fn wake(event: &AtomicU32) {
    event.fetch_add(1, Ordering::SeqCst);
    // Fails only for an address that is not mapped.
    let _ = futex::wake(event, futex::Flags::empty(), u32::MAX >> 1);
}

/// Bytes of `n_units`.
pub(super) fn bytes(n_units: u64) -> u64 {
    n_units.saturating_mul(UNIT_BYTES)
}

impl GrantTable for LedgerLayout {
    type Word = AtomicU64;

    fn n_slots(&self) -> usize {
        let n_used = self.header.n_slots_used.load(Ordering::Acquire);
        usize::try_from(n_used).map_or(N_SLOTS, |n_used| n_used.min(N_SLOTS))
    }

    fn grant(&self, slot: usize) -> &AtomicU64 {
        &self.slots[slot].grant
    }

    fn group(&self, slot: usize) -> u64 {
        self.slots[slot].group.load(Ordering::Acquire)
    }

    fn budget_units(&self) -> u64 {
        self.header.budget_units.load(Ordering::Acquire)
    }

    fn limit_units(&self, group: u64) -> u64 {
        self.group_at(group).map_or(0, |group| group.max_units.load(Ordering::Acquire))
    }
}

impl LedgerLayout {
    /// The group with this index, if it is one.
    pub(super) fn group_at(&self, group: u64) -> Option<&GroupLayout> {
        let group = self.groups.get(usize::try_from(group).ok()?)?;
        (group.state.load(Ordering::Acquire) != GROUP_FREE).then_some(group)
    }

    /// The index of the group with this name.
    pub(super) fn find_group(&self, name: &str) -> Option<usize> {
        self.groups.iter().position(|group| group.name_if_used().as_deref() == Some(name))
    }

    /// The slots that are not free.
    pub(super) fn taken_slots(&self) -> impl Iterator<Item = (usize, &SlotLayout)> {
        self.slots[..self.n_slots()].iter().enumerate().filter(|(_, slot)| slot.is_taken())
    }

    /// The taken slots of one group.
    pub(super) fn members_of(&self, group: usize) -> impl Iterator<Item = (usize, &SlotLayout)> {
        self.taken_slots().filter(move |(_, slot)| slot.group.load(Ordering::Acquire) == group as u64)
    }

    /// What counts as held by the members of `group`.
    pub(super) fn group_held_units(&self, group: usize) -> u64 {
        let slots = self.slots[..self.n_slots()].iter();
        slots
            .filter(|slot| slot.group.load(Ordering::Acquire) == group as u64)
            .map(|slot| slot.grant().held_units())
            .sum()
    }

    /// What counts as held by all.
    pub(super) fn device_held_units(&self) -> u64 {
        self.slots[..self.n_slots()].iter().map(|slot| slot.grant().held_units()).sum()
    }

    /// Whether a slot other than `slot` has a wait that counts.
    pub(super) fn does_other_wait(&self, slot: usize) -> bool {
        let mut now = None;
        let slots = self.slots[..self.n_slots()].iter().enumerate();
        slots.filter(|&(other, _)| other != slot).any(|(_, other)| {
            other.wait_ticket.load(Ordering::SeqCst) != 0
                && other.wait_expires_ms.load(Ordering::Relaxed) >= *now.get_or_insert_with(now_ms)
        })
    }

    /// The epoch in which a member may keep what it gives back as slack; `None` while a claim waits or a limit is exceeded.
    pub(super) fn calm_epoch(&self, slot: usize) -> Option<u64> {
        // Before the look: a wait that begins after it has advanced the epoch.
        let epoch = self.header.calm_epoch.load(Ordering::SeqCst);
        let does_none_wait =
            self.slots[..self.n_slots()].iter().all(|slot| slot.wait_ticket.load(Ordering::SeqCst) == 0);
        (does_none_wait && claim::is_within_limits(self, slot)).then_some(epoch)
    }

    /// Ends the slack of all members, because a claim waits or a limit has moved; says how much was free by it.
    pub(super) fn end_slack(&self) -> u64 {
        self.header.calm_epoch.fetch_add(1, Ordering::SeqCst);
        super::steps::step();
        fence(Ordering::SeqCst);
        claim::take_slack(self)
    }

    /// Everything that a decision about shares depends on.
    pub(super) fn situation(&self) -> Situation {
        let now = now_ms();
        let groups = self.groups.iter().map(GroupLayout::share).collect::<Vec<_>>();
        let members = self
            .taken_slots()
            .filter_map(|(index, slot)| {
                let group = usize::try_from(slot.group.load(Ordering::Acquire)).ok()?;
                let held_units = slot.grant().held_units();
                let parked_units = slot.parked_bytes.load(Ordering::Relaxed) / UNIT_BYTES;
                (group < groups.len()).then(|| MemberShare {
                    slot: index,
                    group,
                    held_units,
                    parked_units: parked_units.min(held_units),
                    waits: slot.wait(now),
                })
            })
            .collect();
        Situation { budget_units: self.budget_units(), groups, members }
    }

    /// Wakes all waiters because memory came back.
    pub(super) fn announce_capacity(&self) {
        self.header.capacity_event.fetch_add(1, Ordering::SeqCst);
        let mut does_anybody_wait = false;
        for slot in &self.slots[..self.n_slots()] {
            if slot.wait_ticket.load(Ordering::SeqCst) != 0 {
                does_anybody_wait = true;
                slot.notify(NOTICE_CAPACITY);
            }
        }
        // A waiter that begins after this look reads the advanced event before it sleeps.
        if does_anybody_wait {
            wake(&self.header.capacity_event);
        }
    }

    /// Tells members, of one group or all, that their limit moved, and asks for what is above it.
    pub(super) fn announce_limit(&self, group: Option<usize>) {
        self.end_slack();
        let asks = self.situation().asks_above_limits();
        for (index, slot) in self.taken_slots() {
            if group.is_none_or(|group| slot.group.load(Ordering::Acquire) == group as u64) {
                if let Some(ask) = asks.iter().find(|ask| ask.slot == index) {
                    slot.reclaim_units.fetch_max(ask.n_units, Ordering::SeqCst);
                }
                slot.notify(NOTICE_LIMIT);
            }
        }
        self.announce_capacity();
    }
}

impl GroupLayout {
    /// The name of a group that is in use and has a name that one can have.
    pub(super) fn name_if_used(&self) -> Option<String> {
        if self.state.load(Ordering::Acquire) == GROUP_FREE {
            return None;
        }
        Some(load_name(&self.name)).filter(|name| is_ipc_name(name))
    }

    fn share(&self) -> GroupShare {
        let is_used = self.state.load(Ordering::Acquire) != GROUP_FREE;
        let word = |word: &AtomicU64| word.load(Ordering::Acquire);
        let small = |word: &AtomicU64| u32::try_from(word.load(Ordering::Acquire)).unwrap_or(u32::MAX);
        GroupShare {
            min_units: word(&self.min_units),
            max_units: if is_used { word(&self.max_units) } else { 0 },
            weight: small(&self.weight),
            priority: small(&self.priority),
        }
    }
}

impl SlotLayout {
    /// Whether the slot has an owner or what an owner left.
    pub(super) fn is_taken(&self) -> bool {
        self.state.load(Ordering::Acquire) != SLOT_FREE || self.grant.load(Ordering::Acquire) != 0
    }

    /// The slot's grant.
    pub(super) fn grant(&self) -> Grant {
        Grant::unpack(self.grant.load(Ordering::Acquire))
    }

    /// The wait of the slot, if it has one that counts.
    pub(super) fn wait(&self, now_ms: u64) -> Option<Wait> {
        let ticket = self.wait_ticket.load(Ordering::SeqCst);
        let n_units = self.wanted_units.load(Ordering::Relaxed);
        let expires_ms = self.wait_expires_ms.load(Ordering::Relaxed);
        // No member may reserve its place for longer than the rule allows, whatever is written there.
        let counts = (now_ms..=now_ms.saturating_add(WAIT_COUNTS_MS)).contains(&expires_ms);
        let is_starved = self.starved.load(Ordering::Relaxed) != 0;
        (ticket != 0 && n_units != 0 && counts).then_some(Wait { ticket, n_units, is_starved })
    }

    /// Leaves a notice and wakes the owner.
    pub(super) fn notify(&self, notice: u64) {
        self.notices.fetch_or(notice, Ordering::SeqCst);
        wake(&self.event);
    }

    /// Asks the owner to give `n_units` back; requests do not add up, since each is made again as
    /// long as it is needed.
    pub(super) fn ask(&self, n_units: u64) {
        if self.reclaim_units.fetch_max(n_units, Ordering::SeqCst) < n_units {
            wake(&self.event);
        }
    }

    /// Makes the slot free. Each store may be the last: what is left is cleared again by the next.
    pub(super) fn clear(&self) {
        let zero = |word: &AtomicU64| word.store(0, Ordering::SeqCst);
        zero(&self.grant);
        super::steps::step();
        for word in [
            &self.wait_ticket,
            &self.wanted_units,
            &self.wait_expires_ms,
            &self.starved,
            &self.parked_bytes,
            &self.used_bytes,
            &self.reclaim_units,
            &self.notices,
            &self.pid,
            &self.pid_started_ticks,
            &self.pid_namespace,
            &self.counters.mapped_bytes,
            &self.counters.unmapped_bytes,
            &self.counters.n_waits,
            &self.counters.waited_us,
            &self.counters.n_denied,
            &self.counters.wait_started_ms,
        ] {
            zero(word);
        }
        self.label.iter().for_each(zero);
        self.page_file.store(0, Ordering::SeqCst);
        super::steps::step();
        self.state.store(SLOT_FREE, Ordering::SeqCst);
    }
}
