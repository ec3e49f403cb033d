use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use proptest::prelude::*;
use proptest::sample::Index;

use super::fake::{FakeMapper, Fault, fake_pages};
use super::*;
use crate::geometry::{PageId, UNIT_BYTES};

fn take(pages: &PageAllocator, n_pages: u32) -> Vec<PageId> {
    let mut taken = Vec::new();
    assert_eq!(pages.alloc(n_pages, &mut taken).unwrap(), PagesOutcome::Allocated);
    assert_eq!(taken.len(), n_pages as usize);
    taken
}

fn refused(pages: &PageAllocator, n_pages: u32) -> Shortage {
    let mut taken = Vec::new();
    let outcome = pages.alloc(n_pages, &mut taken).unwrap();
    assert!(taken.is_empty(), "all or nothing");
    match outcome {
        PagesOutcome::NoMemory(shortage) => shortage,
        PagesOutcome::Allocated => panic!("{n_pages} pages were handed out"),
    }
}

fn plain(capacity_pages: u32) -> (PageAllocator, Arc<FakeMapper>, Arc<FixedGrants>) {
    fake_pages(capacity_pages, PageSettings::default()).unwrap()
}

fn these(pages: &[u32]) -> Vec<PageId> {
    pages.iter().copied().map(PageId).collect()
}

#[test]
fn pages_that_are_named_are_taken_all_or_none() {
    let (pages, mapper, grants) = plain(16);
    assert_eq!(pages.alloc_these(&these(&[3, 9, 15])).unwrap(), PagesOutcome::Allocated);
    assert!([3, 9, 15].iter().all(|&page| mapper.is_mapped(PageId(page))));
    pages.free(&these(&[9])).unwrap();
    // A parked page among them, and one that is not mapped.
    assert_eq!(pages.alloc_these(&these(&[9, 0])).unwrap(), PagesOutcome::Allocated);
    grants.set_limit_bytes(5 * UNIT_BYTES);
    let outcome = pages.alloc_these(&these(&[1, 2])).unwrap();
    assert_eq!(outcome, PagesOutcome::NoMemory(Shortage::GroupLimit));
    assert_eq!((mapper.n_pages(), grants.held_bytes()), (4, 4 * UNIT_BYTES));
    assert_eq!(pages.counters().n_used, 4);
}

#[test]
fn a_named_page_that_is_used_twice_or_not_there_is_refused_and_nothing_changes() {
    let (pages, mapper, _) = plain(16);
    assert_eq!(pages.alloc_these(&these(&[4, 5])).unwrap(), PagesOutcome::Allocated);
    pages.free(&these(&[5])).unwrap();
    let before = pages.counters();
    for wrong in [[5, 4], [6, 6], [5, 16], [7, u32::MAX]] {
        assert!(pages.alloc_these(&these(&wrong)).is_err(), "{wrong:?}");
        let after = pages.counters();
        assert_eq!((after.n_used, after.n_parked), (before.n_used, before.n_parked), "{wrong:?}");
    }
    assert_eq!(mapper.n_pages(), 2);
}

#[test]
fn parked_pages_make_room_for_pages_that_are_named() {
    let (pages, mapper, grants) = plain(16);
    grants.set_limit_bytes(3 * UNIT_BYTES);
    assert_eq!(pages.alloc_these(&these(&[0, 1, 2])).unwrap(), PagesOutcome::Allocated);
    pages.free(&these(&[1, 2])).unwrap();
    assert_eq!(pages.alloc_these(&these(&[8, 9])).unwrap(), PagesOutcome::Allocated);
    assert!(!mapper.is_mapped(PageId(1)) && !mapper.is_mapped(PageId(2)));
    assert_eq!(grants.held_bytes(), 3 * UNIT_BYTES);
}

#[test]
fn named_pages_that_cannot_be_mapped_are_given_up_and_parked_ones_stay_parked() {
    let (pages, mapper, grants) = plain(16);
    assert_eq!(pages.alloc_these(&these(&[0])).unwrap(), PagesOutcome::Allocated);
    pages.free(&these(&[0])).unwrap();
    mapper.order(&[Fault::Fail { has_stuck: false }]);
    assert!(pages.alloc_these(&these(&[0, 1])).is_err());
    assert_eq!((pages.counters().n_parked, grants.held_bytes()), (1, UNIT_BYTES));
    assert_eq!(pages.alloc_these(&these(&[0, 1])).unwrap(), PagesOutcome::Allocated);
}

