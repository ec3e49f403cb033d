//! What every backend does alike: each function is one test, run on each device.

use std::os::fd::AsFd;
use std::sync::Arc;

use kvik_memory::vmm::{Access, Backdrop, Created, MemoryInfo, PhysicalHandle, Stream, VirtualRange, Vmm};
use kvik_memory::{MemoryError, Result};

/// Makes a test of each function below, on the devices that `$open` opens.
macro_rules! vmm_conformance {
    ($open:path) => {
        crate::vmm_suite::vmm_conformance!($open:
            mapped_memory_keeps_what_was_written,
            memory_mapped_twice_is_the_same_memory,
            a_run_of_mappings_changes_access_and_goes_in_one_call,
            a_part_of_memory_can_be_mapped_or_is_refused_without_effect,
            more_than_the_device_has_is_no_memory,
            exported_memory_is_the_importers_memory,
            a_fence_is_complete_after_the_device_is_synchronized,
            sizes_that_are_not_of_the_granularity_are_refused,
            ranges_outside_of_a_reservation_are_refused,
            mapping_over_a_mapping_is_refused,
            access_and_unmap_take_whole_mappings_only,
            released_and_mapped_handles_are_not_released,
            a_reservation_in_use_is_not_freed,
            memory_without_access_is_not_touched,
            a_handle_of_another_device_is_refused,
        );
    };
    ($open:path: $($name:ident,)*) => {
        $(
            #[test]
            fn $name() {
                crate::vmm_suite::$name(&|| $open());
            }
        )*
    };
}
pub(crate) use vmm_conformance;

pub(crate) type Open<'a> = &'a dyn Fn() -> Arc<dyn Vmm>;

pub(crate) fn create(vmm: &dyn Vmm, n_bytes: u64) -> PhysicalHandle {
    match vmm.create(n_bytes).unwrap() {
        Created::Memory(handle) => handle,
        Created::NoMemory => panic!("the device has no {n_bytes} bytes"),
    }
}

/// `n_units` of the granularity, from `first_unit` of the range on.
fn part(vmm: &dyn Vmm, range: VirtualRange, first_unit: u64, n_units: u64) -> VirtualRange {
    let unit_bytes = vmm.granularity_bytes();
    VirtualRange { address: range.address + first_unit * unit_bytes, n_bytes: n_units * unit_bytes }
}

fn read_array<const N: usize>(vmm: &dyn Vmm, address: u64) -> [u8; N] {
    let mut bytes = [0xee; N];
    vmm.read(address, &mut bytes).unwrap();
    bytes
}

#[track_caller]
fn assert_invalid<T: std::fmt::Debug>(result: Result<T>, expected_field: &str, expected: &str) {
    match result {
        Err(MemoryError::Invalid { field, allowed, .. }) => {
            assert_eq!(field, expected_field, "{allowed}");
            assert!(allowed.contains(expected), "`{expected}` is in `{allowed}`");
        }
        other => panic!("{expected_field} is refused because of `{expected}`, not {other:?}"),
    }
}

pub(crate) fn mapped_memory_keeps_what_was_written(open: Open<'_>) {
    let vmm = &*open();
    let unit_bytes = vmm.granularity_bytes();
    let range = vmm.reserve(4 * unit_bytes, Backdrop::Nothing).unwrap();
    assert_eq!(range.address % unit_bytes, 0);
    let handle = create(vmm, 2 * unit_bytes);
    let first = part(vmm, range, 0, 2);
    vmm.map(first, handle).unwrap();
    vmm.set_access(first, Access::ReadWrite).unwrap();
    vmm.fill(first, 7).unwrap();
    vmm.write(first.address + unit_bytes - 2, b"abcd").unwrap();
    assert_eq!(&read_array::<6>(vmm, first.address + unit_bytes - 3), b"\x07abcd\x07");
    assert_eq!(read_array(vmm, first.end() - 1), [7]);

    vmm.unmap(first).unwrap();
    let second = part(vmm, range, 2, 2);
    vmm.map(second, handle).unwrap();
    vmm.set_access(second, Access::ReadOnly).unwrap();
    assert_eq!(&read_array::<6>(vmm, second.address + unit_bytes - 3), b"\x07abcd\x07");
    vmm.unmap(second).unwrap();
    vmm.release(handle).unwrap();
    vmm.free_reservation(range).unwrap();
}

