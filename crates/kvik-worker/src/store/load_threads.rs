//! The threads in which loads wait for disks, servers and other processes.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use crate::error::{Result, WorkerError};

/// Chains that are read at a time: a slow read of one tier leaves the threads of the others free, and more
/// readers than this only share a disk.
pub(super) const N_THREADS: usize = 8;

/// Chains that wait for a thread. Beyond, a prompt is computed: it would wait longer than that takes.
pub(super) const MAX_WAITING: usize = 64;

/// What a thread of loads does.
pub(super) trait LoadTask: Send {
    /// Whether its result is still waited for.
    fn is_wanted(&self) -> bool;

    /// Does it.
    fn run(self: Box<Self>);
}

/// Threads that do tasks in their order; dropping it ends and joins them.
#[derive(Debug)]
pub(super) struct LoadThreads {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

struct QueueState {
    waiting: VecDeque<Box<dyn LoadTask>>,
    is_closed: bool,
}

impl LoadThreads {
    /// Starts the threads, which are called by `name`.
    ///
    /// # Errors
    /// If the operating system gives none.
    pub(super) fn start(name: &str) -> Result<Self> {
        let state = Mutex::new(QueueState { waiting: VecDeque::new(), is_closed: false });
        let queue = Arc::new(Queue { state, changed: Condvar::new() });
        let mut threads = Self { queue, threads: Vec::new() };
        for idx in 0..N_THREADS {
            let queue = Arc::clone(&threads.queue);
            let thread = std::thread::Builder::new()
                .name(format!("kvik-{name}-{idx}"))
                .spawn(move || queue.run())
                .map_err(|source| WorkerError::Io { what: "start a thread of loads".to_owned(), source })?;
            threads.threads.push(thread);
        }
        Ok(threads)
    }

    /// Queues a task; false where too many wait: it is dropped then.
    pub(super) fn begin(&self, task: Box<dyn LoadTask>) -> bool {
        let mut state = self.queue.state.lock();
        if MAX_WAITING <= state.waiting.len() {
            // Those that were given up hold their places only until a thread comes by.
            state.waiting.retain(|task| task.is_wanted());
        }
        if MAX_WAITING <= state.waiting.len() {
            return false;
        }
        state.waiting.push_back(task);
        drop(state);
        self.queue.changed.notify_one();
        true
    }
}

impl Drop for LoadThreads {
    fn drop(&mut self) {
        self.queue.state.lock().is_closed = true;
        self.queue.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

impl Queue {
    fn run(&self) {
        while let Some(task) = self.next() {
            task.run();
        }
    }

    /// The next task; `None` at the end.
    fn next(&self) -> Option<Box<dyn LoadTask>> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(task) = state.waiting.pop_front() {
                return Some(task);
            }
            self.changed.wait(&mut state);
        }
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Queue")
            .field("n_waiting", &self.state.lock().waiting.len())
            .finish_non_exhaustive()
    }
}
