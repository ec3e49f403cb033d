use std::sync::atomic::AtomicU64;

use super::*;
use crate::geometry::UNIT_BYTES;
use crate::pages::FixedGrants;
use crate::pages::fake::{FakeMapper, Fault};

const N_PAGES: u32 = 64;

struct Setup {
    pool: KvPool,
    mapper: Arc<FakeMapper>,
    grants: Arc<FixedGrants>,
}

/// Two blocks a page, no preallocation, and nothing is trimmed by itself.
fn settings() -> PoolSettings {
    PoolSettings {
        is_preallocating: false,
        trim_after: Duration::from_hours(1),
        ..PoolSettings::new(UNIT_BYTES / 2)
    }
}

fn pages(n_pages: u32) -> u64 {
    u64::from(n_pages) * UNIT_BYTES
}

fn start(settings: PoolSettings) -> Setup {
    let mapper = FakeMapper::new(N_PAGES);
    let grants = Arc::new(FixedGrants::new(pages(N_PAGES)));
    let pool = KvPool::start(parts(&mapper, &grants), settings).unwrap();
    Setup { pool, mapper, grants }
}

fn parts(mapper: &Arc<FakeMapper>, grants: &Arc<FixedGrants>) -> PoolParts {
    PoolParts { mapper: mapper.clone(), grants: grants.clone(), events: grants.clone(), observer: None }
}

fn take(pool: &KvPool, n_blocks: u32) -> Vec<BlockId> {
    let mut taken = Vec::new();
    assert_eq!(pool.alloc(n_blocks, &mut taken).unwrap(), BlocksOutcome::Allocated);
    taken
}

fn is_refused(pool: &KvPool, n_blocks: u32) -> bool {
    let mut taken = Vec::new();
    let outcome = pool.alloc(n_blocks, &mut taken).unwrap();
    pool.free(&taken).unwrap();
    outcome != BlocksOutcome::Allocated
}

fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_true() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        thread::yield_now();
    }
}

#[test]
fn a_lone_idle_engine_shrinks_when_its_limit_falls() {
    let Setup { pool, grants, .. } = start(settings());
    let taken = take(&pool, 40);
    pool.free(&taken).unwrap();
    assert_eq!(grants.held_bytes(), pages(20));
    grants.set_limit_bytes(pages(4));
    eventually("shrinking to the limit", || grants.held_bytes() <= pages(4));
    assert!(is_refused(&pool, 9));
}

#[test]
fn limits_work_with_preallocation_off_and_on() {
    for is_preallocating in [false, true] {
        let Setup { pool, grants, .. } = start(PoolSettings { is_preallocating, ..settings() });
        let taken = take(&pool, 20);
        grants.set_limit_bytes(pages(2));
        pool.free(&taken).unwrap();
        eventually("shrinking to the limit", || grants.held_bytes() <= pages(2));
    }
}

#[test]
fn a_limit_of_zero_is_obeyed() {
    let Setup { pool, grants, mapper } = start(PoolSettings { is_preallocating: true, ..settings() });
    let taken = take(&pool, 3);
    pool.free(&taken).unwrap();
    grants.set_limit_bytes(0);
    eventually("giving everything back", || grants.held_bytes() == 0);
    eventually("unmapping everything", || mapper.n_pages() == 0);
    assert!(is_refused(&pool, 1));
    assert_eq!(pool.available_blocks(), 0);
}

#[test]
fn a_limit_below_use_is_reached_as_blocks_are_freed() {
    let Setup { pool, grants, .. } = start(settings());
    let taken: Vec<Vec<BlockId>> = (0..10).map(|_| take(&pool, 2)).collect();
    grants.set_limit_bytes(pages(3));
    for (n_freed, blocks) in (1..).zip(&taken) {
        pool.free(blocks).unwrap();
        let n_expected = (10 - n_freed).max(3);
        eventually("giving freed pages back", || grants.held_bytes() == pages(n_expected));
    }
}

#[test]
fn restoring_the_limit_lets_it_grow_again() {
    let Setup { pool, grants, .. } = start(settings());
    grants.set_limit_bytes(0);
    assert!(is_refused(&pool, 1));
    grants.set_limit_bytes(pages(N_PAGES));
    assert_eq!(take(&pool, 2 * N_PAGES).len() as u32, 2 * N_PAGES);
}

#[test]
fn the_limit_of_the_pool_itself_moves_both_ways() {
    let Setup { pool, grants, .. } = start(settings());
    let taken = take(&pool, 6);
    pool.free(&taken).unwrap();
    pool.resize(0);
    assert_eq!(grants.held_bytes(), 0, "the empty page that is kept goes too");
    assert!(is_refused(&pool, 1));
    pool.resize(u32::MAX);
    assert_eq!(pool.available_blocks(), 2 * N_PAGES);
}