pub(crate) fn memory_mapped_twice_is_the_same_memory(open: Open<'_>) {
    let vmm = &*open();
    let range = vmm.reserve(2 * vmm.granularity_bytes(), Backdrop::Nothing).unwrap();
    let handle = create(vmm, vmm.granularity_bytes());
    let (left, right) = (part(vmm, range, 0, 1), part(vmm, range, 1, 1));
    vmm.map(left, handle).unwrap();
    vmm.map(right, handle).unwrap();
    vmm.set_access(left, Access::ReadWrite).unwrap();
    vmm.set_access(right, Access::ReadOnly).unwrap();
    vmm.write(left.address + 100, b"once").unwrap();
    assert_eq!(&read_array::<4>(vmm, right.address + 100), b"once");
    vmm.unmap(left).unwrap();
    assert_invalid(vmm.release(handle), "handle", "not mapped");
    vmm.unmap(right).unwrap();
    vmm.release(handle).unwrap();
}

pub(crate) fn a_run_of_mappings_changes_access_and_goes_in_one_call(open: Open<'_>) {
    let vmm = &*open();
    let unit_bytes = vmm.granularity_bytes();
    let range = vmm.reserve(8 * unit_bytes, Backdrop::Nothing).unwrap();
    let handles: Vec<_> = [1, 2, 1].map(|n_units| create(vmm, n_units * unit_bytes)).into();
    let parts = [part(vmm, range, 1, 1), part(vmm, range, 2, 2), part(vmm, range, 4, 1)];
    for (part, handle) in parts.iter().zip(&handles) {
        vmm.map(*part, *handle).unwrap();
    }
    let run = part(vmm, range, 1, 4);
    vmm.set_access(run, Access::ReadWrite).unwrap();
    for (byte, part) in (1..).zip(&parts) {
        vmm.fill(*part, byte).unwrap();
    }
    assert_eq!(read_array(vmm, parts[1].address - 1), [1, 2]);
    assert_eq!(read_array(vmm, parts[2].address - 1), [2, 3]);
    vmm.unmap(run).unwrap();
    vmm.read(parts[1].address, &mut [0]).unwrap_err();
    // The memory is the handles', in whatever order they come back.
    vmm.map(part(vmm, range, 0, 1), handles[2]).unwrap();
    vmm.map(part(vmm, range, 1, 1), handles[0]).unwrap();
    vmm.set_access(part(vmm, range, 0, 2), Access::ReadOnly).unwrap();
    assert_eq!(read_array(vmm, range.address + unit_bytes - 1), [3, 1]);
    vmm.unmap(part(vmm, range, 0, 2)).unwrap();
    for handle in handles {
        vmm.release(handle).unwrap();
    }
    vmm.free_reservation(range).unwrap();
}

pub(crate) fn a_part_of_memory_can_be_mapped_or_is_refused_without_effect(open: Open<'_>) {
    let vmm = &*open();
    let range = vmm.reserve(2 * vmm.granularity_bytes(), Backdrop::Nothing).unwrap();
    let handle = create(vmm, 2 * vmm.granularity_bytes());
    let half = part(vmm, range, 1, 1);
    match vmm.map(half, handle) {
        Ok(()) => vmm.unmap(half).unwrap(),
        Err(error) => assert!(matches!(error, MemoryError::Device { .. }), "{error}"),
    }
    vmm.map(range, handle).unwrap();
    vmm.unmap(range).unwrap();
    vmm.release(handle).unwrap();
}

pub(crate) fn more_than_the_device_has_is_no_memory(open: Open<'_>) {
    let vmm = &*open();
    let MemoryInfo { free_bytes, total_bytes } = vmm.memory_info().unwrap();
    assert!(free_bytes <= total_bytes);
    let n_bytes = total_bytes.next_multiple_of(vmm.granularity_bytes()) + vmm.granularity_bytes();
    assert_eq!(vmm.create(n_bytes).unwrap(), Created::NoMemory);
    assert_eq!(vmm.create_exportable(n_bytes).unwrap(), Created::NoMemory);
    vmm.release(create(vmm, vmm.granularity_bytes())).unwrap();
}

