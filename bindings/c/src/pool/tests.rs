use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use kvik_memory::config::MemoryConfig;
use kvik_memory::vmm::Fence;

use super::*;
use crate::config::{KVIK_FLAG_NO_PREALLOCATION, kvik_config};

const BLOCK_BYTES: u64 = UNIT_BYTES / 2;

#[derive(Debug, Clone, Default)]
struct FakeFence(Arc<AtomicBool>);

impl Fence for FakeFence {
    fn is_complete(&self) -> kvik_memory::Result<bool> {
        Ok(self.0.load(Ordering::SeqCst))
    }
}

fn open(dir: &tempfile::TempDir, ipc_name: &str) -> Box<Pool> {
    let config = kvik_config {
        block_bytes: BLOCK_BYTES,
        n_blocks: 8,
        flags: KVIK_FLAG_NO_PREALLOCATION,
        host_bytes: 64 * UNIT_BYTES,
        ..kvik_config::new()
    };
    let names = Names {
        ipc_name: Some(ipc_name.to_owned()),
        directory: Some(dir.path().to_str().unwrap().to_owned()),
        label: None,
    };
    Pool::open(&config, names, &MemoryConfig::default()).unwrap()
}

fn take(pool: &Pool, n_blocks: usize) -> Vec<BlockId> {
    let mut taken = Vec::new();
    pool.alloc(n_blocks, |blocks| taken.extend_from_slice(blocks)).unwrap();
    taken
}

fn eventually(what: &str, mut is_true: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_true() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::yield_now();
    }
}

#[test]
fn the_agent_frees_blocks_when_their_event_is_over_without_a_call() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open(&dir, "agent");
    let blocks = take(&pool, 8);
    let fence = FakeFence::default();
    pool.blocks.free_after(&blocks, Box::new(fence.clone())).unwrap();
    pool.grants.interrupt();
    let n_limbo = || pool.blocks.pool.counters().blocks.n_limbo;
    assert_eq!(n_limbo(), 8);
    fence.0.store(true, Ordering::SeqCst);
    eventually("freeing by the agent", || n_limbo() == 0);
}

#[test]
fn a_pool_with_blocks_in_limbo_can_be_closed() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open(&dir, "limbo");
    let blocks = take(&pool, 8);
    pool.blocks.free_after(&blocks, Box::new(FakeFence::default())).unwrap();
    drop(pool);
    assert_eq!(take(&open(&dir, "limbo"), 8).len(), 8);
}

#[test]
fn what_is_beside_the_pages_is_not_available_to_them() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open(&dir, "beside");
    pool.set_limit(Some(4 * UNIT_BYTES), None).unwrap();
    assert_eq!(pool.stats().n_available_blocks, 8);
    pool.admit(3 * UNIT_BYTES).unwrap();
    assert_eq!(pool.stats().n_available_blocks, 2);
    take(&pool, 2);
    assert!(pool.alloc(1, |_| ()).is_err());
    pool.retire(3 * UNIT_BYTES).unwrap();
    take(&pool, 6);
}

#[test]
fn tools_see_what_is_beside_the_pages() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open(&dir, "tools");
    take(&pool, 2);
    pool.admit(2 * UNIT_BYTES).unwrap();
    let chunks = pool.acquire_chunks(3).unwrap();
    let prefix = std::fs::read(dir.path().join("tools")).unwrap();
    let used_bytes = u64::from_le_bytes(prefix[8..16].try_into().unwrap());
    assert_eq!(used_bytes, 6 * UNIT_BYTES);
    pool.release_chunks(&chunks).unwrap();
    assert_eq!(pool.grants.member().held_bytes(), 3 * UNIT_BYTES);
}

#[test]
fn chunks_that_the_device_does_not_have_leave_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let pool = open(&dir, "device");
    // The ledger would grant more than the device of this process has.
    pool.grants.member().ledger().set_budget_bytes(1_000 * UNIT_BYTES).unwrap();
    let failure = pool.acquire_chunks(65).unwrap_err();
    assert_eq!(failure.status, kvik_status::KVIK_NO_MEMORY);
    assert_eq!(pool.grants.member().held_bytes(), 0);
    assert_eq!(pool.stats().chunk_bytes, 0);
    pool.acquire_chunks(64).unwrap();
}
