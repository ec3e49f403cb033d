//! Regions on the host's memory: with the kernel's zero page as the guard, and with guard pieces as a GPU
//! needs them.
#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::sync::Arc;

use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::pages::{MapOutcome, PageMapper};
use kvik_memory::region::{Guard, Region};
use kvik_memory::vmm::Vmm;
use kvik_memory::vmm::faulty::{Call, Fault, FaultyVmm, Refusals};
use kvik_memory::vmm::host::{HostDevice, HostVmm};
use kvik_memory::{Extent, Geometry, MemoryError, PageId};

use self::region_suite::{Modelled, extent};

mod region_suite;

const TOTAL_BYTES: u64 = 256 * UNIT_BYTES;

fn open_host(has_zeros_backdrop: bool) -> Arc<dyn Vmm> {
    Arc::new(HostVmm::open(HostDevice { total_bytes: TOTAL_BYTES, has_zeros_backdrop }).unwrap())
}

fn used_bytes(vmm: &dyn Vmm) -> u64 {
    TOTAL_BYTES - vmm.memory_info().unwrap().free_bytes
}

mod with_the_kernels_zero_page {
    use super::*;

    fn open() -> Arc<dyn Vmm> {
        open_host(true)
    }

    region_suite::region_conformance!(open);
}

mod with_guard_pieces {
    use super::*;

    fn open() -> Arc<dyn Vmm> {
        open_host(false)
    }

    region_suite::region_conformance!(open);
}

mod with_guard_pieces_of_whole_handles {
    use super::*;

    fn open() -> Arc<dyn Vmm> {
        let vmm = FaultyVmm::new(open_host(false));
        vmm.set_refusals(Refusals { partial_maps: true, read_only: false });
        Arc::new(vmm)
    }

    region_suite::region_conformance!(open);
}

#[test]
fn guard_pieces_are_as_large_as_they_can_be_and_merge_again() {
    let vmm = open_host(false);
    let geometry = Geometry::try_new(1, UNIT_BYTES, 100).unwrap();
    let region = Region::try_new(Arc::clone(&vmm), geometry, Guard::Zero).unwrap();
    let n_pieces = || region.usage().n_guard_pieces;
    assert_eq!(n_pieces(), 4, "three of 32 pages and one of 4");
    assert_eq!(region.usage().guard_bytes, 32 * UNIT_BYTES);
    assert!(region.usage().guard_bytes <= Region::max_guard_bytes(&*vmm, &geometry, Guard::Zero));

    assert!(matches!(region.map(&[extent(40, 1)]), MapOutcome::Mapped));
    assert_eq!(n_pieces(), 3 + 5, "31 pages around a single one are 1, 2, 4, 8 and 16");
    assert!(matches!(region.map(&[extent(0, 32)]), MapOutcome::Mapped));
    assert_eq!(n_pieces(), 2 + 5);
    assert!(matches!(region.map(&[extent(32, 8)]), MapOutcome::Mapped));
    assert_eq!(n_pieces(), 2 + 4);
    assert!(region.unmap(&[extent(40, 1)]).is_empty());
    assert_eq!(n_pieces(), 2 + 5, "its page is a piece, beside an extent");
    assert!(region.unmap(&[extent(32, 8), extent(0, 32)]).is_empty());
    assert_eq!(n_pieces(), 3 + 6, "few pieces stay as they are");

    let singles: Vec<Extent> = (33..64).step_by(2).map(|page| extent(page, 1)).collect();
    assert!(matches!(region.map(&singles), MapOutcome::Mapped));
    assert_eq!(n_pieces(), 3 + 16);
    assert!(region.unmap(&singles[1..]).is_empty());
    assert_eq!(n_pieces(), 3 + 31, "an extent is still there");
    assert!(region.unmap(&singles[..1]).is_empty());
    assert_eq!(n_pieces(), 4, "many pieces become one");
    assert_eq!(used_bytes(&*vmm), 32 * UNIT_BYTES);
    drop(region);
    assert_eq!(used_bytes(&*vmm), 0);
}

