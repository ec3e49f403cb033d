//! A device that fails on request, for tests.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Access, Backdrop, Created, Fence, MemoryInfo, PhysicalHandle, Stream, VirtualRange, Vmm};
use crate::{MemoryError, Result};

/// Counts and records the calls that change something, and fails those it was told to.
///
/// A call that fails never reaches the device.
#[derive(Debug)]
pub struct FaultyVmm {
    inner: Arc<dyn Vmm>,
    state: Mutex<State>,
}

/// A kind of call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    /// [`Vmm::create`] and [`Vmm::create_exportable`].
    Create,
    /// [`Vmm::map`].
    Map,
    /// [`Vmm::set_access`].
    SetAccess,
    /// [`Vmm::unmap`].
    Unmap,
    /// [`Vmm::release`].
    Release,
}

/// One call, as it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallRecord {
    /// Its kind.
    pub call: Call,
    /// The addresses it was about, where it has any.
    pub range: Option<VirtualRange>,
    /// Whether it was made to fail.
    pub has_failed: bool,
}

/// Which call fails, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The kind of call that is counted; any kind if nothing.
    pub call: Option<Call>,
    /// How many such calls go well before.
    pub after: usize,
    /// How many such calls fail then.
    pub n_failures: usize,
    /// Whether a create says "no memory" instead of failing.
    pub is_no_memory: bool,
}

/// What some drivers refuse and others do not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Refusals {
    /// To map less than a whole handle.
    pub partial_maps: bool,
    /// [`Access::ReadOnly`].
    pub read_only: bool,
}

#[derive(Debug, Default)]
struct State {
    refusals: Refusals,
    created_bytes: HashMap<PhysicalHandle, u64>,
    records: Vec<CallRecord>,
    fault: Option<Fault>,
    n_counted: usize,
}

enum Verdict {
    Pass,
    Fail(MemoryError),
    NoMemory,
}

impl Fault {
    /// The `n`-th call from now on fails, counted from 0, and no other.
    pub fn once(call: Option<Call>, n: usize) -> Self {
        Self { call, after: n, n_failures: 1, is_no_memory: false }
    }

    /// All calls fail.
    pub fn always(call: Option<Call>) -> Self {
        Self { call, after: 0, n_failures: usize::MAX, is_no_memory: false }
    }

    /// The `n`-th create from now on finds no memory, counted from 0.
    pub fn no_memory(n: usize) -> Self {
        Self { call: Some(Call::Create), after: n, n_failures: 1, is_no_memory: true }
    }
}

impl FaultyVmm {
    /// `inner`, until a failure is ordered.
    pub fn new(inner: Arc<dyn Vmm>) -> Self {
        Self { inner, state: Mutex::default() }
    }

    /// Sets what fails from now on, instead of what was set before.
    pub fn set_fault(&self, fault: Option<Fault>) {
        let mut state = self.state.lock();
        state.fault = fault;
        state.n_counted = 0;
    }

    /// Sets what is refused from now on.
    pub fn set_refusals(&self, refusals: Refusals) {
        self.state.lock().refusals = refusals;
    }

    /// The calls since the last time they were taken.
    pub fn take_records(&self) -> Vec<CallRecord> {
        std::mem::take(&mut self.state.lock().records)
    }

    fn judge(&self, call: Call, range: Option<VirtualRange>) -> Verdict {
        let mut state = self.state.lock();
        let mut verdict = Verdict::Pass;
        if let Some(fault) = state.fault.filter(|fault| fault.call.is_none_or(|kind| kind == call)) {
            let n = state.n_counted;
            state.n_counted += 1;
            if n >= fault.after && n - fault.after < fault.n_failures {
                verdict = if fault.is_no_memory { Verdict::NoMemory } else { Verdict::Fail(injected(call)) };
            }
        }
        state.records.push(CallRecord { call, range, has_failed: !matches!(verdict, Verdict::Pass) });
        verdict
    }