#[test]
fn the_null_block_is_taken_before_preallocation() {
    let settings = PoolSettings { has_null_block: true, is_preallocating: true, ..settings() };
    let Setup { pool, mapper, .. } = start(settings);
    eventually("preparing pages", || pool.counters().pages.n_parked >= 5);
    assert!(mapper.is_mapped(crate::PageId(0)));
    assert!(!take(&pool, 2 * N_PAGES - 1).contains(&BlockId(0)));
    assert!(pool.free(&[BlockId(0)]).is_err());
}

#[test]
fn a_pool_without_memory_for_its_null_block_is_refused_and_leaves_nothing() {
    let mapper = FakeMapper::new(N_PAGES);
    let grants = Arc::new(FixedGrants::new(UNIT_BYTES - 1));
    let settings = PoolSettings { has_null_block: true, ..settings() };
    let error = KvPool::start(parts(&mapper, &grants), settings).unwrap_err();
    assert!(error.to_string().contains("null block"), "{error}");
    assert_eq!((mapper.n_pages(), grants.held_bytes()), (0, 0));
}

#[test]
fn the_agent_keeps_pages_ready() {
    let Setup { pool, .. } = start(PoolSettings { is_preallocating: true, ..settings() });
    for _ in 0..3 {
        eventually("preparing pages", || pool.counters().pages.n_parked >= 5);
        take(&pool, 10);
    }
}

#[test]
fn the_agent_goes_on_after_a_call_that_failed() {
    let mapper = FakeMapper::new(N_PAGES);
    let grants = Arc::new(FixedGrants::new(pages(N_PAGES)));
    mapper.order(&[Fault::Fail { has_stuck: true }]);
    let settings = PoolSettings { is_preallocating: true, ..settings() };
    let pool = KvPool::start(parts(&mapper, &grants), settings).unwrap();
    eventually("the failure", || pool.counters().pages.n_quarantined == 4);
    grants.set_limit_bytes(pages(N_PAGES));
    eventually("preparing pages", || pool.counters().pages.n_parked >= 5);
}

#[test]
fn pages_that_lie_idle_above_the_high_watermark_are_unmapped() {
    let settings = PoolSettings { trim_after: Duration::from_millis(5), ..settings() };
    let Setup { pool, mapper, .. } = start(settings);
    let taken: Vec<Vec<BlockId>> = (0..30).map(|_| take(&pool, 2)).collect();
    for blocks in &taken {
        pool.free(blocks).unwrap();
    }
    eventually("trimming", || mapper.n_pages() == 10);
    assert_eq!(pool.counters().pages.n_used, 0, "the empty page that is kept is parked too");
}

#[test]
fn pages_that_were_in_use_a_moment_ago_stay_above_the_high_watermark() {
    let Setup { pool, grants, .. } = start(settings());
    let taken = take(&pool, 60);
    pool.free(&taken).unwrap();
    grants.interrupt();
    grants.set_limit_bytes(pages(N_PAGES));
    grants.request_reclaim(pages(1));
    eventually("giving pages back", || grants.held_bytes() < pages(30));
    assert!(pool.counters().pages.n_parked > 10, "an hour has not passed");
}

#[test]
fn a_request_takes_parked_pages_first_and_asks_the_engine_for_the_rest() {
    let Setup { pool, grants, .. } = start(settings());
    let used: Vec<Vec<BlockId>> = (0..6).map(|_| take(&pool, 2)).collect();
    let parked: Vec<Vec<BlockId>> = (0..4).map(|_| take(&pool, 2)).collect();
    for blocks in &parked {
        pool.free(blocks).unwrap();
    }
    let asked_bytes = Arc::new(AtomicU64::new(0));
    pool.set_reclaim_callback({
        let asked_bytes = Arc::clone(&asked_bytes);
        move |n_bytes| asked_bytes.store(n_bytes, Ordering::SeqCst)
    });
    grants.request_reclaim(pages(3));
    eventually("giving parked pages back", || grants.held_bytes() == pages(7));
    assert_eq!(asked_bytes.load(Ordering::SeqCst), 0, "what is parked was enough");
    grants.request_reclaim(pages(3));
    eventually("asking the engine", || asked_bytes.load(Ordering::SeqCst) == pages(2));
    assert_eq!(grants.held_bytes(), pages(6));
    for (n_freed, blocks) in (1..).zip(&used[..4]) {
        pool.free(blocks).unwrap();
        let n_expected = 6 - n_freed.min(2);
        eventually("giving freed pages back", || grants.held_bytes() == pages(n_expected));
    }
    assert_eq!(pool.counters().held_bytes, pages(4), "no more than was asked for");
}

