//! What is reserved, created and mapped, and which requests are in order: no I/O.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Access, Backdrop, PhysicalHandle, VirtualRange};
use crate::{MemoryError, Result};

/// The space of one device in this process; `M` is the driver's word for physical memory.
#[derive(Debug)]
pub(super) struct AddressSpace<M> {
    granularity_bytes: u64,
    reservations: BTreeMap<u64, Reservation>,
    memories: HashMap<PhysicalHandle, Memory<M>>,
}

#[derive(Debug)]
struct Reservation {
    n_bytes: u64,
    backdrop: Backdrop,
    mappings: BTreeMap<u64, Mapping>,
}

#[derive(Debug)]
struct Mapping {
    n_bytes: u64,
    handle: PhysicalHandle,
    access: Option<Access>,
}

#[derive(Debug)]
struct Memory<M> {
    inner: M,
    n_bytes: u64,
    n_mappings: u64,
    is_exportable: bool,
}

impl<M> AddressSpace<M> {
    pub(super) fn new(granularity_bytes: u64) -> Self {
        Self { granularity_bytes, reservations: BTreeMap::new(), memories: HashMap::new() }
    }

    // --- checks: the request is in order, or the error that every backend gives ---

    pub(super) fn check_size(&self, n_bytes: u64) -> Result<()> {
        if n_bytes != 0 && n_bytes.is_multiple_of(self.granularity_bytes) && usize::try_from(n_bytes).is_ok()
        {
            return Ok(());
        }
        let allowed = format!("a positive multiple of {} bytes", self.granularity_bytes);
        Err(MemoryError::Invalid { field: "n_bytes", value: n_bytes.to_string(), allowed })
    }

    /// The backdrop of a reservation that can be freed.
    pub(super) fn check_free_reservation(&self, range: VirtualRange) -> Result<()> {
        match self.reservations.get(&range.address) {
            Some(reservation) if reservation.n_bytes != range.n_bytes => {
                Err(bad_range(range, "a whole reservation"))
            }
            Some(reservation) if !reservation.mappings.is_empty() => {
                Err(bad_range(range, "a reservation in which nothing is mapped"))
            }
            Some(_) => Ok(()),
            None => Err(bad_range(range, "a whole reservation")),
        }
    }

    pub(super) fn check_map(&self, range: VirtualRange, handle: PhysicalHandle) -> Result<&M> {
        let (_, reservation) = self.reservation_of(range)?;
        let memory = self.memory(handle)?;
        if range.n_bytes > memory.n_bytes {
            return Err(bad_range(range, &format!("up to the memory's {:#x} bytes", memory.n_bytes)));
        }
        let previous = reservation.mappings.range(..range.end()).next_back();
        if previous.is_some_and(|(address, mapping)| address + mapping.n_bytes > range.address) {
            return Err(bad_range(range, "addresses where nothing is mapped"));
        }
        Ok(&memory.inner)
    }

    /// The backdrop behind a run of whole mappings.
    pub(super) fn check_run(&self, range: VirtualRange) -> Result<Backdrop> {
        let (_, reservation) = self.reservation_of(range)?;
        let mut covered_to = range.address;
        for (address, mapping) in reservation.mappings.range(range.address..range.end()) {
            if *address != covered_to {
                break;
            }
            covered_to = address + mapping.n_bytes;
        }
        if covered_to == range.end() {
            return Ok(reservation.backdrop);
        }
        Err(bad_range(range, "a run of whole mappings"))
    }

    /// Whether each byte may be read, or also written.
    pub(super) fn check_access(&self, address: u64, n_bytes: u64, access: Access) -> Result<()> {
        let range = VirtualRange { address, n_bytes };
        let refused = || match access {
            Access::ReadWrite => bad_range(range, "mapped addresses with write access"),
            Access::ReadOnly => bad_range(range, "mapped addresses with access"),
        };
        let end = address.checked_add(n_bytes).ok_or_else(refused)?;
        let (base, reservation) = self.reservations.range(..=address).next_back().ok_or_else(refused)?;
        if end > base + reservation.n_bytes {
            return Err(refused());
        }
        let is_bare_readable = access == Access::ReadOnly && reservation.backdrop == Backdrop::Zeros;
        let first = reservation.mappings.range(..=address).next_back().map_or(address, |(first, _)| *first);
        let mut allowed_to = address;
        for (mapped_at, mapping) in reservation.mappings.range(first..end) {
            if mapped_at + mapping.n_bytes <= address {
                continue;
            }
            let is_allowed = match mapping.access {
                Some(Access::ReadWrite) => true,
                Some(Access::ReadOnly) => access == Access::ReadOnly,
                None => false,
            };
            if !is_allowed || (*mapped_at > allowed_to && !is_bare_readable) {
                return Err(refused());
            }
            allowed_to = mapped_at + mapping.n_bytes;
        }
        if allowed_to < end && !is_bare_readable { Err(refused()) } else { Ok(()) }
    }

    pub(super) fn check_release(&self, handle: PhysicalHandle) -> Result<&M> {
        let memory = self.memory(handle)?;
        if memory.n_mappings == 0 {
            return Ok(&memory.inner);
        }
        Err(bad_handle(handle, "memory that is not mapped"))
    }

