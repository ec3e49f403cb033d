//! A process dies or stops at every step of a transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvik_memory::pages::{MapOutcome, PageMapper};
use kvik_memory::ranks::RankMapper;
use kvik_memory::ranks::frame::{Op, Request};
use parking_lot::Mutex;

use crate::children::{self, ChildProcess, Role};
use crate::proxy::{Act, Packets, Proxy};
use crate::support::{
    FakeMapper, MapFault, assert_mapped, leader, page, peer, rank_failure, scratch_directory, try_leader,
    wait_until, worker,
};

/// A leader with a local rank 0 and rank 1 in a process that dies at the first `op`.
struct Doomed {
    mapper: RankMapper,
    local: Arc<FakeMapper>,
    _proxy: Proxy,
    _directory: tempfile::TempDir,
}

fn doomed(op: Op, act: Act) -> Doomed {
    let directory = scratch_directory();
    let (front, back) = (directory.path().join("front"), directory.path().join("back"));
    let mut rank = children::spawn(Role::Rank, &back);
    wait_until("the rank listens", || Packets::try_connect(&back).is_some());
    let decide = move |request: &Request| {
        if request.op() == op { act } else { Act::Forward }
    };
    let proxy = Proxy::start(&front, &back, decide, move || rank.kill());
    let local = Arc::new(FakeMapper::new());
    let mapper = leader(Some(&local), vec![peer(1, front)]);
    Doomed { mapper, local, _proxy: proxy, _directory: directory }
}

#[test]
fn a_rank_killed_in_a_map_leaves_nothing_mapped_on_the_others() {
    for op in [Op::PrepareMap, Op::CommitMap] {
        for act in [Act::KillBefore, Act::KillAfter] {
            let group = doomed(op, act);
            let started = Instant::now();
            let (rank, reason, stuck) = rank_failure(group.mapper.map(&[page(1), page(2)]));
            assert_eq!(rank, 1, "{op:?} {act:?}: {reason}");
            assert!(started.elapsed() < Duration::from_secs(10), "the leader waited for a dead rank");
            assert_eq!(stuck, [page(1), page(2)], "it is unknown what the dead rank had mapped");
            assert_eq!(group.local.mapped(), [], "{op:?} {act:?}");
            // From now on nothing is begun, so nothing more is lost.
            let (rank, _, stuck) = rank_failure(group.mapper.map(&[page(3)]));
            assert_eq!((rank, stuck), (1, Vec::new()));
            assert_eq!(group.local.mapped(), []);
        }
    }
}

#[test]
fn a_rank_killed_before_an_unmap_is_decided_leaves_all_mapped_on_the_others() {
    for act in [Act::KillBefore, Act::KillAfter] {
        let group = doomed(Op::PrepareUnmap, act);
        assert_mapped(&group.mapper.map(&[page(1), page(2)]));
        assert_eq!(group.mapper.unmap(&[page(1)]), [page(1)]);
        assert_eq!(group.local.mapped(), [page(1), page(2)]);
    }
}

#[test]
fn a_rank_killed_in_the_commit_of_an_unmap_makes_its_pages_unusable() {
    for act in [Act::KillBefore, Act::KillAfter] {
        let group = doomed(Op::CommitUnmap, act);
        assert_mapped(&group.mapper.map(&[page(1), page(2)]));
        assert_eq!(group.mapper.unmap(&[page(1)]), [page(1)], "the pool must not use the page again");
        assert_eq!(group.local.mapped(), [page(2)]);
    }
}

#[test]
fn a_rank_killed_in_an_abort_makes_the_pages_unusable() {
    for act in [Act::KillBefore, Act::KillAfter] {
        let group = doomed(Op::AbortMap, act);
        group.local.set_map_fault(Some(MapFault::NoMemory));
        let (rank, _, stuck) = rank_failure(group.mapper.map(&[page(1)]));
        assert_eq!((rank, stuck), (1, vec![page(1)]));
        assert_eq!(group.local.mapped(), []);
    }
}

#[test]
fn a_rank_killed_while_idle_loses_no_pages() {
    let directory = scratch_directory();
    let path = directory.path().join("r1");
    let mut rank = children::spawn(Role::Rank, &path);
    let local = Arc::new(FakeMapper::new());
    let mapper = leader(Some(&local), vec![peer(1, path.clone())]);
    assert_mapped(&mapper.map(&[page(1)]));
    rank.kill();
    let (rank, reason, stuck) = rank_failure(mapper.map(&[page(2)]));
    assert_eq!((rank, stuck), (1, Vec::new()), "{reason}");
    assert_eq!(local.mapped(), [page(1)]);
}

