//! The threads of a store, from its opening to its end.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::core::Core;
use crate::error::{Result, StoreError};
use crate::lower;

/// The threads, and how to end them.
#[derive(Debug)]
pub(crate) struct Threads {
    core: Arc<Core>,
    handles: Mutex<Vec<JoinHandle<()>>>,
    live: Arc<Live>,
}

/// Threads that have not ended.
#[derive(Debug, Default)]
struct Live {
    n_threads: Mutex<usize>,
    changed: Condvar,
}

/// Counts one thread as long as it runs, however it ends.
struct LiveThread(Arc<Live>);

impl Threads {
    pub(crate) fn start(core: &Arc<Core>) -> Result<Self> {
        let threads = Self { core: Arc::clone(core), handles: Mutex::default(), live: Arc::default() };
        threads.spawn("kvik-reclaim".to_owned(), |core| core.run_reclaimer())?;
        for lower in &core.lowers {
            let tier = lower.tier_idx;
            let name = &core.labels[tier].name;
            for read_idx in 0..lower.n_read_threads {
                threads.spawn(format!("kvik-{name}-read-{read_idx}"), move |core| core.run_reads(tier))?;
            }
            threads.spawn(format!("kvik-{name}-write"), move |core| core.run_writes(tier))?;
        }
        Ok(threads)
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Ends the threads. Reads that wait are lost; writes that wait are done, as far as
    /// [`close_timeout`](crate::StoreOptions::close_timeout) allows. A thread that hangs in a tier is left
    /// behind.
    pub(crate) fn close(&self) {
        let deadline = Instant::now() + self.core.options.close_timeout;
        self.core.reclaim_wake.close();
        for lower in &self.core.lowers {
            lower::lose(lower.reads.abort());
            lower.writes.drain();
        }
        let handles = std::mem::take(&mut *self.handles.lock());
        // A callback of a prefetch may drop the last handle of the store on one of these threads.
        let own = thread::current().id();
        let n_own = handles.iter().filter(|handle| handle.thread().id() == own).count();
        let have_ended = self.live.wait_until_at_most(n_own, deadline);
        for lower in &self.core.lowers {
            drop(lower.writes.abort());
        }
        for handle in handles {
            if handle.thread().id() != own && (have_ended || handle.is_finished()) {
                // A thread that panicked in a tier has lost its flights, and that is all.
                let _ = handle.join();
            }
        }
    }

    /// The state of a closed store, if no thread, lease or slot uses it any more; else the threads as they were.
    pub(crate) fn into_core(self) -> std::result::Result<Core, Self> {
        // A weak reference could be upgraded later; an observation's is only used to end it.
        if Arc::strong_count(&self.core) > 1 || !self.core.has_only_chunks() {
            return Err(self);
        }
        let core = Arc::clone(&self.core);
        let live = Arc::clone(&self.live);
        drop(self);
        Arc::try_unwrap(core).map_err(|core| Self { core, handles: Mutex::default(), live })
    }

    fn spawn(&self, name: String, work: impl FnOnce(&Arc<Core>) + Send + 'static) -> Result<()> {
        let live_thread = LiveThread::new(&self.live);
        let core = Arc::clone(&self.core);
        let handle = thread::Builder::new().name(name.clone()).spawn(move || {
            // The core goes first: a caller that waits for the threads may open the same tiers next.
            let _live_thread = live_thread;
            let core = core;
            work(&core);
        });
        let handle = handle.map_err(|source| StoreError::Thread { name, source })?;
        self.handles.lock().push(handle);
        Ok(())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.close();
    }
}

impl Live {
    /// Says whether no more than `n_threads` are left, at the deadline at the latest.
    fn wait_until_at_most(&self, n_threads: usize, deadline: Instant) -> bool {
        let mut n_live = self.n_threads.lock();
        while *n_live > n_threads && !self.changed.wait_until(&mut n_live, deadline).timed_out() {}
        *n_live <= n_threads
    }
}

impl LiveThread {
    fn new(live: &Arc<Live>) -> Self {
        *live.n_threads.lock() += 1;
        Self(Arc::clone(live))
    }
}

impl Drop for LiveThread {
    fn drop(&mut self) {
        *self.0.n_threads.lock() -= 1;
        self.0.changed.notify_all();
    }
}
