//! The metrics of a coordinator.
//!
//! | name | kind | meaning |
//! |---|---|---|
//! | `kvik_coordinator_workers{state}` | gauge | members in the snapshot held, by state |
//! | `kvik_coordinator_stores` | gauge | store daemons in the snapshot held |
//! | `kvik_coordinator_heartbeats_total` | counter | heartbeats that a leader took |
//! | `kvik_coordinator_expired_total` | counter | members that missed three heartbeats |
//! | `kvik_coordinator_term` | gauge | term of the snapshot held |
//! | `kvik_coordinator_is_leader` | gauge | 1 for the leader, else 0 |
//! | `kvik_coordinator_rebalanced_total{outcome}` | counter | decisions to move a running request, by what became of them |
//!
//! Outcomes: `moved`; `refused`, one of the workers did not; `none_fits`, no request of the full worker may move;
//! `unreachable`, one of the workers did not say what runs there.

use kvik_proto::coordinator::{Snapshot, WorkerState};
use metrics::{counter, describe_counter, describe_gauge, gauge};

const WORKERS: &str = "kvik_coordinator_workers";
const STORES: &str = "kvik_coordinator_stores";
const HEARTBEATS: &str = "kvik_coordinator_heartbeats_total";
const EXPIRED: &str = "kvik_coordinator_expired_total";
const TERM: &str = "kvik_coordinator_term";
const IS_LEADER: &str = "kvik_coordinator_is_leader";
const REBALANCED: &str = "kvik_coordinator_rebalanced_total";

/// Tells the registry what the metrics mean.
pub(crate) fn describe() {
    describe_gauge!(WORKERS, "Members in the snapshot held, by state.");
    describe_gauge!(STORES, "Store daemons in the snapshot held.");
    describe_counter!(HEARTBEATS, "Heartbeats that a leader took.");
    describe_counter!(EXPIRED, "Members that missed three heartbeats.");
    describe_gauge!(TERM, "Term of the snapshot held.");
    describe_gauge!(IS_LEADER, "1 for the leader, else 0.");
    describe_counter!(REBALANCED, "Decisions to move a running request, by what became of them.");
}

/// A heartbeat was taken.
pub(crate) fn heartbeat() {
    counter!(HEARTBEATS).increment(1);
}

/// A member missed its heartbeats.
pub(crate) fn expired() {
    counter!(EXPIRED).increment(1);
}

/// It was decided to move a running request.
pub(crate) fn rebalanced(outcome: &'static str) {
    counter!(REBALANCED, "outcome" => outcome).increment(1);
}

/// The role changed.
pub(crate) fn leader(is_leader: bool) {
    gauge!(IS_LEADER).set(f64::from(u8::from(is_leader)));
}

/// A snapshot is held.
pub(crate) fn snapshot(snapshot: &Snapshot) {
    let of = |state| snapshot.members.iter().filter(|member| member.state == state).count() as f64;
    gauge!(WORKERS, "state" => "ready").set(of(WorkerState::Ready));
    gauge!(WORKERS, "state" => "draining").set(of(WorkerState::Draining));
    gauge!(STORES).set(snapshot.stores.len() as f64);
    gauge!(TERM).set(snapshot.term as f64);
}
