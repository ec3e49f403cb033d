//! One engine's place in a ledger.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::checked::{WAIT_COUNTS_MS, bytes, now_ms, sleep_on, wake};
use super::claim::{self, GrantTable as _, Outcome};
use super::handle::{Exclusive, Ledger};
use super::ipc::IpcFile;
use super::layout::{
    GROUP_OPEN, NOTICE_CAPACITY, NOTICE_LIMIT, NOTICE_TRIM, SLOT_JOINING, SLOT_LIVE, SlotLayout,
};
use super::liveness::{LockFile, ProcessIdentity};
use super::name::{check_ipc_name, store_name};
use super::page_states::PageStates;
use super::policy::Policy;
use super::share::{Admission, Ask, admit};
use super::steps;
use crate::geometry::UNIT_BYTES;
use crate::pages::{Claim, Event, GrantEvents, Grants, Shortage, Usage};
use crate::{MemoryError, Result};

/// The longest sleep: what is not announced (a death, a limit written by an old tool) is seen then.
const MAX_SLEEP: Duration = Duration::from_millis(100);

/// How an engine joins a ledger.
#[derive(Debug, Clone)]
pub struct JoinOptions {
    /// The name of its group; engines with one name are under one limit.
    pub ipc_name: String,
    /// What the engine calls itself, for tools; cut to 64 bytes.
    pub label: String,
    /// The policy of the group if it does not exist yet; what an operator or another member set holds.
    pub policy: Policy,
}

/// One engine's place in a ledger; it leaves when this is dropped.
///
/// The caller that drops it has released all memory that it was granted: its grants go back.
#[derive(Debug)]
pub struct Member {
    ledger: Ledger,
    slot: usize,
    group: usize,
    ipc_name: String,
    /// Says that this member lives, until it is dropped or its process dies.
    _owner: LockFile,
    ipc: Option<IpcFile>,
    /// The slot has one writer: threads of this process take turns. What it holds is the epoch in which what is given back
    /// may stay as slack, see [`LedgerLayout::calm_epoch`](super::layout::LedgerLayout).
    writing: Mutex<Option<u64>>,
    syncing: Mutex<()>,
    is_interrupted: AtomicBool,
}

// === impl JoinOptions ===

impl JoinOptions {
    /// An engine called `label` in the group `ipc_name`, with the default policy.
    pub fn new(ipc_name: impl Into<String>, label: impl Into<String>) -> Self {
        Self { ipc_name: ipc_name.into(), label: label.into(), policy: Policy::default() }
    }
}

// === impl Ledger ===

impl Ledger {
    /// Joins the ledger.
    ///
    /// Fails where all slots are taken by live engines, where files of the group belong to others,
    /// or where they do not fit; nothing is left behind then.
    pub fn join(&self, options: &JoinOptions) -> Result<Member> {
        check_ipc_name(&options.ipc_name)?;
        options.policy.check()?;
        let exclusive = self.exclusive()?;
        self.reap_exclusive(&exclusive)?;
        steps::step();
        let group = self.find_or_make_group(&exclusive, &options.ipc_name, &options.policy, GROUP_OPEN)?;
        steps::step();
        let result = self.join_group(&exclusive, options, group);
        if result.is_err() {
            self.collect_groups(&exclusive)?;
        }
        result
    }

    fn join_group(&self, exclusive: &Exclusive<'_>, options: &JoinOptions, group: usize) -> Result<Member> {
        let total_bytes = self.visible_limit_bytes(group);
        let ipc = IpcFile::open(self.dir(), &options.ipc_name, self.device(), total_bytes)?;
        let owner = self.owner_lock(exclusive)?;
        let index = self.take_slot(&owner)?;
        let slot = &self.layout().slots[index];
        slot.state.store(SLOT_JOINING, Ordering::SeqCst);
        steps::step();
        let identity = ProcessIdentity::current();
        slot.pid.store(identity.pid, Ordering::SeqCst);
        slot.pid_started_ticks.store(identity.started_ticks, Ordering::SeqCst);
        slot.pid_namespace.store(identity.namespace, Ordering::SeqCst);
        slot.group.store(group as u64, Ordering::SeqCst);
        slot.generation.fetch_add(1, Ordering::SeqCst);
        store_name(&slot.label, &options.label);
        steps::step();
        slot.state.store(SLOT_LIVE, Ordering::SeqCst);
        Self::slot_written(&owner, index);
        steps::step();
        Ok(Member {
            ledger: self.clone(),
            slot: index,
            group,
            ipc_name: options.ipc_name.clone(),
            _owner: owner,
            ipc: Some(ipc),
            writing: Mutex::new(None),
            syncing: Mutex::new(()),
            is_interrupted: AtomicBool::new(false),
        })
    }