#[test]
fn a_callback_that_panics_does_not_end_the_agent() {
    let Setup { pool, grants, .. } = start(settings());
    let taken = take(&pool, 2);
    let n_calls = Arc::new(AtomicU64::new(0));
    pool.set_reclaim_callback({
        let n_calls = Arc::clone(&n_calls);
        move |_| {
            n_calls.fetch_add(1, Ordering::SeqCst);
            panic!("the engine is broken");
        }
    });
    grants.request_reclaim(pages(1));
    eventually("the panic", || n_calls.load(Ordering::SeqCst) == 1);
    pool.free(&taken).unwrap();
    eventually("giving the page back", || grants.held_bytes() == 0);
}

#[test]
fn a_callback_may_free_blocks() {
    let Setup { pool, grants, .. } = start(settings());
    let pool = Arc::new(pool);
    let taken = take(&pool, 8);
    pool.set_reclaim_callback({
        let pool = Arc::downgrade(&pool);
        move |_| {
            if let Some(pool) = pool.upgrade() {
                let _ = pool.free(&taken);
            }
        }
    });
    grants.set_limit_bytes(0);
    eventually("giving everything back", || grants.held_bytes() == 0);
}

#[test]
fn a_waiter_gets_blocks_when_others_free_them() {
    let Setup { pool, .. } = start(settings());
    let taken = take(&pool, 2 * N_PAGES);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let mut blocks = Vec::new();
            let deadline = Instant::now() + Duration::from_secs(20);
            (pool.alloc_wait(2, deadline, &mut blocks).unwrap(), blocks)
        });
        eventually("waiting", || pool.shared.waiters.n_waiting() > 0);
        pool.free(&taken[..2]).unwrap();
        let (outcome, blocks) = waiter.join().unwrap();
        assert_eq!((outcome, blocks.len()), (BlocksOutcome::Allocated, 2));
    });
}

#[test]
fn a_waiter_gets_blocks_when_the_limit_rises() {
    let Setup { pool, grants, .. } = start(settings());
    grants.set_limit_bytes(0);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let deadline = Instant::now() + Duration::from_secs(20);
            pool.alloc_wait(2, deadline, &mut Vec::new()).unwrap()
        });
        eventually("waiting", || pool.shared.waiters.n_waiting() > 0);
        grants.set_limit_bytes(pages(1));
        assert_eq!(waiter.join().unwrap(), BlocksOutcome::Allocated);
    });
}

#[test]
fn a_waiter_looks_again_when_it_is_woken() {
    const N_ROUNDS: u32 = 20;
    let Setup { pool, .. } = start(settings());
    let begun = Instant::now();
    for _ in 0..N_ROUNDS {
        let (is_enough, n_looks) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                pool.wait_for(Instant::now() + Duration::from_secs(20), || {
                    n_looks.fetch_add(1, Ordering::SeqCst);
                    is_enough.load(Ordering::SeqCst).then_some(7)
                })
            });
            eventually("looking", || n_looks.load(Ordering::SeqCst) > 0);
            is_enough.store(true, Ordering::SeqCst);
            pool.wake();
            assert_eq!(waiter.join().unwrap(), Some(7));
        });
    }
    // Waiters look again by themselves, too, but so late that all of them would take longer.
    assert!(begun.elapsed() < N_ROUNDS * super::ASK_AGAIN_AFTER / 2, "waiters were not woken");
    assert_eq!(pool.wait_for(Instant::now(), || None::<()>), None);
}

#[test]
fn a_wait_in_vain_ends_at_the_deadline() {
    let Setup { pool, grants, .. } = start(settings());
    grants.set_limit_bytes(0);
    let begun = Instant::now();
    let outcome = pool.alloc_wait(1, begun + Duration::from_millis(20), &mut Vec::new()).unwrap();
    assert!(matches!(outcome, BlocksOutcome::NoMemory(_)));
    assert!(begun.elapsed() >= Duration::from_millis(20));
}

#[test]
fn a_pool_that_goes_takes_its_agent_and_its_memory_with_it() {
    let Setup { pool, mapper, grants } = start(PoolSettings { is_preallocating: true, ..settings() });
    take(&pool, 7);
    drop(pool);
    assert_eq!((mapper.n_pages(), grants.held_bytes()), (0, 0));
    assert_eq!(Arc::strong_count(&mapper), 1, "no owner is left that could map");
}

#[test]
fn the_last_handle_may_be_dropped_by_the_callback() {
    let Setup { pool, grants, mapper } = start(settings());
    take(&pool, 2);
    let pool = Arc::new(pool);
    let last = Arc::new(Mutex::new(None));
    pool.set_reclaim_callback({
        let last: Arc<Mutex<Option<Arc<KvPool>>>> = Arc::clone(&last);
        move |_| drop(last.lock().take())
    });
    *last.lock() = Some(pool);
    grants.request_reclaim(pages(1));
    eventually("the end of the pool", || mapper.n_pages() == 0);
}