#[test]
fn named_pages_that_come_back_together_are_mapped_by_extents() {
    let (pages, mapper, grants) = plain(64);
    assert_eq!(pages.alloc_these(&these(&[12])).unwrap(), PagesOutcome::Allocated);
    pages.free(&these(&[12])).unwrap();
    // Of 3 to 29: 3, 4 to 7, 8 to 11, the parked 12, 13, 14 and 15, 16 to 23, 24 to 27, 28.
    let run: Vec<PageId> = (3..29).map(PageId).collect();
    let n_before = pages.counters().n_map_calls;
    assert_eq!(pages.alloc_in_extents(&run, 8).unwrap(), PagesOutcome::Allocated);
    assert_eq!(pages.counters().n_map_calls - n_before, 8);
    assert_eq!((pages.counters().n_used, mapper.n_pages(), grants.held_bytes()), (26, 26, 26 * UNIT_BYTES));
    // A used one among them refuses all, and nothing changes.
    assert!(pages.alloc_in_extents(&these(&[32, 33, 28]), 8).is_err());
    assert_eq!((pages.counters().n_used, mapper.n_pages()), (26, 26));
    // An extent goes when all of it is parked.
    let (some, rest) = run.split_at(20);
    pages.free(some).unwrap();
    pages.trim_all();
    assert!(mapper.is_mapped(PageId(22)) && !mapper.is_mapped(PageId(15)), "23 is of the extent of 16 to 23");
    pages.free(rest).unwrap();
    pages.trim_all();
    assert_eq!((mapper.n_pages(), grants.held_bytes()), (0, 0));
}

#[test]
fn shrinking_then_growing_past_the_start_never_hands_out_an_id_twice() {
    let (pages, ..) = plain(100);
    pages.resize(90);
    pages.resize(110);
    let taken = take(&pages, 100);
    assert_eq!(taken.iter().collect::<BTreeSet<_>>().len(), 100);
    assert_eq!(refused(&pages, 1), Shortage::DeviceFull);
}

#[test]
fn growing_never_passes_the_reservation() {
    let (pages, _, grants) = plain(100);
    grants.set_limit_bytes(1_000 * UNIT_BYTES);
    pages.resize(u32::MAX);
    assert_eq!(pages.counters().limit_pages, 100);
    assert_eq!(pages.available_pages(), 100);
    assert!(take(&pages, 100).iter().all(|page| page.0 < 100));
    refused(&pages, 1);
}

#[test]
fn a_limit_of_zero_is_obeyed() {
    let (pages, mapper, grants) = plain(16);
    let taken = take(&pages, 16);
    pages.free(&taken).unwrap();
    assert_eq!(mapper.n_pages(), 16);
    pages.resize(0);
    assert_eq!((mapper.n_pages(), grants.held_bytes(), pages.available_pages()), (0, 0, 0));
    assert_eq!(refused(&pages, 1), Shortage::GroupLimit);
}

#[test]
fn a_limit_below_use_is_reached_as_pages_are_freed() {
    let (pages, mapper, _) = plain(16);
    let taken: Vec<PageId> = (0..8).flat_map(|_| take(&pages, 1)).collect();
    pages.resize(3);
    assert_eq!(mapper.n_pages(), 8, "what is used stays");
    for (n_freed, page) in (1..).zip(&taken) {
        pages.free(&[*page]).unwrap();
        assert_eq!(mapper.n_pages(), (8 - n_freed).max(3));
        assert_eq!(pages.available_pages(), n_freed.saturating_sub(5));
    }
}

#[test]
fn restoring_the_limit_lets_it_grow_again() {
    let (pages, ..) = plain(64);
    let taken = take(&pages, 64);
    pages.free(&taken).unwrap();
    pages.resize(1);
    refused(&pages, 2);
    pages.resize(64);
    take(&pages, 64);
}

#[test]
fn a_failed_unmap_quarantines_only_its_pages_and_resize_still_works() {
    let (pages, mapper, grants) = plain(64);
    let single_pages: Vec<PageId> = (0..4).flat_map(|_| take(&pages, 1)).collect();
    pages.free(&single_pages).unwrap();
    mapper.order(&[Fault::Fail { has_stuck: true }]);
    assert_eq!(pages.trim_all(), 3);
    assert_eq!(pages.counters().n_quarantined, 1);
    assert_eq!(grants.held_bytes(), UNIT_BYTES, "the grant of a page that is still mapped is kept");
    pages.resize(10);
    let taken = take(&pages, 9);
    refused(&pages, 1);
    pages.free(&taken).unwrap();
    pages.resize(64);
    let taken = take(&pages, 63);
    assert!(taken.iter().all(|page| mapper.is_mapped(*page)));
}

