use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use kvik_memory::Geometry;
use kvik_memory::blocks::BlocksOutcome;
use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::pages::FixedGrants;
use kvik_memory::pool::{PoolOptions, PoolSettings};
use kvik_memory::region::Guard;
use kvik_memory::vmm::host::{HostDevice, HostVmm};

use super::*;

#[derive(Debug, Clone, Default)]
struct FakeFence(Arc<AtomicBool>);

impl Fence for FakeFence {
    fn is_complete(&self) -> kvik_memory::Result<bool> {
        Ok(self.0.load(Ordering::SeqCst))
    }
}

/// Four blocks on two pages.
fn block_pool() -> BlockPool {
    let vmm = Arc::new(HostVmm::open(HostDevice::new(16 * UNIT_BYTES)).unwrap());
    let options = PoolOptions {
        geometry: Geometry::try_new(1, UNIT_BYTES, 2).unwrap(),
        guard: Guard::Zero,
        settings: PoolSettings { is_preallocating: false, ..PoolSettings::new(UNIT_BYTES / 2) },
    };
    let budget = Arc::new(FixedGrants::new(16 * UNIT_BYTES));
    BlockPool::new(KvPool::open_alone(vmm, budget, &options).unwrap())
}

fn take(block_pool: &BlockPool, n_blocks: u32) -> Vec<BlockId> {
    let mut blocks = Vec::new();
    assert_eq!(block_pool.pool.alloc(n_blocks, &mut blocks).unwrap(), BlocksOutcome::Allocated);
    blocks
}

#[test]
fn blocks_are_not_given_out_before_the_device_has_passed_their_event() {
    let block_pool = block_pool();
    let blocks = take(&block_pool, 4);
    let fence = FakeFence::default();
    block_pool.free_after(&blocks, Box::new(fence.clone())).unwrap();
    assert!(block_pool.poll());
    assert_ne!(block_pool.pool.alloc(1, &mut Vec::new()).unwrap(), BlocksOutcome::Allocated);
    fence.0.store(true, Ordering::SeqCst);
    assert!(!block_pool.poll());
    assert_eq!(take(&block_pool, 4).len(), 4);
}

#[test]
fn events_free_in_the_order_of_the_calls() {
    let block_pool = block_pool();
    let blocks = take(&block_pool, 4);
    let (first, second) = (FakeFence::default(), FakeFence::default());
    block_pool.free_after(&blocks[..2], Box::new(first.clone())).unwrap();
    block_pool.free_after(&blocks[2..], Box::new(second.clone())).unwrap();
    second.0.store(true, Ordering::SeqCst);
    assert!(block_pool.poll());
    assert_eq!(block_pool.pool.counters().blocks.n_limbo, 4);
    first.0.store(true, Ordering::SeqCst);
    assert!(!block_pool.poll());
    assert_eq!(block_pool.pool.counters().blocks.n_limbo, 0);
}

#[test]
fn a_block_in_limbo_cannot_be_freed_again() {
    let block_pool = block_pool();
    let blocks = take(&block_pool, 1);
    block_pool.free_after(&blocks, Box::new(FakeFence::default())).unwrap();
    assert!(block_pool.free_after(&blocks, Box::new(FakeFence::default())).is_err());
    assert!(block_pool.pool.free(&blocks).is_err());
    assert_eq!(block_pool.pool.counters().blocks.n_limbo, 1);
}
