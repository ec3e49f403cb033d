//! What a rank says to requests, in and out of order, and to peers that are no leader.

use std::path::Path;
use std::sync::Arc;

use kvik_memory::Extent;
use kvik_memory::Geometry;
use kvik_memory::pages::PageMapper;
use kvik_memory::ranks::RankWorker;
use kvik_memory::ranks::frame::{Body, Greeting, Kind, MAX_FRAME_BYTES, Reply, Request, Status};

use crate::proxy::Packets;
use crate::support::{
    FakeMapper, MapFault, assert_mapped, geometry, leader, page, peer, rank_failure, scratch_directory,
    try_leader, wait_until, worker,
};

const GREETING: fn() -> Greeting =
    || Greeting { generation: 7, resumed_instance: 0, rank: 0, world: 1, geometry: geometry() };

/// One rank and a leader made by hand.
struct Session {
    socket: Packets,
    mapper: Arc<FakeMapper>,
    directory: tempfile::TempDir,
    _worker: RankWorker,
}

impl Session {
    fn new() -> Self {
        let directory = scratch_directory();
        let mapper = Arc::new(FakeMapper::new());
        let worker = worker(0, 1, directory.path().join("r0"), &mapper);
        let socket = connect_as(&directory.path().join("r0"), GREETING());
        Self { socket, mapper, directory, _worker: worker }
    }

    fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("r0")
    }

    fn ask(&self, transaction: u64, body: Body) -> Reply {
        self.socket.ask(&Request { transaction, group: 0, body }).unwrap()
    }

    fn status(&self, transaction: u64, body: Body) -> Status {
        self.ask(transaction, body).status
    }
}

fn hello(greeting: Greeting) -> Request {
    Request { transaction: 0, group: 0, body: Body::Hello(greeting) }
}

fn connect_as(path: &Path, greeting: Greeting) -> Packets {
    let socket = Packets::connect(path);
    let reply = socket.ask(&hello(greeting)).unwrap();
    assert_eq!(reply.status, Status::Done, "{}", reply.detail);
    socket
}

fn prepare(kind: Kind, part: u32, extents: &[Extent]) -> Body {
    Body::Prepare { kind, part, extents: extents.to_vec() }
}

#[test]
fn a_repeated_request_is_done_once_and_answered_alike() {
    let session = Session::new();
    for _ in 0..3 {
        assert_eq!(session.status(1, prepare(Kind::Map, 0, &[page(1)])), Status::Done);
    }
    assert_eq!(session.status(1, prepare(Kind::Map, 0, &[page(2)])), Status::Refused);
    assert_eq!(session.status(1, prepare(Kind::Map, 2, &[page(2)])), Status::Refused, "part 1 is missing");
    for _ in 0..3 {
        assert_eq!(session.status(1, Body::Commit(Kind::Map)), Status::Done);
        assert_eq!(session.status(1, prepare(Kind::Map, 0, &[page(1)])), Status::Done);
    }
    assert_eq!(session.mapper.n_maps(), 1);
    session.mapper.set_stubborn(&[page(1)]);
    assert_eq!(session.status(2, prepare(Kind::Unmap, 0, &[page(1)])), Status::Done);
    let first = session.ask(2, Body::Commit(Kind::Unmap));
    assert_eq!((first.status, &first.extents[..]), (Status::Failed, &[page(1)][..]));
    session.mapper.set_stubborn(&[]);
    assert_eq!(session.ask(2, Body::Commit(Kind::Unmap)), first, "it is not tried again");
}

#[test]
fn a_failed_prepare_is_not_tried_again_and_cannot_be_committed() {
    let session = Session::new();
    session.mapper.set_map_fault(Some(MapFault::NoMemory));
    assert_eq!(session.status(1, prepare(Kind::Map, 0, &[page(1)])), Status::NoMemory);
    session.mapper.set_map_fault(None);
    assert_eq!(session.status(1, prepare(Kind::Map, 0, &[page(1)])), Status::NoMemory);
    assert_eq!(session.status(1, Body::Commit(Kind::Map)), Status::Refused);
    assert_eq!(session.status(1, Body::Abort(Kind::Map)), Status::Done);
    assert_eq!(session.status(1, prepare(Kind::Map, 0, &[page(1)])), Status::Refused, "it was aborted");
    assert_eq!(session.mapper.n_maps(), 1);
}

#[test]
fn the_state_of_a_transaction_can_be_asked_for() {
    let session = Session::new();
    assert_eq!(session.status(1, Body::Status), Status::Unknown);
    session.ask(1, prepare(Kind::Map, 0, &[page(1)]));
    assert_eq!(session.status(1, Body::Status), Status::Prepared);
    session.ask(1, Body::Commit(Kind::Map));
    assert_eq!(session.status(1, Body::Status), Status::Committed);
    session.ask(1, Body::Abort(Kind::Map));
    assert_eq!(session.status(1, Body::Status), Status::Aborted);
    assert_eq!(session.mapper.mapped(), [], "a map can be undone right after its commit");
}

