//! A GPU's memory against the suites of all backends; needs the feature `cuda-tests` and a device.
#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::sync::Arc;

use kvik_memory::vmm::Vmm;
use kvik_memory::vmm::cuda::CudaVmm;

mod region_suite;
mod vmm_suite;

fn open_cuda() -> Arc<dyn Vmm> {
    Arc::new(CudaVmm::open(0).unwrap())
}

vmm_suite::vmm_conformance!(open_cuda);
region_suite::region_conformance!(open_cuda);

#[test]
fn the_device_is_named_by_its_uuid() {
    let vmm = open_cuda();
    let name = vmm.device_name();
    assert!(name.starts_with("GPU-") && name.len() == 40, "{name}");
    assert_eq!(open_cuda().device_name(), name);
}
