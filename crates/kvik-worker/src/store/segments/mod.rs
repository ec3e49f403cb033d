//! Segments in the store: KV that was computed alone and is used at any place of a prompt.
//!
//! [`SegmentStore`] is what the engine's thread asks; [`SegmentPlace`] is what a store must be able to do for it: `local` in this
//! process, `daemon` in a daemon. Segments have a namespace of their own, so no prompt finds them as its prefix and no index
//! receives events of them.

mod daemon;
mod local;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvik_model::{ComputedSegment, LayerKv, SegmentKv};
use kvik_store::ChunkFormat;
use kvik_types::hash::{HashChain as _, KvikChain};
use kvik_types::{BlockSize, CacheSalt, Namespace, TokenId};
use parking_lot::Mutex;

use super::{PanicGuard, refused};
use crate::error::{Result, WorkerError};

pub(super) use daemon::DaemonSegments;
pub(super) use local::LocalSegments;

/// Names what the bytes of segments are: keys after rotation, token by token.
const FORMAT: &str = "keys,values=token,head,dim";

/// Segments that wait to be stored; beyond, they are computed again when they are needed again.
const MAX_WAITING: usize = 64;

/// Where segments lie.
pub(super) trait SegmentPlace: fmt::Debug + Send + Sync {
    /// Begins to load a segment; `None` where it cannot be there. Does not wait for disks, servers or other processes.
    fn load(&self, tokens: &[TokenId], salt: Option<&CacheSalt>) -> Option<Box<dyn ComingSegment>>;

    /// Copies a segment, as far as there is room. May wait.
    fn write(&self, segment: &ComputedSegment, salt: Option<&CacheSalt>);

    /// Whether it can be asked now.
    fn is_there(&self) -> bool {
        true
    }

    /// Ends what it has of its own; it is not used after that.
    fn close(&self) {}
}

/// How the segments of a model are computed and named.
#[derive(Debug, Clone)]
pub(super) struct SegmentKind {
    namespace: Namespace,
    format: ChunkFormat,
    /// Position that the first key of each is rotated to.
    first_position: usize,
}

/// A segment on its way; dropping it gives it up.
pub(super) trait ComingSegment: fmt::Debug + Send {
    fn is_done(&self) -> bool;

    /// Calls `callback` once when nothing more will arrive, on another thread or at once.
    fn on_done(&self, callback: Box<dyn FnOnce() + Send>);

    /// The segment, if all of it has arrived.
    fn finish(self: Box<Self>) -> Option<Arc<dyn SegmentKv>>;
}

/// The segments of one model in a store.
#[derive(Debug)]
pub(crate) struct SegmentStore {
    place: Arc<dyn SegmentPlace>,
    load_timeout: Duration,
    panic_guard: PanicGuard,
    /// `None` after the end.
    writer: Mutex<Option<Writer>>,
}

/// The thread that copies segments into the store.
#[derive(Debug)]
struct Writer {
    waiting: SyncSender<(Arc<ComputedSegment>, Option<CacheSalt>)>,
    thread: JoinHandle<()>,
}

/// What came of the request to load a segment.
#[derive(Debug)]
pub(crate) enum SegmentLoading {
    /// The store does not have it, or not all of it.
    Nothing,
    /// It is there.
    Ready(Arc<dyn SegmentKv>),
    /// It comes.
    Pending(SegmentLoad),
}

/// A segment that was asked for and has not arrived. Dropping it gives it up.
#[derive(Debug)]
pub(crate) struct SegmentLoad {
    coming: Box<dyn ComingSegment>,
    deadline: Instant,
}

impl SegmentStore {
    /// Starts the thread that writes.
    ///
    /// # Errors
    /// If the operating system gives none.
    pub(super) fn start(
        place: Arc<dyn SegmentPlace>,
        load_timeout: Duration,
        panic_guard: PanicGuard,
    ) -> Result<Self> {
        let (waiting, segments) =
            mpsc::sync_channel::<(Arc<ComputedSegment>, Option<CacheSalt>)>(MAX_WAITING);
        let (target, guard) = (Arc::clone(&place), panic_guard.clone());
        let thread = std::thread::Builder::new()
            .name("kvik-segments".to_owned())
            .spawn(move || {
                for (segment, salt) in segments {
                    guard.run(|| target.write(&segment, salt.as_ref()));
                }
            })
            .map_err(|source| WorkerError::Io { what: "start the thread of segments".to_owned(), source })?;
        let writer = Mutex::new(Some(Writer { waiting, thread }));
        Ok(Self { place, load_timeout, panic_guard, writer })
    }

