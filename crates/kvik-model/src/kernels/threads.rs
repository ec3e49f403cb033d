//! The threads that compute a forward pass.
//!
//! A parallel section is a closure and a number of chunks; any free thread claims the next
//! chunk. The caller works too and never waits for a thread that has not started, so a section
//! costs no more than doing it alone even when the other cores are busy elsewhere. Threads spin
//! briefly between sections, because the sections of one forward pass follow each other within
//! microseconds, and then park, because an idle engine must not burn a core.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};

/// Spins before a thread parks: about 50 us, several times the gap between two sections of a
/// forward pass and well below the time between two requests.
const SPINS_BEFORE_PARK: u32 = 2_000;

/// Low half of [`Shared::state`]: threads inside the current section.
const MEMBERS_MASK: u64 = 0x7fff_ffff;
/// Set while threads may enter the current section.
const OPEN: u64 = 0x8000_0000;
/// One section; the high half of [`Shared::state`] counts them.
const SECTION: u64 = 1 << 32;

/// A section's closure with its lifetime erased.
type Work = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Section number, [`OPEN`] and the number of members, in one word so that entering a
    /// section and closing it cannot cross.
    state: AtomicU64,
    work: UnsafeCell<Option<Work>>,
    n_chunks: AtomicUsize,
    next_chunk: AtomicUsize,
    has_panicked: AtomicBool,
    is_stopping: AtomicBool,
}

// SAFETY: `work` is written only by the pool's owner while the section is closed and has no
// members, and read only by members; the acquire/release pairs on `state` order the two.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer inside `work` is used only while its closure is borrowed.
unsafe impl Send for Shared {}

struct Worker {
    thread: Thread,
    is_parked: Arc<AtomicBool>,
    handle: Option<JoinHandle<()>>,
}

/// A fixed set of threads for the parallel sections of one engine.
pub(crate) struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
}

impl std::fmt::Debug for ThreadPool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("ThreadPool").field("n_threads", &self.n_threads()).finish_non_exhaustive()
    }
}

