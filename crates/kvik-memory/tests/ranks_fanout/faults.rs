//! Ranks that fail, and connections that break, while all processes live.

use std::sync::Arc;
use std::time::Duration;

use kvik_memory::pages::{MapOutcome, PageMapper};
use kvik_memory::ranks::frame::{MAX_FRAME_EXTENTS, Op, Request};
use kvik_memory::ranks::{RankMapper, RankWorker};
use kvik_memory::{Extent, Geometry, MemoryError};

use crate::proxy::{Act, Proxy};
use crate::support::{
    FakeMapper, MapFault, assert_mapped, leader, page, peer, rank_failure, scratch_directory, try_leader,
    worker,
};

/// A leader with rank 0 in its process and ranks 1 and 2 behind sockets.
struct Group {
    mapper: RankMapper,
    ranks: Vec<Arc<FakeMapper>>,
    _workers: Vec<RankWorker>,
    _directory: tempfile::TempDir,
}

fn group() -> Group {
    let directory = scratch_directory();
    let ranks: Vec<Arc<FakeMapper>> = (0..3).map(|_| Arc::new(FakeMapper::new())).collect();
    let path = |rank: u32| directory.path().join(format!("r{rank}"));
    let workers = (1..3).map(|rank| worker(rank, 3, path(rank), &ranks[rank as usize])).collect();
    let mapper = leader(Some(&ranks[0]), (1..3).map(|rank| peer(rank, path(rank))).collect());
    Group { mapper, ranks, _workers: workers, _directory: directory }
}

impl Group {
    fn assert_all_have(&self, extents: &[Extent]) {
        for (rank, mapper) in self.ranks.iter().enumerate() {
            assert_eq!(mapper.mapped(), extents, "rank {rank}");
        }
    }
}

#[test]
fn a_rank_without_memory_undoes_the_map_everywhere_as_a_value() {
    let group = group();
    assert_mapped(&group.mapper.map(&[page(7)]));
    for rank in 0..3 {
        group.ranks[rank].set_map_fault(Some(MapFault::NoMemory));
        assert!(matches!(group.mapper.map(&[page(1), page(2)]), MapOutcome::NoMemory), "rank {rank}");
        group.ranks[rank].set_map_fault(None);
        group.assert_all_have(&[page(7)]);
    }
}

#[test]
fn a_rank_that_fails_is_named_with_its_reason() {
    let group = group();
    for rank in 0..3 {
        group.ranks[rank].set_map_fault(Some(MapFault::Failed));
        let (failed, reason, stuck) = rank_failure(group.mapper.map(&[page(1), page(2)]));
        assert_eq!((failed as usize, stuck), (rank, Vec::new()));
        assert!(reason.contains("fakeMap failed: told to fail"), "{reason}");
        group.ranks[rank].set_map_fault(None);
        group.assert_all_have(&[]);
    }
}

#[test]
fn a_failure_outweighs_a_lack_of_memory() {
    let group = group();
    group.ranks[0].set_map_fault(Some(MapFault::NoMemory));
    group.ranks[2].set_map_fault(Some(MapFault::Failed));
    assert_eq!(rank_failure(group.mapper.map(&[page(1)])).0, 2);
    group.assert_all_have(&[]);
}

#[test]
fn only_what_a_rank_could_not_undo_is_stuck() {
    let group = group();
    group.ranks[1].set_stubborn(&[page(2)]);
    group.ranks[2].set_map_fault(Some(MapFault::NoMemory));
    let (rank, _, stuck) = rank_failure(group.mapper.map(&[page(1), page(2), page(3)]));
    assert_eq!((rank, stuck), (1, vec![page(2)]));
    assert_eq!(group.ranks[1].mapped(), [page(2)]);
    group.ranks[2].set_map_fault(Some(MapFault::FailedStuck));
    let (rank, _, stuck) = rank_failure(group.mapper.map(&[page(4), page(5)]));
    assert_eq!((rank, stuck), (2, vec![page(4)]));
}

#[test]
fn an_extent_that_stays_on_one_rank_is_returned_and_the_rest_is_unmapped() {
    let group = group();
    let extents = [page(1), page(2), page(3)];
    assert_mapped(&group.mapper.map(&extents));
    group.ranks[1].set_stubborn(&[page(1)]);
    group.ranks[2].set_stubborn(&[page(3)]);
    assert_eq!(group.mapper.unmap(&extents), [page(1), page(3)]);
    assert_eq!(group.ranks[0].mapped(), []);
    assert_eq!(group.ranks[1].mapped(), [page(1)]);
    assert_eq!(group.ranks[2].mapped(), [page(3)]);
}

#[test]
fn a_transaction_larger_than_a_frame_is_one_transaction() {
    let group = group();
    let extents: Vec<Extent> = (0..2 * MAX_FRAME_EXTENTS as u32 + 10).map(page).collect();
    assert_mapped(&group.mapper.map(&extents));
    assert_eq!(group.ranks[1].n_maps(), 3);
    group.assert_all_have(&extents);
    assert!(group.mapper.unmap(&extents).is_empty());
    group.assert_all_have(&[]);
    // The third part of the second try.
    group.ranks[2].set_map_fault(Some(MapFault::NoMemoryFromCall(6)));
    assert!(matches!(group.mapper.map(&extents), MapOutcome::NoMemory));
    group.assert_all_have(&[]);
}

#[test]
fn more_stuck_extents_than_a_reply_holds_are_all_of_them() {
    let group = group();
    let extents: Vec<Extent> = (0..MAX_FRAME_EXTENTS as u32 + 10).map(page).collect();
    assert_mapped(&group.mapper.map(&extents));
    group.ranks[1].set_stubborn(&extents[..=MAX_FRAME_EXTENTS]);
    assert_eq!(group.mapper.unmap(&extents), extents);
}

