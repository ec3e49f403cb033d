//! Snapshots of coordinators, one after the other, and the fleet that they make.

use kvik_proto::coordinator::{WorkerInfo, WorkerLoad};

use super::*;

const RETAIN: Duration = Duration::from_mins(1);

fn member(id: &str, epoch: u64) -> Member {
    let worker = WorkerInfo {
        id: id.to_owned(),
        epoch,
        address: format!("http://{id}:1"),
        model: "m".to_owned(),
        capacity_tokens: 1000,
        weight: 1.0,
        role: WorkerRole::default(),
        store: None,
    };
    Member { worker, state: WorkerState::Ready, load: WorkerLoad::default(), ring_weight: 1.0 }
}

fn snapshot(term: u64, version: u64, ids: &[&str]) -> Snapshot {
    let members = ids.iter().map(|id| member(id, 1)).collect();
    Snapshot { incarnation: 0, term, version, ring: RingConfig::default(), members, stores: Vec::new() }
}

fn ids(book: &mut MemberBook) -> Vec<String> {
    let fleet = book.fleet(&GatewayConfig::default());
    fleet.group("m").map_or(Vec::new(), |group| group.ring.members().to_vec())
}

#[test]
fn stale_snapshots_are_ignored() {
    let (mut book, now) = (MemberBook::default(), Instant::now());
    assert!(book.apply(snapshot(2, 5, &["a", "b"]), RETAIN, now));
    assert!(!book.apply(snapshot(2, 4, &["a"]), RETAIN, now));
    assert!(!book.apply(snapshot(2, 5, &["a"]), RETAIN, now));
    assert!(!book.apply(snapshot(1, 9, &["a"]), RETAIN, now));
    assert_eq!(ids(&mut book), ["a", "b"]);
    assert!(book.apply(snapshot(2, 6, &["a"]), RETAIN, now));
    assert_eq!(ids(&mut book), ["a"]);
}

#[test]
fn workers_take_parts_of_requests_as_soon_as_one_of_their_model_says_so() {
    let (mut book, now) = (MemberBook::default(), Instant::now());
    let parts = |book: &mut MemberBook| -> Vec<(Role, Option<PdProtocol>)> {
        let fleet = book.fleet(&GatewayConfig::default());
        let seats = &fleet.group("m").unwrap().seats;
        seats.iter().map(|seat| (seat.part.role, seat.part.protocol())).collect()
    };
    book.apply(snapshot(1, 1, &["a", "b"]), RETAIN, now);
    assert_eq!(parts(&mut book), [(Role::Both, None); 2]);
    let mut parted = snapshot(1, 2, &["a", "b"]);
    parted.members[0].worker.role = WorkerRole::Prefill;
    assert!(book.apply(parted, RETAIN, now));
    let kvik = Some(PdProtocol::Kvik);
    assert_eq!(parts(&mut book), [(Role::Prefill, kvik), (Role::Both, kvik)]);
}

#[test]
fn a_coordinator_that_restarts_with_an_earlier_clock_is_followed() {
    let (mut book, now) = (MemberBook::default(), Instant::now());
    let of = |incarnation, snapshot| Snapshot { incarnation, ..snapshot };
    book.apply(of(7, snapshot(500, 5, &["a", "b"])), RETAIN, now);
    assert!(book.apply(of(8, snapshot(400, 1, &["c"])), RETAIN, now));
    assert_eq!(ids(&mut book), ["a", "b", "c"], "members that it does not list yet stay for a while");
    assert!(!book.apply(of(8, snapshot(400, 1, &[])), RETAIN, now), "stale within the incarnation");
    assert!(book.apply(of(8, snapshot(400, 2, &["a", "c"])), RETAIN, now));
    assert!(book.expire_retained(now + RETAIN));
    assert_eq!(ids(&mut book), ["a", "c"]);
}

#[test]
fn a_coordinator_that_restarts_empty_moves_no_worker() {
    let (mut book, now) = (MemberBook::default(), Instant::now());
    book.apply(snapshot(1, 5, &["a", "b", "c"]), RETAIN, now);
    book.apply(snapshot(2, 1, &[]), RETAIN, now);
    assert_eq!(ids(&mut book), ["a", "b", "c"]);
    book.apply(snapshot(2, 2, &["b"]), RETAIN, now);
    assert_eq!(ids(&mut book), ["a", "b", "c"]);
    assert!(book.drop_retained("c"));
    assert_eq!(ids(&mut book), ["a", "b"]);
    assert!(book.expire_retained(now + RETAIN));
    assert_eq!(ids(&mut book), ["b"]);
}