#[test]
fn a_map_that_fails_takes_nothing_and_keeps_only_the_grant_of_what_is_stuck() {
    let (pages, mapper, grants) = plain(64);
    let parked = take(&pages, 2);
    pages.free(&parked).unwrap();
    let before = pages.counters();
    mapper.order(&[Fault::NoMemory]);
    assert_eq!(refused(&pages, 8), Shortage::DeviceFull);
    assert_eq!((pages.counters().n_parked, grants.held_bytes()), (before.n_parked, 2 * UNIT_BYTES));
    mapper.order(&[Fault::Fail { has_stuck: true }]);
    let mut taken = Vec::new();
    assert!(pages.alloc(8, &mut taken).is_err());
    assert!(taken.is_empty());
    let counters = pages.counters();
    assert_eq!((counters.n_parked, counters.n_used, counters.n_quarantined), (2, 0, 4));
    assert_eq!(grants.held_bytes(), 6 * UNIT_BYTES);
    take(&pages, 60);
}

#[test]
fn steady_state_maps_and_unmaps_nothing() {
    let (pages, ..) = plain(64);
    let taken = take(&pages, 20);
    pages.free(&taken).unwrap();
    let before = pages.counters();
    for n_pages in 1..=20 {
        let taken = take(&pages, n_pages);
        pages.free(&taken).unwrap();
    }
    let after = pages.counters();
    assert_eq!((after.n_map_calls, after.n_unmap_calls), (before.n_map_calls, before.n_unmap_calls));
}

#[test]
fn growth_uses_the_largest_extents_that_fit() {
    let (pages, mapper, _) = plain(256);
    take(&pages, 64 + 32 + 4 + 1);
    assert_eq!(mapper.n_extents(), 5, "three of 32, one of 4 and one of 1");
    assert_eq!(pages.counters().n_map_calls, 1);
}

#[test]
fn pages_beside_used_ones_are_handed_out_first_so_that_whole_extents_can_go() {
    let (pages, mapper, _) = plain(64);
    let low = take(&pages, 32);
    let high = take(&pages, 32);
    pages.free(&low).unwrap();
    pages.free(&high[1..]).unwrap();
    assert_eq!(take(&pages, 31), high[1..]);
    assert_eq!(pages.trim_all(), 32);
    assert!(!mapper.is_mapped(low[0]) && mapper.is_mapped(high[0]));
}

#[test]
fn trim_unmaps_no_more_than_it_must() {
    let (pages, mapper, _) = plain(128);
    let taken: Vec<PageId> = [32, 8, 1].iter().flat_map(|&n_pages| take(&pages, n_pages)).collect();
    pages.free(&taken).unwrap();
    assert_eq!(pages.trim(9), 9);
    assert_eq!(mapper.n_pages(), 32);
    assert_eq!(pages.trim(5), 32, "the smallest extent that is left");
}

#[test]
fn freeing_twice_or_what_was_never_taken_is_refused_and_changes_nothing() {
    let (pages, ..) = plain(8);
    let taken = take(&pages, 4);
    let before = pages.counters();
    for wrong in [
        vec![taken[0], taken[1], taken[0]],
        vec![taken[2], PageId(7)],
        vec![PageId(8)],
        vec![taken[3], PageId(u32::MAX)],
    ] {
        let error = pages.free(&wrong).unwrap_err().to_string();
        assert!(error.contains("page"), "{error}");
        assert_eq!(pages.counters().n_used, before.n_used, "{wrong:?}");
        assert_eq!(pages.counters().n_parked, before.n_parked, "{wrong:?}");
    }
    pages.free(&taken).unwrap();
    assert!(pages.free(&taken[..1]).is_err());
}

#[test]
fn preparing_parks_up_to_the_low_watermark_and_never_passes_the_limit() {
    let settings = PageSettings { limit_pages: Some(6), low_watermark_pages: 4, high_watermark_pages: 8 };
    let (pages, _, grants) = fake_pages(64, settings).unwrap();
    assert_eq!(pages.prepare().unwrap(), PagesOutcome::Allocated);
    assert_eq!(pages.counters().n_parked, 4);
    take(&pages, 4);
    assert_eq!(pages.prepare().unwrap(), PagesOutcome::Allocated);
    assert_eq!(pages.counters().n_parked, 2);
    assert_eq!(pages.prepare().unwrap(), PagesOutcome::NoMemory(Shortage::GroupLimit));
    assert_eq!(grants.usage(), Usage { used_bytes: 4 * UNIT_BYTES, parked_bytes: 2 * UNIT_BYTES });
}