    pub(super) fn find(&self, handle: PhysicalHandle) -> Result<&M> {
        Ok(&self.memory(handle)?.inner)
    }

    pub(super) fn check_export(&self, handle: PhysicalHandle) -> Result<&M> {
        let memory = self.memory(handle)?;
        if memory.is_exportable {
            return Ok(&memory.inner);
        }
        Err(bad_handle(handle, "memory that was created exportable"))
    }

    // --- entries: what the driver has done ---

    pub(super) fn enter_reservation(&mut self, range: VirtualRange, backdrop: Backdrop) {
        let reservation = Reservation { n_bytes: range.n_bytes, backdrop, mappings: BTreeMap::new() };
        self.reservations.insert(range.address, reservation);
    }

    pub(super) fn strike_reservation(&mut self, range: VirtualRange) {
        self.reservations.remove(&range.address);
    }

    pub(super) fn enter_memory(&mut self, inner: M, n_bytes: u64, is_exportable: bool) -> PhysicalHandle {
        // One counter for the process, so that a handle of another device is not mistaken for one of
        // this; nothing is ordered by it.
        static NEXT_HANDLE: AtomicU64 = AtomicU64::new(1);
        let handle = PhysicalHandle(NEXT_HANDLE.fetch_add(1, Ordering::Relaxed));
        self.memories.insert(handle, Memory { inner, n_bytes, n_mappings: 0, is_exportable });
        handle
    }

    pub(super) fn strike_memory(&mut self, handle: PhysicalHandle) {
        self.memories.remove(&handle);
    }

    pub(super) fn enter_mapping(&mut self, range: VirtualRange, handle: PhysicalHandle) {
        if let Some(memory) = self.memories.get_mut(&handle) {
            memory.n_mappings += 1;
        }
        if let Some((_, reservation)) = self.reservations.range_mut(..=range.address).next_back() {
            reservation
                .mappings
                .insert(range.address, Mapping { n_bytes: range.n_bytes, handle, access: None });
        }
    }

    pub(super) fn enter_access(&mut self, run: VirtualRange, access: Access) {
        if let Some((_, reservation)) = self.reservations.range_mut(..=run.address).next_back() {
            for (_, mapping) in reservation.mappings.range_mut(run.address..run.end()) {
                mapping.access = Some(access);
            }
        }
    }

    pub(super) fn strike_mappings(&mut self, run: VirtualRange) {
        let Some((_, reservation)) = self.reservations.range_mut(..=run.address).next_back() else {
            return;
        };
        while let Some((&address, mapping)) = reservation.mappings.range(run.address..run.end()).next() {
            if let Some(memory) = self.memories.get_mut(&mapping.handle) {
                memory.n_mappings -= 1;
            }
            reservation.mappings.remove(&address);
        }
    }

    // --- the end ---

    /// Every mapping with the backdrop behind it.
    pub(super) fn mappings(&self) -> Vec<(VirtualRange, Backdrop)> {
        let of_reservation = |reservation: &Reservation| {
            let backdrop = reservation.backdrop;
            let ranges = reservation.mappings.iter();
            ranges
                .map(move |(&address, mapping)| {
                    (VirtualRange { address, n_bytes: mapping.n_bytes }, backdrop)
                })
                .collect::<Vec<_>>()
        };
        self.reservations.values().flat_map(of_reservation).collect()
    }

    pub(super) fn memories(&self) -> impl Iterator<Item = &M> {
        self.memories.values().map(|memory| &memory.inner)
    }

    pub(super) fn reservations(&self) -> impl Iterator<Item = VirtualRange> {
        self.reservations
            .iter()
            .map(|(&address, reservation)| VirtualRange { address, n_bytes: reservation.n_bytes })
    }

    fn reservation_of(&self, range: VirtualRange) -> Result<(u64, &Reservation)> {
        let granularity_bytes = self.granularity_bytes;
        let is_aligned = range.address.is_multiple_of(granularity_bytes)
            && range.n_bytes.is_multiple_of(granularity_bytes)
            && range.n_bytes != 0;
        if !is_aligned {
            return Err(bad_range(
                range,
                &format!("address and size are positive multiples of {granularity_bytes}"),
            ));
        }
        let outside = || bad_range(range, "inside of a reservation");
        let end = range.address.checked_add(range.n_bytes).ok_or_else(outside)?;
        let (base, reservation) =
            self.reservations.range(..=range.address).next_back().ok_or_else(outside)?;
        if end > base + reservation.n_bytes {
            return Err(outside());
        }
        Ok((*base, reservation))
    }

    fn memory(&self, handle: PhysicalHandle) -> Result<&Memory<M>> {
        self.memories
            .get(&handle)
            .ok_or_else(|| bad_handle(handle, "memory of this device that is not released"))
    }
}

fn bad_range(range: VirtualRange, allowed: &str) -> MemoryError {
    MemoryError::Invalid { field: "range", value: range.to_string(), allowed: allowed.to_owned() }
}

fn bad_handle(handle: PhysicalHandle, allowed: &str) -> MemoryError {
    MemoryError::Invalid { field: "handle", value: handle.0.to_string(), allowed: allowed.to_owned() }
}
