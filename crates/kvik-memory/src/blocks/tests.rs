use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::MemoryError;
use crate::geometry::{BlockGeometry, BlockId, Geometry, UNIT_BYTES};
use crate::pages::fake::{FakeMapper, Fault, fake_pages};
use crate::pages::{FixedGrants, PageMapper, PageSettings, PagesOutcome};

fn fake_blocks(capacity_pages: u32, block_bytes: u64) -> (BlockAllocator, Arc<FakeMapper>, Arc<FixedGrants>) {
    let (pages, mapper, grants) = fake_pages(capacity_pages, PageSettings::default()).unwrap();
    let geometry = Geometry::try_new(1, UNIT_BYTES, capacity_pages).unwrap();
    let geometry = BlockGeometry::try_new(&geometry, block_bytes).unwrap();
    (BlockAllocator::try_new(Arc::new(pages), geometry).unwrap(), mapper, grants)
}

fn take(blocks: &BlockAllocator, n_blocks: u32) -> Vec<BlockId> {
    let mut taken = Vec::new();
    assert_eq!(blocks.alloc(n_blocks, &mut taken).unwrap(), BlocksOutcome::Allocated);
    assert_eq!(taken.len(), n_blocks as usize);
    taken
}

/// The page of a block where a page has `n` blocks.
fn page_of(block: BlockId, n: u32) -> u32 {
    block.0 / n
}

#[test]
fn the_null_block_is_never_handed_out_and_never_freed() {
    let (blocks, ..) = fake_blocks(2, UNIT_BYTES / 4);
    assert_eq!(blocks.reserve_null_block().unwrap(), BlocksOutcome::Allocated);
    assert_eq!(blocks.reserve_null_block().unwrap(), BlocksOutcome::Allocated);
    assert_eq!(blocks.available_blocks(), 7);
    let taken = take(&blocks, 7);
    assert!(!taken.contains(&BlockId(0)));
    assert!(blocks.free(&[taken[0], BlockId(0)]).is_err());
    assert!(blocks.free_after(&[BlockId(0)], Epoch(1)).is_err());
    assert_eq!(blocks.counters().n_used, 8);
    blocks.reset();
    assert_eq!(blocks.counters().n_used, 1);
    assert!(!take(&blocks, 7).contains(&BlockId(0)));
}

#[test]
fn the_null_block_cannot_come_after_others() {
    let (blocks, ..) = fake_blocks(2, UNIT_BYTES);
    take(&blocks, 1);
    assert!(matches!(blocks.reserve_null_block(), Err(MemoryError::Invalid { .. })));
    take(&blocks, 1);
}

#[test]
fn the_null_block_is_block_0_also_where_pages_were_prepared() {
    for n_prepared in [1, 4, 5] {
        let settings = PageSettings {
            low_watermark_pages: n_prepared,
            high_watermark_pages: n_prepared,
            ..PageSettings::default()
        };
        let (pages, mapper, _) = fake_pages(5, settings).unwrap();
        assert_eq!(pages.prepare().unwrap(), PagesOutcome::Allocated);
        let geometry = BlockGeometry::try_new(mapper.geometry(), UNIT_BYTES).unwrap();
        let blocks = BlockAllocator::try_new(Arc::new(pages), geometry).unwrap();
        assert_eq!(blocks.reserve_null_block().unwrap(), BlocksOutcome::Allocated);
        let taken = take(&blocks, 4);
        assert!(!taken.contains(&BlockId(0)));
    }
}

#[test]
fn the_null_block_without_memory_is_a_value() {
    let (blocks, _, grants) = fake_blocks(2, UNIT_BYTES);
    grants.set_limit_bytes(0);
    assert_eq!(blocks.reserve_null_block().unwrap(), BlocksOutcome::NoMemory(Shortage::GroupLimit));
}

#[test]
fn a_lone_block_goes_to_the_fullest_page_that_has_room() {
    let (blocks, ..) = fake_blocks(4, UNIT_BYTES / 8);
    let taken = take(&blocks, 24);
    blocks.free(&taken[0..5]).unwrap();
    blocks.free(&taken[8..10]).unwrap();
    blocks.free(&taken[16..19]).unwrap();
    let lone: Vec<u32> = (0..5).map(|_| page_of(take(&blocks, 1)[0], 8)).collect();
    assert_eq!(lone, [1, 1, 2, 2, 2]);
}

