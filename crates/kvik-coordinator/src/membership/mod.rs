//! The members as a state machine; the time is an argument of its calls.
//!
//! Workers are one membership and store daemons another: both live by the same rules, and neither is in the list of the
//! other.
//!
//! Life of a member:
//!
//! - It joins with `register`. A later epoch replaces an earlier one; an earlier epoch is refused,
//!   and so is the same epoch from another address: two processes took one name.
//! - It stays as long as heartbeats come. More than three intervals after the last one it expires.
//! - `drain` marks it, or it says itself that it drains; gateways give it nothing new. It stays so
//!   until it leaves with `deregister` or by expiring; only a later epoch is ready again.
//!
//! Slow start: a member whose caches are cold must not take its whole share of the keys at once. It
//! starts with a tenth of its weight and reaches all of it in nine equal steps over the slow start.
//! That is pointless where no member is warm: a member that joins while no other one has been there for
//! a whole slow start has its full weight at once. So do the first members of an empty ring, and
//! all of them when they come back to a coordinator that was restarted.
//!
//! The version counts the changes that gateways route by: members, states and ring weights. Loads
//! are not among them. Time is a distance from any fixed point and must not run backward; every
//! operation first makes happen what was due.

mod info;

use std::collections::BTreeMap;
use std::time::Duration;

use kvik_proto::coordinator::{Member, WorkerInfo, WorkerLoad, WorkerState};
use kvik_proto::stores::StoreInfo;

pub(crate) use info::MemberInfo;

/// Heartbeats that a member may miss.
const MISSED_HEARTBEATS: u32 = 3;
/// Steps from a tenth of the weight to all of it.
const RAMP_STEPS: u32 = 9;

/// The members.
#[derive(Debug)]
pub(crate) struct Membership<I = WorkerInfo> {
    heartbeat_interval: Duration,
    slow_start: Duration,
    version: u64,
    members: BTreeMap<String, Entry<I>>,
    changes: Vec<Change<I>>,
}

/// What has to be written down about a member so that the next leader knows it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Record<I = WorkerInfo> {
    pub(crate) info: I,
    pub(crate) state: WorkerState,
    /// Time since it joined.
    pub(crate) age: Duration,
    /// Whether it has or had a slow start.
    pub(crate) ramps: bool,
}

/// A change that has to be written down.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Change<I = WorkerInfo> {
    Put(Box<Record<I>>),
    /// The member left.
    Delete(String),
    /// The member missed its heartbeats.
    Expire(String),
}

/// Why a call changed nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MembershipError {
    /// There is no such member; it has to register.
    Unknown,
    /// A later life of the worker is registered.
    StaleEpoch { registered: u64 },
    /// Another process has the same id and epoch.
    AddressTaken { registered: String },
}

#[derive(Debug)]
struct Entry<I> {
    info: I,
    state: WorkerState,
    load: WorkerLoad,
    last_seen: Duration,
    joined: Duration,
    /// Age that it had at `joined`, under an earlier leader.
    prior: Duration,
    ramps: bool,
    /// Of [`RAMP_STEPS`].
    step: u32,
}

// === impl Change ===

impl<I: MemberInfo> Change<I> {
    /// The member that changed.
    pub(crate) fn id(&self) -> &str {
        match self {
            Self::Put(record) => record.info.id(),
            Self::Delete(id) | Self::Expire(id) => id,
        }
    }
}

// === impl Membership ===

impl<I: MemberInfo> Membership<I> {
    pub(crate) fn new(heartbeat_interval: Duration, slow_start: Duration) -> Self {
        Self { heartbeat_interval, slow_start, version: 0, members: BTreeMap::new(), changes: Vec::new() }
    }

    /// Takes over the records of an earlier leader. Every member counts as just seen.
    pub(crate) fn restore(
        &mut self,
        records: Vec<Record<I>>,
        load_of: impl Fn(&str) -> Option<WorkerLoad>,
        now: Duration,
    ) {
        for Record { info, state, age, ramps } in records {
            let load = load_of(info.id()).unwrap_or_default();
            let step = self.step(ramps, age);
            let id = info.id().to_owned();
            let entry = Entry { info, state, load, last_seen: now, joined: now, prior: age, ramps, step };
            self.members.insert(id, entry);
        }
        self.version += 1;
    }

    pub(crate) fn register(
        &mut self,
        info: I,
        load: WorkerLoad,
        state: WorkerState,
        now: Duration,
    ) -> Result<(), MembershipError> {
        self.advance(now);
        if let Some(entry) = self.members.get_mut(info.id()) {
            if info.epoch() < entry.info.epoch() {
                return Err(MembershipError::StaleEpoch { registered: entry.info.epoch() });
            }
            if info.epoch() == entry.info.epoch() {
                if info.address() != entry.info.address() {
                    return Err(MembershipError::AddressTaken {
                        registered: entry.info.address().to_owned(),
                    });
                }
                // The answer to the first call was lost, or the member corrects what it said.
                (entry.last_seen, entry.load) = (now, load);
                let begins_to_drain = state == WorkerState::Draining && entry.state != state;
                if info != entry.info || begins_to_drain {
                    entry.info = info;
                    if begins_to_drain {
                        entry.state = state;
                    }
                    let record = entry.record(now);
                    self.changed(Change::Put(Box::new(record)));
                }
                return Ok(());
            }
        }
        let is_warm = |entry: &Entry<I>| entry.info.id() != info.id() && self.slow_start <= entry.age(now);
        let ramps = self.slow_start > Duration::ZERO && self.members.values().any(is_warm);
        let entry = Entry {
            info,
            state,
            load,
            last_seen: now,
            joined: now,
            prior: Duration::ZERO,
            ramps,
            step: self.step(ramps, Duration::ZERO),
        };
        let record = entry.record(now);
        self.members.insert(entry.info.id().to_owned(), entry);
        self.changed(Change::Put(Box::new(record)));
        Ok(())
    }

