//! Work that was recorded once and is started by one call.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::{Device, check, warn_of};
use crate::error::Result;

/// Recorded work.
#[derive(Debug)]
pub(in super::super) struct Graph {
    device: Arc<Device>,
    raw: sys::CUgraphExec,
}

// SAFETY: graphs can be started by any thread of the process; this value is the only one that names it.
unsafe impl Send for Graph {}

impl Device {
    /// Records what `queue` queues on the stream, instead of doing it.
    ///
    /// # Errors
    /// Those of `queue`, and if the driver cannot record or prepare the work. The stream can be used as before.
    pub(in super::super) fn record(self: &Arc<Self>, queue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.enter()?;
        // Other threads copy meanwhile, on streams of their own.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`, and nothing is recorded on it yet.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) })?;
        let queued = queue();
        let mut graph = ptr::null_mut();
        // The recording ends in any case: the stream takes no other work before.
        // SAFETY: the graph goes to a local.
        let ended = unsafe { sys::cuStreamEndCapture(self.stream, &raw mut graph) };
        queued?;
        check("cuStreamEndCapture", ended)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the graph was just made, and what is prepared from it goes to a local.
        let prepared = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut raw, graph, 0) };
        // SAFETY: made once, destroyed once here; what was prepared from it does not need it.
        warn_of("cuGraphDestroy", unsafe { sys::cuGraphDestroy(graph) });
        check("cuGraphInstantiate", prepared)?;
        Ok(Graph { device: Arc::clone(self), raw })
    }
}

impl Graph {
    /// Queues the recorded work.
    ///
    /// # Safety
    /// As for each of its kernels: until the stream has passed them, all memory that their arguments name is alive and large enough.
    pub(in super::super) unsafe fn launch(&self) -> Result<()> {
        self.device.enter()?;
        // SAFETY: graph and stream are alive; the caller answers for the memory.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.raw, self.device.stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: made once, destroyed once here; the driver keeps what still runs.
            warn_of("cuGraphExecDestroy", unsafe { sys::cuGraphExecDestroy(self.raw) });
        }
    }
}