#[test]
fn a_batch_goes_to_the_smallest_page_that_holds_it_or_to_the_emptiest() {
    let (blocks, ..) = fake_blocks(4, UNIT_BYTES / 8);
    let taken = take(&blocks, 24);
    blocks.free(&taken[0..6]).unwrap();
    blocks.free(&taken[8..11]).unwrap();
    blocks.free(&taken[16..17]).unwrap();
    let pages = |n_blocks| -> Vec<u32> {
        take(&blocks, n_blocks).into_iter().map(|block| page_of(block, 8)).collect()
    };
    assert_eq!(pages(3), [1, 1, 1]);
    assert_eq!(pages(7), [0, 0, 0, 0, 0, 0, 2]);
    assert_eq!(blocks.counters().n_free, 0);
}

#[test]
fn a_lone_block_taken_and_freed_moves_no_page() {
    let (blocks, ..) = fake_blocks(4, UNIT_BYTES / 8);
    let taken = take(&blocks, 1);
    blocks.free(&taken).unwrap();
    let before = blocks.pages().counters();
    for _ in 0..100 {
        let taken = take(&blocks, 1);
        blocks.free(&taken).unwrap();
    }
    assert_eq!(blocks.pages().counters(), before);
    assert_eq!(blocks.counters().n_empty_pages, 1);
    blocks.release_empty_pages();
    assert_eq!(blocks.pages().counters().n_parked, 1);
}

#[test]
fn a_wrong_free_names_the_block_and_changes_nothing() {
    let (blocks, ..) = fake_blocks(4, 600_000);
    let taken = take(&blocks, 6);
    let limbo = taken[5];
    blocks.free_after(&[limbo], Epoch(9)).unwrap();
    let before = blocks.counters();
    let straddling = BlockId(3);
    let unheld = BlockId(12);
    for (batch, wrong, word) in [
        (vec![taken[0], taken[1], taken[0]], taken[0], "twice"),
        (vec![taken[0], limbo], limbo, "limbo"),
        (vec![taken[0], straddling], straddling, "no page"),
        (vec![taken[0], unheld], unheld, "free already"),
        (vec![taken[0], BlockId(u32::MAX)], BlockId(u32::MAX), "out of range"),
    ] {
        for outcome in [blocks.free(&batch), blocks.free_after(&batch, Epoch(9))] {
            let Err(MemoryError::NotAllocated { block, reason }) = outcome else {
                panic!("{batch:?} was taken: {outcome:?}");
            };
            assert_eq!(block, wrong);
            assert!(reason.contains(word), "{batch:?}: {reason}");
            assert_eq!(blocks.counters(), before);
        }
    }
    blocks.free(&taken[..5]).unwrap();
    assert!(blocks.free(&taken[..1]).is_err());
}

#[test]
fn blocks_in_limbo_keep_their_page_until_the_epoch_is_complete() {
    let (blocks, mapper, _) = fake_blocks(4, UNIT_BYTES / 2);
    let taken = take(&blocks, 8);
    blocks.free_after(&taken[..4], Epoch(5)).unwrap();
    blocks.free_after(&taken[4..], Epoch(3)).unwrap();
    blocks.trim();
    assert_eq!((mapper.n_pages(), blocks.available_blocks()), (4, 0));
    assert_eq!(blocks.advance(Epoch(4)), 0, "an epoch never overtakes one that was queued before it");
    assert_eq!(blocks.advance(Epoch(5)), 8);
    assert_eq!(blocks.advance(Epoch(1)), 0);
    assert_eq!(blocks.available_blocks(), 8);
    blocks.trim();
    assert_eq!(mapper.n_pages(), 0);
    let taken = take(&blocks, 1);
    blocks.free_after(&taken, Epoch(5)).unwrap();
    assert_eq!(blocks.counters().n_limbo, 0, "complete already");
}

#[test]
fn moving_few_blocks_is_reported_to_empty_pages() {
    let (blocks, ..) = fake_blocks(4, UNIT_BYTES / 8);
    assert_eq!(blocks.reserve_null_block().unwrap(), BlocksOutcome::Allocated);
    let taken = take(&blocks, 31);
    let on_page = |page: u32| taken.iter().copied().filter(move |block| page_of(*block, 8) == page);
    blocks.free(&on_page(1).skip(1).collect::<Vec<_>>()).unwrap();
    blocks.free(&on_page(2).skip(3).collect::<Vec<_>>()).unwrap();
    let pages = |max_moves| {
        let report = blocks.fragmentation(max_moves);
        (report.pages.iter().map(|page| page.0).collect::<Vec<_>>(), report.n_moves)
    };
    assert_eq!(pages(0), (vec![], 0));
    assert_eq!(pages(1), (vec![1], 1));
    assert_eq!(pages(100), (vec![1], 1), "page 2 would have nowhere to go");
}

