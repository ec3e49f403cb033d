//! A result that another thread is working on.

use std::sync::Arc;

use parking_lot::Mutex;

/// The working side.
pub(super) struct Job<T> {
    state: Mutex<State<T>>,
}

/// The waiting side; dropping it gives the job up.
pub(super) struct JobHandle<T>(Arc<Job<T>>);

struct State<T> {
    is_done: bool,
    /// The result is not waited for any more.
    is_given_up: bool,
    result: Option<T>,
    callback: Option<Box<dyn FnOnce() + Send>>,
}

impl<T> Job<T> {
    pub(super) fn is_wanted(&self) -> bool {
        !self.state.lock().is_given_up
    }

    /// Hands the result over; the first one counts.
    pub(super) fn complete(&self, result: Option<T>) {
        let callback = {
            let mut state = self.state.lock();
            if state.is_done {
                return;
            }
            state.is_done = true;
            state.result = result;
            state.callback.take()
        };
        if let Some(callback) = callback {
            callback();
        }
    }
}

impl<T> Default for Job<T> {
    fn default() -> Self {
        let state = State { is_done: false, is_given_up: false, result: None, callback: None };
        Self { state: Mutex::new(state) }
    }
}

impl<T> std::fmt::Debug for Job<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Job").field("is_done", &self.state.lock().is_done).finish_non_exhaustive()
    }
}

impl<T> JobHandle<T> {
    pub(super) fn new(job: Arc<Job<T>>) -> Self {
        Self(job)
    }

    pub(super) fn is_done(&self) -> bool {
        self.0.state.lock().is_done
    }

    /// Calls `callback` once when the job is done, on another thread or at once.
    pub(super) fn on_done(&self, callback: Box<dyn FnOnce() + Send>) {
        let mut state = self.0.state.lock();
        if !state.is_done {
            state.callback = Some(callback);
            return;
        }
        drop(state);
        callback();
    }

    /// The result, if the job is done and has one.
    pub(super) fn take(&self) -> Option<T> {
        self.0.state.lock().result.take()
    }
}

impl<T> Drop for JobHandle<T> {
    fn drop(&mut self) {
        self.0.state.lock().is_given_up = true;
    }
}

impl<T> std::fmt::Debug for JobHandle<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}