#[test]
fn a_thread_that_finds_too_little_while_another_unmaps_waits_for_it() {
    let (pages, mapper, _) = plain(8);
    let taken = take(&pages, 8);
    pages.free(&taken).unwrap();
    mapper.close_gate();
    thread::scope(|scope| {
        scope.spawn(|| pages.trim_all());
        mapper.wait_at_gate();
        let taker = scope.spawn(|| take(&pages, 8));
        mapper.open_gate();
        assert_eq!(taker.join().unwrap().len(), 8);
    });
}

#[test]
fn parked_pages_are_served_while_another_thread_maps() {
    let (pages, mapper, _) = plain(64);
    let held = take(&pages, 40);
    mapper.close_gate();
    thread::scope(|scope| {
        let grower = scope.spawn(|| take(&pages, 16));
        mapper.wait_at_gate();
        pages.free(&held).unwrap();
        assert_eq!(take(&pages, 40).len(), 40);
        mapper.open_gate();
        assert_eq!(grower.join().unwrap().len(), 16);
    });
}

#[test]
fn dropping_the_allocator_unmaps_and_gives_everything_back() {
    let (pages, mapper, grants) = plain(64);
    take(&pages, 33);
    drop(pages);
    assert_eq!((mapper.n_pages(), grants.held_bytes(), grants.usage()), (0, 0, Usage::default()));
}

#[test]
fn threads_never_hold_one_page_twice_and_lose_none() {
    const N_PAGES: u32 = 96;
    let (pages, mapper, grants) = plain(N_PAGES);
    let owners: Vec<AtomicBool> = (0..N_PAGES).map(|_| AtomicBool::new(false)).collect();
    let n_running = AtomicU32::new(4);
    thread::scope(|scope| {
        for seed in 1..=4_u32 {
            let (pages, owners, n_running) = (&pages, &owners, &n_running);
            scope.spawn(move || {
                let mut random = seed;
                let mut held: Vec<PageId> = Vec::new();
                for _ in 0..3_000 {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let n_pages = random >> 16 & 15;
                    let n_before = held.len();
                    if random >> 24 & 1 == 0 {
                        let _ = pages.alloc(n_pages, &mut held).unwrap();
                        for page in &held[n_before..] {
                            assert!(!owners[page.0 as usize].swap(true, Ordering::SeqCst), "{page} twice");
                        }
                    } else {
                        let given_back = held.split_off(n_before.saturating_sub(n_pages as usize));
                        for page in &given_back {
                            assert!(owners[page.0 as usize].swap(false, Ordering::SeqCst));
                        }
                        pages.free(&given_back).unwrap();
                    }
                }
                for page in &held {
                    owners[page.0 as usize].store(false, Ordering::SeqCst);
                }
                pages.free(&held).unwrap();
                n_running.fetch_sub(1, Ordering::SeqCst);
            });
        }
        scope.spawn(|| {
            for turn in 0.. {
                if n_running.load(Ordering::SeqCst) == 0 {
                    break;
                }
                pages.trim(turn % 7);
                pages.resize([N_PAGES, 40, 0, N_PAGES][turn as usize % 4]);
                let _ = pages.prepare().unwrap();
                thread::yield_now();
            }
        });
    });
    pages.resize(N_PAGES);
    assert_eq!(pages.counters().n_used, 0);
    assert_eq!(take(&pages, N_PAGES).len(), N_PAGES as usize);
    drop(pages);
    assert_eq!((mapper.n_pages(), grants.held_bytes()), (0, 0));
}

#[derive(Debug, Clone)]
enum Step {
    Alloc(u32),
    Free(Vec<Index>),
    FreeWrong(Index),
    Trim(u32),
    Resize(u32),
    Budget(u32),
    Prepare,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0_u32..70).prop_map(Step::Alloc),
        4 => prop::collection::vec(any::<Index>(), 0..60).prop_map(Step::Free),
        1 => any::<Index>().prop_map(Step::FreeWrong),
        1 => (0_u32..80).prop_map(Step::Trim),
        1 => (0_u32..160).prop_map(Step::Resize),
        1 => (0_u32..160).prop_map(Step::Budget),
        1 => Just(Step::Prepare),
    ]
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        12 => Just(Fault::None),
        1 => Just(Fault::NoMemory),
        1 => any::<bool>().prop_map(|has_stuck| Fault::Fail { has_stuck }),
    ]
}