pub(crate) fn exported_memory_is_the_importers_memory(open: Open<'_>) {
    let (exporter, importer) = (open(), open());
    let unit_bytes = exporter.granularity_bytes();
    let Created::Memory(exported) = exporter.create_exportable(unit_bytes).unwrap() else {
        panic!("the device has no memory");
    };
    let descriptor = exporter.export(exported).unwrap();
    let imported = importer.import(descriptor.as_fd(), unit_bytes).unwrap();
    drop(descriptor);

    let ours = exporter.reserve(unit_bytes, Backdrop::Nothing).unwrap();
    exporter.map(ours, exported).unwrap();
    exporter.set_access(ours, Access::ReadWrite).unwrap();
    let theirs = importer.reserve(unit_bytes, Backdrop::Nothing).unwrap();
    importer.map(theirs, imported).unwrap();
    importer.set_access(theirs, Access::ReadWrite).unwrap();
    exporter.write(ours.address + 5, b"from us").unwrap();
    assert_eq!(&read_array::<7>(&*importer, theirs.address + 5), b"from us");

    exporter.unmap(ours).unwrap();
    exporter.release(exported).unwrap();
    assert_eq!(&read_array::<7>(&*importer, theirs.address + 5), b"from us", "it lives while it is mapped");
    importer.unmap(theirs).unwrap();
    importer.release(imported).unwrap();

    let private = create(&*exporter, unit_bytes);
    assert_invalid(exporter.export(private), "handle", "created exportable");
    assert_invalid(importer.import(std::io::stdin().as_fd(), 1), "n_bytes", "positive multiple");
}

pub(crate) fn a_fence_is_complete_after_the_device_is_synchronized(open: Open<'_>) {
    let vmm = &*open();
    let fence = vmm.record(Stream::default()).unwrap();
    vmm.synchronize().unwrap();
    assert!(fence.is_complete().unwrap());
}

pub(crate) fn sizes_that_are_not_of_the_granularity_are_refused(open: Open<'_>) {
    let vmm = &*open();
    let unit_bytes = vmm.granularity_bytes();
    for n_bytes in [0, 1, unit_bytes - 1, unit_bytes + 1, u64::MAX] {
        assert_invalid(vmm.reserve(n_bytes, Backdrop::Nothing), "n_bytes", "positive multiple");
        assert_invalid(vmm.create(n_bytes), "n_bytes", "positive multiple");
        assert_invalid(vmm.create_exportable(n_bytes), "n_bytes", "positive multiple");
    }
}

pub(crate) fn ranges_outside_of_a_reservation_are_refused(open: Open<'_>) {
    let vmm = &*open();
    let unit_bytes = vmm.granularity_bytes();
    let range = vmm.reserve(2 * unit_bytes, Backdrop::Nothing).unwrap();
    let handle = create(vmm, 4 * unit_bytes);
    let at = |address, n_bytes| VirtualRange { address, n_bytes };
    for (bad, expected) in [
        (at(range.address + 1, unit_bytes), "positive multiples"),
        (at(range.address, unit_bytes - 1), "positive multiples"),
        (at(range.address, 0), "positive multiples"),
        (at(range.address, 3 * unit_bytes), "inside of a reservation"),
        (at(range.address - unit_bytes, unit_bytes), "inside of a reservation"),
        (at(range.end(), unit_bytes), "inside of a reservation"),
        (at(0, unit_bytes), "inside of a reservation"),
        (at(u64::MAX - unit_bytes + 1, unit_bytes), "inside of a reservation"),
    ] {
        assert_invalid(vmm.map(bad, handle), "range", expected);
        assert_invalid(vmm.set_access(bad, Access::ReadWrite), "range", expected);
        assert_invalid(vmm.unmap(bad), "range", expected);
    }
    assert_invalid(vmm.read(u64::MAX, &mut [0, 0]), "range", "mapped addresses");
    assert_invalid(vmm.read(0, &mut [0, 0]), "range", "mapped addresses");
    vmm.release(handle).unwrap();
    let small = create(vmm, unit_bytes);
    assert_invalid(vmm.map(range, small), "range", "up to the memory's");
}

pub(crate) fn mapping_over_a_mapping_is_refused(open: Open<'_>) {
    let vmm = &*open();
    let unit_bytes = vmm.granularity_bytes();
    let range = vmm.reserve(5 * unit_bytes, Backdrop::Nothing).unwrap();
    let handle = create(vmm, 5 * unit_bytes);
    let middle = create(vmm, unit_bytes);
    vmm.map(part(vmm, range, 2, 1), middle).unwrap();
    for (first_unit, n_units) in [(2, 1), (1, 2), (2, 2), (0, 5), (1, 3)] {
        let over = part(vmm, range, first_unit, n_units);
        assert_invalid(vmm.map(over, handle), "range", "nothing is mapped");
    }
    vmm.map(part(vmm, range, 3, 1), middle).unwrap();
    vmm.map(part(vmm, range, 1, 1), middle).unwrap();
}

