//! Work on threads of this module.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;
use rustix::process::setpriority_process;

use crate::awaiting::{Waiter, future_of};
use crate::error::invalid;
use crate::found::Found;
use crate::layers::{LayerProgress, LayerReporter};

/// The lowest priority that Linux has for a thread that is not real-time.
const LOWEST_PRIORITY: i32 = 19;

/// Longest wait between two looks for Python's signals, such as an interrupt by the user.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Something that runs in the background, such as a load. `await` gives its result, in a running loop of asyncio.
///
/// It goes on when a task that awaits it is cancelled, and has the memory that it uses until it ends.
#[pyclass(frozen, module = "kvik")]
#[derive(Debug)]
pub(crate) struct Job {
    state: Arc<JobState>,
    /// Set by a lookup before it is done.
    found: Arc<OnceLock<Found>>,
    /// How far a load has come that brings layer after layer.
    layers: Option<Arc<LayerProgress>>,
}

#[derive(Debug, Default)]
struct JobState {
    outcome: Mutex<Outcome>,
    changed: Condvar,
    /// Rung at the end; none are added afterwards. Locked with the outcome.
    waiters: Mutex<Vec<Waiter>>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Outcome {
    #[default]
    Waiting,
    Running,
    Cancelled,
    /// Chunks, or tokens, as the job says.
    Done(usize),
}

/// Threads that run jobs in the order in which they came; dropping it cancels those that wait and joins the threads.
#[derive(Debug)]
pub(crate) struct Workers {
    shared: Arc<WorkersShared>,
    threads: Vec<JoinHandle<()>>,
}

type Work = Box<dyn FnOnce() -> usize + Send>;

#[derive(Default)]
struct WorkersShared {
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<(Arc<JobState>, Work)>,
    is_closing: bool,
}

#[pymethods]
impl Job {
    /// Whether it has ended.
    #[getter]
    fn is_done(&self) -> bool {
        matches!(*self.state.outcome.lock(), Outcome::Done(_) | Outcome::Cancelled)
    }

    /// What it achieved: chunks for loads and saves, tokens for lookups; 0 where it failed, was cancelled or is not done.
    #[getter]
    fn result(&self) -> usize {
        self.state.outcome.lock().result()
    }

    /// What a lookup found; `None` for other jobs, where there is no daemon, and until it is done.
    #[getter]
    fn found(&self) -> Option<Found> {
        self.found.get().cloned()
    }

    /// Waits for the end; says whether it came within `timeout_s` seconds, or for ever without it.
    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        let ended = wait_for(py, timeout_s, |until| self.state.wait_until(until).then_some(()))?;
        Ok(ended.is_some())
    }

    /// Waits for the first `n_layers` layers of a load by layers; says whether all blocks have them within `timeout_s` seconds. Where
    /// the load ends without them, that is known at once.
    #[pyo3(signature = (n_layers, timeout_s=None))]
    fn wait_layers(&self, py: Python<'_>, n_layers: usize, timeout_s: Option<f64>) -> PyResult<bool> {
        let layers = self.layers()?;
        let has_come = wait_for(py, timeout_s, |until| layers.wait_until(n_layers, until))?;
        Ok(has_come.unwrap_or(false))
    }

    /// Gives a load by layers up. When this returns, nothing writes its blocks any more; it may end later, with 0 as its result or
    /// with what had come.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        let layers = self.layers()?;
        self.cancel();
        py.detach(|| layers.abandon());
        Ok(())
    }

    /// Keeps it from starting; says whether it has not started and will not. One that runs goes on: wait for it.
    fn cancel(&self) -> bool {
        let mut outcome = self.state.outcome.lock();
        if *outcome == Outcome::Waiting {
            self.state.end(&mut outcome, Outcome::Cancelled);
            if let Some(layers) = &self.layers {
                layers.end();
            }
        }
        *outcome == Outcome::Cancelled
    }

    fn __await__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        future_of(py, |waiter| self.state.notify_at_end(waiter))?.call_method0("__await__")
    }

    fn __repr__(&self) -> String {
        format!("Job({:?})", *self.state.outcome.lock())
    }
}

/// Asks again and again, each time until the given moment at most, whether something is known; `None` after `timeout_s` seconds.
pub(crate) fn wait_for<T: Send>(
    py: Python<'_>,
    timeout_s: Option<f64>,
    mut ask: impl FnMut(Instant) -> Option<T> + Send,
) -> PyResult<Option<T>> {
    let deadline = timeout_s
        .and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok())
        .and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let next_look = Instant::now() + SIGNAL_INTERVAL;
        let until = deadline.map_or(next_look, |deadline| deadline.min(next_look));
        if let Some(answer) = py.detach(|| ask(until)) {
            return Ok(Some(answer));
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(None);
        }
        py.check_signals()?;
    }
}

impl Job {
    fn layers(&self) -> PyResult<&Arc<LayerProgress>> {
        self.layers
            .as_ref()
            .ok_or_else(|| invalid("job", &"without layers", "a load that was started with `by_layers`"))
    }

