//! Checksums of chunks, by several threads: one thread reads memory at a fraction of its rate.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use kvik_store::ChunkWriter;
use kvik_tier::shared::{Checksum, checksum, combine_checksums};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::error::{NodeError, Result};

/// Bytes that a thread sums up at a time: enough to outweigh taking them, and several of a common chunk.
const PART_BYTES: usize = 1 << 20;

/// Threads that help at most. Eight of them read more than most memories give.
const MAX_THREADS: usize = 8;

/// Threads that help sessions to sum up chunks; dropping it joins them.
///
/// A session sums up its own chunk and is helped as far as threads are idle, so it never waits for the chunk of another. It
/// asks for help only where something waits for the sum: threads that are not needed take the processor and the memory from
/// the clients.
#[derive(Debug)]
pub(super) struct SumThreads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Chunks with parts that no thread has taken, oldest first.
    waiting: Mutex<VecDeque<Arc<SharedSum>>>,
    wake: Condvar,
    is_closing: AtomicBool,
}

/// A chunk that several threads sum up.
#[derive(Debug)]
struct SharedSum {
    /// A thread takes and sums up parts only while it holds this for reading, so one that has it for writing after the
    /// last part was taken knows that all are done.
    writer: RwLock<Option<ChunkWriter>>,
    next_part: AtomicUsize,
    parts: Vec<AtomicU64>,
}

impl SumThreads {
    /// Starts a thread for every fourth processor, at most 8: the others belong to the engines.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub(super) fn start() -> Result<Self> {
        let n_processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self::start_some((n_processors / 4).min(MAX_THREADS))
    }

    fn start_some(n_threads: usize) -> Result<Self> {
        // Threads that were started are joined if a later one cannot be.
        let mut started = Self { shared: Arc::default(), threads: Vec::with_capacity(n_threads) };
        for _ in 0..n_threads {
            let shared = Arc::clone(&started.shared);
            let thread = std::thread::Builder::new()
                .name("kvik-sum".to_owned())
                .spawn(move || shared.run())
                .map_err(NodeError::io("start a summing thread"))?;
            started.threads.push(thread);
        }
        Ok(started)
    }

    /// The checksum of a chunk's bytes; `None` if the chunk was taken away meanwhile, which no thread does. Other threads
    /// help as soon as `is_urgent` says so.
    pub(super) fn sum(
        &self,
        writer: ChunkWriter,
        is_urgent: impl Fn() -> bool,
    ) -> Option<(ChunkWriter, Checksum)> {
        let n_bytes = writer.payload().len();
        if self.threads.is_empty() || n_bytes <= PART_BYTES {
            let sum = checksum(writer.payload());
            return Some((writer, sum));
        }
        let sum = Arc::new(SharedSum::new(writer));
        if !sum.help_until(is_urgent) {
            self.shared.waiting.lock().push_back(Arc::clone(&sum));
            self.shared.wake.notify_all();
            sum.help_until(|| false);
            self.shared.forget(&sum);
        }
        sum.finish()
    }
}