pub(crate) fn access_and_unmap_take_whole_mappings_only(open: Open<'_>) {
    let vmm = &*open();
    let unit_bytes = vmm.granularity_bytes();
    let range = vmm.reserve(6 * unit_bytes, Backdrop::Nothing).unwrap();
    let handle = create(vmm, 2 * unit_bytes);
    vmm.map(part(vmm, range, 0, 2), handle).unwrap();
    vmm.map(part(vmm, range, 3, 2), handle).unwrap();
    for (first_unit, n_units) in [(0, 1), (1, 1), (0, 3), (2, 1), (0, 5), (1, 2), (3, 3), (5, 1)] {
        let bad = part(vmm, range, first_unit, n_units);
        assert_invalid(vmm.set_access(bad, Access::ReadWrite), "range", "whole mappings");
        assert_invalid(vmm.unmap(bad), "range", "whole mappings");
    }
    vmm.unmap(part(vmm, range, 0, 2)).unwrap();
    assert_invalid(vmm.unmap(part(vmm, range, 0, 2)), "range", "whole mappings");
    vmm.unmap(part(vmm, range, 3, 2)).unwrap();
}

pub(crate) fn released_and_mapped_handles_are_not_released(open: Open<'_>) {
    let vmm = &*open();
    let range = vmm.reserve(vmm.granularity_bytes(), Backdrop::Nothing).unwrap();
    let handle = create(vmm, vmm.granularity_bytes());
    vmm.map(range, handle).unwrap();
    assert_invalid(vmm.release(handle), "handle", "not mapped");
    vmm.unmap(range).unwrap();
    vmm.release(handle).unwrap();
    assert_invalid(vmm.release(handle), "handle", "not released");
    assert_invalid(vmm.map(range, handle), "handle", "not released");
    assert_invalid(vmm.export(handle), "handle", "not released");
}

pub(crate) fn a_reservation_in_use_is_not_freed(open: Open<'_>) {
    let vmm = &*open();
    let range = vmm.reserve(2 * vmm.granularity_bytes(), Backdrop::Nothing).unwrap();
    let handle = create(vmm, vmm.granularity_bytes());
    let mapped = part(vmm, range, 1, 1);
    vmm.map(mapped, handle).unwrap();
    assert_invalid(vmm.free_reservation(range), "range", "nothing is mapped");
    vmm.unmap(mapped).unwrap();
    assert_invalid(vmm.free_reservation(mapped), "range", "whole reservation");
    assert_invalid(vmm.free_reservation(part(vmm, range, 0, 1)), "range", "whole reservation");
    vmm.free_reservation(range).unwrap();
    assert_invalid(vmm.free_reservation(range), "range", "whole reservation");
}

pub(crate) fn memory_without_access_is_not_touched(open: Open<'_>) {
    let vmm = &*open();
    let unit_bytes = vmm.granularity_bytes();
    let range = vmm.reserve(3 * unit_bytes, Backdrop::Nothing).unwrap();
    let handle = create(vmm, unit_bytes);
    let (left, right) = (part(vmm, range, 0, 1), part(vmm, range, 1, 1));
    assert_invalid(vmm.read(left.address, &mut [0]), "range", "with access");
    vmm.map(left, handle).unwrap();
    vmm.map(right, handle).unwrap();
    assert_invalid(vmm.read(left.address, &mut [0]), "range", "with access");
    vmm.set_access(left, Access::ReadWrite).unwrap();
    vmm.write(left.address, b"x").unwrap();
    assert_invalid(vmm.read(right.address - 1, &mut [0, 0]), "range", "with access");
    vmm.set_access(right, Access::ReadOnly).unwrap();
    vmm.read(right.address - 1, &mut [0, 0]).unwrap();
    assert_invalid(vmm.write(right.address - 1, &[0, 0]), "range", "write access");
    assert_invalid(vmm.fill(right, 0), "range", "write access");
    assert_invalid(vmm.read(right.end() - 1, &mut [0, 0]), "range", "with access");
    assert_invalid(vmm.read(range.end() - 1, &mut [0, 0]), "range", "with access");
}

pub(crate) fn a_handle_of_another_device_is_refused(open: Open<'_>) {
    let (vmm, other) = (open(), open());
    let handle = create(&*other, other.granularity_bytes());
    create(&*vmm, vmm.granularity_bytes());
    assert_invalid(vmm.release(handle), "handle", "of this device");
    other.release(handle).unwrap();
}
