//! What both projects are asked to do: the same bytes, in the same batches, from as many threads.

use std::ops::Range;
use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use bytes::Bytes;

pub const MIB: usize = 1 << 20;

/// Bytes of the chunks that one call stores or reads. Two threads then have as much under way as the memory
/// part of either project holds.
pub const BATCH_BYTES: usize = 32 * MIB;

/// Threads that store and read.
pub const N_THREADS: usize = 2;

/// The unit of direct I/O; memory that starts at a multiple of it goes to a disk as it is.
const BLOCK_BYTES: usize = 4096;

/// Bytes at both ends of a chunk that every read compares. The content is random, so they tell chunks apart.
const PROBE_BYTES: usize = 64;

/// More reads of one chunk at a time add no precision that a run on a shared machine could use.
const MAX_SINGLE_GETS: usize = 256;

/// All bytes of a run, cut into chunks of one length.
pub struct Workload {
    corpus: Bytes,
    pub chunk_bytes: usize,
}

/// Memory of one reader that a disk fills without a copy.
pub struct ReadMemory {
    bytes: Vec<u8>,
    start: usize,
}

/// What chunks are stored in.
pub trait Sink: Sync {
    /// Stores the chunks of a batch; returns when they were handed to the disk.
    fn put(&self, batch: Range<usize>) -> Result<()>;

    /// Makes what was put as durable as the project offers.
    fn finish(&self) -> Result<()>;
}

/// What chunks are read from.
pub trait Source: Sync {
    /// Reads chunks of one batch and calls `seen` with each that was there. Must not answer from memory.
    fn get(
        &self,
        chunks: Range<usize>,
        memory: &mut ReadMemory,
        seen: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()>;
}

impl Workload {
    pub fn new(corpus: &Bytes, chunk_bytes: usize) -> Self {
        Self { corpus: corpus.clone(), chunk_bytes }
    }

    pub fn n_chunks(&self) -> usize {
        self.corpus.len() / self.chunk_bytes
    }

    pub fn n_in_batch(&self) -> usize {
        BATCH_BYTES / self.chunk_bytes
    }

    /// The bytes of a chunk, shared and not copied.
    pub fn chunk(&self, chunk_idx: usize) -> Bytes {
        self.corpus.slice(self.range(chunk_idx))
    }

    fn bytes_of(&self, chunk_idx: usize) -> &[u8] {
        &self.corpus[self.range(chunk_idx)]
    }

    fn range(&self, chunk_idx: usize) -> Range<usize> {
        chunk_idx * self.chunk_bytes..(chunk_idx + 1) * self.chunk_bytes
    }

    /// The batches of one thread, in order.
    fn batches(&self, thread_idx: usize, n_threads: usize) -> impl Iterator<Item = Range<usize>> {
        let n_batches = self.corpus.len() / BATCH_BYTES;
        let n_in_batch = self.n_in_batch();
        let batches = thread_idx * n_batches / n_threads..(thread_idx + 1) * n_batches / n_threads;
        batches.map(move |batch_idx| batch_idx * n_in_batch..(batch_idx + 1) * n_in_batch)
    }

    /// Stores everything; returns seconds.
    pub fn time_puts(&self, sink: &dyn Sink) -> Result<f64> {
        let begin = Instant::now();
        on_threads(vec![(); N_THREADS], |thread_idx, ()| {
            self.batches(thread_idx, N_THREADS).try_for_each(|batch| sink.put(batch))
        })?;
        sink.finish()?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Reads everything; returns GB/s of what was there, and how many chunks were not.
    pub fn time_gets(&self, source: &dyn Source, n_threads: usize) -> Result<(f64, usize)> {
        let memories: Vec<ReadMemory> = (0..n_threads).map(|_| ReadMemory::new()).collect();
        let begin = Instant::now();
        let n_hits = on_threads(memories, |thread_idx, mut memory| {
            let mut n_hits = 0;
            let mut wrong = None;
            for batch in self.batches(thread_idx, n_threads) {
                source.get(batch, &mut memory, &mut |chunk_idx, bytes| {
                    n_hits += 1;
                    if !self.has_ends_of(chunk_idx, bytes) {
                        wrong = Some(chunk_idx);
                    }
                })?;
            }
            ensure!(wrong.is_none(), "chunk {wrong:?} came back with other bytes");
            Ok(n_hits)
        })?;
        let seconds = begin.elapsed().as_secs_f64();
        let n_hits: usize = n_hits.into_iter().sum();
        Ok((gb(n_hits * self.chunk_bytes) / seconds, self.n_chunks() - n_hits))
    }

    /// Reads chunks one at a time, each once and in no order; returns the milliseconds of each that was
    /// there. Every byte is compared after the time is taken.
    pub fn time_single_gets(&self, source: &dyn Source) -> Result<Vec<f64>> {
        let mut memory = ReadMemory::new();
        let mut times_ms = Vec::new();
        for chunk_idx in shuffled(self.n_chunks()).into_iter().take(MAX_SINGLE_GETS) {
            let mut is_right = true;
            let begin = Instant::now();
            source.get(chunk_idx..chunk_idx + 1, &mut memory, &mut |seen_idx, bytes| {
                times_ms.push(begin.elapsed().as_secs_f64() * 1e3);
                is_right = seen_idx == chunk_idx && bytes == self.bytes_of(chunk_idx);
            })?;
            ensure!(is_right, "chunk {chunk_idx} came back with other bytes");
        }
        Ok(times_ms)
    }

    fn has_ends_of(&self, chunk_idx: usize, bytes: &[u8]) -> bool {
        let expected = self.bytes_of(chunk_idx);
        bytes.len() == expected.len()
            && bytes[..PROBE_BYTES] == expected[..PROBE_BYTES]
            && bytes[bytes.len() - PROBE_BYTES..] == expected[expected.len() - PROBE_BYTES..]
    }
}

impl ReadMemory {
    fn new() -> Self {
        let bytes = vec![1; BATCH_BYTES + BLOCK_BYTES];
        let start = to_block(&bytes);
        Self { bytes, start }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + BATCH_BYTES]
    }
}

/// Random bytes, always the same, from the start of a block on.
pub fn corpus(n_bytes: usize) -> Bytes {
    let mut bytes = vec![0; n_bytes + BLOCK_BYTES];
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&random.next().to_le_bytes());
    }
    let start = to_block(&bytes);
    Bytes::from(bytes).slice(start..start + n_bytes)
}

/// Gigabytes.
pub fn gb(n_bytes: usize) -> f64 {
    n_bytes as f64 / 1e9
}

/// Bytes until the next start of a block.
fn to_block(bytes: &[u8]) -> usize {
    bytes.as_ptr().addr().next_multiple_of(BLOCK_BYTES) - bytes.as_ptr().addr()
}

/// Does `work` with every input, each on a thread of its own; the first failure, or what they returned.
fn on_threads<I: Send, O: Send>(
    inputs: Vec<I>,
    work: impl Fn(usize, I) -> Result<O> + Sync,
) -> Result<Vec<O>> {
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> = inputs
            .into_iter()
            .enumerate()
            .map(|(thread_idx, input)| scope.spawn(move || work(thread_idx, input)))
            .collect();
        threads.into_iter().map(|it| it.join().map_err(|_| anyhow!("a thread panicked"))?).collect()
    })
}

fn shuffled(n_chunks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n_chunks).collect();
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    for last in (1..n_chunks).rev() {
        order.swap(last, (random.next() % (last as u64 + 1)) as usize);
    }
    order
}

/// Marsaglia's xorshift: good enough to fill memory and to shuffle.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
