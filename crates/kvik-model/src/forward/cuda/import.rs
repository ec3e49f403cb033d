//! KV on its way into the device, copied by a thread of its own while passes go on.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use kvik_memory::vmm::cuda::{CopyPiece, CopyWay, CudaCopier};

use super::device::Device;
use super::files::{CALL_BYTES, FileMover};
use super::pages::{PageAddresses, Pages, add_piece};
use super::progress::{self, Teller};
use crate::error::{ModelError, Result};
use crate::forward::{BlockImport, BlockSource, KvImport};
use crate::paging::BlockId;

/// Least bytes that are copied by one call, whole layers: few enough that a pass can begin soon, enough that the calls take little
/// beside them.
const BYTES_AT_A_TIME: usize = 64 << 20;

/// How long the copy waits for a layer of its source: other copies wait behind it.
const LAYER_PATIENCE: Duration = Duration::from_millis(200);

/// Copies blocks in, at once or on threads of its own, which end with this.
#[derive(Debug)]
pub(super) struct Importer {
    copier: Arc<Copier>,
    /// Of memory.
    thread: CopyThread,
    /// Of files, which may keep it waiting.
    file_thread: Option<CopyThread>,
}

/// A thread that copies.
#[derive(Debug)]
struct CopyThread {
    /// `None` only while this is dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Copier {
    device: Arc<Device>,
    stream: CudaCopier,
    pages: PageAddresses,
    /// Of KV in files.
    files: Option<Arc<FileMover>>,
}

/// A copy that the thread does.
#[derive(Debug)]
struct Job {
    source: Arc<dyn BlockSource>,
    blocks: Vec<(usize, BlockId)>,
    teller: Teller,
}

/// A copy of many blocks, ready for the driver.
#[derive(Debug)]
struct Gathered {
    pieces: Vec<CopyPiece>,
    way: CopyWay,
}

/// Some layers of all blocks of a copy, and the first layer behind them.
type GatheredLayers = (Gathered, usize);

/// Memory of the host that is known to be registered with the driver.
#[derive(Debug, Default)]
struct KnownMemory(Option<Range<usize>>);

impl Importer {
    /// Starts the threads.
    ///
    /// # Errors
    /// If the device gives no stream, or the system no thread.
    pub(super) fn start(device: &Arc<Device>, pages: &Pages, files: Option<Arc<FileMover>>) -> Result<Self> {
        let stream = CudaCopier::open_staged(device.ordinal());
        let copier = Arc::new(Copier {
            device: Arc::clone(device),
            stream: stream.map_err(|error| ModelError::Memory(Box::new(error)))?,
            pages: pages.addresses(),
            files,
        });
        let thread = CopyThread::start("kvik-import", &copier)?;
        let file_thread = copier.files.is_some().then(|| CopyThread::start("kvik-files", &copier));
        Ok(Self { copier, thread, file_thread: file_thread.transpose()? })
    }

    /// The longest section of a file that blocks are copied from; `None` where that is not done.
    pub(super) fn max_file_section_bytes(&self) -> Option<usize> {
        self.copier.files.as_ref().map(|_| CALL_BYTES)
    }

    /// Copies blocks in at once. The caller has waited for what uses them, and has checked their lengths.
    pub(super) fn import(&self, imports: &[BlockImport<'_>]) -> Result<()> {
        let pieces = imports.iter().map(|import| (import.layer_idx, import.block, import.bytes));
        let gathered = self.copier.gather(pieces, &mut KnownMemory::default());
        // SAFETY: the sources are borrowed until this returns, and the caller holds the targets.
        unsafe { self.copier.copy(&gathered) }
    }

    /// Begins to copy all layers of blocks of `source`. The caller has waited for what uses the blocks.
    pub(super) fn begin(
        &self,
        source: Arc<dyn BlockSource>,
        blocks: Vec<(usize, BlockId)>,
    ) -> Option<Box<dyn KvImport>> {
        let is_in_files = blocks.iter().any(|(block_idx, _)| source.file_blocks(*block_idx).is_some());
        let thread = if is_in_files { self.file_thread.as_ref()? } else { &self.thread };
        let (teller, import) = progress::begin(self.copier.pages.n_layers(), is_in_files);
        thread.jobs.as_ref()?.send(Job { source, blocks, teller }).ok()?;
        Some(Box::new(import))
    }
}

impl CopyThread {
    fn start(name: &str, copier: &Arc<Copier>) -> Result<Self> {
        let (jobs, received) = channel();
        let copier = Arc::clone(copier);
        let thread = std::thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || copier.run(&received));
        let thread = thread
            .map_err(|error| ModelError::Device { call: "start a thread", reason: error.to_string() })?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }
}

impl Drop for CopyThread {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::warn!("the thread that copies KV in has panicked");
        }
    }
}

impl Copier {
    fn run(&self, jobs: &Receiver<Job>) {
        let mut known = KnownMemory::default();
        for Job { source, blocks, teller } in jobs {
            let result = self.copy_all(source.as_ref(), &blocks, &mut known, &teller);
            // The bytes are let go before the end is reported: they may be lent by the store.
            drop(source);
            teller.end(result);
        }
    }