#[test]
fn an_extent_that_comes_and_goes_cuts_the_guard_once() {
    let vmm = Arc::new(FaultyVmm::new(open_host(false)));
    let geometry = Geometry::try_new(1, UNIT_BYTES, 32).unwrap();
    let region = Region::try_new(vmm.clone(), geometry, Guard::Zero).unwrap();
    let n_calls = || {
        vmm.take_records();
        assert!(matches!(region.map(&[extent(0, 4)]), MapOutcome::Mapped));
        let n_map_calls = vmm.take_records().len();
        assert!(region.unmap(&[extent(0, 4)]).is_empty());
        (n_map_calls, vmm.take_records().len())
    };
    // Create, unmap the piece, map and access; three pieces more with one access.
    assert_eq!(n_calls(), (4 + 4, 4));
    assert_eq!(n_calls(), (4, 4));
}

#[test]
fn a_driver_that_maps_whole_handles_only_gets_one_for_each_size() {
    let vmm = Arc::new(FaultyVmm::new(open_host(false)));
    vmm.set_refusals(Refusals { partial_maps: true, read_only: false });
    let modelled = Modelled::new(vmm.clone());
    assert_eq!(modelled.region.guard(), Guard::Zero);
    assert_eq!(modelled.region.usage().guard_bytes, 31 * UNIT_BYTES);
    let geometry = modelled.region.geometry();
    assert_eq!(Region::max_guard_bytes(&*vmm, geometry, Guard::Zero), 31 * UNIT_BYTES);
    modelled.check(&[]);
}

#[test]
fn a_driver_without_read_only_memory_has_no_guard_and_says_so() {
    let vmm = Arc::new(FaultyVmm::new(open_host(false)));
    vmm.set_refusals(Refusals { partial_maps: false, read_only: true });
    let geometry = Geometry::try_new(2, UNIT_BYTES, 8).unwrap();
    let region = Region::try_new(vmm.clone(), geometry, Guard::Zero).unwrap();
    assert_eq!(region.guard(), Guard::None);
    assert_eq!(used_bytes(&*vmm), 0, "what was tried is given back");
    vmm.read(region.range().address, &mut [0]).unwrap_err();
    assert!(matches!(region.map(&[extent(0, 8)]), MapOutcome::Mapped));
}

#[test]
fn a_full_device_has_a_smaller_guard_or_none() {
    let full_but = |n_pages: u64| {
        let vmm = open_host(false);
        let _ = vmm.create(TOTAL_BYTES - n_pages * UNIT_BYTES).unwrap();
        let geometry = Geometry::try_new(1, UNIT_BYTES, 64).unwrap();
        Region::try_new(vmm, geometry, Guard::Zero).unwrap()
    };
    let small = full_but(5);
    assert_eq!((small.guard(), small.usage().guard_bytes), (Guard::Zero, 4 * UNIT_BYTES));
    assert_eq!(small.usage().n_guard_pieces, 16);
    assert!(matches!(small.map(&[extent(0, 2)]), MapOutcome::NoMemory));
    assert!(matches!(small.map(&[extent(33, 1)]), MapOutcome::Mapped));
    assert_eq!(full_but(0).guard(), Guard::None);
}

#[test]
fn a_region_that_cannot_be_made_leaves_nothing_behind() {
    for k in 0.. {
        let vmm = Arc::new(FaultyVmm::new(open_host(false)));
        vmm.set_fault(Some(Fault::once(None, k)));
        let geometry = Geometry::try_new(2, UNIT_BYTES, 40).unwrap();
        let made = Region::try_new(vmm.clone(), geometry, Guard::Zero);
        vmm.set_fault(None);
        let records = vmm.take_records();
        match made {
            Ok(region) => {
                let has_failed = records.iter().any(|record| record.has_failed);
                assert!(matches!(region.map(&[extent(0, 32)]), MapOutcome::Mapped));
                drop(region);
                assert_eq!(used_bytes(&*vmm), 0);
                if !has_failed {
                    assert!(k > 5);
                    break;
                }
            }
            Err(error) => {
                assert!(matches!(error, MemoryError::Device { .. }), "{error}");
                // A failing unmap is the one thing that cannot be cleaned up.
                let is_unmap = records.iter().any(|record| record.has_failed && record.call == Call::Unmap);
                assert_eq!(used_bytes(&*vmm) != 0, is_unmap, "call {k}: {error}");
            }
        }
    }
}