    /// What tools see as the limit of a group: its own, or all that the device has.
    pub(super) fn visible_limit_bytes(&self, group: usize) -> u64 {
        let max_units = self.layout().limit_units(group as u64);
        bytes(max_units.min(self.layout().budget_units()))
    }
}

// === impl Member ===

impl Member {
    /// The ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The name of the group.
    pub fn ipc_name(&self) -> &str {
        &self.ipc_name
    }

    /// The number of the slot.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// What is held.
    pub fn held_bytes(&self) -> u64 {
        bytes(self.words().grant().confirmed.into())
    }

    /// Claims `n_bytes`, and waits up to `timeout` for others to give them back.
    pub fn claim_within(&self, n_bytes: u64, timeout: Duration) -> Result<Claim> {
        let deadline = Instant::now() + timeout;
        loop {
            let event = &self.ledger.layout().header.capacity_event;
            let seen = event.load(Ordering::SeqCst);
            let claim = self.claim(n_bytes)?;
            let n_left = deadline.saturating_duration_since(Instant::now());
            if claim == Claim::Granted {
                return Ok(claim);
            }
            if n_left.is_zero() {
                self.stop_waiting();
                return Ok(claim);
            }
            // The ticket is written, so a process that returns memory from here on advances the event.
            self.sync_limit();
            sleep_on(event, seen, n_left.min(MAX_SLEEP));
        }
    }

    /// Creates the file in which tools see the state of every page.
    ///
    /// The file goes with the member.
    pub fn create_page_states(&self, n_pages: u32, page_cost_bytes: u64) -> Result<PageStates> {
        self.ledger.check_life()?;
        let states = PageStates::create(self.ledger.dir(), &self.ipc_name, n_pages, page_cost_bytes)?;
        steps::step();
        self.words().page_file.store(states.number() + 1, Ordering::SeqCst);
        Ok(states)
    }

    /// Brings the group's limit and the file that old tools write together; see
    /// [`GrantEvents::wait`], which does it all the time.
    pub fn sync_limit(&self) {
        let (Some(ipc), Ok(())) = (&self.ipc, self.ledger.check_life()) else { return };
        let Some(_syncing) = self.syncing.try_lock() else { return };
        let layout = self.ledger.layout();
        let expected_bytes = self.ledger.visible_limit_bytes(self.group);
        let result = ipc.sync_total(expected_bytes, |total_bytes| {
            layout.groups[self.group].max_units.store(total_bytes / UNIT_BYTES, Ordering::SeqCst);
            tracing::info!(ipc_name = %self.ipc_name, total_bytes, "a tool changed the limit");
            layout.announce_limit(Some(self.group));
        });
        if let Err(error) = result {
            tracing::warn!(ipc_name = %self.ipc_name, %error, "cannot publish the limit");
        }
        self.publish_group_usage();
    }

    fn words(&self) -> &SlotLayout {
        &self.ledger.layout().slots[self.slot]
    }

    /// The caller holds `writing`.
    fn try_claim(&self, n_units: u32) -> Result<Claim> {
        let layout = self.ledger.layout();
        // Without another waiting claim there is nothing to be fair about.
        if layout.does_other_wait(self.slot)
            && let Admission::Denied { shortage, .. } = admit(&layout.situation(), self.slot, n_units.into())
        {
            return Ok(Claim::Denied(shortage));
        }
        match claim::claim(layout, self.slot, n_units) {
            Outcome::Granted => Ok(Claim::Granted),
            Outcome::GroupLimit => Ok(Claim::Denied(Shortage::GroupLimit)),
            Outcome::DeviceFull => Ok(Claim::Denied(Shortage::DeviceFull)),
            Outcome::Lost => Err(MemoryError::ForeignSegment {
                path: self.ledger.dir().join(format!("kvik_{}", self.ledger.device())),
                reason: format!("another process wrote the grant of slot {}", self.slot),
            }),
        }
    }

