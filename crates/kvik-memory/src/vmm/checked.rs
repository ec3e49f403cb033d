//! Virtual memory over a driver, with every request checked first.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use parking_lot::Mutex;
use tracing::warn;

use super::address_space::AddressSpace;
use super::{Access, Backdrop, Created, Fence, MemoryInfo, PhysicalHandle, Stream, VirtualRange, Vmm};
use crate::{MemoryError, Result};

/// The bare calls of a backend.
///
/// Arguments are in order when a method is called: [`CheckedVmm`] is the only caller, and gives its driver
/// to no request. A method that fails has changed nothing, as far as the driver can tell.
pub trait Driver: Send + Sync + fmt::Debug {
    /// Physical memory as the driver names it.
    type Memory: Send + Sync + fmt::Debug;

    /// See [`Vmm::device_name`].
    fn device_name(&self) -> &str;

    /// See [`Vmm::granularity_bytes`].
    fn granularity_bytes(&self) -> u64;

    /// See [`Vmm::has_zeros_backdrop`].
    fn has_zeros_backdrop(&self) -> bool;

    /// The address of a new reservation.
    fn reserve(&self, n_bytes: u64, backdrop: Backdrop) -> Result<u64>;

    /// Frees a whole reservation with nothing mapped in it.
    fn free_reservation(&self, range: VirtualRange) -> Result<()>;

    /// New memory, or nothing where the device has none left.
    fn create(&self, n_bytes: u64, is_exportable: bool) -> Result<Option<Self::Memory>>;

    /// Frees memory that is not mapped; it is not used again after success.
    fn release(&self, memory: &Self::Memory) -> Result<()>;

    /// Maps the first bytes of `memory` into a bare part of a reservation.
    fn map(&self, range: VirtualRange, memory: &Self::Memory) -> Result<()>;

    /// Allows access to a run of whole mappings.
    fn set_access(&self, range: VirtualRange, access: Access) -> Result<()>;

    /// Replaces a run of whole mappings by the backdrop.
    fn unmap(&self, range: VirtualRange, backdrop: Backdrop) -> Result<()>;

    /// See [`Vmm::export`].
    fn export(&self, memory: &Self::Memory) -> Result<OwnedFd>;

    /// See [`Vmm::import`].
    fn import(&self, descriptor: BorrowedFd<'_>, n_bytes: u64) -> Result<Self::Memory>;

    /// See [`Vmm::memory_info`].
    fn memory_info(&self) -> Result<MemoryInfo>;

    /// See [`Vmm::synchronize`].
    fn synchronize(&self) -> Result<()>;

    /// See [`Vmm::record`].
    fn record(&self, stream: Stream) -> Result<Box<dyn Fence>>;

    /// Copies from readable addresses, which stay so during the call.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()>;

    /// Copies to writable addresses, which stay so during the call.
    fn write(&self, address: u64, bytes: &[u8]) -> Result<()>;

    /// Sets bytes of a writable range, which stays so during the call.
    fn fill(&self, range: VirtualRange, byte: u8) -> Result<()>;
}

/// [`Vmm`] over a driver.
///
/// The address space is locked during a driver call: what was checked is still true when the driver is asked.
/// Dropping it gives everything back that is still held.
#[derive(Debug)]
pub struct CheckedVmm<D: Driver> {
    driver: D,
    space: Mutex<AddressSpace<D::Memory>>,
}

impl<D: Driver> CheckedVmm<D> {
    /// Virtual memory over `driver`.
    pub fn new(driver: D) -> Self {
        let space = Mutex::new(AddressSpace::new(driver.granularity_bytes()));
        Self { driver, space }
    }

    /// The driver, for what only its backend can do.
    pub(super) fn driver(&self) -> &D {
        &self.driver
    }

    /// Looks at memory as the driver names it; it cannot be released meanwhile.
    pub(super) fn look_at<T>(&self, handle: PhysicalHandle, look: impl FnOnce(&D::Memory) -> T) -> Result<T> {
        Ok(look(self.space.lock().find(handle)?))
    }

    fn create_memory(&self, n_bytes: u64, is_exportable: bool) -> Result<Created> {
        let mut space = self.space.lock();
        space.check_size(n_bytes)?;
        Ok(match self.driver.create(n_bytes, is_exportable)? {
            Some(memory) => Created::Memory(space.enter_memory(memory, n_bytes, is_exportable)),
            None => Created::NoMemory,
        })
    }
}

impl<D: Driver> Vmm for CheckedVmm<D> {
    fn device_name(&self) -> &str {
        self.driver.device_name()
    }

