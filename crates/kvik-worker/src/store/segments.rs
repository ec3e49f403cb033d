//! Segments in the store: KV that was computed alone and is used at any place of a prompt.
//!
//! They have a namespace of their own, so no prompt finds them as its prefix and no index hears of them.

use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvik_model::{ComputedSegment, LayerKv, SegmentKv, SegmentPart};
use kvik_store::{ChunkFormat, Prefetch, Retrieved, Space, Store, Write};
use kvik_types::{BlockSize, CacheSalt, Namespace, TokenId};
use parking_lot::Mutex;

use super::{PanicGuard, refused};
use crate::error::{Result, WorkerError};

/// Names how segments are computed: alone, from position 0 on, keys after rotation, token by token.
const CONVENTION: &str = "+segment_1/alone/positions=0/keys,values=token,head,dim";

/// Segments that wait to be stored; beyond, they are computed again when they are needed again.
const MAX_WAITING: usize = 64;

/// The segments of one model in a store of this process.
#[derive(Debug)]
pub(crate) struct SegmentStore {
    store: Store,
    space: Space,
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
    prefetch: Prefetch,
    n_tokens: usize,
    deadline: Instant,
}

/// A segment in leases of the store.
#[derive(Debug)]
struct StoredSegment {
    retrieved: Retrieved,
    n_tokens: usize,
}

impl SegmentStore {
    /// The place of a model's segments in a store whose chunks of prompts have `namespace` and `format`.
    ///
    /// # Errors
    /// If the format is refused or the operating system gives no thread.
    pub(super) fn open(
        store: &Store,
        namespace: &Namespace,
        format: ChunkFormat,
        load_timeout: Duration,
        panic_guard: PanicGuard,
    ) -> Result<Self> {
        let layout = format!("{}{CONVENTION}", namespace.layout);
        let format = ChunkFormat { block_tokens: BlockSize::try_new(1).map_err(refused)?, ..format };
        let space =
            store.space_with_tails(&Namespace { layout, ..namespace.clone() }, format).map_err(refused)?;
        let (waiting, segments) =
            mpsc::sync_channel::<(Arc<ComputedSegment>, Option<CacheSalt>)>(MAX_WAITING);
        let (target, target_space, guard) = (store.clone(), space.clone(), panic_guard.clone());
        let thread = std::thread::Builder::new()
            .name("kvik-segments".to_owned())
            .spawn(move || {
                for (segment, salt) in segments {
                    guard.run(|| write(&target, &target_space, &segment, salt.as_ref()));
                }
            })
            .map_err(|source| WorkerError::Io { what: "start the thread of segments".to_owned(), source })?;
        let writer = Mutex::new(Some(Writer { waiting, thread }));
        Ok(Self { store: store.clone(), space, load_timeout, panic_guard, writer })
    }

    /// Begins to load a segment.
    pub(crate) fn load(&self, tokens: &[TokenId], salt: Option<&CacheSalt>) -> SegmentLoading {
        let begin = || {
            let chain = self.space.salted_chain(tokens, salt);
            self.store.note_request(&chain, None);
            let load = SegmentLoad {
                prefetch: self.store.prefetch(&chain, 0),
                n_tokens: tokens.len(),
                deadline: Instant::now() + self.load_timeout,
            };
            if !load.prefetch.is_done() {
                return SegmentLoading::Pending(load);
            }
            load.finish().map_or(SegmentLoading::Nothing, SegmentLoading::Ready)
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

    /// Stores what waits and ends the thread.
    pub(super) fn close(&self) {
        let Some(Writer { waiting, thread }) = self.writer.lock().take() else { return };
        drop(waiting);
        // A thread that panicked has said so.
        let _ = thread.join();
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
        self.prefetch.on_done(callback);
    }

    /// The segment, if all of it has arrived.
    pub(crate) fn finish(self) -> Option<Arc<dyn SegmentKv>> {
        let Self { prefetch, n_tokens, .. } = self;
        let retrieved = prefetch.wait(Duration::ZERO);
        let is_whole = retrieved.n_tokens() == n_tokens && 0 < n_tokens;
        is_whole.then(|| Arc::new(StoredSegment { retrieved, n_tokens }) as Arc<dyn SegmentKv>)
    }
}

impl SegmentKv for StoredSegment {
    fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    fn n_parts(&self) -> usize {
        self.retrieved.chunks().len()
    }

    fn part(&self, layer_idx: usize, part_idx: usize) -> Option<SegmentPart<'_>> {
        let section = self.retrieved.chunks().get(part_idx)?.layer(0, layer_idx);
        let (keys, values) = section.split_at(section.len() / 2);
        (!keys.is_empty()).then_some(SegmentPart { keys, values })
    }
}

/// Copies a segment chunk by chunk: of each layer the keys of its tokens, then the values.
fn write(store: &Store, space: &Space, segment: &ComputedSegment, salt: Option<&CacheSalt>) {
    let chain = space.salted_chain(&segment.tokens, salt);
    for chunk_idx in 0..chain.n_chunks() {
        let mut writer = match store.begin_write(&chain, chunk_idx, 0) {
            Write::Slot(writer) => writer,
            Write::Present => continue,
            Write::NoRoom | Write::NoParent | Write::Collision => return,
        };
        let tokens = chain.tokens_of(chunk_idx);
        for (layer_idx, LayerKv { n_tokens, keys, values }) in segment.layers.iter().enumerate() {
            let token_bytes = keys.len() / n_tokens.max(&1);
            let range = tokens.start * token_bytes..tokens.end * token_bytes;
            let section = writer.layer_mut(layer_idx);
            let (to_keys, to_values) = section.split_at_mut(section.len() / 2);
            to_keys.copy_from_slice(&keys[range.clone()]);
            to_values.copy_from_slice(&values[range]);
        }
        writer.commit();
    }
}
