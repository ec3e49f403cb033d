//! What a forked child may do to its parent's pool: nothing.

use std::sync::Arc;

use kvik_memory::Geometry;
use kvik_memory::blocks::BlocksOutcome;
use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::pages::FixedGrants;
use kvik_memory::pool::{KvPool, PoolOptions, PoolSettings};
use kvik_memory::region::Guard;
use kvik_memory::vmm::host::{HostDevice, HostVmm};

#[test]
fn a_child_that_drops_its_copy_of_a_pool_leaves_the_parents_memory_alone() {
    let vmm = Arc::new(HostVmm::open(HostDevice::new(4 * UNIT_BYTES)).unwrap());
    let budget = Arc::new(FixedGrants::new(4 * UNIT_BYTES));
    let options = PoolOptions {
        geometry: Geometry::try_new(1, UNIT_BYTES, 4).unwrap(),
        guard: Guard::Zero,
        settings: PoolSettings { is_preallocating: false, ..PoolSettings::new(UNIT_BYTES) },
    };
    let pool = KvPool::open_alone(vmm, budget, &options).unwrap();
    let mut blocks = Vec::new();
    assert_eq!(pool.alloc(1, &mut blocks).unwrap(), BlocksOutcome::Allocated);
    let region = pool.region().unwrap();
    let address = region.range().address + pool.block_geometry().offset_bytes(blocks[0]);
    region.vmm().write(address, &[7; 4_096]).unwrap();

    // SAFETY: the child drops a pool, which takes no lock there, and ends without running anything else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(pool);
        // SAFETY: ends the child at once; nothing of the test's harness runs in it.
        unsafe { libc::_exit(0) };
    }
    assert!(child > 0);
    let mut status = 0;
    // SAFETY: waits for the child from above, with a place for its status.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0));

    let mut read = [0; 4_096];
    pool.region().unwrap().vmm().read(address, &mut read).unwrap();
    assert_eq!(read, [7; 4_096]);
}
