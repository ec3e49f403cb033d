//! foyer's side: a hybrid cache with its block engine on a directory.

use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use foyer::{
    BlockEngineConfig, Compression, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder,
    HybridCachePolicy, IoEngineConfig, PsyncIoEngineConfig, RecoverMode, Source as EntrySource,
    UringIoEngineConfig,
};
use futures_util::future::join_all;
use tokio::runtime::Runtime;

use crate::sample::{DISK_BYTES, MEMORY_BYTES, Sample};
use crate::workload::{BATCH_BYTES, MIB, N_THREADS, ReadMemory, Sink, Source, Workload, gb};

/// Room for four chunks of the longest kind with their headers: an entry does not cross blocks.
const BLOCK_BYTES: usize = 4 * BATCH_BYTES + MIB;

/// As many blocks are written at a time as there are threads that store.
const N_FLUSHERS: usize = N_THREADS;

/// A flusher drops what does not fit beside what it is writing, so each has room for all that can wait: a
/// batch of every thread, and a header for every chunk.
const FLUSHER_BYTES: usize = N_THREADS * BATCH_BYTES + 4 * MIB;

/// How foyer does its I/O.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum DiskIo {
    Uring,
    Psync,
}

struct Subject<'a> {
    workload: &'a Workload,
    // Before the runtime, whose end must find no user.
    cache: HybridCache<u128, Bytes>,
    runtime: Runtime,
}

/// Stores, opens again and reads everything once.
pub fn measure(dir: &Path, workload: &Workload, io: DiskIo) -> Result<Sample> {
    let (subject, _) = Subject::open(dir, workload, io)?;
    let put_s = workload.time_puts(&subject)?;
    let n_present = subject.n_on_disk();
    subject.close()?;

    let (subject, reopen_ms) = Subject::open(dir, workload, io)?;
    let n_recovered = subject.n_on_disk();
    let (get_gb_per_s, n_missed) = workload.time_gets(&subject, N_THREADS)?;
    subject.cache.memory().clear();
    let single_gets_ms = workload.time_single_gets(&subject)?;
    subject.cache.memory().clear();
    let (retrieve_gb_per_s, n_missed_by_one) = workload.time_gets(&subject, 1)?;
    subject.close()?;
    Ok(Sample {
        put_gb_per_s: gb(n_present * workload.chunk_bytes) / put_s,
        get_gb_per_s,
        retrieve_gb_per_s,
        single_retrieves_ms: single_gets_ms.clone(),
        single_gets_ms,
        reopen_ms,
        n_dropped: workload.n_chunks() - n_present,
        n_lost: n_present - n_recovered,
        n_missed: n_missed + n_missed_by_one,
    })
}

impl DiskIo {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uring => "foyer io_uring",
            Self::Psync => "foyer psync",
        }
    }
}

impl<'a> Subject<'a> {
    /// Opens the cache; also returns the milliseconds that took.
    fn open(dir: &Path, workload: &'a Workload, io: DiskIo) -> Result<(Self, f64)> {
        let runtime = tokio::runtime::Builder::new_multi_thread().build().context("start a runtime")?;
        let begin = Instant::now();
        let device = FsDeviceBuilder::new(dir).with_capacity(DISK_BYTES).with_direct(true).build()?;
        let engine = BlockEngineConfig::new(device)
            .with_block_size(BLOCK_BYTES)
            .with_flushers(N_FLUSHERS)
            .with_buffer_pool_size(N_FLUSHERS * FLUSHER_BYTES)
            .with_submit_queue_size_threshold(2 * N_FLUSHERS * FLUSHER_BYTES);
        let builder = HybridCacheBuilder::new()
            .with_policy(HybridCachePolicy::WriteOnInsertion)
            .memory(MEMORY_BYTES)
            // A shard must have room for the longest chunk.
            .with_shards(1)
            .with_weighter(|_: &u128, value: &Bytes| value.len())
            .storage()
            .with_compression(Compression::None)
            .with_recover_mode(RecoverMode::Quiet)
            .with_engine_config(engine);
        let io: Box<dyn IoEngineConfig> = match io {
            DiskIo::Uring => Box::new(UringIoEngineConfig::new()),
            DiskIo::Psync => Box::new(PsyncIoEngineConfig::new()),
        };
        let cache =
            runtime.block_on(builder.with_io_engine_config(io).build()).context("open the hybrid cache")?;
        Ok((Self { workload, cache, runtime }, begin.elapsed().as_secs_f64() * 1e3))
    }

    fn n_on_disk(&self) -> usize {
        let keys = (0..self.workload.n_chunks()).map(key);
        keys.filter(|key| self.cache.storage().may_contains(key)).count()
    }

    fn close(self) -> Result<()> {
        self.runtime.block_on(self.cache.close()).context("close the hybrid cache")
    }
}

impl Sink for Subject<'_> {
    fn put(&self, batch: Range<usize>) -> Result<()> {
        for chunk_idx in batch {
            self.cache.insert(key(chunk_idx), self.workload.chunk(chunk_idx));
        }
        self.runtime.block_on(self.cache.storage().wait());
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        self.runtime.block_on(self.cache.storage().wait());
        Ok(())
    }
}

impl Source for Subject<'_> {
    fn get(
        &self,
        chunks: Range<usize>,
        _: &mut ReadMemory,
        seen: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        let gets = chunks.clone().map(|chunk_idx| self.cache.get(&key(chunk_idx)));
        let entries = self.runtime.block_on(join_all(gets));
        for (chunk_idx, entry) in chunks.zip(entries) {
            if let Some(entry) = entry.context("read a chunk")? {
                ensure!(entry.source() == EntrySource::Disk, "chunk {chunk_idx} came from memory");
                seen(chunk_idx, entry.value());
            }
        }
        Ok(())
    }
}

fn key(chunk_idx: usize) -> u128 {
    (chunk_idx as u128).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
}