#[test]
fn an_idle_engine_pins_no_more_than_its_blocks_need() {
    let (blocks, mapper, _) = fake_blocks(64, UNIT_BYTES / 16);
    let taken = take(&blocks, 1_024);
    blocks.free(&taken[16..]).unwrap();
    blocks.trim();
    assert_eq!(mapper.n_pages(), 32, "the extent of the page in use");
    assert_eq!(blocks.counters().n_pages, 1);
}

#[test]
fn a_batch_that_does_not_fit_takes_nothing_and_keeps_no_page() {
    let (blocks, mapper, _) = fake_blocks(4, UNIT_BYTES / 8);
    let mut taken = Vec::new();
    assert_eq!(blocks.alloc(33, &mut taken).unwrap(), BlocksOutcome::NoMemory(Shortage::DeviceFull));
    assert!(taken.is_empty());
    assert_eq!((mapper.n_pages(), blocks.counters()), (0, BlockCounters::default()));
    mapper.order(&[Fault::Fail { has_stuck: false }]);
    assert!(blocks.alloc(1, &mut taken).is_err());
    assert_eq!(take(&blocks, 32).len(), 32);
}

#[test]
fn threads_never_hold_one_block_twice_and_lose_none() {
    const N_BLOCKS: u32 = 128;
    let (blocks, mapper, grants) = fake_blocks(16, UNIT_BYTES / 8);
    let owners: Vec<AtomicBool> = (0..N_BLOCKS).map(|_| AtomicBool::new(false)).collect();
    thread::scope(|scope| {
        for seed in 1..=4_u32 {
            let (blocks, owners) = (&blocks, &owners);
            scope.spawn(move || {
                let mut random = seed;
                let mut held: Vec<BlockId> = Vec::new();
                for turn in 0..4_000_u64 {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let n_blocks = random >> 16 & 31;
                    let n_before = held.len();
                    if random >> 24 & 1 == 0 {
                        let _ = blocks.alloc(n_blocks, &mut held).unwrap();
                        for block in &held[n_before..] {
                            assert!(!owners[block.0 as usize].swap(true, Ordering::SeqCst), "{block} twice");
                        }
                    } else {
                        let given_back = held.split_off(n_before.saturating_sub(n_blocks as usize));
                        for block in &given_back {
                            assert!(owners[block.0 as usize].swap(false, Ordering::SeqCst));
                        }
                        match random >> 26 & 3 {
                            0 => blocks.free_after(&given_back, Epoch(turn)).unwrap(),
                            _ => blocks.free(&given_back).unwrap(),
                        }
                    }
                    match random >> 28 {
                        0 => drop(blocks.trim()),
                        1 => blocks.pages().resize(random >> 8 & 31),
                        2 => drop(blocks.advance(Epoch(turn))),
                        _ => {}
                    }
                }
                for block in &held {
                    owners[block.0 as usize].store(false, Ordering::SeqCst);
                }
                blocks.free(&held).unwrap();
            });
        }
    });
    blocks.advance(Epoch(u64::MAX));
    blocks.pages().resize(u32::MAX);
    assert_eq!(blocks.counters().n_used, 0);
    assert_eq!(blocks.available_blocks(), N_BLOCKS);
    assert_eq!(take(&blocks, N_BLOCKS).iter().collect::<BTreeSet<_>>().len(), N_BLOCKS as usize);
    drop(blocks);
    assert_eq!((mapper.n_pages(), grants.held_bytes()), (0, 0));
}

#[derive(Debug, Clone)]
enum Step {
    Alloc(u32),
    Free(Vec<Index>),
    FreeAfter(Vec<Index>, u64),
    Advance(u64),
    FreeWrong(Index),
    Trim,
    Resize(u32),
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (0_u32..60).prop_map(Step::Alloc),
        8 => prop::collection::vec(any::<Index>(), 0..60).prop_map(Step::Free),
        4 => (prop::collection::vec(any::<Index>(), 0..30), 0_u64..9).prop_map(|(which, epoch)| Step::FreeAfter(which, epoch)),
        3 => (0_u64..9).prop_map(Step::Advance),
        2 => any::<Index>().prop_map(Step::FreeWrong),
        2 => Just(Step::Trim),
        2 => (0_u32..20).prop_map(Step::Resize),
        1 => Just(Step::Reset),
    ]
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        12 => Just(Fault::None),
        1 => Just(Fault::NoMemory),
        1 => any::<bool>().prop_map(|has_stuck| Fault::Fail { has_stuck }),
    ]
}

fn draw(used: &mut BTreeSet<BlockId>, which: &[Index]) -> Vec<BlockId> {
    let mut drawn = Vec::new();
    for index in which {
        if !used.is_empty() {
            let block = *used.iter().nth(index.index(used.len())).unwrap();
            used.remove(&block);
            drawn.push(block);
        }
    }
    drawn
}