#[test]
fn a_committed_map_cannot_be_aborted_once_another_transaction_has_begun() {
    let session = Session::new();
    for (transaction, extent) in [(1, page(1)), (2, page(2))] {
        session.ask(transaction, prepare(Kind::Map, 0, &[extent]));
        assert_eq!(session.status(transaction, Body::Commit(Kind::Map)), Status::Done);
    }
    assert_eq!(session.status(1, Body::Abort(Kind::Map)), Status::Refused);
    assert_eq!(session.status(1, Body::Abort(Kind::Unmap)), Status::Refused);
    assert_eq!(session.mapper.mapped(), [page(1), page(2)]);
}

#[test]
fn requests_that_do_not_fit_the_state_change_nothing() {
    let session = Session::new();
    session.ask(5, prepare(Kind::Map, 0, &[page(1), page(2)]));
    assert_eq!(session.status(6, prepare(Kind::Map, 0, &[page(3)])), Status::Refused, "5 is not over");
    assert_eq!(session.status(5, prepare(Kind::Unmap, 0, &[page(1)])), Status::Refused, "5 is a map");
    assert_eq!(session.status(5, prepare(Kind::Map, 1, &[page(2)])), Status::Refused, "listed twice");
    session.ask(5, Body::Commit(Kind::Map));
    let two_pages = Extent { n_pages: 2, ..page(2) };
    for (extents, why) in [
        (vec![page(1)], "mapped already"),
        (vec![two_pages], "its first page is mapped"),
        (vec![page(9), page(9)], "listed twice"),
        (vec![page(geometry().capacity_pages())], "beyond the reservation"),
    ] {
        assert_eq!(session.status(6, prepare(Kind::Map, 0, &extents)), Status::Refused, "{why}");
    }
    for (extents, why) in [(vec![page(9)], "not mapped"), (vec![two_pages], "mapped as two extents")] {
        assert_eq!(session.status(6, prepare(Kind::Unmap, 0, &extents)), Status::Refused, "{why}");
    }
    assert_eq!(session.status(6, Body::Commit(Kind::Map)), Status::Refused, "never prepared");
    assert_eq!(
        session.status(4, prepare(Kind::Map, 0, &[page(9)])),
        Status::Refused,
        "older than the latest"
    );
    assert_eq!((session.mapper.mapped(), session.mapper.n_maps()), (vec![page(1), page(2)], 1));
}

#[test]
fn what_is_not_committed_is_undone_when_the_connection_ends() {
    let session = Session::new();
    session.ask(1, prepare(Kind::Map, 0, &[page(1)]));
    session.ask(1, Body::Commit(Kind::Map));
    session.ask(2, prepare(Kind::Map, 0, &[page(2)]));
    let instance = session.ask(2, prepare(Kind::Map, 1, &[page(3)])).instance;
    let Session { socket, mapper, directory, _worker } = session;
    drop(socket);
    wait_until("the rank has rolled back", || mapper.mapped() == [page(1)]);
    let resumed =
        connect_as(&directory.path().join("r0"), Greeting { resumed_instance: instance, ..GREETING() });
    let again = Request { transaction: 2, group: 0, body: prepare(Kind::Map, 0, &[page(2)]) };
    assert_eq!(resumed.ask(&again).unwrap().status, Status::Done, "the transaction can be repeated");
    assert_eq!(mapper.mapped(), [page(1), page(2)]);
}

#[test]
fn what_cannot_be_rolled_back_is_told_to_the_leader_when_it_resumes() {
    let session = Session::new();
    session.mapper.set_stubborn(&[page(2)]);
    let prepare_two = prepare(Kind::Map, 0, &[page(2), page(3)]);
    let instance = session.ask(1, prepare_two.clone()).instance;
    let Session { socket, mapper, directory, _worker } = session;
    drop(socket);
    wait_until("the rank has rolled back", || mapper.mapped() == [page(2)]);
    let resumed =
        connect_as(&directory.path().join("r0"), Greeting { resumed_instance: instance, ..GREETING() });
    let ask = |transaction, body| resumed.ask(&Request { transaction, group: 0, body }).unwrap();
    assert_eq!(ask(1, prepare_two).status, Status::Refused);
    let aborted = ask(1, Body::Abort(Kind::Map));
    assert_eq!((aborted.status, aborted.extents), (Status::Failed, vec![page(2)]));
    assert_eq!(ask(2, prepare(Kind::Map, 0, &[page(2)])).status, Status::Refused, "its state is unknown");
    drop(resumed);
    let refused = Packets::connect(&directory.path().join("r0")).ask(&hello(GREETING())).unwrap();
    assert_eq!(refused.status, Status::Refused, "a new leader would map over it");
    assert!(refused.detail.contains("start this rank anew"), "{}", refused.detail);
}