impl ThreadPool {
    /// A pool of `n_threads` threads, the caller of [`ThreadPool::run`] among them. Threads the
    /// system refuses to start are done without.
    pub(crate) fn new(n_threads: usize) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            work: UnsafeCell::new(None),
            n_chunks: AtomicUsize::new(0),
            next_chunk: AtomicUsize::new(0),
            has_panicked: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
        });
        let workers = (1..n_threads.max(1))
            .filter_map(|idx| {
                let shared = Arc::clone(&shared);
                let is_parked = Arc::new(AtomicBool::new(false));
                let parked_flag = Arc::clone(&is_parked);
                let handle = std::thread::Builder::new()
                    .name(format!("kvik-compute-{idx}"))
                    .spawn(move || shared.serve(&parked_flag))
                    .ok()?;
                Some(Worker { thread: handle.thread().clone(), is_parked, handle: Some(handle) })
            })
            .collect();
        Self { shared, workers }
    }

    /// The caller and the pool's own threads.
    pub(crate) fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work` once for every chunk in `0..n_chunks`, on any thread, in any order, and
    /// returns when all calls have ended.
    ///
    /// # Panics
    /// If a call of `work` panicked, after all others have ended.
    pub(crate) fn run(&mut self, n_chunks: usize, work: &(dyn Fn(usize) + Sync)) {
        if n_chunks <= 1 || self.workers.is_empty() {
            (0..n_chunks).for_each(work);
            return;
        }
        let shared = &*self.shared;
        #[expect(
            clippy::transmute_ptr_to_ptr,
            reason = "a cast cannot change the lifetime of a trait object"
        )]
        // SAFETY: only the lifetime changes. The pointer is used by members of the section
        // alone, and this function does not return before the section is closed and empty.
        let erased: Work = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Work>(std::ptr::from_ref(work))
        };
        // SAFETY: the previous section is closed and has no members, and `&mut self` keeps a
        // second section from starting: no other thread accesses `work` now.
        unsafe { *shared.work.get() = Some(erased) };
        // Relaxed: published by the release store of `state` below.
        shared.n_chunks.store(n_chunks, Ordering::Relaxed);
        shared.next_chunk.store(0, Ordering::Relaxed);
        let section = (shared.state.load(Ordering::Relaxed) & !(SECTION - 1)).wrapping_add(SECTION);
        // SeqCst with the flag of the parking thread: either it sees the new section before it
        // parks, or this thread sees that it is parked.
        shared.state.store(section | OPEN, Ordering::SeqCst);
        for worker in &self.workers {
            if worker.is_parked.load(Ordering::SeqCst) {
                worker.thread.unpark();
            }
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| shared.claim_chunks(work)));
        if outcome.is_err() {
            // No thread starts another chunk of a section that will be reported as failed.
            shared.next_chunk.store(n_chunks, Ordering::Relaxed);
        }
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut n_spins = 0_u32;
        while shared.state.load(Ordering::Acquire) & MEMBERS_MASK != 0 {
            n_spins += 1;
            if n_spins < SPINS_BEFORE_PARK {
                std::hint::spin_loop();
            } else {
                // A member lost its core in the middle of a chunk; give it this one.
                std::thread::yield_now();
            }
        }
        let worker_panicked = shared.has_panicked.swap(false, Ordering::AcqRel);
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        assert!(!worker_panicked, "a thread of the compute pool panicked");
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.is_stopping.store(true, Ordering::SeqCst);
        for worker in &mut self.workers {
            worker.thread.unpark();
            if let Some(handle) = worker.handle.take() {
                // A panic of the thread was already reported by the section it happened in.
                let _ = handle.join();
            }
        }
    }
}

impl Shared {
    fn claim_chunks(&self, work: &(dyn Fn(usize) + Sync)) {
        let n_chunks = self.n_chunks.load(Ordering::Relaxed);
        loop {
            // Relaxed: the counter only hands out numbers; `state` orders the data.
            let chunk = self.next_chunk.fetch_add(1, Ordering::Relaxed);
            if n_chunks <= chunk {
                return;
            }
            work(chunk);
        }
    }

    /// The life of a pool thread.
    fn serve(&self, is_parked: &AtomicBool) {
        let mut last_section = 0;
        loop {
            let Some(section) = self.wait_for_section(last_section, is_parked) else {
                return;
            };
            last_section = section;
            if !self.enter(section) {
                continue;
            }
            // SAFETY: this thread is a member of an open section, so `run` has written `work`
            // and does not return, keeping the closure alive, until this thread has left.
            let outcome = catch_unwind(AssertUnwindSafe(|| unsafe {
                if let Some(work) = *self.work.get() {
                    self.claim_chunks(&*work);
                }
            }));
            if outcome.is_err() {
                self.has_panicked.store(true, Ordering::Release);
            }
            self.state.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Returns the number of an open section after `last_section`, or `None` when the pool ends.
    fn wait_for_section(&self, last_section: u64, is_parked: &AtomicBool) -> Option<u64> {
        let mut n_spins = 0_u32;
        loop {
            if self.is_stopping.load(Ordering::Relaxed) {
                return None;
            }
            let state = self.state.load(Ordering::Acquire);
            if state & OPEN != 0 && state / SECTION != last_section {
                return Some(state / SECTION);
            }
            n_spins += 1;
            if n_spins < SPINS_BEFORE_PARK {
                std::hint::spin_loop();
                continue;
            }
            is_parked.store(true, Ordering::SeqCst);
            let state = self.state.load(Ordering::SeqCst);
            let is_idle = state & OPEN == 0 || state / SECTION == last_section;
            if is_idle && !self.is_stopping.load(Ordering::SeqCst) {
                std::thread::park();
                n_spins = 0;
            }
            is_parked.store(false, Ordering::SeqCst);
        }
    }

    /// Makes the calling thread a member of `section` if it is still open.
    fn enter(&self, section: u64) -> bool {
        let mut state = self.state.load(Ordering::Acquire);
        while state & OPEN != 0 && state / SECTION == section {
            match self.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(current) => state = current,
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_runs_exactly_once_in_every_section() {
        for n_threads in [1, 2, 3, 5] {
            let mut pool = ThreadPool::new(n_threads);
            for section in 0..2_000_usize {
                let counts: Vec<AtomicUsize> = (0..section % 17).map(|_| AtomicUsize::new(0)).collect();
                pool.run(counts.len(), &|chunk| {
                    counts[chunk].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_parked_pool_wakes_for_the_next_section() {
        let mut pool = ThreadPool::new(2);
        for _ in 0..20 {
            while !pool.workers[0].is_parked.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            // Two chunks that wait for each other end only if the parked thread takes part.
            let n_arrived = AtomicUsize::new(0);
            pool.run(2, &|_| {
                n_arrived.fetch_add(1, Ordering::SeqCst);
                while n_arrived.load(Ordering::SeqCst) < 2 {
                    std::thread::yield_now();
                }
            });
        }
    }

    #[test]
    fn a_panic_in_a_chunk_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = ThreadPool::new(2);
        for _ in 0..10 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(8, &|chunk| assert!(chunk != 5, "chunk five fails"));
            }));
            assert!(outcome.is_err());
            let sum = AtomicUsize::new(0);
            pool.run(8, &|chunk| {
                sum.fetch_add(chunk, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 28);
        }
    }
}