    /// Whether segments can be loaded and kept now.
    pub(crate) fn is_there(&self) -> bool {
        self.place.is_there()
    }

    /// Begins to load a segment.
    pub(crate) fn load(&self, tokens: &[TokenId], salt: Option<&CacheSalt>) -> SegmentLoading {
        let begin = || {
            let Some(coming) = self.place.load(tokens, salt) else { return SegmentLoading::Nothing };
            if coming.is_done() {
                return coming.finish().map_or(SegmentLoading::Nothing, SegmentLoading::Ready);
            }
            SegmentLoading::Pending(SegmentLoad { coming, deadline: Instant::now() + self.load_timeout })
        };
        self.panic_guard.run(begin).unwrap_or(SegmentLoading::Nothing)
    }

    /// Has a segment stored, soon and if there is room.
    pub(crate) fn keep(&self, segment: &Arc<ComputedSegment>, salt: Option<CacheSalt>) {
        let writer = self.writer.lock();
        let Some(writer) = &*writer else { return };
        if let Err(TrySendError::Full(_)) = writer.waiting.try_send((Arc::clone(segment), salt)) {
            tracing::debug!("a segment was not stored: others wait");
        }
    }

    /// Stores what waits and ends the threads.
    pub(super) fn close(&self) {
        let Some(Writer { waiting, thread }) = self.writer.lock().take() else { return };
        drop(waiting);
        // A thread that panicked has said so.
        let _ = thread.join();
        self.place.close();
    }
}

impl Drop for SegmentStore {
    fn drop(&mut self) {
        self.close();
    }
}

impl SegmentLoad {
    /// When it is waited for no longer.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Calls `callback` once when nothing more will arrive, on another thread or at once.
    pub(crate) fn on_done(&self, callback: impl FnOnce() + Send + 'static) {
        self.coming.on_done(Box::new(callback));
    }

    /// The segment, if all of it has arrived.
    pub(crate) fn finish(self) -> Option<Arc<dyn SegmentKv>> {
        self.coming.finish()
    }
}

impl SegmentKind {
    /// The segments of a model whose prompts have `namespace` and `format`, computed behind the tokens of `priming`, or alone
    /// where that is empty. What was computed in another way has another namespace. A segment ends at any token.
    ///
    /// # Errors
    /// If the priming context has more tokens than a block may have.
    pub(super) fn new(namespace: &Namespace, format: ChunkFormat, priming: &[TokenId]) -> Result<Self> {
        let first_position = priming.len();
        let context = if priming.is_empty() {
            "alone".to_owned()
        } else {
            let block_size = BlockSize::try_new(first_position).map_err(refused)?;
            let hash = KvikChain::after(namespace.seed(), block_size).push_block(priming);
            format!("primed={hash}")
        };
        let layout = format!("{}+segment_1/{context}/positions={first_position}/{FORMAT}", namespace.layout);
        let block_tokens = BlockSize::try_new(1).map_err(refused)?;
        Ok(Self {
            namespace: Namespace { layout, ..namespace.clone() },
            format: ChunkFormat { block_tokens, ..format },
            first_position,
        })
    }
}

/// Copies one layer of the tokens of a chunk: their keys, then their values.
fn copy_layer(layer: &LayerKv, tokens: &Range<usize>, section: &mut [u8]) {
    let LayerKv { n_tokens, keys, values } = layer;
    let token_bytes = keys.len() / n_tokens.max(&1);
    let range = tokens.start * token_bytes..tokens.end * token_bytes;
    let (to_keys, to_values) = section.split_at_mut(section.len() / 2);
    to_keys.copy_from_slice(&keys[range.clone()]);
    to_values.copy_from_slice(&values[range]);
}
