//! KV out of the engine.
//!
//! The engine lends the blocks of a sequence that has ended; a thread copies them into the store's memory and
//! gives them back. The engine never waits for it: what does not fit into the queue is not stored, and counted.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use kvik_model::{EndedSequence, KvSink};
use parking_lot::{Condvar, Mutex};

use crate::error::{Result, WorkerError};

/// Most KV that is lent at a time, in bytes: two sequences of 8192 tokens at 128 KiB a token. Blocks that are
/// lent are missing to the engine. One sequence is taken whatever its size.
const MAX_LENT_BYTES: usize = 2 << 30;

/// Copies a sequence, as long as the flag is not set.
pub(super) type Copy = dyn Fn(&EndedSequence, &AtomicBool) + Send + Sync;

/// Hands the KV of ended sequences to a thread that copies it; dropping it copies what waits and joins the
/// thread.
#[derive(Debug)]
pub(super) struct StoreSink {
    queue: Arc<Queue>,
    limit_bytes: usize,
    counts: Arc<SinkCounts>,
    thread: Option<JoinHandle<()>>,
}

/// What is on its way, and what was not stored.
#[derive(Debug, Default)]
pub(crate) struct SinkCounts {
    /// Of all sequences that wait, and of the one that is being copied.
    lent_bytes: AtomicUsize,
    n_refused: AtomicU64,
    n_given_up: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
    /// Whether the sequence that is being copied is to be dropped.
    is_given_up: AtomicBool,
}

#[derive(Debug, Default)]
struct QueueState {
    waiting: VecDeque<EndedSequence>,
    is_copying: bool,
    is_closed: bool,
}

// === impl SinkCounts ===

impl SinkCounts {
    /// Bytes of KV that are not copied yet.
    pub(crate) fn lent_bytes(&self) -> usize {
        // Acquire and release: a reader that sees that a sequence is copied finds it in the store.
        self.lent_bytes.load(Ordering::Acquire)
    }

    /// Sequences that ended while too much waited to be copied.
    pub(crate) fn n_refused(&self) -> u64 {
        self.n_refused.load(Ordering::Relaxed)
    }

    /// Sequences whose blocks the engine needed before they were copied.
    pub(crate) fn n_given_up(&self) -> u64 {
        self.n_given_up.load(Ordering::Relaxed)
    }
}

// === impl StoreSink ===

impl StoreSink {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the operating system gives none.
    pub(super) fn start(copy: Box<Copy>, counts: Arc<SinkCounts>) -> Result<Self> {
        Self::start_with(copy, counts, MAX_LENT_BYTES)
    }

    fn start_with(copy: Box<Copy>, counts: Arc<SinkCounts>, limit_bytes: usize) -> Result<Self> {
        let queue = Arc::new(Queue::default());
        let (copying, counting) = (Arc::clone(&queue), Arc::clone(&counts));
        let thread = std::thread::Builder::new()
            .name("kvik-copy".to_owned())
            .spawn(move || copying.run(&*copy, &counting))
            .map_err(|source| WorkerError::Io { what: "start the thread of copies".to_owned(), source })?;
        Ok(Self { queue, limit_bytes, counts, thread: Some(thread) })
    }
}

impl KvSink for StoreSink {
    fn has_room(&mut self, n_bytes: usize) -> bool {
        let lent_bytes = self.counts.lent_bytes();
        let has_room = lent_bytes == 0 || lent_bytes.saturating_add(n_bytes) <= self.limit_bytes;
        if !has_room {
            self.counts.n_refused.fetch_add(1, Ordering::Relaxed);
        }
        has_room
    }

    fn offer(&mut self, sequence: EndedSequence) {
        self.counts.lent_bytes.fetch_add(sequence.n_bytes(), Ordering::Relaxed);
        self.queue.state.lock().waiting.push_back(sequence);
        self.queue.changed.notify_one();
    }

    fn give_up(&mut self) {
        let mut state = self.queue.state.lock();
        let waiting = std::mem::take(&mut state.waiting);
        // Under the lock: the flag is for the sequence that is being copied now, not for the next one.
        let ends_copy = state.is_copying && !self.queue.is_given_up.swap(true, Ordering::Relaxed);
        drop(state);
        let n_given_up = waiting.len() as u64 + u64::from(ends_copy);
        self.counts.n_given_up.fetch_add(n_given_up, Ordering::Relaxed);
        let waiting_bytes = waiting.iter().map(EndedSequence::n_bytes).sum();
        drop(waiting);
        self.counts.lent_bytes.fetch_sub(waiting_bytes, Ordering::Release);
    }
}

