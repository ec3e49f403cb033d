use proptest::prelude::*;

use super::*;

const INTERVAL: Duration = Duration::from_secs(1);
const SLOW_START: Duration = Duration::from_secs(9);

fn worker(id: &str, epoch: u64) -> WorkerInfo {
    WorkerInfo {
        id: id.to_owned(),
        epoch,
        address: format!("http://{id}:8082"),
        model: "kvik-tiny".to_owned(),
        capacity_tokens: 1000,
        weight: 1.0,
        role: kvik_proto::coordinator::WorkerRole::default(),
        store: None,
    }
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn membership() -> Membership {
    Membership::new(INTERVAL, SLOW_START)
}

fn ids(membership: &Membership) -> Vec<String> {
    membership.members().into_iter().map(|member| member.worker.id).collect()
}

fn join(membership: &mut Membership, id: &str, epoch: u64, now: Duration) {
    membership.register(worker(id, epoch), WorkerLoad::default(), WorkerState::Ready, now).unwrap();
}

fn weight(membership: &Membership, id: &str) -> f64 {
    membership.members().into_iter().find(|member| member.worker.id == id).unwrap().ring_weight
}

#[test]
fn a_later_life_replaces_an_earlier_one_and_not_the_reverse() {
    let mut membership = membership();
    join(&mut membership, "a", 2, ms(0));
    let error = membership.register(worker("a", 1), WorkerLoad::default(), WorkerState::Ready, ms(1));
    assert_eq!(error, Err(MembershipError::StaleEpoch { registered: 2 }));
    membership.drain("a", ms(2)).unwrap();
    join(&mut membership, "a", 3, ms(3));
    let members = membership.members();
    assert_eq!((members[0].worker.epoch, members[0].state), (3, WorkerState::Ready));
}

#[test]
fn two_processes_with_one_name_and_epoch_are_told_apart_by_their_address() {
    let mut membership = membership();
    join(&mut membership, "a", 1, ms(0));
    let other = WorkerInfo { address: "http://other:8082".to_owned(), ..worker("a", 1) };
    let error = membership.register(other, WorkerLoad::default(), WorkerState::Ready, ms(1));
    assert_eq!(error, Err(MembershipError::AddressTaken { registered: "http://a:8082".to_owned() }));
}

#[test]
fn a_member_that_says_it_drains_drains_until_its_next_life() {
    let mut membership = membership();
    let register = |membership: &mut Membership, epoch: u64, state: WorkerState| {
        membership.register(worker("a", epoch), WorkerLoad::default(), state, ms(epoch)).unwrap();
        membership.members()[0].state
    };
    // To a coordinator that has forgotten it.
    assert_eq!(register(&mut membership, 1, WorkerState::Draining), WorkerState::Draining);
    membership.take_changes();
    assert_eq!(register(&mut membership, 1, WorkerState::Ready), WorkerState::Draining);
    assert_eq!(membership.take_changes(), []);
    assert_eq!(register(&mut membership, 2, WorkerState::Ready), WorkerState::Ready);
    // To one that knows it.
    let version = membership.version();
    assert_eq!(register(&mut membership, 2, WorkerState::Draining), WorkerState::Draining);
    assert!(version < membership.version());
    let changes = membership.take_changes();
    let is_written =
        |change: &Change| matches!(change, Change::Put(record) if record.state == WorkerState::Draining);
    assert!(changes.last().is_some_and(is_written), "{changes:?}");
}

#[test]
fn registering_twice_changes_nothing_but_a_corrected_field() {
    let mut membership = membership();
    join(&mut membership, "a", 1, ms(0));
    let version = membership.version();
    join(&mut membership, "a", 1, ms(1));
    assert_eq!(membership.version(), version);
    membership.drain("a", ms(2)).unwrap();
    let heavier = WorkerInfo { weight: 2.0, ..worker("a", 1) };
    membership.register(heavier, WorkerLoad::default(), WorkerState::Ready, ms(3)).unwrap();
    assert_eq!(membership.version(), version + 2);
    let members = membership.members();
    assert_eq!((members[0].ring_weight, members[0].state), (2.0, WorkerState::Draining));
}

#[test]
fn a_member_expires_after_three_missed_heartbeats() {
    let mut membership = membership();
    join(&mut membership, "a", 1, ms(0));
    join(&mut membership, "b", 1, ms(0));
    membership.heartbeat("b", 1, WorkerLoad::default(), ms(3000)).unwrap();
    assert_eq!(ids(&membership), ["a", "b"]);
    membership.take_changes();
    assert_eq!(membership.next_deadline(), Some(ms(3000) + Duration::from_nanos(1)));
    membership.advance(ms(3001));
    assert_eq!(ids(&membership), ["b"]);
    assert_eq!(membership.take_changes(), [Change::Expire("a".to_owned())]);
    assert_eq!(membership.heartbeat("a", 1, WorkerLoad::default(), ms(3001)), Err(MembershipError::Unknown));
}

#[test]
fn a_heartbeat_of_another_life_is_refused() {
    let mut membership = membership();
    join(&mut membership, "a", 5, ms(0));
    let stale = membership.heartbeat("a", 4, WorkerLoad::default(), ms(1));
    assert_eq!(stale, Err(MembershipError::StaleEpoch { registered: 5 }));
    assert_eq!(membership.heartbeat("a", 6, WorkerLoad::default(), ms(1)), Err(MembershipError::Unknown));
}

#[test]
fn leaving_needs_the_registered_epoch() {
    let mut membership = membership();
    join(&mut membership, "a", 2, ms(0));
    membership.deregister("a", 1, ms(1));
    membership.deregister("b", 1, ms(1));
    assert_eq!(ids(&membership), ["a"]);
    membership.deregister("a", 2, ms(2));
    assert!(ids(&membership).is_empty());
}

#[test]
fn the_first_members_have_their_full_weight_and_a_later_one_rises_to_it() {
    let mut membership = membership();
    join(&mut membership, "a", 1, ms(0));
    join(&mut membership, "b", 1, ms(500));
    assert_eq!((weight(&membership, "a"), weight(&membership, "b")), (1.0, 1.0));

    let alive = |membership: &mut Membership, ids: &[&str], now: Duration| {
        for id in ids {
            membership.heartbeat(id, 1, WorkerLoad::default(), now).unwrap();
        }
    };
    for second in 1..=9 {
        alive(&mut membership, &["a", "b"], ms(second * 1000));
    }
    join(&mut membership, "c", 1, ms(9000));
    assert_eq!(membership.next_deadline(), Some(ms(10_000)), "the next step, before any member expires");
    let mut seen = vec![weight(&membership, "c")];
    let version = membership.version();
    for second in 10..=18 {
        alive(&mut membership, &["a", "b", "c"], ms(second * 1000));
        seen.push(weight(&membership, "c"));
    }
    let expected: Vec<f64> = (1..=10).map(|tenth| f64::from(tenth) / 10.0).collect();
    assert_eq!(seen, expected);
    assert_eq!(membership.version(), version + 9, "each step is a version");
}

#[test]
fn a_slow_start_goes_on_under_the_next_leader() {
    let record = |id: &str, age, ramps| Record { info: worker(id, 1), state: WorkerState::Ready, age, ramps };
    let mut membership = membership();
    membership.restore(vec![record("a", ms(60_000), false), record("b", ms(4000), true)], |_| None, ms(0));
    assert_eq!((weight(&membership, "a"), weight(&membership, "b")), (1.0, 0.5));
    assert_eq!(membership.next_deadline(), Some(ms(1000)));
    membership.advance(ms(1000));
    assert!((weight(&membership, "b") - 0.6).abs() < 1e-9);
    assert!(membership.take_changes().is_empty(), "a step is not written down");
}

#[test]
fn a_pause_of_the_coordinator_is_not_held_against_the_members() {
    let mut membership = membership();
    join(&mut membership, "a", 1, ms(0));
    membership.excuse(ms(60_000));
    membership.advance(ms(62_000));
    assert_eq!(ids(&membership), ["a"]);
    membership.advance(ms(63_001));
    assert!(ids(&membership).is_empty());
}

/// A member as the model sees it: facts only, everything else is computed when asked for.
#[derive(Debug, Clone)]
struct Fact {
    worker: WorkerInfo,
    is_draining: bool,
    last_seen_ms: u64,
    joined_ms: u64,
    ramps: bool,
}

#[derive(Debug, Clone)]
enum Operation {
    Register { id: usize, epoch: u64, is_elsewhere: bool },
    Heartbeat { id: usize, epoch: u64 },
    Deregister { id: usize, epoch: u64 },
    Drain { id: usize },
    Advance,
}

fn operations() -> impl Strategy<Value = Vec<(u64, Operation)>> {
    let id = 0..4_usize;
    let epoch = 1..4_u64;
    let operation = prop_oneof![
        3 => (id.clone(), epoch.clone(), prop::bool::weighted(0.1))
            .prop_map(|(id, epoch, is_elsewhere)| Operation::Register { id, epoch, is_elsewhere }),
        6 => (id.clone(), epoch.clone()).prop_map(|(id, epoch)| Operation::Heartbeat { id, epoch }),
        1 => (id.clone(), epoch).prop_map(|(id, epoch)| Operation::Deregister { id, epoch }),
        1 => id.prop_map(|id| Operation::Drain { id }),
        2 => Just(Operation::Advance),
    ];
    proptest::collection::vec((prop_oneof![0..300_u64, 0..2000_u64], operation), 1..120)
}

fn id_of(id: usize) -> String {
    format!("worker-{id}")
}

/// The naive membership: a list, searched for everything.
fn apply(facts: &mut Vec<Fact>, operation: &Operation, now_ms: u64) {
    facts.retain(|fact| now_ms - fact.last_seen_ms <= 3000);
    match operation {
        Operation::Register { id, epoch, is_elsewhere } => {
            let mut worker = worker(&id_of(*id), *epoch);
            if *is_elsewhere {
                worker.address.push('1');
            }
            let old = facts.iter().position(|fact| fact.worker.id == worker.id);
            if let Some(old) = old {
                if *epoch == facts[old].worker.epoch && worker.address == facts[old].worker.address {
                    facts[old].last_seen_ms = now_ms;
                }
                if *epoch <= facts[old].worker.epoch {
                    return;
                }
                facts.remove(old);
            }
            let ramps = facts.iter().any(|fact| now_ms - fact.joined_ms >= 9000);
            facts.push(Fact { worker, is_draining: false, last_seen_ms: now_ms, joined_ms: now_ms, ramps });
        }
        Operation::Heartbeat { id, epoch } => {
            let of = |fact: &&mut Fact| fact.worker.id == id_of(*id) && fact.worker.epoch == *epoch;
            if let Some(fact) = facts.iter_mut().find(of) {
                fact.last_seen_ms = now_ms;
            }
        }
        Operation::Deregister { id, epoch } => {
            facts.retain(|fact| fact.worker.id != id_of(*id) || fact.worker.epoch != *epoch);
        }
        Operation::Drain { id } => {
            for fact in facts.iter_mut().filter(|fact| fact.worker.id == id_of(*id)) {
                fact.is_draining = true;
            }
        }
        Operation::Advance => {}
    }
}

/// Id, epoch, address, draining and tenths of the weight.
type Visible = Vec<(String, u64, String, bool, u64)>;

fn visible_facts(facts: &[Fact], now_ms: u64) -> Visible {
    let tenths = |fact: &Fact| if fact.ramps { (1 + (now_ms - fact.joined_ms) / 1000).min(10) } else { 10 };
    let mut visible: Visible = facts
        .iter()
        .map(|fact| {
            let worker = fact.worker.clone();
            (worker.id, worker.epoch, worker.address, fact.is_draining, tenths(fact))
        })
        .collect();
    visible.sort();
    visible
}

fn visible(membership: &Membership) -> Visible {
    let member = |member: Member| {
        let tenths = (member.ring_weight * 10.0).round() as u64;
        let Member { worker, state, .. } = member;
        (worker.id, worker.epoch, worker.address, state == WorkerState::Draining, tenths)
    };
    membership.members().into_iter().map(member).collect()
}

proptest! {
    #[test]
    fn the_membership_does_what_a_naive_list_does(operations in operations()) {
        let mut membership = membership();
        let mut facts = Vec::new();
        let mut written = BTreeMap::new();
        let mut now_ms = 0;
        for (wait_ms, operation) in operations {
            now_ms += wait_ms;
            let (before, version, now) = (visible(&membership), membership.version(), ms(now_ms));
            apply(&mut facts, &operation, now_ms);
            let load = WorkerLoad { outstanding_tokens: now_ms, ..WorkerLoad::default() };
            match &operation {
                Operation::Register { id, epoch, is_elsewhere } => {
                    let mut worker = worker(&id_of(*id), *epoch);
                    if *is_elsewhere {
                        worker.address.push('1');
                    }
                    let _ = membership.register(worker, load, WorkerState::Ready, now);
                }
                Operation::Heartbeat { id, epoch } => {
                    let _ = membership.heartbeat(&id_of(*id), *epoch, load, now);
                }
                Operation::Deregister { id, epoch } => membership.deregister(&id_of(*id), *epoch, now),
                Operation::Drain { id } => {
                    let _ = membership.drain(&id_of(*id), now);
                }
                Operation::Advance => membership.advance(now),
            }
            let after = visible(&membership);
            prop_assert_eq!(&after, &visible_facts(&facts, now_ms));

            let changes = membership.take_changes();
            if after != before {
                prop_assert!(membership.version() > version);
            } else if changes.is_empty() {
                prop_assert_eq!(membership.version(), version);
            }
            for change in changes {
                match change {
                    Change::Put(record) => written.insert(record.info.id.clone(), record.state),
                    Change::Delete(id) | Change::Expire(id) => written.remove(&id),
                };
            }
            let members = membership.members();
            let states: BTreeMap<_, _> = members.into_iter().map(|member| (member.worker.id, member.state)).collect();
            prop_assert_eq!(&states, &written, "the written records are the members");
            prop_assert!(membership.next_deadline().is_none_or(|deadline| now < deadline));
        }
    }
}