    /// The job of a lookup, which sets `found`.
    pub(crate) fn with_found(self, found: Arc<OnceLock<Found>>) -> Self {
        Self { found, ..self }
    }

    /// Waits for the end. Where Python is interrupted meanwhile, cancels it or waits for its end, and raises the interruption.
    pub(crate) fn wait_or_stop(&self, py: Python<'_>) -> PyResult<usize> {
        if let Err(interruption) = self.wait(py, None) {
            self.cancel();
            py.detach(|| while !self.state.wait_until(Instant::now() + SIGNAL_INTERVAL) {});
            return Err(interruption);
        }
        Ok(self.result())
    }
}

// === impl JobState ===

impl JobState {
    fn wait_until(&self, until: Instant) -> bool {
        let mut outcome = self.outcome.lock();
        while matches!(*outcome, Outcome::Waiting | Outcome::Running) {
            if self.changed.wait_until(&mut outcome, until).timed_out() {
                break;
            }
        }
        matches!(*outcome, Outcome::Done(_) | Outcome::Cancelled)
    }

    /// Says that it runs; `false` where it was cancelled.
    fn begin(&self) -> bool {
        let mut outcome = self.outcome.lock();
        if *outcome == Outcome::Waiting {
            *outcome = Outcome::Running;
        }
        *outcome == Outcome::Running
    }

    fn finish(&self, outcome: Outcome) {
        self.end(&mut self.outcome.lock(), outcome);
    }

    fn end(&self, state: &mut Outcome, outcome: Outcome) {
        *state = outcome;
        self.changed.notify_all();
        for waiter in self.waiters.lock().drain(..) {
            waiter.ring(outcome.result());
        }
    }

    /// Rings a waiter at the end; its result where that was before.
    fn notify_at_end(&self, waiter: Waiter) -> Option<usize> {
        let outcome = self.outcome.lock();
        if matches!(*outcome, Outcome::Done(_) | Outcome::Cancelled) {
            return Some(outcome.result());
        }
        self.waiters.lock().push(waiter);
        None
    }
}

impl Outcome {
    fn result(self) -> usize {
        match self {
            Self::Done(result) => result,
            Self::Waiting | Self::Running | Self::Cancelled => 0,
        }
    }
}

// === impl Workers ===

impl Workers {
    /// Starts threads. Idle ones, and those that they start, run where no other thread needs the processor.
    pub(crate) fn start(name: &str, n_threads: usize, is_idle: bool) -> std::io::Result<Self> {
        let mut workers = Self { shared: Arc::default(), threads: Vec::with_capacity(n_threads) };
        for _ in 0..n_threads {
            let shared = Arc::clone(&workers.shared);
            let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
                if is_idle {
                    become_idle();
                }
                shared.run();
            })?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    pub(crate) fn submit(&self, work: impl FnOnce() -> usize + Send + 'static) -> Job {
        let state = Arc::<JobState>::default();
        {
            let mut queue = self.shared.queue.lock();
            if queue.is_closing {
                state.finish(Outcome::Cancelled);
            } else {
                queue.waiting.push_back((Arc::clone(&state), Box::new(work)));
            }
        }
        self.shared.wake.notify_one();
        Job { state, found: Arc::default(), layers: None }
    }

    /// Begins work that tells which layers have come.
    pub(crate) fn submit_layers(&self, work: impl FnOnce(&LayerReporter) -> usize + Send + 'static) -> Job {
        let layers = Arc::<LayerProgress>::default();
        let reporter = LayerReporter::new(Arc::clone(&layers));
        let job = self.submit(move || work(&reporter));
        Job { layers: Some(layers), ..job }
    }

    /// Cancels what waits, and waits for what runs.
    pub(crate) fn close(&mut self) {
        let waiting = {
            let mut queue = self.shared.queue.lock();
            queue.is_closing = true;
            std::mem::take(&mut queue.waiting)
        };
        self.shared.wake.notify_all();
        for (state, _) in waiting {
            state.finish(Outcome::Cancelled);
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.close();
    }
}

/// Lowers the priority of this thread as far as it goes.
fn become_idle() {
    // Without it the work is done all the same, and costs others some time.
    if let Err(error) = setpriority_process(None, LOWEST_PRIORITY) {
        tracing::debug!(%error, "could not lower the priority of a thread");
    }
}

impl WorkersShared {
    fn run(&self) {
        while let Some((state, work)) = self.next() {
            if !state.begin() {
                continue;
            }
            // What fails here costs a hit, and must not take the thread with it.
            let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or(0);
            state.finish(Outcome::Done(result));
        }
    }

    fn next(&self) -> Option<(Arc<JobState>, Work)> {
        let mut queue = self.queue.lock();
        loop {
            if queue.is_closing {
                return None;
            }
            if let Some(next) = queue.waiting.pop_front() {
                return Some(next);
            }
            self.wake.wait(&mut queue);
        }
    }
}

impl std::fmt::Debug for WorkersShared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("WorkersShared").finish_non_exhaustive()
    }
}
