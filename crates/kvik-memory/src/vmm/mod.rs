//! Virtual memory of a device: reserve addresses, create physical memory, map one behind the other.
//!
//! [`Vmm`] is the seam. [`CheckedVmm`] implements it over a [`Driver`]: it keeps the space of
//! reservations, mappings and handles and refuses misuse before the driver sees it, so every backend
//! answers the same mistake with the same error. Backends: [`host`], memory of this process, and
//! [`cuda`], the driver's. [`faulty`] is a decorator that fails on request.
//!
//! # Invariants
//!
//! * A mapping lies whole inside of one reservation, overlaps no other, and is unmapped whole.
//! * Memory is released only when nothing maps it, addresses are freed only when nothing is mapped there.
//! * A call that failed has changed nothing in the space.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::Result;

pub mod cuda;
pub mod faulty;
pub mod host;

mod address_space;
mod checked;

pub use checked::{CheckedVmm, Driver};

/// Virtual memory of one device.
///
/// Sizes and addresses are multiples of [`granularity_bytes`](Self::granularity_bytes). Every method can
/// be called by any thread. The caller of [`unmap`](Self::unmap) makes sure that nothing, kernels on the
/// device included, uses the range.
pub trait Vmm: Send + Sync + fmt::Debug {
    /// The device as the ledger names it: `host0`, `GPU-<uuid>`.
    fn device_name(&self) -> &str;

    /// What all sizes and addresses are multiples of.
    fn granularity_bytes(&self) -> u64;

    /// Whether [`reserve`](Self::reserve) takes [`Backdrop::Zeros`].
    fn has_zeros_backdrop(&self) -> bool;

    /// Takes a range of addresses, with `backdrop` wherever nothing is mapped.
    fn reserve(&self, n_bytes: u64, backdrop: Backdrop) -> Result<VirtualRange>;

    /// Gives addresses back: a whole reservation in which nothing is mapped.
    fn free_reservation(&self, range: VirtualRange) -> Result<()>;

    /// Creates physical memory of unspecified contents.
    fn create(&self, n_bytes: u64) -> Result<Created>;

    /// Like [`create`](Self::create), for memory that [`export`](Self::export) takes.
    ///
    /// On the host each costs a file descriptor.
    fn create_exportable(&self, n_bytes: u64) -> Result<Created>;

    /// Gives memory back that is not mapped anywhere.
    fn release(&self, handle: PhysicalHandle) -> Result<()>;

    /// Maps the first `range.n_bytes` of the memory; it must not be touched before
    /// [`set_access`](Self::set_access).
    ///
    /// Memory may be mapped several times. A driver may refuse a range smaller than the memory, with
    /// [`MemoryError::Device`](crate::MemoryError::Device).
    fn map(&self, range: VirtualRange, handle: PhysicalHandle) -> Result<()>;

    /// Allows access to a run of whole mappings.
    ///
    /// A driver may refuse [`Access::ReadOnly`].
    fn set_access(&self, range: VirtualRange, access: Access) -> Result<()>;

    /// Unmaps a run of whole mappings; the backdrop is behind it when this returns.
    ///
    /// A failure leaves the run mapped in the space, in an unknown state on the device.
    fn unmap(&self, range: VirtualRange) -> Result<()>;

    /// A descriptor through which another process can [`import`](Self::import) the memory.
    fn export(&self, handle: PhysicalHandle) -> Result<OwnedFd>;

    /// Takes memory that another process exported; `n_bytes` is its size.
    ///
    /// The memory lives until exporter and importers have released it.
    fn import(&self, descriptor: BorrowedFd<'_>, n_bytes: u64) -> Result<PhysicalHandle>;

    /// What the device has.
    fn memory_info(&self) -> Result<MemoryInfo>;

    /// Waits until the device has done what was asked of it.
    fn synchronize(&self) -> Result<()>;

    /// Marks the present end of `stream`.
    fn record(&self, stream: Stream) -> Result<Box<dyn Fence>>;

    /// Copies from the device, from readable addresses.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()>;

    /// Copies to the device, to writable addresses.
    fn write(&self, address: u64, bytes: &[u8]) -> Result<()>;

    /// Sets each byte of a writable range.
    fn fill(&self, range: VirtualRange, byte: u8) -> Result<()>;
}

/// A point in the work of a device.
pub trait Fence: Send + Sync + fmt::Debug {
    /// Whether the device has passed it.
    fn is_complete(&self) -> Result<bool>;
}

/// A range of addresses of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VirtualRange {
    /// The first byte.
    pub address: u64,
    /// How many bytes.
    pub n_bytes: u64,
}

/// Physical memory of a device, until it is released.
///
/// No two are equal in the life of a process, so a stale or foreign one is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PhysicalHandle(u64);

/// What came of creating memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Created {
    /// The memory.
    Memory(PhysicalHandle),
    /// The device has none left.
    NoMemory,
}

/// What may be done with mapped memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reads and writes.
    ReadWrite,
    /// Reads; a write faults.
    ReadOnly,
}

/// What lies in a reservation where nothing is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backdrop {
    /// Nothing: any access faults.
    Nothing,
    /// Zeros that can be read; a write faults. Costs no memory.
    Zeros,
}

/// The memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free bytes.
    pub free_bytes: u64,
    /// All bytes.
    pub total_bytes: u64,
}

/// A queue of work on the device; the default is the driver's default stream. The host has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stream(u64);

impl VirtualRange {
    /// The address after the last byte; saturates.
    pub fn end(&self) -> u64 {
        self.address.saturating_add(self.n_bytes)
    }
}

impl Stream {
    /// The stream that the driver names `raw`: a `CUstream` as an integer.
    ///
    /// # Safety
    ///
    /// It is a stream of the device's primary context, and lives as long as this value is passed on.
    pub unsafe fn from_raw(raw: u64) -> Self {
        Self(raw)
    }
}

impl fmt::Display for VirtualRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:#x}+{:#x}", self.address, self.n_bytes)
    }
}