#[test]
fn a_panicking_rank_fails_the_map_at_once() {
    let group = group();
    group.ranks[2].set_map_fault(Some(MapFault::Panic));
    let (rank, _, stuck) = rank_failure(group.mapper.map(&[page(1)]));
    assert_eq!((rank, stuck), (2, vec![page(1)]));
    assert_eq!(group.ranks[0].mapped(), []);
    assert_eq!(group.ranks[1].mapped(), []);
}

#[test]
fn extents_that_no_region_has_are_refused_before_any_rank_is_asked() {
    let group = group();
    let odd = Extent { n_pages: 3, ..page(0) };
    let outcome = group.mapper.map(&[odd]);
    assert!(matches!(outcome, MapOutcome::Failed { error: MemoryError::Invalid { .. }, .. }), "{outcome:?}");
    assert_eq!(group.mapper.unmap(&[odd]), [odd]);
    assert_eq!(group.mapper.unmap(&[page(1)]), [page(1)], "it is not mapped");
    let beyond = page(group.mapper.geometry().capacity_pages());
    assert_eq!(rank_failure(group.mapper.map(&[beyond])).2, []);
    assert_mapped(&group.mapper.map(&[]));
    assert!(group.mapper.unmap(&[]).is_empty());
    assert_mapped(&group.mapper.map(&[page(1)]));
}

#[test]
fn a_group_whose_ranks_do_not_add_up_is_refused() {
    let connect =
        |peers| try_leader(Some(&Arc::new(FakeMapper::new())), peers, Duration::from_millis(50)).unwrap_err();
    let invalid = |error: MemoryError| matches!(error, MemoryError::Invalid { .. });
    assert!(invalid(connect(vec![peer(2, "r2".into())])));
    assert!(invalid(connect(vec![peer(0, "r0".into())])));
    let mut other_pages = peer(1, "r1".into());
    other_pages.geometry = Geometry::try_new(4, 2 << 20, 17).unwrap();
    assert!(invalid(connect(vec![other_pages])));
    assert!(invalid(try_leader(None, Vec::new(), Duration::ZERO).unwrap_err()));
    let missing = connect(vec![peer(1, scratch_directory().path().join("r1"))]);
    assert!(matches!(missing, MemoryError::Rank { rank: 1, .. }), "{missing}");
}

#[test]
fn a_leader_waits_for_a_rank_that_starts_later() {
    let directory = scratch_directory();
    let path = directory.path().join("r0");
    let connecting = std::thread::spawn({
        let path = path.clone();
        move || assert_mapped(&leader(None, vec![peer(0, path)]).map(&[page(1)]))
    });
    let mapper = Arc::new(FakeMapper::new());
    let _worker = worker(0, 1, path, &mapper);
    connecting.join().unwrap();
}

/// Runs `use_it` with rank 1 behind a proxy that does `act` to the first `op` only.
fn with_one_incident(op: Op, act: Act, use_it: impl FnOnce(&RankMapper, &FakeMapper, &FakeMapper)) {
    let directory = scratch_directory();
    let (front, back) = (directory.path().join("front"), directory.path().join("back"));
    let remote = Arc::new(FakeMapper::new());
    let _worker = worker(1, 2, back.clone(), &remote);
    let mut is_over = false;
    let decide = move |request: &Request| {
        if request.op() != op || is_over {
            return Act::Forward;
        }
        is_over = true;
        act
    };
    let _proxy = Proxy::start(&front, &back, decide, || unreachable!("no rank dies here"));
    let local = Arc::new(FakeMapper::new());
    let mapper = leader(Some(&local), vec![peer(1, front)]);
    use_it(&mapper, &local, &remote);
}

#[test]
fn a_broken_connection_is_mended_and_the_transaction_goes_on() {
    for op in [Op::PrepareMap, Op::CommitMap, Op::PrepareUnmap, Op::CommitUnmap] {
        for act in [Act::BreakBefore, Act::BreakAfter, Act::Repeat] {
            with_one_incident(op, act, |mapper, local, remote| {
                assert_mapped(&mapper.map(&[page(1), page(2)]));
                assert_eq!(remote.mapped(), [page(1), page(2)], "{op:?} {act:?}");
                assert!(mapper.unmap(&[page(1)]).is_empty(), "{op:?} {act:?}");
                assert_eq!(
                    (local.mapped(), remote.mapped()),
                    (vec![page(2)], vec![page(2)]),
                    "{op:?} {act:?}"
                );
            });
        }
    }
}

#[test]
fn a_connection_that_breaks_in_an_abort_is_mended_and_nothing_is_stuck() {
    for act in [Act::BreakBefore, Act::BreakAfter, Act::Repeat] {
        with_one_incident(Op::AbortMap, act, |mapper, local, remote| {
            local.set_map_fault(Some(MapFault::NoMemory));
            assert!(matches!(mapper.map(&[page(1)]), MapOutcome::NoMemory), "{act:?}");
            assert_eq!(remote.mapped(), []);
        });
    }
}

#[test]
fn a_rank_that_answers_nonsense_is_dropped_and_undone_when_it_is_found_again() {
    for op in [Op::PrepareMap, Op::CommitMap] {
        with_one_incident(op, Act::Garble, |mapper, local, remote| {
            let (rank, _, stuck) = rank_failure(mapper.map(&[page(1)]));
            assert_eq!((rank, stuck), (1, vec![page(1)]), "{op:?}");
            assert_eq!(local.mapped(), []);
            assert_mapped(&mapper.map(&[page(2)]));
            assert_eq!(remote.mapped(), [page(2)], "{op:?}: the rank undid what was aborted on the others");
        });
    }
}