#[test]
fn a_backend_lives_through_changes_and_ends_with_its_epoch() {
    let (mut book, now) = (MemberBook::default(), Instant::now());
    let backend = |book: &mut MemberBook| {
        let fleet = book.fleet(&GatewayConfig::default());
        Arc::clone(&fleet.group("m").unwrap().seats[0].backend)
    };
    book.apply(snapshot(1, 1, &["a"]), RETAIN, now);
    let first = backend(&mut book);
    book.apply(snapshot(1, 2, &["a", "b"]), RETAIN, now);
    assert!(Arc::ptr_eq(&first, &backend(&mut book)));
    let mut later = snapshot(1, 3, &["a", "b"]);
    later.members[0].worker.epoch = 2;
    book.apply(later, RETAIN, now);
    assert!(!Arc::ptr_eq(&first, &backend(&mut book)));
}

#[test]
fn a_backend_that_left_is_asked_for_its_health_while_it_answers() {
    let (mut book, now) = (MemberBook::default(), Instant::now());
    let probed = |book: &MemberBook| {
        let mut ids: Vec<String> = book.probed_backends().iter().map(|backend| backend.id.clone()).collect();
        ids.sort();
        ids
    };
    book.apply(snapshot(1, 1, &["a", "b"]), RETAIN, now);
    let fleet = book.fleet(&GatewayConfig::default());
    let load = fleet.group("m").unwrap().seats[0].backend.load(10, 5);
    book.apply(snapshot(1, 2, &["b"]), RETAIN, now);
    assert_eq!(ids(&mut book), ["b"]);
    assert_eq!(probed(&book), ["a", "b"]);
    drop(load);
    assert_eq!(probed(&book), ["b"]);
}

#[test]
fn a_backend_that_another_life_or_address_replaced_is_asked_for_its_health_while_it_answers() {
    let (mut book, now) = (MemberBook::default(), Instant::now());
    let backend = |book: &mut MemberBook| {
        let fleet = book.fleet(&GatewayConfig::default());
        Arc::clone(&fleet.group("m").unwrap().seats[0].backend)
    };
    let is_probed = |book: &MemberBook, backend: &Arc<Backend>| {
        book.probed_backends().iter().any(|probed| Arc::ptr_eq(probed, backend))
    };
    book.apply(snapshot(1, 1, &["a"]), RETAIN, now);
    let first = backend(&mut book);
    let load = first.load(10, 5);
    let mut moved = snapshot(1, 2, &["a"]);
    moved.members[0].worker.address = "http://elsewhere:1".to_owned();
    book.apply(moved.clone(), RETAIN, now);
    let second = backend(&mut book);
    assert!(is_probed(&book, &first) && is_probed(&book, &second));
    moved.version = 3;
    moved.members[0].worker.epoch = 2;
    book.apply(moved, RETAIN, now);
    let third = backend(&mut book);
    assert!(is_probed(&book, &first) && is_probed(&book, &third));
    assert!(!is_probed(&book, &second), "it has nothing to answer");
    drop(load);
    assert!(!is_probed(&book, &first));
}

#[test]
fn only_a_backend_that_neither_answers_nor_streams_ends_its_answers() {
    let backend = Arc::new(Backend::new("a".to_owned(), BackendKind::Worker, 1, "http://a:1"));
    let breaker = GatewayConfig::default().breaker;
    let miss = || backend.end_probe(false, 3, Duration::ZERO, &breaker);
    let load = backend.load(10, 5);
    for _ in 0..9 {
        backend.hear();
        miss();
    }
    assert!(!load.silence.is_cancelled() && backend.is_usable());
    (0..3).for_each(|_| miss());
    assert!(load.silence.is_cancelled() && !backend.is_usable());
    assert!(!backend.load(10, 5).silence.is_cancelled(), "what comes later has its own fate");
}

#[test]
fn a_model_whose_workers_are_gone_is_known_and_has_no_backend() {
    let (mut book, now) = (MemberBook::default(), Instant::now());
    book.apply(snapshot(1, 1, &["a"]), RETAIN, now);
    assert_eq!(ids(&mut book), ["a"]);
    book.apply(snapshot(1, 2, &[]), RETAIN, now);
    book.expire_retained(now + RETAIN);
    let fleet = book.fleet(&GatewayConfig::default());
    assert!(fleet.group("m").is_some_and(|group| group.seats.is_empty()) && !fleet.is_usable());
}

#[test]
fn loads_alone_change_nothing() {
    let (mut book, now) = (MemberBook::default(), Instant::now());
    book.apply(snapshot(1, 1, &["a"]), RETAIN, now);
    let mut busier = snapshot(1, 2, &["a"]);
    busier.members[0].load.running = 9;
    assert!(!book.apply(busier, RETAIN, now));
    assert!(!book.apply(snapshot(1, 1, &["b"]), RETAIN, now));
}