    /// Copies blocks of `source` from where each of them is.
    fn copy_all(
        &self,
        source: &dyn BlockSource,
        blocks: &[(usize, BlockId)],
        known: &mut KnownMemory,
        teller: &Teller,
    ) -> Result<()> {
        let (in_files, others): (Vec<_>, Vec<_>) =
            blocks.iter().copied().partition(|(block_idx, _)| source.file_blocks(*block_idx).is_some());
        if in_files.is_empty() {
            // Also of a source whose files are gone by now.
            return teller
                .write(|| self.copy_blocks(source, &others, known, &|n_there| teller.tell_layers(n_there)));
        }
        let files = self.files.as_ref();
        let files = files.ok_or_else(|| ModelError::request("kv", "in files", "in memory"))?;
        // A layer is there when it has come from everywhere.
        if !others.is_empty() {
            teller.write(|| self.copy_blocks(source, &others, known, &|_| ()))?;
        }
        let copy = |pieces: &[CopyPiece]| {
            teller.write(|| {
                // SAFETY: the reader's memory stays until this returns, and the targets are blocks that the request alone holds as
                // long as the copy was not given up.
                unsafe { self.stream.copy(pieces, CopyWay::Inside, None) }
                    .map_err(|error| ModelError::Memory(Box::new(error)))
            })
        };
        // SAFETY: `copy` writes only blocks that the request alone holds.
        unsafe { files.read(source, &in_files, &self.pages, &copy, &|n_there| teller.tell_layers(n_there)) }
    }

    /// Copies blocks of `source`, layer after layer, and gathers the next layers meanwhile.
    fn copy_blocks(
        &self,
        source: &dyn BlockSource,
        blocks: &[(usize, BlockId)],
        known: &mut KnownMemory,
        tell: &dyn Fn(usize),
    ) -> Result<()> {
        let (n_layers, layer_bytes) = (self.pages.n_layers(), blocks.len() * self.pages.block_bytes());
        // What is still coming is copied as it comes.
        let n_bytes = if source.layers().has_ended { BYTES_AT_A_TIME } else { 1 };
        let n_at_a_time = n_bytes.div_ceil(layer_bytes.max(1)).min(n_layers.max(1));
        std::thread::scope(|scope| {
            let (sender, receiver) = sync_channel::<Result<GatheredLayers>>(1);
            scope.spawn(move || {
                for first in (0..n_layers).step_by(n_at_a_time) {
                    let layers = first..n_layers.min(first + n_at_a_time);
                    let gathered = self.gather_layers(source, blocks, layers.clone(), known);
                    let is_last = gathered.is_err();
                    if sender.send(gathered.map(|gathered| (gathered, layers.end))).is_err() || is_last {
                        return;
                    }
                }
            });
            for gathered in receiver {
                let (gathered, n_there) = gathered?;
                // SAFETY: `source` is borrowed until this returns, and the targets are blocks that the request alone holds.
                unsafe { self.copy(&gathered)? };
                tell(n_there);
            }
            Ok(())
        })
    }

    fn gather_layers(
        &self,
        source: &dyn BlockSource,
        blocks: &[(usize, BlockId)],
        layers: Range<usize>,
        known: &mut KnownMemory,
    ) -> Result<Gathered> {
        let mut pieces = Vec::with_capacity(blocks.len() * layers.len());
        for layer_idx in layers {
            if !source.wait_layer(layer_idx, LAYER_PATIENCE) {
                let value = format!("{layer_idx} layers");
                return Err(ModelError::request("kv", value, format!("{} layers", self.pages.n_layers())));
            }
            for &(block_idx, block) in blocks {
                let bytes = source.block(layer_idx, block_idx);
                let bytes = bytes.filter(|bytes| bytes.len() == self.pages.block_bytes());
                let bytes = bytes.ok_or_else(|| {
                    let allowed = format!("{} bytes in layer {layer_idx}", self.pages.block_bytes());
                    ModelError::request("block", block_idx, allowed)
                })?;
                pieces.push((layer_idx, block, bytes));
            }
        }
        Ok(self.gather(pieces.into_iter(), known))
    }

    fn gather<'a>(
        &self,
        blocks: impl Iterator<Item = (usize, BlockId, &'a [u8])>,
        known: &mut KnownMemory,
    ) -> Gathered {
        let mut is_registered = true;
        let piece_of = |(layer_idx, block, bytes): (usize, BlockId, &'a [u8])| {
            is_registered = is_registered && known.has(&self.device, bytes);
            let source = bytes.as_ptr().expose_provenance() as u64;
            CopyPiece { target: self.pages.address(layer_idx, block), source, n_bytes: bytes.len() }
        };
        let mut blocks: Vec<CopyPiece> = blocks.map(piece_of).collect();
        // Layers of a chunk lie behind each other on the host: what comes by one call comes in long runs.
        blocks.sort_unstable_by_key(|piece| piece.source);
        let mut pieces: Vec<CopyPiece> = Vec::new();
        for piece in blocks {
            add_piece(&mut pieces, piece);
        }
        Gathered { pieces, way: if is_registered { CopyWay::BatchOrKernel } else { CopyWay::Single } }
    }

    /// # Safety
    /// The bytes that were gathered are still borrowed, and the blocks are the caller's alone until this returns.
    unsafe fn copy(&self, gathered: &Gathered) -> Result<()> {
        // SAFETY: the caller answers for the bytes and the blocks.
        unsafe { self.stream.copy(&gathered.pieces, gathered.way, None) }
            .map_err(|error| ModelError::Memory(Box::new(error)))
    }
}

impl KnownMemory {
    /// Whether the copy engine reaches `bytes` by itself.
    fn has(&mut self, device: &Device, bytes: &[u8]) -> bool {
        let range = bytes.as_ptr_range();
        let (start, end) = (range.start.addr(), range.end.addr());
        if self.0.as_ref().is_some_and(|known| known.start <= start && end <= known.end) {
            return true;
        }
        let Some(registered) = device.registered_around(bytes) else { return false };
        let is_inside = registered.start <= start && end <= registered.end;
        self.0 = Some(registered);
        is_inside
    }
}