    fn pass(&self, call: Call, range: Option<VirtualRange>) -> Result<()> {
        match self.judge(call, range) {
            Verdict::Pass => Ok(()),
            Verdict::Fail(error) => Err(error),
            Verdict::NoMemory => Err(injected(call)),
        }
    }

    fn create_unless_faulty(
        &self,
        n_bytes: u64,
        create: impl FnOnce() -> Result<Created>,
    ) -> Result<Created> {
        match self.judge(Call::Create, None) {
            Verdict::Pass => {
                let created = create()?;
                if let Created::Memory(handle) = created {
                    self.state.lock().created_bytes.insert(handle, n_bytes);
                }
                Ok(created)
            }
            Verdict::Fail(error) => Err(error),
            Verdict::NoMemory => Ok(Created::NoMemory),
        }
    }
}

impl Vmm for FaultyVmm {
    fn device_name(&self) -> &str {
        self.inner.device_name()
    }

    fn granularity_bytes(&self) -> u64 {
        self.inner.granularity_bytes()
    }

    fn has_zeros_backdrop(&self) -> bool {
        self.inner.has_zeros_backdrop()
    }

    fn reserve(&self, n_bytes: u64, backdrop: Backdrop) -> Result<VirtualRange> {
        self.inner.reserve(n_bytes, backdrop)
    }

    fn free_reservation(&self, range: VirtualRange) -> Result<()> {
        self.inner.free_reservation(range)
    }

    fn create(&self, n_bytes: u64) -> Result<Created> {
        self.create_unless_faulty(n_bytes, || self.inner.create(n_bytes))
    }

    fn create_exportable(&self, n_bytes: u64) -> Result<Created> {
        self.create_unless_faulty(n_bytes, || self.inner.create_exportable(n_bytes))
    }

    fn release(&self, handle: PhysicalHandle) -> Result<()> {
        self.pass(Call::Release, None)?;
        self.inner.release(handle)
    }

    fn map(&self, range: VirtualRange, handle: PhysicalHandle) -> Result<()> {
        self.pass(Call::Map, Some(range))?;
        let state = self.state.lock();
        let is_partial = state.created_bytes.get(&handle).is_some_and(|n_bytes| range.n_bytes < *n_bytes);
        if is_partial && state.refusals.partial_maps {
            return Err(injected(Call::Map));
        }
        drop(state);
        self.inner.map(range, handle)
    }

    fn set_access(&self, range: VirtualRange, access: Access) -> Result<()> {
        self.pass(Call::SetAccess, Some(range))?;
        if access == Access::ReadOnly && self.state.lock().refusals.read_only {
            return Err(injected(Call::SetAccess));
        }
        self.inner.set_access(range, access)
    }

    fn unmap(&self, range: VirtualRange) -> Result<()> {
        self.pass(Call::Unmap, Some(range))?;
        self.inner.unmap(range)
    }

    fn export(&self, handle: PhysicalHandle) -> Result<OwnedFd> {
        self.inner.export(handle)
    }

    fn import(&self, descriptor: BorrowedFd<'_>, n_bytes: u64) -> Result<PhysicalHandle> {
        self.inner.import(descriptor, n_bytes)
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.inner.memory_info()
    }

    fn synchronize(&self) -> Result<()> {
        self.inner.synchronize()
    }

    fn record(&self, stream: Stream) -> Result<Box<dyn Fence>> {
        self.inner.record(stream)
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<()> {
        self.inner.read(address, bytes)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        self.inner.write(address, bytes)
    }

    fn fill(&self, range: VirtualRange, byte: u8) -> Result<()> {
        self.inner.fill(range, byte)
    }
}

fn injected(call: Call) -> MemoryError {
    let call = match call {
        Call::Create => "create",
        Call::Map => "map",
        Call::SetAccess => "set_access",
        Call::Unmap => "unmap",
        Call::Release => "release",
    };
    MemoryError::Device { call, reason: "fault injected".to_owned() }
}