proptest! {
    #[test]
    fn blocks_agree_with_a_set_of_ids_whatever_fails(
        capacity_pages in 1_u32..20,
        block_bytes in prop_oneof![
            Just(UNIT_BYTES), Just(UNIT_BYTES / 8), Just(600_000), Just(700_001), Just(16 << 10), Just(20_480),
        ],
        has_null_block in any::<bool>(),
        steps in prop::collection::vec((step(), fault()), 1..60),
    ) {
        let (blocks, mapper, grants) = fake_blocks(capacity_pages, block_bytes);
        let page_of = |block: BlockId| u64::from(block.0) * block_bytes / UNIT_BYTES;
        if has_null_block {
            prop_assert_eq!(blocks.reserve_null_block().unwrap(), BlocksOutcome::Allocated);
        }
        let mut used: BTreeSet<BlockId> = BTreeSet::new();
        let mut limbo: BTreeMap<BlockId, u64> = BTreeMap::new();
        let mut completed = None;
        let mut last_epoch = 0;
        for (step, fault) in steps {
            mapper.order(&[fault]);
            let n_available = blocks.available_blocks();
            let before = blocks.counters();
            match step {
                Step::Alloc(n_blocks) => {
                    let mut taken = Vec::new();
                    let outcome = blocks.alloc(n_blocks, &mut taken);
                    let is_allocated = matches!(outcome, Ok(BlocksOutcome::Allocated));
                    if fault == Fault::None {
                        prop_assert_eq!(is_allocated, n_blocks <= n_available, "{:?}", outcome);
                    }
                    prop_assert_eq!(taken.len(), if is_allocated { n_blocks as usize } else { 0 });
                    for block in taken {
                        prop_assert!(!(has_null_block && block == BlockId(0)));
                        prop_assert!(!limbo.contains_key(&block), "{} is in limbo", block);
                        prop_assert!(used.insert(block), "{} twice", block);
                        let end_bytes = (u64::from(block.0) + 1) * block_bytes;
                        prop_assert!(end_bytes <= (page_of(block) + 1) * UNIT_BYTES, "{} straddles", block);
                    }
                }
                Step::Free(which) => {
                    let freed = draw(&mut used, &which);
                    blocks.free(&freed).unwrap();
                }
                Step::FreeAfter(which, epoch) => {
                    let freed = draw(&mut used, &which);
                    blocks.free_after(&freed, Epoch(epoch)).unwrap();
                    if !freed.is_empty() && completed.is_none_or(|completed| epoch > completed) {
                        last_epoch = if limbo.is_empty() { epoch } else { epoch.max(last_epoch) };
                        limbo.extend(freed.into_iter().map(|block| (block, last_epoch)));
                    }
                }
                Step::Advance(epoch) => {
                    blocks.advance(Epoch(epoch));
                    completed = completed.max(Some(epoch));
                    limbo.retain(|_, queued| Some(*queued) > completed);
                }
                Step::FreeWrong(index) => {
                    let wrong = BlockId(index.index(1 << 16) as u32);
                    if !used.contains(&wrong) {
                        let mut batch: Vec<BlockId> = used.iter().copied().collect();
                        batch.push(wrong);
                        prop_assert!(blocks.free(&batch).is_err());
                        prop_assert!(blocks.free_after(&batch, Epoch(100)).is_err());
                        prop_assert_eq!(blocks.counters(), before);
                    }
                }
                Step::Trim => {
                    blocks.trim();
                    prop_assert_eq!(blocks.counters().n_empty_pages, 0);
                }
                Step::Resize(limit_pages) => blocks.pages().resize(limit_pages),
                Step::Reset => {
                    blocks.reset();
                    used.clear();
                    limbo.clear();
                }
            }
            let counters = blocks.counters();
            prop_assert_eq!(counters.n_used as usize, used.len() + usize::from(has_null_block));
            prop_assert_eq!(counters.n_limbo as usize, limbo.len());
            prop_assert!(counters.n_empty_pages <= 1);
            let pages: BTreeSet<u64> = used.iter().chain(limbo.keys()).map(|&block| page_of(block))
                .chain(has_null_block.then_some(0)).collect();
            prop_assert_eq!(counters.n_pages as usize, pages.len() + counters.n_empty_pages as usize);
            prop_assert_eq!(blocks.pages().counters().n_used, counters.n_pages);
            for page in pages {
                prop_assert!(mapper.is_mapped(PageId(page as u32)));
            }
            prop_assert_eq!(grants.held_bytes(), u64::from(mapper.n_pages()) * UNIT_BYTES);
            let report = blocks.fragmentation(10);
            prop_assert!(report.n_moves <= 10 && report.n_moves <= counters.n_free);
        }
    }
}