proptest! {
    #[test]
    fn pages_agree_with_a_set_of_ids_whatever_fails(
        capacity_pages in 1_u32..150,
        steps in prop::collection::vec((step(), fault()), 1..60),
    ) {
        let settings = PageSettings { low_watermark_pages: 3, high_watermark_pages: 9, ..PageSettings::default() };
        let (pages, mapper, grants) = fake_pages(capacity_pages, settings).unwrap();
        let mut used: BTreeSet<PageId> = BTreeSet::new();
        let mut limit_pages = capacity_pages;
        for (step, fault) in steps {
            mapper.order(&[fault]);
            let n_available = pages.available_pages();
            let before = pages.counters();
            match step {
                Step::Alloc(n_pages) => {
                    let mut taken = Vec::new();
                    let outcome = pages.alloc(n_pages, &mut taken);
                    if fault == Fault::None {
                        let is_allocated = matches!(outcome, Ok(PagesOutcome::Allocated));
                        prop_assert_eq!(is_allocated, n_pages <= n_available, "{:?}", outcome);
                    }
                    if let Ok(PagesOutcome::Allocated) = outcome {
                        prop_assert_eq!(taken.len(), n_pages as usize);
                    } else {
                        prop_assert!(taken.is_empty());
                    }
                    for page in taken {
                        prop_assert!(page.0 < capacity_pages && mapper.is_mapped(page));
                        prop_assert!(used.insert(page), "{} twice", page);
                    }
                    prop_assert!(used.len() as u32 <= limit_pages.max(before.n_used));
                }
                Step::Free(which) => {
                    let mut freed = Vec::new();
                    for index in which {
                        if !used.is_empty() {
                            let page = *used.iter().nth(index.index(used.len())).unwrap();
                            used.remove(&page);
                            freed.push(page);
                        }
                    }
                    pages.free(&freed).unwrap();
                }
                Step::FreeWrong(index) => {
                    let wrong = PageId(index.index(2 * capacity_pages as usize) as u32);
                    let mut batch: Vec<PageId> = used.iter().copied().collect();
                    batch.push(wrong);
                    prop_assert!(pages.free(&batch).is_err());
                    prop_assert_eq!(pages.counters().n_parked, before.n_parked);
                }
                Step::Trim(n_pages) => {
                    pages.trim(n_pages);
                }
                Step::Resize(limit) => {
                    limit_pages = limit.min(capacity_pages);
                    pages.resize(limit);
                }
                Step::Budget(n_pages) => grants.set_limit_bytes(u64::from(n_pages) * UNIT_BYTES),
                Step::Prepare => {
                    let _ = pages.prepare();
                    prop_assert!(pages.counters().n_parked <= before.n_parked.max(3));
                }
            }
            let counters = pages.counters();
            let n_held = counters.n_used + counters.n_parked + counters.n_quarantined;
            prop_assert_eq!(counters.n_used as usize, used.len());
            prop_assert_eq!(counters.n_in_transition, 0);
            prop_assert_eq!(counters.n_unmapped + n_held, capacity_pages);
            prop_assert_eq!(mapper.n_pages(), n_held);
            prop_assert_eq!(grants.held_bytes(), u64::from(n_held) * UNIT_BYTES);
            prop_assert!(used.iter().all(|&page| mapper.is_mapped(page)));
            if n_held > limit_pages {
                mapper.order(&[]);
                prop_assert_eq!(pages.trim(1), 0, "more is held than the limit, and could go");
            }
        }
        mapper.order(&[]);
        pages.free(&used.into_iter().collect::<Vec<_>>()).unwrap();
        pages.trim_all();
        let counters = pages.counters();
        prop_assert_eq!((counters.n_used, counters.n_parked), (0, 0));
        grants.set_limit_bytes(u64::MAX);
        pages.resize(capacity_pages);
        prop_assert_eq!(take(&pages, capacity_pages - counters.n_quarantined).len() as u32 + counters.n_quarantined, capacity_pages);
        drop(pages);
        prop_assert_eq!(grants.held_bytes(), u64::from(counters.n_quarantined) * UNIT_BYTES);
    }
}
