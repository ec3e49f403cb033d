//! A queue that is bounded in bytes and never blocks its producer.

use std::collections::VecDeque;

use parking_lot::{Condvar, Mutex};

/// Jobs without bytes are bounded by their number.
const MAX_JOBS: usize = 1 << 16;

/// Jobs for the threads of a tier, in order.
///
/// A job's bytes count from [`Queue::push`] until the batch it came in is dropped, so the bound is on what
/// waits and on what is being done. One job always fits.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    limit_bytes: u64,
}

/// Jobs that were taken together.
#[derive(Debug)]
pub(crate) struct Batch<'a, T> {
    queue: &'a Queue<T>,
    pub(crate) jobs: Vec<T>,
    n_bytes: u64,
}

#[derive(Debug)]
struct State<T> {
    jobs: VecDeque<(u64, T)>,
    n_bytes: u64,
    end: End,
}

/// How far the queue's end has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Open,
    /// Nothing is added; what is there is still done.
    Draining,
    /// Nothing more is done.
    Aborted,
}

impl<T> Queue<T> {
    pub(crate) fn new(limit_bytes: u64) -> Self {
        let state = State { jobs: VecDeque::new(), n_bytes: 0, end: End::Open };
        Self { state: Mutex::new(state), changed: Condvar::new(), limit_bytes }
    }

    /// Adds a job; gives it back where it does not fit or the queue has ended.
    pub(crate) fn push(&self, n_bytes: u64, job: T) -> Result<(), T> {
        let mut state = self.state.lock();
        let has_bytes = state.n_bytes == 0 || n_bytes <= self.limit_bytes.saturating_sub(state.n_bytes);
        if state.end != End::Open || !has_bytes || state.jobs.len() >= MAX_JOBS {
            return Err(job);
        }
        state.n_bytes += n_bytes;
        state.jobs.push_back((n_bytes, job));
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// Takes the next job and those after it that fit into `batch_bytes`. Waits for one; `None` at the end.
    ///
    /// A job without bytes, such as a question, is taken alone: reads do not wait for it on the same thread.
    pub(crate) fn pop(&self, batch_bytes: u64) -> Option<Batch<'_, T>> {
        let mut state = self.state.lock();
        while state.jobs.is_empty() && state.end == End::Open {
            self.changed.wait(&mut state);
        }
        if state.end == End::Aborted {
            return None;
        }
        let (mut n_bytes, first) = state.jobs.pop_front()?;
        let mut jobs = vec![first];
        while n_bytes > 0
            && let Some(next_bytes) = state.jobs.front().map(|(next_bytes, _)| *next_bytes)
            && next_bytes > 0
            && n_bytes + next_bytes <= batch_bytes
            && let Some((_, job)) = state.jobs.pop_front()
        {
            n_bytes += next_bytes;
            jobs.push(job);
        }
        Some(Batch { queue: self, jobs, n_bytes })
    }

    /// Ends the queue after what is in it.
    pub(crate) fn drain(&self) {
        self.end_at_least(End::Draining);
    }

    /// Ends the queue now and gives back what was in it.
    pub(crate) fn abort(&self) -> Vec<T> {
        self.end_at_least(End::Aborted);
        let jobs = std::mem::take(&mut self.state.lock().jobs);
        jobs.into_iter().map(|(_, job)| job).collect()
    }

    /// Bytes that wait or are being worked on.
    pub(crate) fn n_bytes(&self) -> u64 {
        self.state.lock().n_bytes
    }

    fn end_at_least(&self, end: End) {
        let mut state = self.state.lock();
        state.end = state.end.max(end);
        drop(state);
        self.changed.notify_all();
    }
}

impl<T> Drop for Batch<'_, T> {
    fn drop(&mut self) {
        let mut state = self.queue.state.lock();
        state.n_bytes = state.n_bytes.saturating_sub(self.n_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_given_back() {
        let queue = Queue::new(10);
        assert_eq!(queue.push(100, 'a'), Ok(()), "one job always fits");
        assert_eq!(queue.push(1, 'b'), Err('b'));
        let batch = queue.pop(1000).unwrap();
        assert_eq!(batch.jobs, ['a']);
        assert_eq!(queue.push(1, 'c'), Err('c'), "a job counts until it is done");
        drop(batch);
        assert_eq!(queue.push(10, 'd'), Ok(()));
        assert_eq!(queue.push(1, 'e'), Err('e'));
    }

    #[test]
    fn a_batch_takes_in_order_what_fits_into_it() {
        let queue = Queue::new(100);
        for job in [3, 4, 5, 1] {
            queue.push(job, job).unwrap();
        }
        assert_eq!(queue.pop(7).unwrap().jobs, [3, 4]);
        assert_eq!(queue.pop(1).unwrap().jobs, [5], "at least one");
        queue.drain();
        assert_eq!(queue.push(1, 2), Err(2));
        assert_eq!(queue.pop(7).unwrap().jobs, [1]);
        assert!(queue.pop(7).is_none());
        assert_eq!(queue.n_bytes(), 0);
    }

    #[test]
    fn a_job_without_bytes_is_taken_alone() {
        let queue = Queue::new(100);
        for (n_bytes, job) in [(1, 'a'), (1, 'b'), (0, 'c'), (0, 'd'), (1, 'e')] {
            queue.push(n_bytes, job).unwrap();
        }
        let batches = std::iter::from_fn(|| {
            queue.drain();
            queue.pop(7).map(|batch| batch.jobs.iter().collect::<String>())
        });
        assert_eq!(batches.collect::<Vec<_>>(), ["ab", "c", "d", "e"]);
    }

    #[test]
    fn an_aborted_queue_gives_its_jobs_back() {
        let queue = Queue::new(100);
        queue.push(1, 'a').unwrap();
        assert_eq!(queue.abort(), ['a']);
        assert!(queue.pop(7).is_none());
    }
}