#[test]
fn a_rank_that_was_started_anew_is_not_taken_for_the_old_one() {
    let directory = scratch_directory();
    let path = directory.path().join("r1");
    let mut rank = children::spawn(Role::Rank, &path);
    let mapper = leader(Some(&Arc::new(FakeMapper::new())), vec![peer(1, path.clone())]);
    assert_mapped(&mapper.map(&[page(1)]));
    rank.kill();
    let mut another = children::spawn(Role::Rank, &path);
    wait_until("the leader meets the new rank", || {
        let (rank, reason, stuck) = rank_failure(mapper.map(&[page(2)]));
        assert_eq!((rank, stuck), (1, Vec::new()));
        reason.contains("started anew")
    });
    another.kill();
}

#[test]
fn a_stopped_rank_fails_the_map_at_the_deadline_and_undoes_it_when_it_goes_on() {
    let directory = scratch_directory();
    let path = directory.path().join("r1");
    let rank = children::spawn(Role::Rank, &path);
    let local = Arc::new(FakeMapper::new());
    wait_until("the rank listens", || Packets::try_connect(&path).is_some());
    let mapper = try_leader(Some(&local), vec![peer(1, path.clone())], Duration::from_secs(2)).unwrap();
    assert_mapped(&mapper.map(&[page(1)]));
    rank.stop();
    let started = Instant::now();
    let (failed, reason, stuck) = rank_failure(mapper.map(&[page(2), page(3)]));
    assert_eq!((failed, stuck), (1, vec![page(2), page(3)]), "{reason}");
    assert!(started.elapsed() >= Duration::from_secs(2), "it could have answered still");
    assert!(started.elapsed() < Duration::from_secs(20), "the deadline passed unnoticed");
    assert_eq!(local.mapped(), [page(1)]);
    rank.go_on();
    // The pool would never use these pages again; that they can be mapped shows that the rank undid them.
    wait_until("the rank is back", || matches!(mapper.map(&[page(2), page(3)]), MapOutcome::Mapped));
    assert_eq!(local.mapped(), [page(1), page(2), page(3)]);
}

#[test]
fn a_leader_killed_in_a_transaction_leaves_each_rank_with_all_of_it_or_nothing() {
    let in_question = [page(1), page(2)];
    for op in [Op::PrepareMap, Op::CommitMap, Op::PrepareUnmap, Op::CommitUnmap] {
        for act in [Act::KillBefore, Act::KillAfter] {
            let directory = scratch_directory();
            let path = |name: &str| directory.path().join(name);
            let ranks: Vec<Arc<FakeMapper>> = (0..2).map(|_| Arc::new(FakeMapper::new())).collect();
            let workers = [worker(0, 2, path("leader0"), &ranks[0]), worker(1, 2, path("back"), &ranks[1])];
            let child: Arc<Mutex<Option<ChildProcess>>> = Arc::default();
            let victim = Arc::clone(&child);
            let is_dead = Arc::new(AtomicBool::new(false));
            let told = Arc::clone(&is_dead);
            let decide = move |request: &Request| {
                if request.op() == op { act } else { Act::Forward }
            };
            let kill = move || {
                wait_until("the leader has a handle", || victim.lock().is_some());
                victim.lock().as_mut().unwrap().kill();
                told.store(true, Ordering::SeqCst);
            };
            let proxy = Proxy::start(&path("leader1"), &path("back"), decide, kill);
            *child.lock() = Some(children::spawn(Role::Leader, &path("leader")));
            wait_until("the leader is dead", || is_dead.load(Ordering::SeqCst));
            // What is prepared is undone; what a rank has committed, or was asked to unmap and was not told
            // to, stays.
            let settled: &[_] = match (op, act) {
                (Op::PrepareMap, _)
                | (Op::CommitMap, Act::KillBefore)
                | (Op::CommitUnmap, Act::KillAfter) => &[],
                _ => &in_question,
            };
            wait_until("rank 1 has settled", || ranks[1].mapped() == settled);
            drop(proxy);
            let peers = vec![peer(0, path("leader0")), peer(1, path("back"))];
            let next = leader(None, peers);
            for rank in &ranks {
                assert_eq!(rank.mapped(), [], "a new leader begins with nothing: {op:?} {act:?}");
            }
            assert_mapped(&next.map(&in_question));
            drop(next);
            drop(workers);
        }
    }
}
