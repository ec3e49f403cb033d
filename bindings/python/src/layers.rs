//! Loads that bring the layers of blocks one after the other.
//!
//! An engine may read a layer of its blocks as soon as that has come, while the next one is copied. It may also give the load
//! up: from then on nothing writes its blocks, whatever the daemon does.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use kvik_node::{NodeClient, NodeError, RemoteLease};
use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard};

use crate::copies::{Transfer, piece_mut};

/// How far a load has come, for the threads that wait for it.
#[derive(Debug, Default)]
pub(crate) struct LayerProgress {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the load was given up. Locked for reading while bytes are copied, so that the thread that sets it returns when
    /// no copy is under way.
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
}

/// The part of a load that reports; dropping it says that no further layer comes.
#[derive(Debug)]
pub(crate) struct LayerReporter(Arc<LayerProgress>);

impl LayerProgress {
    /// Waits for the first `n_layers`: whether they have come, or `None` where that was not known in time.
    pub(crate) fn wait_until(&self, n_layers: usize, until: Instant) -> Option<bool> {
        let mut state = self.state.lock();
        while state.n_layers < n_layers && !state.is_over {
            if self.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        let has_come = state.n_layers >= n_layers;
        (has_come || state.is_over).then_some(has_come)
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

    /// Says that no further layer comes.
    pub(crate) fn end(&self) {
        self.state.lock().is_over = true;
        self.changed.notify_all();
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

impl Transfer {
    /// Reads chunks into the blocks, the first layer of all of them first; how many blocks came whole, from the first on. None
    /// did where the load was given up.
    pub(crate) fn load_layers(
        &self,
        client: &NodeClient,
        reporter: &LayerReporter,
    ) -> Result<usize, NodeError> {
        if reporter.0.begin_copy().is_none() {
            // Nothing is brought into memory for it.
            return Ok(0);
        }
        let Some(lease) = self.lease(client)? else { return Ok(0) };
        if !reporter.0.begin() {
            // Another daemon took over while bytes were copied. The engine may read what has come, so nothing is written again.
            return Ok(0);
        }
        let n_chunks = lease.n_chunks().min(self.n_chunks());
        if n_chunks < self.n_chunks() {
            // What waits for all blocks need not wait longer; those that come are of use all the same.
            reporter.0.end();
        }
        let is_whole = self.copy_layers(&lease, n_chunks, &reporter.0)?;
        Ok(if is_whole { self.n_blocks_up_to(n_chunks) } else { 0 })
    }

    /// Copies all layers, on several threads; `false` where the load was given up meanwhile.
    fn copy_layers(
        &self,
        lease: &RemoteLease,
        n_chunks: usize,
        progress: &LayerProgress,
    ) -> Result<bool, NodeError> {
        let n_layers = self.chain.space().format().n_layers as usize;
        let is_all = n_chunks == self.n_chunks();
        let next = AtomicUsize::new(0);
        let n_missing: Vec<AtomicUsize> = (0..n_layers).map(|_| AtomicUsize::new(n_chunks)).collect();
        let copy_next = || {
            loop {
                // Relaxed: it only hands out numbers.
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= n_layers * n_chunks {
                    return Ok(true);
                }
                let (layer_idx, place) = (number / n_chunks, number % n_chunks);
                let Some(_copying) = progress.begin_copy() else { return Ok(false) };
                for (start, piece) in self.layer_pieces(place, layer_idx, n_layers) {
                    lease.copy_piece(place, start, piece_mut(piece))?;
                }
                // Release and acquire: the thread that counts the last chunk tells of the copies of all threads.
                if n_missing[layer_idx].fetch_sub(1, Ordering::AcqRel) == 1 && is_all {
                    progress.came(layer_idx);
                }
            }
        };
        let n_threads = self.n_threads.clamp(1, n_chunks.max(1));
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..n_threads).map(|_| scope.spawn(copy_next)).collect();
            let own = copy_next();
            others.into_iter().fold(own, |ended, other| {
                let other =
                    other.join().unwrap_or(Err(NodeError::Gone { reason: "a copying thread panicked" }));
                Ok(ended? & other?)
            })
        })
    }
}