impl Drop for SumThreads {
    fn drop(&mut self) {
        {
            // Under the lock: a thread that has looked at the flag sleeps before it is woken.
            let _waiting = self.shared.waiting.lock();
            self.shared.is_closing.store(true, Ordering::Relaxed);
        }
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

// === impl Shared ===

impl Shared {
    fn run(&self) {
        while let Some(sum) = self.next() {
            sum.help_until(|| false);
            self.forget(&sum);
        }
    }

    /// Waits for a chunk that needs help; `None` at the end.
    fn next(&self) -> Option<Arc<SharedSum>> {
        let mut waiting = self.waiting.lock();
        loop {
            if self.is_closing.load(Ordering::Relaxed) {
                return None;
            }
            if let Some(sum) = waiting.front() {
                return Some(Arc::clone(sum));
            }
            self.wake.wait(&mut waiting);
        }
    }

    /// Takes a chunk whose parts are all taken off the list.
    fn forget(&self, sum: &Arc<SharedSum>) {
        self.waiting.lock().retain(|other| !Arc::ptr_eq(other, sum));
    }
}

// === impl SharedSum ===

impl SharedSum {
    fn new(writer: ChunkWriter) -> Self {
        let n_parts = writer.payload().len().div_ceil(PART_BYTES);
        Self {
            writer: RwLock::new(Some(writer)),
            next_part: AtomicUsize::new(0),
            parts: (0..n_parts).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Sums up parts until none is left, or `is_enough`; says whether none is left.
    fn help_until(&self, is_enough: impl Fn() -> bool) -> bool {
        let writer = self.writer.read();
        let Some(writer) = &*writer else { return true };
        // Relaxed: which part is all that the number says, and the lock orders the sums before their use.
        while let part_idx = self.next_part.fetch_add(1, Ordering::Relaxed)
            && let Some(part) = self.parts.get(part_idx)
        {
            let bytes = writer.payload().chunks(PART_BYTES).nth(part_idx).unwrap_or_default();
            part.store(checksum(bytes).0, Ordering::Relaxed);
            if is_enough() {
                return false;
            }
        }
        true
    }

    /// Waits for the parts that others sum up, and joins all.
    fn finish(&self) -> Option<(ChunkWriter, Checksum)> {
        let writer = self.writer.write().take()?;
        let lengths = writer.payload().chunks(PART_BYTES).map(<[u8]>::len);
        let sums = self.parts.iter().map(|part| Checksum(part.load(Ordering::Relaxed)));
        let whole = sums.zip(lengths).reduce(|(whole, n_before), (part, n_bytes)| {
            (combine_checksums(whole, part, n_bytes), n_before + n_bytes)
        });
        whole.map(|(whole, _)| (writer, whole))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use kvik_store::{ChunkFormat, Store, StoreOptions, Write};
    use kvik_tier::{Arena, ArenaOptions, RamTier};
    use kvik_types::{BlockSize, Dtype, Namespace};

    use super::*;

    /// Chunks of 256 tokens with `token_bytes` each.
    fn writers(token_bytes: u64, n_chunks: usize) -> (Store, Vec<ChunkWriter>) {
        let arena = Arena::new(ArenaOptions::new(64 << 20)).unwrap();
        let store = Store::builder(StoreOptions::default(), RamTier::new(arena)).open().unwrap();
        let namespace = Namespace {
            model: "sums".to_owned(),
            dtype: Dtype::BF16,
            layout: "rows".to_owned(),
            tenant: String::new(),
        };
        let block_tokens = BlockSize::try_new(16).unwrap();
        let format = ChunkFormat { n_layers: 1, token_layer_bytes: token_bytes, n_ranks: 1, block_tokens };
        let space = store.space(&namespace, format).unwrap();
        let tokens: Vec<u32> = (0..256 * n_chunks as u32).collect();
        let chain = space.chain(&tokens);
        let writers = (0..n_chunks)
            .map(|chunk_idx| {
                let Write::Slot(mut writer) = store.begin_write(&chain, chunk_idx, 0) else { panic!() };
                let payload = writer.payload_mut().iter_mut().enumerate();
                payload.for_each(|(place, byte)| *byte = ((place * 31 + chunk_idx) >> 3) as u8);
                writer
            })
            .collect();
        (store, writers)
    }

    #[test]
    fn the_sum_of_several_threads_is_that_of_one_for_chunks_of_all_lengths() {
        let threads = SumThreads::start_some(3).unwrap();
        for token_bytes in [16, 4096, 4097, 8191, 20_000] {
            let (_store, writers) = writers(token_bytes, 2);
            for writer in writers {
                let expected = checksum(writer.payload());
                let (writer, alone) = threads.sum(writer, || false).unwrap();
                assert_eq!(alone, expected, "{token_bytes}");
                assert_eq!(threads.sum(writer, || true).unwrap().1, expected, "{token_bytes}");
            }
        }
    }

    #[test]
    fn sessions_that_sum_up_at_a_time_get_each_its_own_sum() {
        let threads = SumThreads::start_some(2).unwrap();
        let (_store, writers) = writers(20_000, 8);
        std::thread::scope(|scope| {
            for writer in writers {
                scope.spawn(|| {
                    let mut writer = Some(writer);
                    for round in 0..20 {
                        let given = writer.take().unwrap();
                        let expected = checksum(given.payload());
                        let n_alone = Cell::new(round % 4_u32);
                        let is_urgent = || n_alone.replace(n_alone.get().saturating_sub(1)) == 0;
                        let (back, sum) = threads.sum(given, is_urgent).unwrap();
                        assert_eq!(sum, expected);
                        writer = Some(back);
                    }
                });
            }
        });
        assert!(threads.shared.waiting.lock().is_empty());
    }
}
