//! Pools of several engines on one ledger, with memory of the host behind them.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvik_memory::blocks::BlocksOutcome;
use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::ledger::{JoinOptions, Ledger, LedgerOptions, PageStates};
use kvik_memory::pages::FixedGrants;
use kvik_memory::pool::{KvPool, PoolOptions, PoolSettings};
use kvik_memory::region::Guard;
use kvik_memory::vmm::Vmm;
use kvik_memory::vmm::host::{HostDevice, HostVmm};
use kvik_memory::{BlockId, Geometry};

const BUDGET_PAGES: u32 = 16;

fn vmm() -> Arc<dyn Vmm> {
    Arc::new(HostVmm::open(HostDevice::new(u64::from(BUDGET_PAGES) * UNIT_BYTES)).unwrap())
}

/// One block a page, as many pages as the device has, and nothing moves by itself.
fn options() -> PoolOptions {
    PoolOptions {
        geometry: Geometry::try_new(1, UNIT_BYTES, BUDGET_PAGES).unwrap(),
        guard: Guard::Zero,
        settings: PoolSettings {
            is_preallocating: false,
            trim_after: Duration::from_hours(1),
            ..PoolSettings::new(UNIT_BYTES)
        },
    }
}

fn ledger(dir: &Path) -> Ledger {
    Ledger::open(&LedgerOptions {
        dir: dir.to_owned(),
        budget_bytes: Some(u64::from(BUDGET_PAGES) * UNIT_BYTES),
        ..LedgerOptions::new("host0")
    })
    .unwrap()
}

fn open(ledger: &Ledger, ipc_name: &str) -> KvPool {
    let member = ledger.join(&JoinOptions::new(ipc_name, "test engine")).unwrap();
    KvPool::open(vmm(), member, &options()).unwrap()
}

/// Takes blocks, waiting for others to give them back.
fn take(pool: &KvPool, n_blocks: u32) -> Vec<BlockId> {
    let mut blocks = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(20);
    assert_eq!(pool.alloc_wait(n_blocks, deadline, &mut blocks).unwrap(), BlocksOutcome::Allocated);
    blocks
}

fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_true() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        thread::yield_now();
    }
}

#[test]
fn memory_that_one_engine_freed_goes_to_another_that_waits() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = ledger(dir.path());
    let (one, other) = (open(&ledger, "one"), open(&ledger, "other"));
    for _ in 0..3 {
        for (from, to) in [(&one, &other), (&other, &one)] {
            // Page by page, so that each can go by itself.
            let taken: Vec<BlockId> = (0..BUDGET_PAGES - 2).flat_map(|_| take(from, 1)).collect();
            from.free(&taken).unwrap();
            assert!(from.counters().held_bytes >= u64::from(BUDGET_PAGES - 2) * UNIT_BYTES, "parked");
            let taken = take(to, BUDGET_PAGES / 2);
            to.free(&taken).unwrap();
        }
    }
}

#[test]
fn what_a_pool_holds_is_written_to_and_the_ledger_shows_its_pages() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = ledger(dir.path());
    let pool = open(&ledger, "one");
    let taken = take(&pool, 6);
    let region = pool.region().unwrap();
    for block in &taken {
        let address = region.range().address + pool.block_geometry().offset_bytes(*block);
        let pattern = vec![block.0 as u8 + 1; 4_096];
        region.vmm().write(address, &pattern).unwrap();
        let mut read = vec![0; 4_096];
        region.vmm().read(address, &mut read).unwrap();
        assert_eq!(read, pattern);
    }
    pool.free(&taken[..3]).unwrap();
    let states = PageStates::open(dir.path(), "one", 0).unwrap().unwrap();
    let counts = states.counts();
    let counters = pool.counters().pages;
    assert_eq!((counts.n_used, counts.n_parked), (counters.n_used.into(), counters.n_parked.into()));
    assert_eq!(counts.n_used + counts.n_parked, 6);
    pool.free(&taken[3..]).unwrap();
    pool.trim();
    assert_eq!(states.counts().n_unmapped, BUDGET_PAGES.into());
}

#[test]
fn the_ledger_has_everything_back_when_a_pool_goes() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = ledger(dir.path());
    let one = open(&ledger, "one");
    take(&one, BUDGET_PAGES);
    drop(one);
    let other = open(&ledger, "other");
    assert_eq!(other.available_blocks(), BUDGET_PAGES);
    take(&other, BUDGET_PAGES);
}

#[test]
fn two_engines_with_one_name_are_under_one_limit_and_the_exit_of_one_leaves_the_other_alone() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = ledger(dir.path());
    let (one, twin) = (open(&ledger, "shared"), open(&ledger, "shared"));
    let limit_bytes = 8 * UNIT_BYTES;
    ledger.set_limit("shared", Some(limit_bytes), None).unwrap();
    let taken = take(&one, 5);
    assert_eq!(twin.available_blocks(), 3);
    assert!(matches!(twin.alloc(4, &mut Vec::new()).unwrap(), BlocksOutcome::NoMemory(_)));
    drop(twin);
    assert!(one.available_blocks() >= 3);
    take(&one, 3);
    one.free(&taken).unwrap();
}

#[test]
fn an_idle_engine_obeys_a_limit_that_a_tool_writes() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = ledger(dir.path());
    let pool = open(&ledger, "idle");
    let taken: Vec<BlockId> = (0..10).flat_map(|_| take(&pool, 1)).collect();
    pool.free(&taken).unwrap();
    ledger.set_limit("idle", Some(4 * UNIT_BYTES), None).unwrap();
    eventually("shrinking to the limit", || pool.counters().held_bytes <= 4 * UNIT_BYTES);
    ledger.set_limit("idle", Some(0), None).unwrap();
    eventually("giving everything back", || pool.counters().held_bytes == 0);
    ledger.set_limit("idle", Some(u64::from(BUDGET_PAGES) * UNIT_BYTES), None).unwrap();
    take(&pool, BUDGET_PAGES);
}

#[test]
fn a_pool_alone_has_a_budget_of_its_own() {
    let budget = Arc::new(FixedGrants::new(5 * UNIT_BYTES));
    let pool = KvPool::open_alone(vmm(), budget.clone(), &options()).unwrap();
    take(&pool, 5);
    assert!(matches!(pool.alloc(1, &mut Vec::new()).unwrap(), BlocksOutcome::NoMemory(_)));
    drop(pool);
    assert_eq!(budget.held_bytes(), 0);
}