#[test]
fn a_dropped_region_gives_back_what_was_stuck() {
    let vmm = Arc::new(FaultyVmm::new(open_host(true)));
    let mut modelled = Modelled::new(vmm.clone());
    assert!(matches!(modelled.map(&[extent(0, 4), extent(8, 1)]), MapOutcome::Mapped));
    vmm.set_fault(Some(Fault::always(Some(Call::Unmap))));
    assert_eq!(modelled.region.unmap(&[extent(0, 4)]), [extent(0, 4)]);
    vmm.set_fault(None);
    assert_eq!(modelled.region.usage().n_stuck, 1);
    drop(modelled);
    assert_eq!(used_bytes(&*vmm), 0);
}

#[test]
fn buffers_lie_one_after_the_other() {
    let vmm = open_host(true);
    let geometry = Geometry::try_new(3, UNIT_BYTES, 8).unwrap();
    let region = Region::try_new(vmm, geometry, Guard::None).unwrap();
    assert_eq!(region.address_of(1, PageId(2)), Some(region.range().address + 10 * UNIT_BYTES));
    assert_eq!(region.address_of(3, PageId(0)), None);
    assert_eq!(region.address_of(0, PageId(8)), None);
    assert_eq!(region.range().n_bytes, 24 * UNIT_BYTES);
}

/// How a child that touches `address` ends: its exit status, or the signal that killed it.
fn fate_of_touching(address: u64, is_write: bool) -> Result<i32, i32> {
    let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: the child calls nothing but async-signal-safe functions, and then ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork");
    if child == 0 {
        // SAFETY: the access may fault: that is the question. It is the child's own copy.
        unsafe {
            libc::prctl(libc::PR_SET_DUMPABLE, 0);
            if is_write {
                pointer.write_volatile(1);
                libc::_exit(0);
            }
            libc::_exit(i32::from(pointer.read_volatile()));
        }
    }
    let mut status = 0;
    // SAFETY: the child was just made and is waited for once; the status is a local.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    if libc::WIFSIGNALED(status) { Err(libc::WTERMSIG(status)) } else { Ok(libc::WEXITSTATUS(status)) }
}

#[test]
fn a_stray_write_faults_and_a_stray_read_sees_zero_or_faults_as_the_guard_says() {
    for has_zeros_backdrop in [true, false] {
        for guard in [Guard::Zero, Guard::None] {
            let vmm = open_host(has_zeros_backdrop);
            let geometry = Geometry::try_new(2, UNIT_BYTES, 8).unwrap();
            let region = Region::try_new(Arc::clone(&vmm), geometry, guard).unwrap();
            assert!(matches!(region.map(&[extent(2, 2)]), MapOutcome::Mapped));
            let address = |page| region.address_of(1, PageId(page)).unwrap();
            vmm.write(address(2), &[42]).unwrap();
            assert_eq!(fate_of_touching(address(2), false), Ok(42));
            assert_eq!(fate_of_touching(address(2), true), Ok(0));

            let read = if guard == Guard::Zero { Ok(0) } else { Err(libc::SIGSEGV) };
            for page in [0, 1, 4, 7] {
                assert_eq!(fate_of_touching(address(page), false), read);
                assert_eq!(fate_of_touching(address(page) + UNIT_BYTES - 1, true), Err(libc::SIGSEGV));
            }
            assert!(region.unmap(&[extent(2, 2)]).is_empty());
            assert_eq!(fate_of_touching(address(2), false), read);
            assert_eq!(fate_of_touching(address(2), true), Err(libc::SIGSEGV));
        }
    }
}