    fn granularity_bytes(&self) -> u64 {
        self.driver.granularity_bytes()
    }

    fn has_zeros_backdrop(&self) -> bool {
        self.driver.has_zeros_backdrop()
    }

    fn reserve(&self, n_bytes: u64, backdrop: Backdrop) -> Result<VirtualRange> {
        let mut space = self.space.lock();
        space.check_size(n_bytes)?;
        if backdrop == Backdrop::Zeros && !self.driver.has_zeros_backdrop() {
            return Err(MemoryError::Invalid {
                field: "backdrop",
                value: "zeros".to_owned(),
                allowed: format!("nothing, on device {}", self.driver.device_name()),
            });
        }
        let range = VirtualRange { address: self.driver.reserve(n_bytes, backdrop)?, n_bytes };
        space.enter_reservation(range, backdrop);
        Ok(range)
    }

    fn free_reservation(&self, range: VirtualRange) -> Result<()> {
        let mut space = self.space.lock();
        space.check_free_reservation(range)?;
        self.driver.free_reservation(range)?;
        space.strike_reservation(range);
        Ok(())
    }

    fn create(&self, n_bytes: u64) -> Result<Created> {
        self.create_memory(n_bytes, false)
    }

    fn create_exportable(&self, n_bytes: u64) -> Result<Created> {
        self.create_memory(n_bytes, true)
    }

    fn release(&self, handle: PhysicalHandle) -> Result<()> {
        let mut space = self.space.lock();
        self.driver.release(space.check_release(handle)?)?;
        space.strike_memory(handle);
        Ok(())
    }

    fn map(&self, range: VirtualRange, handle: PhysicalHandle) -> Result<()> {
        let mut space = self.space.lock();
        self.driver.map(range, space.check_map(range, handle)?)?;
        space.enter_mapping(range, handle);
        Ok(())
    }

    fn set_access(&self, range: VirtualRange, access: Access) -> Result<()> {
        let mut space = self.space.lock();
        space.check_run(range)?;
        self.driver.set_access(range, access)?;
        space.enter_access(range, access);
        Ok(())
    }

    fn unmap(&self, range: VirtualRange) -> Result<()> {
        let mut space = self.space.lock();
        let backdrop = space.check_run(range)?;
        self.driver.unmap(range, backdrop)?;
        space.strike_mappings(range);
        Ok(())
    }

    fn export(&self, handle: PhysicalHandle) -> Result<OwnedFd> {
        self.driver.export(self.space.lock().check_export(handle)?)
    }

    fn import(&self, descriptor: BorrowedFd<'_>, n_bytes: u64) -> Result<PhysicalHandle> {
        let mut space = self.space.lock();
        space.check_size(n_bytes)?;
        let memory = self.driver.import(descriptor, n_bytes)?;
        Ok(space.enter_memory(memory, n_bytes, true))
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.driver.memory_info()
    }

    fn synchronize(&self) -> Result<()> {
        self.driver.synchronize()
    }

    fn record(&self, stream: Stream) -> Result<Box<dyn Fence>> {
        self.driver.record(stream)
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        let space = self.space.lock();
        space.check_access(address, bytes.len() as u64, Access::ReadOnly)?;
        self.driver.read(address, bytes)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        let space = self.space.lock();
        space.check_access(address, bytes.len() as u64, Access::ReadWrite)?;
        self.driver.write(address, bytes)
    }

    fn fill(&self, range: VirtualRange, byte: u8) -> Result<()> {
        let space = self.space.lock();
        space.check_access(range.address, range.n_bytes, Access::ReadWrite)?;
        self.driver.fill(range, byte)
    }
}

impl<D: Driver> Drop for CheckedVmm<D> {
    fn drop(&mut self) {
        let device = self.driver.device_name();
        let space = self.space.get_mut();
        for (range, backdrop) in space.mappings() {
            if let Err(error) = self.driver.unmap(range, backdrop) {
                warn!(device, %range, %error, "could not unmap on close");
            }
        }
        for memory in space.memories() {
            if let Err(error) = self.driver.release(memory) {
                warn!(device, %error, "could not release memory on close");
            }
        }
        for range in space.reservations() {
            if let Err(error) = self.driver.free_reservation(range) {
                warn!(device, %range, %error, "could not free addresses on close");
            }
        }
    }
}
