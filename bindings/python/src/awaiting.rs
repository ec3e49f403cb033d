//! Jobs as awaitables of asyncio.
//!
//! The threads that run jobs never hold Python's lock. A job that ends adds to a descriptor that the event loop polls, and
//! the loop itself sets the results of its futures. A loop has one such descriptor while something awaits a job in it.

use std::collections::HashMap;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

use crate::error::KvikError;

/// The bells of event loops, by the address of the loop, which each bell keeps alive.
static BELLS: Mutex<Option<HashMap<usize, Py<LoopBell>>>> = Mutex::new(None);

/// Wakes one event loop for jobs that have ended; called by the loop when its descriptor is readable.
#[pyclass(frozen, module = "kvik")]
#[derive(Debug)]
pub(crate) struct LoopBell {
    event_loop: Py<PyAny>,
    bell: Arc<Bell>,
    futures: Mutex<Futures>,
}

#[derive(Debug, Default)]
struct Futures {
    next_number: u64,
    waiting: HashMap<u64, Py<PyAny>>,
}

/// The part of a bell that other threads have.
#[derive(Debug)]
struct Bell {
    event: OwnedFd,
    /// Numbers of futures, each with its result.
    ended: Mutex<Vec<(u64, usize)>>,
}

/// A future that waits for a job.
#[derive(Debug)]
pub(crate) struct Waiter {
    bell: Arc<Bell>,
    number: u64,
}

/// Makes a future of the running event loop, and hands `register` what is rung when the job has ended. `register` returns the
/// result where the job has ended already.
pub(crate) fn future_of(
    py: Python<'_>,
    register: impl FnOnce(Waiter) -> Option<usize>,
) -> PyResult<Bound<'_, PyAny>> {
    let event_loop = py.import("asyncio")?.call_method0("get_running_loop")?;
    let future = event_loop.call_method0("create_future")?;
    let bell = LoopBell::of(&event_loop)?;
    let number = {
        let mut futures = bell.get().futures.lock();
        futures.next_number += 1;
        let number = futures.next_number;
        futures.waiting.insert(number, future.clone().unbind());
        number
    };
    // The loop runs in this thread: it cannot be notified of the end before this returns.
    let ended = register(Waiter { bell: Arc::clone(&bell.get().bell), number });
    if let Some(result) = ended {
        bell.get().futures.lock().waiting.remove(&number);
        bell.get().rest(py)?;
        future.call_method1("set_result", (result,))?;
    }
    Ok(future)
}

#[pymethods]
impl LoopBell {
    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        // It is read before the list: what is added behind the list makes it readable again.
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.bell.event, &mut count);
        let ended = std::mem::take(&mut *self.bell.ended.lock());
        for (number, result) in ended {
            let future = self.futures.lock().waiting.remove(&number);
            let Some(future) = future else { continue };
            // A task that was cancelled has cancelled its future.
            if !future.call_method0(py, "done")?.is_truthy(py)? {
                future.call_method1(py, "set_result", (result,))?;
            }
        }
        self.rest(py)
    }
}

impl LoopBell {
    /// The bell of a loop.
    fn of(event_loop: &Bound<'_, PyAny>) -> PyResult<Py<Self>> {
        let py = event_loop.py();
        let address = event_loop.as_ptr() as usize;
        if let Some(bell) = BELLS.lock().as_ref().and_then(|bells| bells.get(&address)) {
            return Ok(bell.clone_ref(py));
        }
        Self::forget_closed_loops(py);
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| KvikError::new_err(format!("make a descriptor for the event loop: {error}")))?;
        let descriptor = event.as_raw_fd();
        let bell = Arc::new(Bell { event, ended: Mutex::default() });
        let bell =
            Py::new(py, Self { event_loop: event_loop.clone().unbind(), bell, futures: Mutex::default() })?;
        event_loop.call_method1("add_reader", (descriptor, bell.clone_ref(py)))?;
        BELLS.lock().get_or_insert_default().insert(address, bell.clone_ref(py));
        Ok(bell)
    }

    /// Takes the descriptor out of the loop when nothing waits.
    fn rest(&self, py: Python<'_>) -> PyResult<()> {
        if !self.futures.lock().waiting.is_empty() {
            return Ok(());
        }
        let address = self.event_loop.as_ptr() as usize;
        let bell = BELLS.lock().as_mut().and_then(|bells| bells.remove(&address));
        self.event_loop.call_method1(py, "remove_reader", (self.bell.event.as_raw_fd(),))?;
        drop(bell);
        Ok(())
    }

    /// Drops the bells of loops that were closed while something waited.
    fn forget_closed_loops(py: Python<'_>) {
        let bells: Vec<_> = {
            let bells = BELLS.lock();
            bells.iter().flatten().map(|(address, bell)| (*address, bell.clone_ref(py))).collect()
        };
        for (address, bell) in bells {
            let is_closed = bell.get().event_loop.call_method0(py, "is_closed");
            if is_closed.and_then(|is_closed| is_closed.is_truthy(py)).unwrap_or(false) {
                let forgotten = BELLS.lock().as_mut().and_then(|bells| bells.remove(&address));
                drop(forgotten);
            }
        }
    }
}

impl Waiter {
    /// Says that the job has ended.
    pub(crate) fn ring(self, result: usize) {
        self.bell.ended.lock().push((self.number, result));
        // Any number is as good, and this one is the same in every order of bytes. It fails only where the count is full, and
        // then it is readable already.
        let _ = rustix::io::write(&self.bell.event, &[1; 8]);
    }
}