    /// Notes that a member lives; returns the state that it should be in.
    pub(crate) fn heartbeat(
        &mut self,
        id: &str,
        epoch: u64,
        load: WorkerLoad,
        now: Duration,
    ) -> Result<WorkerState, MembershipError> {
        self.advance(now);
        let entry = self.members.get_mut(id).ok_or(MembershipError::Unknown)?;
        match epoch.cmp(&entry.info.epoch()) {
            std::cmp::Ordering::Less => Err(MembershipError::StaleEpoch { registered: entry.info.epoch() }),
            // A later life that has not registered.
            std::cmp::Ordering::Greater => Err(MembershipError::Unknown),
            std::cmp::Ordering::Equal => {
                (entry.last_seen, entry.load) = (now, load);
                Ok(entry.state)
            }
        }
    }

    /// Removes a member; nothing happens if it is not there in this epoch.
    pub(crate) fn deregister(&mut self, id: &str, epoch: u64, now: Duration) {
        self.advance(now);
        if self.members.get(id).is_some_and(|entry| entry.info.epoch() == epoch) {
            self.members.remove(id);
            self.changed(Change::Delete(id.to_owned()));
        }
    }

    pub(crate) fn drain(&mut self, id: &str, now: Duration) -> Result<(), MembershipError> {
        self.advance(now);
        let entry = self.members.get_mut(id).ok_or(MembershipError::Unknown)?;
        if entry.state != WorkerState::Draining {
            entry.state = WorkerState::Draining;
            let record = entry.record(now);
            self.changed(Change::Put(Box::new(record)));
        }
        Ok(())
    }

    /// Makes happen what is due: members expire, weights rise.
    pub(crate) fn advance(&mut self, now: Duration) {
        let timeout = self.timeout();
        let is_gone = |entry: &Entry<I>| timeout < now.saturating_sub(entry.last_seen);
        let gone: Vec<String> = self
            .members
            .values()
            .filter(|entry| is_gone(entry))
            .map(|entry| entry.info.id().to_owned())
            .collect();
        for id in gone {
            self.members.remove(&id);
            self.changed(Change::Expire(id));
        }
        let mut is_stepped = false;
        for entry in self.members.values_mut() {
            let step = ramp_step(self.slow_start, entry.ramps, entry.age(now));
            is_stepped |= entry.step != step;
            entry.step = step;
        }
        self.version += u64::from(is_stepped);
    }

    /// Extends every member's deadline by the time in which no heartbeat could arrive, because this process stood
    /// still.
    pub(crate) fn excuse(&mut self, pause: Duration) {
        for entry in self.members.values_mut() {
            entry.last_seen += pause;
        }
    }

    /// When something will be due, if no call comes before.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        let expiry = |entry: &Entry<I>| entry.last_seen + self.timeout() + Duration::from_nanos(1);
        let rise = |entry: &Entry<I>| {
            (entry.step < RAMP_STEPS).then(|| {
                let age =
                    (self.slow_start.as_nanos() * u128::from(entry.step + 1)).div_ceil(RAMP_STEPS.into());
                // A slow start is at most a day, far below 2^64 ns.
                entry.joined + Duration::from_nanos(age as u64).saturating_sub(entry.prior)
            })
        };
        self.members.values().flat_map(|entry| [Some(expiry(entry)), rise(entry)]).flatten().min()
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// What has to be written down since the last call.
    pub(crate) fn take_changes(&mut self) -> Vec<Change<I>> {
        std::mem::take(&mut self.changes)
    }

    fn timeout(&self) -> Duration {
        self.heartbeat_interval * MISSED_HEARTBEATS
    }

    fn step(&self, ramps: bool, age: Duration) -> u32 {
        ramp_step(self.slow_start, ramps, age)
    }

    fn changed(&mut self, change: Change<I>) {
        self.version += 1;
        self.changes.push(change);
    }
}

impl Membership<WorkerInfo> {
    /// The members by id.
    pub(crate) fn members(&self) -> Vec<Member> {
        self.members.values().map(Entry::member).collect()
    }
}

impl Membership<StoreInfo> {
    /// The store daemons by id.
    pub(crate) fn stores(&self) -> Vec<StoreInfo> {
        self.members.values().map(|entry| entry.info.clone()).collect()
    }
}

// === impl Entry ===

impl<I: MemberInfo> Entry<I> {
    fn age(&self, now: Duration) -> Duration {
        self.prior + now.saturating_sub(self.joined)
    }

    fn record(&self, now: Duration) -> Record<I> {
        Record { info: self.info.clone(), state: self.state, age: self.age(now), ramps: self.ramps }
    }
}

impl Entry<WorkerInfo> {
    fn member(&self) -> Member {
        let share = f64::from(self.step + 1) / f64::from(RAMP_STEPS + 1);
        Member {
            worker: self.info.clone(),
            state: self.state,
            load: self.load,
            ring_weight: self.info.weight * share,
        }
    }
}

/// The step that a member of this age has reached; all of them without a slow start.
fn ramp_step(slow_start: Duration, ramps: bool, age: Duration) -> u32 {
    if !ramps || slow_start <= age {
        return RAMP_STEPS;
    }
    // Less than RAMP_STEPS, because the age is less than the slow start.
    (age.as_nanos() * u128::from(RAMP_STEPS) / slow_start.as_nanos()) as u32
}

#[cfg(test)]
mod tests;
