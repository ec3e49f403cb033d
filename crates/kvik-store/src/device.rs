//! Memory of a store that GPUs reach by themselves.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use kvik_memory::vmm::cuda::CudaHostMemory;
use kvik_tier::{Arena, HostRegistrar, TierError};

use crate::error::Result;

/// Registers the memory of `arena` with the CUDA driver, through the device with this index, until the arena
/// is gone: copies between it and any GPU then run at full speed and beside other work.
///
/// All of the memory is taken from the kernel at once. The driver is looked for now, not linked.
///
/// # Errors
/// If there is no driver or no such device, or the memory cannot be had or registered; it then is used as
/// it is.
pub fn register_with_cuda(arena: &Arena, ordinal: u32) -> Result<()> {
    let memory = CudaHostMemory::open(ordinal).map_err(refused)?;
    Ok(arena.register_with(Arc::new(CudaRegistrar(memory)))?)
}

#[derive(Debug)]
struct CudaRegistrar(CudaHostMemory);

impl HostRegistrar for CudaRegistrar {
    fn register(&self, address: NonNull<u8>, n_bytes: usize) -> kvik_tier::Result<()> {
        self.0.register(address, n_bytes).map_err(refused)
    }

    fn unregister(&self, address: NonNull<u8>, _n_bytes: usize) {
        self.0.unregister(address);
    }
}

fn refused(error: kvik_memory::MemoryError) -> TierError {
    TierError::io("register memory with CUDA", io::Error::other(error))
}
