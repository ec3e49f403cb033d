//! Loads that bring the layers of blocks one after the other.
//!
//! An engine may read a layer of its blocks as soon as that has come, while the next one is copied. It may also give the load
//! up: from then on nothing writes its blocks, whatever the daemon does.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvik_node::{NodeClient, NodeError, RemoteLease};
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard};

use crate::copies::{Transfer, piece_mut};

/// From so many bytes on, threads of this module copy beside those that wait: about 10 ms of one thread. Below, they would take
/// processors from an engine that computes on all of them, each for longer than the copy lasts.
const HELPED_BYTES: usize = 64 << 20;

/// How long a thread of this module waits for those that wait for layers to copy some, before it does: they may never come.
const WAITERS_PATIENCE: Duration = Duration::from_millis(100);

/// How far a load has come, for the threads that wait for it.
#[derive(Debug, Default)]
pub(crate) struct LayerProgress {
    state: Mutex<State>,
    changed: Condvar,
    /// Told when all is copied, and when the load is over.
    ended: Condvar,
    /// Whether the load was given up. Locked for reading while bytes are copied, so that the thread that sets it returns when
    /// no copy is under way. It is not locked while the state is.
    is_abandoned: RwLock<bool>,
}

#[derive(Debug, Default)]
struct State {
    /// The first layers that have come, of all blocks.
    n_layers: usize,
    /// Layers behind those that have come too: several threads copy.
    ahead: Vec<usize>,
    /// No further layer comes of all blocks.
    is_over: bool,
    /// Bytes are or were copied.
    has_begun: bool,
    /// What threads that wait for layers copy themselves.
    copies: Option<Arc<LayerCopies>>,
}

/// The copies of a load, handed out to threads piece by piece: the first layer of all chunks first.
#[derive(Debug)]
struct LayerCopies {
    transfer: Arc<Transfer>,
    lease: RemoteLease,
    n_layers: usize,
    n_chunks: usize,
    /// Whether these are all chunks that were asked for.
    is_all: bool,
    /// Layers of chunks that a thread has begun.
    n_begun: AtomicUsize,
    /// Chunks that miss each layer.
    n_missing: Vec<AtomicUsize>,
    /// Layers of chunks that are not copied.
    n_left: AtomicUsize,
    failure: Mutex<Option<NodeError>>,
}

/// The part of a load that reports; dropping it says that no further layer comes.
#[derive(Debug)]
pub(crate) struct LayerReporter(Arc<LayerProgress>);

// === impl LayerProgress ===

impl LayerProgress {
    /// Waits for the first `n_layers`, and copies what is to be copied for them: whether they have come, or `None` where that was not
    /// known in time.
    pub(crate) fn wait_until(&self, n_layers: usize, until: Instant) -> Option<bool> {
        let mut state = self.state.lock();
        loop {
            if state.n_layers >= n_layers || state.is_over {
                return Some(state.n_layers >= n_layers);
            }
            let copies = state.copies.clone().filter(|copies| copies.has_more(n_layers));
            if let Some(copies) = copies {
                MutexGuard::unlocked(&mut state, || copies.copy(self, n_layers));
            } else if self.changed.wait_until(&mut state, until).timed_out() {
                let has_come = state.n_layers >= n_layers;
                return (has_come || state.is_over).then_some(has_come);
            }
        }
    }

    /// Gives the load up; when this returns, no copy runs and none will begin.
    pub(crate) fn abandon(&self) {
        *self.is_abandoned.write() = true;
        self.end();
    }

    /// Says that copies begin; `false` where they did before.
    fn begin(&self) -> bool {
        !std::mem::replace(&mut self.state.lock().has_begun, true)
    }

    /// Lets threads that wait for layers copy them.
    fn offer(&self, copies: &Arc<LayerCopies>) {
        self.state.lock().copies = Some(Arc::clone(copies));
        self.changed.notify_all();
    }

    /// Waits until all is copied or the load is over, as long as threads that wait for layers copy some now and then.
    fn wait_for_waiters(&self, copies: &LayerCopies) {
        let mut state = self.state.lock();
        let mut n_begun = copies.n_begun();
        while !copies.is_done() && !state.is_over {
            let is_late = self.ended.wait_for(&mut state, WAITERS_PATIENCE).timed_out();
            let n_before = std::mem::replace(&mut n_begun, copies.n_begun());
            if is_late && n_begun == n_before {
                return;
            }
        }
    }

    /// Waits until all is copied or the load is over; all has been begun.
    fn wait_for_copies(&self, copies: &LayerCopies) {
        let mut state = self.state.lock();
        state.copies = None;
        while !copies.is_done() && !state.is_over {
            self.ended.wait(&mut state);
        }
    }

    /// Says that no further layer comes.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        state.is_over = true;
        state.copies = None;
        self.changed.notify_all();
        self.ended.notify_all();
    }

    /// Keeps the load from being given up; `None` where it was.
    fn begin_copy(&self) -> Option<RwLockReadGuard<'_, bool>> {
        let is_abandoned = self.is_abandoned.read();
        (!*is_abandoned).then_some(is_abandoned)
    }

    fn came(&self, layer_idx: usize) {
        let mut state = self.state.lock();
        state.ahead.push(layer_idx);
        while let Some(place) = state.ahead.iter().position(|layer_idx| *layer_idx == state.n_layers) {
            state.ahead.swap_remove(place);
            state.n_layers += 1;
        }
        self.changed.notify_all();
    }

    fn note_done(&self) {
        let _state = self.state.lock();
        self.ended.notify_all();
    }
}

