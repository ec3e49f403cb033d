//! Futures for callers that block.

use std::fmt;
use std::sync::mpsc;

use crate::error::{Result, TierError};

/// Threads of the runtime: they wait for the network and copy little.
const N_THREADS: usize = 2;
/// Bytes of tasks that run at a time, unless one alone has more: each may have a copy of its chunk.
const MAX_RUNNING_BYTES: usize = 256 << 20;

/// A runtime of its own whose callers block without being part of it.
///
/// They may be threads of another runtime, whichever they like: nothing here enters a runtime on the
/// caller's thread.
pub(super) struct Runtime {
    runtime: Option<tokio::runtime::Runtime>,
}

/// How a task tells its caller something. When the last of it is gone, the task is over.
pub(super) struct Reporter<M> {
    task_idx: usize,
    sender: mpsc::Sender<(usize, Option<M>)>,
}

impl Runtime {
    /// # Errors
    /// [`TierError::Io`] if threads cannot be had.
    pub(super) fn new() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(N_THREADS)
            .thread_name("kvik-object")
            .enable_all()
            .build()
            .map_err(|error| TierError::io("start the threads of an object tier", error))?;
        Ok(Self { runtime: Some(runtime) })
    }

    /// Runs a task for each of `task_bytes`, at most `n_at_a_time`, and returns when all are over.
    ///
    /// `start` makes a task when its turn has come, `receive` gets what it reports; both run on the caller's
    /// thread. What was reported and not received yet is at most what the running tasks have bytes.
    pub(super) fn run<M: Send + 'static, F: Future<Output = ()> + Send + 'static>(
        &self,
        task_bytes: &[usize],
        n_at_a_time: usize,
        mut start: impl FnMut(usize, Reporter<M>) -> F,
        mut receive: impl FnMut(usize, M),
    ) {
        let Some(runtime) = &self.runtime else { return };
        let (sender, receiver) = mpsc::channel();
        let (mut n_started, mut n_running, mut running_bytes) = (0, 0, 0);
        loop {
            while n_started < task_bytes.len()
                && n_running < n_at_a_time
                && (n_running == 0 || running_bytes + task_bytes[n_started] <= MAX_RUNNING_BYTES)
            {
                let reporter = Reporter { task_idx: n_started, sender: sender.clone() };
                runtime.spawn(start(n_started, reporter));
                running_bytes += task_bytes[n_started];
                n_running += 1;
                n_started += 1;
            }
            if n_running == 0 {
                return;
            }
            match receiver.recv() {
                Ok((task_idx, Some(message))) => receive(task_idx, message),
                Ok((task_idx, None)) => {
                    n_running -= 1;
                    running_bytes -= task_bytes[task_idx];
                }
                // Cannot be: this function has a sender itself.
                Err(mpsc::RecvError) => return,
            }
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waiting for its threads would panic on a thread of another runtime.
            runtime.shutdown_background();
        }
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Runtime")
    }
}

impl<M> Reporter<M> {
    pub(super) fn report(&self, message: M) {
        // The receiver is gone only if the caller panicked.
        drop(self.sender.send((self.task_idx, Some(message))));
    }
}

impl<M> Drop for Reporter<M> {
    fn drop(&mut self) {
        drop(self.sender.send((self.task_idx, None)));
    }
}
