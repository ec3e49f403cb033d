//! Threads that read chains where reading blocks: layer by layer, and from a daemon.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvik_store::Chain;
use parking_lot::{Condvar, Mutex};

use super::job::{Job, JobHandle};
use super::load::{Load, Loading, PromptKv};
use crate::error::{Result, WorkerError};

/// Chains that are read at a time: a slow read of one tier leaves the threads of the others free, and more
/// readers than this only share a disk.
const N_THREADS: usize = 8;

/// Chains that wait for a thread. Beyond, a prompt is computed: it would wait longer than that takes.
const MAX_WAITING: usize = 64;

/// Reads a chain from a chunk on, as long as the job is wanted.
pub(super) type Read<T> = dyn Fn(&Job<T>, &Chain, usize) -> Option<T> + Send + Sync;

/// Threads that read chains; dropping it ends and joins them.
#[derive(Debug)]
pub(super) struct Loader<T> {
    threads: LoadThreads,
    read: ReadFn<T>,
}

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

struct ReadFn<T>(Arc<Read<T>>);

struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

struct QueueState {
    waiting: VecDeque<Box<dyn LoadTask>>,
    is_closed: bool,
}

struct ReadTask<T> {
    job: Arc<Job<T>>,
    chain: Chain,
    first_chunk: usize,
    read: Arc<Read<T>>,
}

impl Loader<PromptKv> {
    /// Begins to load a prompt's KV, unless too many wait.
    pub(super) fn load(&self, chain: &Chain, first_chunk: usize, timeout: Duration) -> Loading {
        match self.begin(chain, first_chunk) {
            Some(job) => Loading::Pending(Load::of_job(job, timeout)),
            None => Loading::Nothing,
        }
    }
}

impl<T: Send + 'static> Loader<T> {
    /// Starts the threads, which are called by `name`.
    ///
    /// # Errors
    /// If the operating system gives none.
    pub(super) fn start(name: &str, read: &Arc<Read<T>>) -> Result<Self> {
        Ok(Self { threads: LoadThreads::start(name)?, read: ReadFn(Arc::clone(read)) })
    }

    /// Begins to read a chain; `None` where too many wait.
    pub(super) fn begin(&self, chain: &Chain, first_chunk: usize) -> Option<JobHandle<T>> {
        let job = Arc::new(Job::default());
        let (chain, read) = (chain.clone(), Arc::clone(&self.read.0));
        let task = ReadTask { job: Arc::clone(&job), chain, first_chunk, read };
        self.threads.begin(Box::new(task)).then(|| JobHandle::new(job))
    }
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

impl<T: Send> LoadTask for ReadTask<T> {
    fn is_wanted(&self) -> bool {
        self.job.is_wanted()
    }

    fn run(self: Box<Self>) {
        let Self { job, chain, first_chunk, read } = *self;
        let result = if job.is_wanted() { read(&job, &chain, first_chunk) } else { None };
        job.complete(result);
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

impl<T> fmt::Debug for ReadFn<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ReadFn")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use kvik_store::{ChunkFormat, Space, StoreOptions};
    use kvik_types::{BlockSize, Dtype, Namespace};

    use super::*;

    /// A loader whose reads of chains of one chunk block until something is sent, and the two chains.
    fn slow_loader() -> (Loader<PromptKv>, mpsc::Sender<()>, [Chain; 2]) {
        let namespace = Namespace {
            model: "m".to_owned(),
            dtype: Dtype::F32,
            layout: "l".to_owned(),
            tenant: String::new(),
        };
        let format = ChunkFormat {
            n_layers: 1,
            token_layer_bytes: 64,
            n_ranks: 1,
            block_tokens: BlockSize::try_new(16).unwrap(),
        };
        let space = Space::detached(&namespace, format, &StoreOptions::default()).unwrap();
        let chains = [1, 2].map(|n_chunks| space.chain(&vec![7; n_chunks * space.chunk_tokens()]));
        let (release, blocked) = mpsc::channel();
        let blocked = Mutex::new(blocked);
        let read = move |_: &Job<PromptKv>, chain: &Chain, _| {
            if chain.n_chunks() == 1 {
                let _ = blocked.lock().recv();
            }
            None
        };
        let read: Arc<Read<PromptKv>> = Arc::new(read);
        (Loader::start("test", &read).unwrap(), release, chains)
    }

    #[test]
    fn a_slow_read_holds_up_no_other_load() {
        let (loader, release, [slow, fast]) = slow_loader();
        let _slow = loader.begin(&slow, 0).unwrap();
        let job = loader.begin(&fast, 0).unwrap();
        let (done, is_done) = mpsc::channel();
        job.on_done(Box::new(move || done.send(()).unwrap()));
        is_done.recv().unwrap();
        drop(release);
    }

    #[test]
    fn loads_beyond_the_limit_are_refused_and_given_up_ones_make_room() {
        let (loader, release, [slow, _]) = slow_loader();
        let mut jobs: Vec<JobHandle<PromptKv>> = Vec::new();
        while jobs.len() < N_THREADS + MAX_WAITING {
            // Threads take the first ones at their own time.
            match loader.begin(&slow, 0) {
                Some(job) => jobs.push(job),
                None => std::thread::yield_now(),
            }
        }
        assert!(loader.begin(&slow, 0).is_none());
        jobs.clear();
        assert!(loader.begin(&slow, 0).is_some());
        drop(release);
    }
}
