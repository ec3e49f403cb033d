//! Events of the driver as fences.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use tracing::warn;

use super::call::{check, words_of};
use super::context::{CurrentContext, PrimaryContext};
use crate::Result;
use crate::vmm::{Fence, Stream};

/// An event that was recorded in a stream.
#[derive(Debug)]
pub(super) struct EventFence {
    context: Arc<PrimaryContext>,
    event: sys::CUevent,
}

// SAFETY: an event can be queried and destroyed by any thread.
unsafe impl Send for EventFence {}
// SAFETY: as above; the driver allows concurrent queries.
unsafe impl Sync for EventFence {}

impl EventFence {
    pub(super) fn record(context: Arc<PrimaryContext>, stream: Stream) -> Result<Self> {
        let current = context.enter()?;
        let mut event = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the event goes to a local.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        drop(current);
        // From here on a failure destroys the event.
        let fence = Self { context, event };
        let current = fence.context.enter()?;
        let stream = ptr::with_exposed_provenance_mut(stream.0 as usize);
        // SAFETY: the event is alive, and so is the stream, as its maker promised.
        check("cuEventRecord", unsafe { sys::cuEventRecord(fence.event, stream) })?;
        drop(current);
        Ok(fence)
    }

    /// An event of our own behind the work that `event` stands for now.
    ///
    /// # Safety
    ///
    /// The event is alive and of `context`.
    pub(super) unsafe fn after(context: &Arc<PrimaryContext>, event: sys::CUevent) -> Result<Self> {
        let queue = FenceQueue::create(context)?;
        // SAFETY: the stream was just created, and the caller promised that the event is alive.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(queue.stream, event, 0) })?;
        let stream = Stream(queue.stream.expose_provenance() as u64);
        Self::record(Arc::clone(context), stream)
    }
}

/// A stream for one fence: what is queued there waits for no other stream.
#[derive(Debug)]
struct FenceQueue<'a> {
    stream: sys::CUstream,
    _current: CurrentContext,
    _context: &'a PrimaryContext,
}

impl<'a> FenceQueue<'a> {
    fn create(context: &'a PrimaryContext) -> Result<Self> {
        let current = context.enter()?;
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the stream goes to a local.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        Ok(Self { stream, _current: current, _context: context })
    }
}

impl Drop for FenceQueue<'_> {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; the driver keeps it until its work is done.
        let result = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        if result != sys::CUresult::CUDA_SUCCESS {
            warn!(error = words_of(result), "could not destroy a stream");
        }
    }
}

impl Fence for EventFence {
    fn is_complete(&self) -> Result<bool> {
        let _current = self.context.enter()?;
        // SAFETY: the event lives as long as `self`.
        match unsafe { sys::cuEventQuery(self.event) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }
}

impl Drop for EventFence {
    fn drop(&mut self) {
        // SAFETY: created once in `record`, destroyed once here; the driver waits with the freeing until
        // the device has passed it.
        let result = unsafe { sys::cuEventDestroy_v2(self.event) };
        if result != sys::CUresult::CUDA_SUCCESS {
            warn!(error = words_of(result), "could not destroy an event");
        }
    }
}