    /// Queues for `n_units` and asks the members that hold them above their share.
    fn wait_for(&self, n_units: u64) {
        let layout = self.ledger.layout();
        let slot = self.words();
        let now = now_ms();
        slot.wanted_units.store(n_units, Ordering::Relaxed);
        slot.wait_expires_ms.store(now + WAIT_COUNTS_MS, Ordering::Relaxed);
        if slot.wait_ticket.load(Ordering::Relaxed) == 0 {
            let ticket = layout.header.last_ticket.fetch_add(1, Ordering::SeqCst).wrapping_add(1).max(1);
            slot.counters.wait_started_ms.store(now, Ordering::Relaxed);
            slot.wait_ticket.store(ticket, Ordering::SeqCst);
        }
        steps::step();
        if layout.end_slack() > 0 {
            layout.announce_capacity();
        }
        steps::step();
        if let Admission::Denied { asks, .. } = admit(&layout.situation(), self.slot, n_units) {
            for Ask { slot, n_units } in asks {
                layout.slots[slot].ask(n_units);
                steps::step();
            }
        }
    }

    /// The caller holds `writing`.
    fn end_wait(&self) {
        let slot = self.words();
        if slot.wait_ticket.load(Ordering::Relaxed) == 0 {
            return;
        }
        let n_waited_ms = now_ms().saturating_sub(slot.counters.wait_started_ms.load(Ordering::Relaxed));
        slot.counters.n_waits.fetch_add(1, Ordering::Relaxed);
        slot.counters.waited_us.fetch_add(n_waited_ms.saturating_mul(1000), Ordering::Relaxed);
        slot.counters.wait_started_ms.store(0, Ordering::Relaxed);
        slot.wanted_units.store(0, Ordering::Relaxed);
        slot.starved.store(0, Ordering::Relaxed);
        slot.wait_ticket.store(0, Ordering::SeqCst);
        // What was kept for this one is for the next.
        self.ledger.layout().announce_capacity();
    }

    fn publish_group_usage(&self) {
        let Some(ipc) = &self.ipc else { return };
        let (mut used_bytes, mut parked_bytes) = (0_u64, 0_u64);
        for (_, slot) in self.ledger.layout().members_of(self.group) {
            used_bytes = used_bytes.saturating_add(slot.used_bytes.load(Ordering::Relaxed));
            parked_bytes = parked_bytes.saturating_add(slot.parked_bytes.load(Ordering::Relaxed));
        }
        ipc.publish_usage(used_bytes, parked_bytes);
    }

    /// Takes the next thing that happened, if any.
    fn take_event(&self) -> Option<Event> {
        let slot = self.words();
        if self.is_interrupted.swap(false, Ordering::SeqCst) {
            return Some(Event::Timeout);
        }
        let take = |notice: u64| slot.notices.fetch_and(!notice, Ordering::SeqCst) & notice != 0;
        if take(NOTICE_LIMIT) {
            return Some(Event::LimitChanged);
        }
        let mut n_bytes = bytes(slot.reclaim_units.swap(0, Ordering::SeqCst));
        if take(NOTICE_TRIM) {
            n_bytes = n_bytes.max(slot.parked_bytes.load(Ordering::Relaxed));
        }
        if n_bytes > 0 {
            return Some(Event::ReclaimRequested { n_bytes: n_bytes.min(self.held_bytes()) });
        }
        take(NOTICE_CAPACITY).then_some(Event::CapacityReturned)
    }
}

impl Grants for Member {
    fn claim(&self, n_bytes: u64) -> Result<Claim> {
        self.ledger.check_life()?;
        if !n_bytes.is_multiple_of(UNIT_BYTES) {
            return Err(MemoryError::Invalid {
                field: "n_bytes",
                value: n_bytes.to_string(),
                allowed: "a multiple of 2 MiB (2097152 bytes)".to_owned(),
            });
        }
        let Ok(n_units) = u32::try_from(n_bytes / UNIT_BYTES) else {
            return Ok(Claim::Denied(Shortage::DeviceFull));
        };
        if n_units == 0 {
            return Ok(Claim::Granted);
        }
        let _writing = self.writing.lock();
        let slot = self.words();
        if slot.wait_ticket.load(Ordering::Relaxed) == 0 && claim::claim_slack(&slot.grant, n_units) {
            steps::step();
            return Ok(Claim::Granted);
        }
        let event = &self.ledger.layout().header.capacity_event;
        let seen = event.load(Ordering::SeqCst);
        let mut claim = self.try_claim(n_units)?;
        if claim != Claim::Granted && self.ledger.reap_in_passing() > 0 {
            claim = self.try_claim(n_units)?;
        }
        if claim == Claim::Granted {
            self.end_wait();
        } else {
            self.words().counters.n_denied.fetch_add(1, Ordering::Relaxed);
            self.wait_for(n_units.into());
            // What came back before the ticket was written was announced to others only.
            if event.load(Ordering::SeqCst) != seen {
                self.words().notify(NOTICE_CAPACITY);
            }
        }
        Ok(claim)
    }

