//! A bounded queue between callers and threads.

use std::collections::VecDeque;

use parking_lot::{Condvar, Mutex};

/// Tasks in the order in which they came.
#[derive(Debug)]
pub(super) struct Queue<T> {
    max_len: usize,
    state: Mutex<State<T>>,
    /// Told when there is a task, or none will come anymore.
    changed: Condvar,
}

#[derive(Debug)]
struct State<T> {
    tasks: VecDeque<T>,
    is_closed: bool,
}

impl<T> Queue<T> {
    pub(super) fn new(max_len: usize) -> Self {
        let state = State { tasks: VecDeque::new(), is_closed: false };
        Self { max_len, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Appends a task; false if there is no room for it.
    pub(super) fn push(&self, task: T) -> bool {
        let mut state = self.state.lock();
        if state.is_closed || self.max_len <= state.tasks.len() {
            return false;
        }
        state.tasks.push_back(task);
        drop(state);
        self.changed.notify_one();
        true
    }

    /// Waits for a task; `None` once the queue is closed.
    pub(super) fn pop(&self) -> Option<T> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(task) = state.tasks.pop_front() {
                return Some(task);
            }
            self.changed.wait(&mut state);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.state.lock().tasks.len()
    }

    /// Drops all tasks and ends all waits.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        let tasks = std::mem::take(&mut state.tasks);
        drop(state);
        self.changed.notify_all();
        drop(tasks);
    }
}