impl Drop for StoreSink {
    fn drop(&mut self) {
        self.queue.state.lock().is_closed = true;
        self.queue.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

// === impl Queue ===

impl Queue {
    fn run(&self, copy: &Copy, counts: &SinkCounts) {
        while let Some(sequence) = self.next() {
            copy(&sequence, &self.is_given_up);
            let n_bytes = sequence.n_bytes();
            drop(sequence);
            self.state.lock().is_copying = false;
            counts.lent_bytes.fetch_sub(n_bytes, Ordering::Release);
        }
    }

    /// The next sequence; `None` at the end, when nothing waits any more.
    fn next(&self) -> Option<EndedSequence> {
        let mut state = self.state.lock();
        loop {
            if let Some(sequence) = state.waiting.pop_front() {
                state.is_copying = true;
                self.is_given_up.store(false, Ordering::Relaxed);
                return Some(sequence);
            }
            if state.is_closed {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use kvik_model::{CpuBackendOptions, Engine, EngineOptions, GenerateRequest, Model, SamplingParams};

    use super::*;

    fn engine(sink: StoreSink) -> Engine {
        let mut backend = CpuBackendOptions::default();
        backend.n_threads = 1;
        let mut engine = Model::bundled().unwrap().cpu_engine(&backend, EngineOptions::default()).unwrap();
        engine.set_kv_sink(Box::new(sink));
        engine
    }

    fn submit(engine: &mut Engine, first_token: u32) {
        let mut sampling = SamplingParams::greedy(4);
        sampling.ignore_eos = true;
        let prompt = (first_token..first_token + 40).collect();
        engine.submit(GenerateRequest { prompt, sampling }).unwrap();
    }

    /// A sink whose copies block until something is sent, and what it has copied.
    fn slow_sink(limit_bytes: usize) -> (StoreSink, Arc<SinkCounts>, mpsc::Sender<()>, mpsc::Receiver<u32>) {
        let (release, blocked) = mpsc::channel();
        let (copied, copies) = mpsc::channel();
        let blocked = Mutex::new(blocked);
        let copy = move |sequence: &EndedSequence, is_given_up: &AtomicBool| {
            let _ = blocked.lock().recv();
            if !is_given_up.load(Ordering::Relaxed) {
                copied.send(sequence.tokens()[0]).unwrap();
            }
        };
        let counts = Arc::new(SinkCounts::default());
        let sink = StoreSink::start_with(Box::new(copy), Arc::clone(&counts), limit_bytes).unwrap();
        (sink, counts, release, copies)
    }

    #[test]
    fn the_engine_goes_on_while_a_copy_is_under_way_and_offers_beyond_the_limit_are_counted() {
        let (sink, counts, release, copies) = slow_sink(0);
        let mut engine = engine(sink);
        for first_token in [100, 200, 300] {
            submit(&mut engine, first_token);
            // Does not return if a step waits for the copy.
            engine.run_until_idle().unwrap();
        }
        assert!(copies.try_recv().is_err());
        assert_eq!((counts.n_refused(), counts.n_given_up()), (2, 0));
        release.send(()).unwrap();
        assert_eq!(copies.recv().unwrap(), 100);
        drop(release);
        drop(engine);
        assert!(copies.recv().is_err());
    }

    #[test]
    fn the_end_of_the_engine_copies_what_waits() {
        let (sink, counts, release, copies) = slow_sink(usize::MAX);
        let mut engine = engine(sink);
        for first_token in [100, 200, 300] {
            submit(&mut engine, first_token);
            engine.run_until_idle().unwrap();
        }
        drop(release);
        drop(engine);
        assert_eq!(copies.iter().collect::<Vec<_>>(), [100, 200, 300]);
        assert_eq!((counts.n_refused(), counts.n_given_up()), (0, 0));
    }

    #[test]
    fn copies_that_are_given_up_are_counted_and_end() {
        let (mut sink, counts, release, copies) = slow_sink(usize::MAX);
        let (sender, offered) = mpsc::channel();
        let mut engine = engine_offering_to(sender);
        for first_token in [100, 200, 300] {
            submit(&mut engine, first_token);
            engine.run_until_idle().unwrap();
        }
        for sequence in offered.try_iter() {
            sink.offer(sequence);
        }
        while !sink.queue.state.lock().is_copying {
            std::thread::yield_now();
        }
        sink.give_up();
        sink.give_up();
        assert_eq!(counts.n_given_up(), 3);
        drop(release);
        drop(sink);
        assert_eq!(copies.iter().count(), 0);
        engine.rest();
        assert_eq!(engine.pool_stats().n_free, engine.pool_stats().n_blocks);
    }

    /// Passes on what it is offered.
    #[derive(Debug)]
    struct Passing(mpsc::Sender<EndedSequence>);

    impl KvSink for Passing {
        fn offer(&mut self, sequence: EndedSequence) {
            self.0.send(sequence).unwrap();
        }
    }

    fn engine_offering_to(sender: mpsc::Sender<EndedSequence>) -> Engine {
        let (sink, ..) = slow_sink(0);
        let mut engine = engine(sink);
        engine.set_kv_sink(Box::new(Passing(sender)));
        engine
    }
}