    fn give_back(&self, n_bytes: u64) {
        if self.ledger.check_life().is_err() {
            return;
        }
        // A part of a unit is still in use: the ledger never says less than what is held.
        let n_units = u32::try_from(n_bytes / UNIT_BYTES).unwrap_or(u32::MAX);
        let layout = self.ledger.layout();
        let mut calm_epoch = self.writing.lock();
        steps::step();
        let calm = calm_epoch.map(|epoch| (&layout.header.calm_epoch, epoch));
        let returned = claim::give_back(&self.words().grant, n_units, calm);
        steps::step();
        if !returned.is_kept {
            *calm_epoch = layout.calm_epoch(self.slot);
        }
        drop(calm_epoch);
        if returned.n_units != n_units {
            let n_returned = returned.n_units;
            tracing::error!(ipc_name = %self.ipc_name, n_units, n_returned, "more was given back than was held");
        }
        if !returned.is_kept {
            layout.announce_capacity();
        }
    }

    fn claimable_bytes(&self) -> u64 {
        let layout = self.ledger.layout();
        let held_units = self.words().grant().held_units();
        let others_in_group = layout.group_held_units(self.group).saturating_sub(held_units);
        let others = layout.device_held_units().saturating_sub(held_units);
        let within_group = layout.limit_units(self.group as u64).saturating_sub(others_in_group);
        let within_device = layout.budget_units().saturating_sub(others);
        bytes(within_group.min(within_device))
    }

    fn limit_bytes(&self) -> u64 {
        self.ledger.visible_limit_bytes(self.group)
    }

    fn publish(&self, usage: Usage) {
        if self.ledger.check_life().is_err() {
            return;
        }
        let slot = self.words();
        // Only this member writes these words, and tools can live with counts of two moments.
        let used_before = slot.used_bytes.swap(usage.used_bytes, Ordering::Relaxed);
        let parked_before = slot.parked_bytes.swap(usage.parked_bytes, Ordering::Relaxed);
        let before = used_before.saturating_add(parked_before);
        let after = usage.used_bytes.saturating_add(usage.parked_bytes);
        if after > before {
            slot.counters.mapped_bytes.fetch_add(after - before, Ordering::Relaxed);
        } else if after < before {
            slot.counters.unmapped_bytes.fetch_add(before - after, Ordering::Relaxed);
        }
        self.publish_group_usage();
    }

    fn note_starved(&self) {
        if self.ledger.check_life().is_ok() {
            let _writing = self.writing.lock();
            let slot = self.words();
            if slot.wait_ticket.load(Ordering::Relaxed) != 0 {
                slot.starved.store(1, Ordering::Relaxed);
            }
        }
    }

    fn stop_waiting(&self) {
        if self.ledger.check_life().is_ok() {
            let _writing = self.writing.lock();
            self.end_wait();
        }
    }
}

impl GrantEvents for Member {
    fn wait(&self, timeout: Duration) -> Event {
        let deadline = Instant::now() + timeout;
        loop {
            if self.ledger.check_life().is_err() {
                return Event::Timeout;
            }
            let seen = self.words().event.load(Ordering::SeqCst);
            self.sync_limit();
            if let Some(event) = self.take_event() {
                return event;
            }
            let n_left = deadline.saturating_duration_since(Instant::now());
            if n_left.is_zero() {
                return Event::Timeout;
            }
            sleep_on(&self.words().event, seen, n_left.min(MAX_SLEEP));
            // A death wakes no waiter: waiters look for it.
            if self.words().wait_ticket.load(Ordering::Relaxed) != 0 {
                self.ledger.reap_in_passing();
            }
        }
    }

    fn interrupt(&self) {
        if self.ledger.check_life().is_err() {
            return;
        }
        self.is_interrupted.store(true, Ordering::SeqCst);
        wake(&self.words().event);
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if self.ledger.check_life().is_err() {
            // The parent is still a member; this is a copy.
            return;
        }
        let exclusive = self.ledger.exclusive();
        steps::step();
        self.ledger.clear_slot(self.words());
        steps::step();
        // Tools must not see the numbers of a member that is gone.
        self.publish_group_usage();
        self.ipc = None;
        match exclusive {
            Ok(exclusive) => {
                if let Err(error) = self.ledger.collect_groups(&exclusive) {
                    tracing::warn!(ipc_name = %self.ipc_name, %error, "cannot remove the files of the group");
                }
            }
            Err(error) => {
                tracing::warn!(ipc_name = %self.ipc_name, %error, "left the files of the group to the next");
            }
        }
        self.ledger.layout().announce_capacity();
        steps::step();
    }
}
