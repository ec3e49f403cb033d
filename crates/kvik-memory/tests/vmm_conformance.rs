//! The host's memory against the suite of all backends, and what it promises beyond.
#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::os::fd::AsFd;
use std::sync::Arc;

use kvik_memory::MemoryError;
use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::vmm::cuda::CudaVmm;
use kvik_memory::vmm::host::{HostDevice, HostVmm};
use kvik_memory::vmm::{Access, Backdrop, Created, Vmm};

mod vmm_suite;

fn open_host() -> Arc<dyn Vmm> {
    Arc::new(HostVmm::open(HostDevice::new(64 * UNIT_BYTES)).unwrap())
}

vmm_suite::vmm_conformance!(open_host);

#[test]
fn the_host_counts_what_is_created_and_gives_no_more_than_it_has() {
    let vmm = HostVmm::open(HostDevice::new(4 * UNIT_BYTES)).unwrap();
    let free_units = || vmm.memory_info().unwrap().free_bytes / UNIT_BYTES;
    let three = vmm_suite::create(&vmm, 3 * UNIT_BYTES);
    assert_eq!(free_units(), 1);
    assert_eq!(vmm.create(2 * UNIT_BYTES).unwrap(), Created::NoMemory);
    let one = vmm_suite::create(&vmm, UNIT_BYTES);
    assert_eq!((free_units(), vmm.create(UNIT_BYTES).unwrap()), (0, Created::NoMemory));
    assert_eq!(vmm.create_exportable(UNIT_BYTES).unwrap(), Created::NoMemory);
    vmm.release(three).unwrap();
    assert_eq!(free_units(), 3);
    vmm.release(one).unwrap();
    assert_eq!(free_units(), 4);
}

#[test]
fn fresh_memory_of_the_host_is_zero_even_if_it_was_used_before() {
    let vmm = HostVmm::open(HostDevice::new(UNIT_BYTES)).unwrap();
    let range = vmm.reserve(UNIT_BYTES, Backdrop::Nothing).unwrap();
    for round in 0..3 {
        let handle = vmm_suite::create(&vmm, UNIT_BYTES);
        vmm.map(range, handle).unwrap();
        vmm.set_access(range, Access::ReadWrite).unwrap();
        let mut bytes = vec![0xee; UNIT_BYTES as usize];
        vmm.read(range.address, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "round {round}");
        vmm.fill(range, 0xff).unwrap();
        vmm.unmap(range).unwrap();
        vmm.release(handle).unwrap();
    }
}

#[test]
fn the_zeros_backdrop_is_there_before_and_after_a_mapping_and_is_not_written_to() {
    let vmm = HostVmm::open(HostDevice::new(UNIT_BYTES)).unwrap();
    let range = vmm.reserve(3 * UNIT_BYTES, Backdrop::Zeros).unwrap();
    let mut bytes = vec![0xee; 3 * UNIT_BYTES as usize];
    let handle = vmm_suite::create(&vmm, UNIT_BYTES);
    let mut middle = range;
    middle.address += UNIT_BYTES;
    middle.n_bytes = UNIT_BYTES;

    vmm.read(range.address, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    vmm.write(middle.address, &[1]).unwrap_err();
    vmm.map(middle, handle).unwrap();
    vmm.read(range.address, &mut bytes).unwrap_err();
    vmm.set_access(middle, Access::ReadWrite).unwrap();
    vmm.fill(middle, 5).unwrap();
    vmm.write(middle.address - 1, &[1, 1]).unwrap_err();
    vmm.read(range.address, &mut bytes).unwrap();
    let unit = UNIT_BYTES as usize;
    assert!(bytes[unit..2 * unit].iter().all(|byte| *byte == 5));
    vmm.unmap(middle).unwrap();
    vmm.read(range.address, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
}

#[test]
fn a_host_without_the_backdrop_refuses_to_lay_it() {
    let device = HostDevice { has_zeros_backdrop: false, ..HostDevice::new(UNIT_BYTES) };
    let vmm = HostVmm::open(device).unwrap();
    assert!(matches!(
        vmm.reserve(UNIT_BYTES, Backdrop::Zeros),
        Err(MemoryError::Invalid { field: "backdrop", .. })
    ));
}

#[test]
fn a_descriptor_with_less_than_was_said_is_not_imported() {
    let vmm = HostVmm::open(HostDevice::new(UNIT_BYTES)).unwrap();
    let Created::Memory(handle) = vmm.create_exportable(UNIT_BYTES).unwrap() else {
        panic!("no memory");
    };
    let descriptor = vmm.export(handle).unwrap();
    vmm.import(descriptor.as_fd(), 2 * UNIT_BYTES).unwrap_err();
    vmm.import(descriptor.as_fd(), UNIT_BYTES).unwrap();
}

#[test]
fn a_device_that_does_not_exist_is_an_error_and_no_panic() {
    let error = CudaVmm::open(4096).unwrap_err();
    assert!(matches!(error, MemoryError::NoDevice { .. }), "{error}");
}