impl LayerReporter {
    pub(crate) fn new(progress: Arc<LayerProgress>) -> Self {
        Self(progress)
    }
}

impl Drop for LayerReporter {
    fn drop(&mut self) {
        self.0.end();
    }
}

// === impl LayerCopies ===

impl LayerCopies {
    fn new(transfer: &Arc<Transfer>, lease: RemoteLease) -> Self {
        let n_layers = transfer.chain.space().format().n_layers as usize;
        let n_chunks = lease.n_chunks().min(transfer.n_chunks());
        Self {
            transfer: Arc::clone(transfer),
            lease,
            n_layers,
            n_chunks,
            is_all: n_chunks == transfer.n_chunks(),
            n_begun: AtomicUsize::new(0),
            n_missing: (0..n_layers).map(|_| AtomicUsize::new(n_chunks)).collect(),
            n_left: AtomicUsize::new(n_layers * n_chunks),
            failure: Mutex::new(None),
        }
    }

    fn n_bytes(&self) -> usize {
        self.transfer.blocks.len() * self.transfer.memory.get().block_bytes()
    }

    fn n_begun(&self) -> usize {
        // Relaxed: it is only compared.
        self.n_begun.load(Ordering::Relaxed)
    }

    /// Whether something of the first layers is not begun.
    fn has_more(&self, n_layers: usize) -> bool {
        self.n_begun() < n_layers.min(self.n_layers) * self.n_chunks
    }

    fn is_done(&self) -> bool {
        // Acquire: the bytes that other threads copied are there.
        self.n_left.load(Ordering::Acquire) == 0
    }

    /// Copies what no other thread has begun of the first layers, until the load is given up. A failure gives it up.
    fn copy(&self, progress: &LayerProgress, n_layers: usize) {
        let end = n_layers.min(self.n_layers) * self.n_chunks;
        // Relaxed: it only hands out numbers.
        let next = |number: usize| (number < end).then_some(number + 1);
        while let Ok(number) = self.n_begun.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
            let (layer_idx, place) = (number / self.n_chunks, number % self.n_chunks);
            // Without its piece the others would be waited for without end.
            let copied = catch_unwind(AssertUnwindSafe(|| self.copy_one(progress, layer_idx, place)));
            let panicked = Err(NodeError::Gone { reason: "a copying thread panicked" });
            if let Err(error) = copied.unwrap_or(panicked) {
                *self.failure.lock() = Some(error);
                progress.abandon();
                return;
            }
        }
    }

    /// Copies what no other thread has begun, on several threads.
    fn copy_all(&self, progress: &LayerProgress) {
        let n_threads = self.transfer.n_threads.clamp(1, self.n_chunks.max(1));
        std::thread::scope(|scope| {
            for _ in 1..n_threads {
                scope.spawn(|| self.copy(progress, self.n_layers));
            }
            self.copy(progress, self.n_layers);
        });
    }

    fn copy_one(&self, progress: &LayerProgress, layer_idx: usize, place: usize) -> Result<(), NodeError> {
        let Some(_copying) = progress.begin_copy() else { return Ok(()) };
        for (start, piece) in self.transfer.layer_pieces(place, layer_idx, self.n_layers) {
            self.lease.copy_piece(place, start, piece_mut(piece))?;
        }
        // Release and acquire: the thread that counts the last chunk tells of the copies of all threads.
        if self.n_missing[layer_idx].fetch_sub(1, Ordering::AcqRel) == 1 && self.is_all {
            progress.came(layer_idx);
        }
        if self.n_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            progress.note_done();
        }
        Ok(())
    }
}

impl Transfer {
    /// Reads chunks into the blocks, the first layer of all of them first; how many blocks came whole, from the first on. None
    /// did where the load was given up. With `waiters_copy`, threads that wait for layers copy them, and this one only helps.
    pub(crate) fn load_layers(
        self: &Arc<Self>,
        client: &NodeClient,
        reporter: &LayerReporter,
        waiters_copy: bool,
    ) -> Result<usize, NodeError> {
        let progress = &reporter.0;
        if progress.begin_copy().is_none() {
            // Nothing is brought into memory for it.
            return Ok(0);
        }
        let Some(lease) = self.lease(client)? else { return Ok(0) };
        if !progress.begin() {
            // Another daemon took over while bytes were copied. The engine may read what has come, so nothing is written again.
            return Ok(0);
        }
        let copies = Arc::new(LayerCopies::new(self, lease));
        if !copies.is_all {
            // What waits for all blocks need not wait longer; those that come are of use all the same.
            progress.end();
        } else if waiters_copy {
            progress.offer(&copies);
            if copies.n_bytes() < HELPED_BYTES {
                progress.wait_for_waiters(&copies);
            }
        }
        copies.copy_all(progress);
        progress.wait_for_copies(&copies);
        if let Some(error) = copies.failure.lock().take() {
            return Err(error);
        }
        Ok(if copies.is_done() { self.n_blocks_up_to(copies.n_chunks) } else { 0 })
    }
}
