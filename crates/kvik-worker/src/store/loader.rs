//! Chains that are read where reading blocks: layer by layer, and from a daemon.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvik_store::Chain;

use super::job::{Job, JobHandle};
use super::load::{Load, Loading, PromptKv};
use super::load_threads::{LoadTask, LoadThreads};
use crate::error::Result;

/// Reads a chain from a chunk on, as long as the job is wanted.
pub(super) type Read<T> = dyn Fn(&Job<T>, &Chain, usize) -> Option<T> + Send + Sync;

/// Threads that read chains; dropping it ends and joins them.
#[derive(Debug)]
pub(super) struct Loader<T> {
    threads: LoadThreads,
    read: ReadFn<T>,
}

struct ReadFn<T>(Arc<Read<T>>);

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
    use parking_lot::Mutex;

    use super::super::load_threads::{MAX_WAITING, N_THREADS};
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