#[test]
fn a_greeting_that_does_not_fit_is_refused_with_the_reason() {
    let session = Session::new();
    let path = session.path();
    let Session { socket, _worker, directory: _directory, .. } = session;
    drop(socket);
    let other_geometry = Geometry::try_new(5, 2 << 20, 1 << 16).unwrap();
    for (greeting, reason) in [
        (Greeting { rank: 3, world: 4, ..GREETING() }, "expects rank 3 of 4, and this is rank 0 of 1"),
        (Greeting { geometry: other_geometry, ..GREETING() }, "n_buffers: 5"),
        (Greeting { resumed_instance: 1, ..GREETING() }, "started anew"),
    ] {
        let socket = Packets::connect(&path);
        let reply = socket.ask(&hello(greeting)).unwrap();
        assert_eq!(reply.status, Status::Refused);
        assert!(reply.detail.contains(reason), "{}", reply.detail);
        assert_eq!(socket.receive(), None, "the connection is closed");
    }
    let reply = Packets::connect(&path).ask(&Request { group: 2, ..hello(GREETING()) }).unwrap();
    assert!(reply.detail.contains("for group 2"), "{}", reply.detail);
    let early = Request { transaction: 1, group: 0, body: prepare(Kind::Map, 0, &[page(1)]) };
    assert_eq!(Packets::connect(&path).ask(&early).unwrap().status, Status::Refused, "no hello was sent");
    connect_as(&path, GREETING());
}

#[test]
fn a_second_leader_is_refused_until_the_first_is_gone_and_then_takes_over() {
    let directory = scratch_directory();
    let path = directory.path().join("r0");
    let mapper = Arc::new(FakeMapper::new());
    let _worker = worker(0, 1, path.clone(), &mapper);
    let first = leader(None, vec![peer(0, path.clone())]);
    assert_mapped(&first.map(&[page(1)]));
    let refused =
        try_leader(None, vec![peer(0, path.clone())], crate::support::PATIENCE).unwrap_err().to_string();
    assert!(refused.contains("another leader is connected"), "{refused}");
    assert_mapped(&first.map(&[page(2)]));
    drop(first);
    let second = leader(None, vec![peer(0, path)]);
    assert_eq!(mapper.mapped(), [], "what the first had is unmapped");
    assert_mapped(&second.map(&[page(1)]));
}

#[test]
fn a_leader_that_was_replaced_does_not_get_its_rank_back() {
    let session = Session::new();
    let instance = session.ask(1, Body::Status).instance;
    let path = session.path();
    let Session { socket, _worker, directory: _directory, .. } = session;
    drop(socket);
    drop(connect_as(&path, Greeting { generation: 8, ..GREETING() }));
    let reply =
        Packets::connect(&path).ask(&hello(Greeting { resumed_instance: instance, ..GREETING() })).unwrap();
    assert_eq!(reply.status, Status::Refused);
    assert!(reply.detail.contains("another leader"), "{}", reply.detail);
}

#[test]
fn garbage_ends_its_connection_and_nothing_else() {
    let directory = scratch_directory();
    let path = directory.path().join("r0");
    let mapper = Arc::new(FakeMapper::new());
    let _worker = worker(0, 1, path.clone(), &mapper);
    let valid = Request { transaction: 1, group: 0, body: prepare(Kind::Map, 0, &[page(1)]) }.encode();
    let mut garbage = vec![
        vec![0],
        vec![0xff; 64],
        vec![0; MAX_FRAME_BYTES + 1],
        b"KVRQ".to_vec(),
        hello(GREETING()).encode(),
    ];
    garbage.extend((1..valid.len()).map(|n_bytes| valid[..n_bytes].to_vec()));
    for frame in &garbage {
        let leader = connect_as(&path, GREETING());
        assert!(leader.send(frame));
        assert_eq!(leader.receive(), None, "{frame:?} got an answer");
    }
    for frame in &garbage[..4] {
        let stranger = Packets::connect(&path);
        assert!(stranger.send(frame));
        let refusal = stranger.receive().map(|reply| Reply::decode(&reply).unwrap().status);
        assert!(matches!(refusal, None | Some(Status::Refused)), "{refusal:?}");
    }
    assert_eq!(mapper.n_maps(), 0);
    assert_mapped(&leader(None, vec![peer(0, path)]).map(&[page(1)]));
}

#[test]
fn a_silent_connection_keeps_no_leader_out() {
    let directory = scratch_directory();
    let path = directory.path().join("r0");
    let _worker = worker(0, 1, path.clone(), &Arc::new(FakeMapper::new()));
    let silent: Vec<Packets> = (0..8).map(|_| Packets::connect(&path)).collect();
    let mapper = leader(None, vec![peer(0, path.clone())]);
    assert_mapped(&mapper.map(&[page(1)]));
    drop(silent);
    let _another = Packets::connect(&path);
    assert_mapped(&mapper.map(&[page(2)]));
}

#[test]
fn a_worker_that_is_dropped_ends_its_connection_and_keeps_what_is_committed() {
    let directory = scratch_directory();
    let path = directory.path().join("r0");
    let rank = Arc::new(FakeMapper::new());
    let worker = worker(0, 1, path.clone(), &rank);
    let mapper = leader(None, vec![peer(0, path)]);
    assert_mapped(&mapper.map(&[page(1)]));
    drop(worker);
    assert_eq!(rank.mapped(), [page(1)]);
    let (failed, _, stuck) = rank_failure(mapper.map(&[page(2)]));
    assert_eq!((failed, stuck), (0, Vec::new()));
    assert_eq!(mapper.unmap(&[page(1)]), [page(1)]);
}
