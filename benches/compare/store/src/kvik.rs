//! kvik's side: the nvme tier behind its checksums, and the store over it.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use kvik_store::{ChunkFormat, Space, Store, StoreBuilder, StoreOptions};
use kvik_tier::{
    Arena, ArenaOptions, Checksummed, ChunkKey, GetItem, NvmeOptions, NvmeTier, PutItem, RamTier, Tier,
    TierKind,
};
use kvik_types::{BlockSize, Dtype, Namespace};

use crate::sample::{DISK_BYTES, MEMORY_BYTES, Sample};
use crate::workload::{N_THREADS, ReadMemory, Sink, Source, Workload, gb};

const CHUNK_TOKENS: usize = 256;
const N_LAYERS: usize = 32;

/// The tier alone, as a store uses it.
struct TierSubject<'a> {
    workload: &'a Workload,
    keys: &'a [ChunkKey],
    tier: Arc<dyn Tier>,
}

/// The tier below memory. Every batch of the workload is one chain.
struct StoreSubject<'a> {
    workload: &'a Workload,
    store: Store,
    space: Space,
}

/// Stores, opens again and reads everything once.
pub fn measure(dir: &Path, workload: &Workload) -> Result<Sample> {
    let keys = keys(workload)?;
    let subject = TierSubject { workload, keys: &keys, tier: open_tier(dir)? };
    let put_s = workload.time_puts(&subject)?;
    let n_present = subject.n_on_disk()?;
    drop(subject);

    let begin = Instant::now();
    let tier = open_tier(dir)?;
    let reopen_ms = begin.elapsed().as_secs_f64() * 1e3;
    let subject = TierSubject { workload, keys: &keys, tier };
    let n_recovered = subject.n_on_disk()?;
    let (get_gb_per_s, n_missed) = workload.time_gets(&subject, N_THREADS)?;
    let single_gets_ms = workload.time_single_gets(&subject)?;
    let TierSubject { tier, .. } = subject;

    let subject = StoreSubject::open(workload, Some(Arc::clone(&tier)))?;
    let (retrieve_gb_per_s, n_missed_retrieves) = workload.time_gets(&subject, 1)?;
    drop(subject);
    // A new store, so that no chunk is in memory.
    let subject = StoreSubject::open(workload, Some(tier))?;
    let single_retrieves_ms = workload.time_single_gets(&subject)?;
    Ok(Sample {
        put_gb_per_s: gb(n_present * workload.chunk_bytes) / put_s,
        get_gb_per_s,
        retrieve_gb_per_s,
        single_gets_ms,
        single_retrieves_ms,
        reopen_ms,
        n_dropped: keys.len() - n_present,
        n_lost: n_present - n_recovered,
        n_missed: n_missed + n_missed_retrieves,
    })
}

fn open_tier(dir: &Path) -> Result<Arc<dyn Tier>> {
    let tier = NvmeTier::open(&NvmeOptions::new(dir, DISK_BYTES as u64)).context("open the nvme tier")?;
    Ok(Arc::new(Checksummed::new(tier)))
}

/// The key of every chunk: those that a store asks for, so that one can be opened over what the tier has.
fn keys(workload: &Workload) -> Result<Vec<ChunkKey>> {
    let subject = StoreSubject::open(workload, None)?;
    let n_batches = workload.n_chunks() / workload.n_in_batch();
    let chains =
        (0..n_batches).map(|batch_idx| subject.space.chain(&tokens(batch_idx, workload.n_in_batch())));
    Ok(chains.flat_map(|chain| (0..chain.n_chunks()).filter_map(move |place| chain.key(place, 0))).collect())
}

/// The first chunks of the sequence of a batch, in tokens.
fn tokens(batch_idx: usize, n_chunks: usize) -> Vec<u32> {
    (0..n_chunks * CHUNK_TOKENS).map(|position| ((batch_idx << 20) + position) as u32).collect()
}

impl TierSubject<'_> {
    fn n_on_disk(&self) -> Result<usize> {
        let mut present = vec![false; self.keys.len()];
        self.tier.contains(self.keys, &mut present)?;
        Ok(present.into_iter().filter(|is_present| *is_present).count())
    }
}

impl Sink for TierSubject<'_> {
    fn put(&self, batch: Range<usize>) -> Result<()> {
        let chunks: Vec<_> = batch.clone().map(|chunk_idx| self.workload.chunk(chunk_idx)).collect();
        let parts: Vec<[&[u8]; 1]> = chunks.iter().map(|bytes| [&bytes[..]]).collect();
        let section_bytes = self.workload.chunk_bytes / N_LAYERS;
        let mut items: Vec<PutItem<'_>> = self.keys[batch]
            .iter()
            .zip(&parts)
            .map(|(key, parts)| PutItem::with_sections(*key, parts, section_bytes))
            .collect();
        self.tier.put(&mut items);
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        self.tier.flush().context("flush the nvme tier")
    }
}

impl Source for TierSubject<'_> {
    fn get(
        &self,
        chunks: Range<usize>,
        memory: &mut ReadMemory,
        seen: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        let buffers = memory.bytes_mut().chunks_exact_mut(self.workload.chunk_bytes);
        let keys = &self.keys[chunks.clone()];
        let mut items: Vec<GetItem<'_>> =
            keys.iter().zip(buffers).map(|(key, buffer)| GetItem::whole(*key, buffer)).collect();
        self.tier.get(&mut items);
        for (chunk_idx, item) in chunks.zip(&items).filter(|(_, item)| item.outcome.is_hit()) {
            seen(chunk_idx, item.buffer);
        }
        Ok(())
    }
}

impl<'a> StoreSubject<'a> {
    fn open(workload: &'a Workload, tier: Option<Arc<dyn Tier>>) -> Result<Self> {
        let ram = RamTier::new(Arena::new(ArenaOptions::new(MEMORY_BYTES as u64))?);
        // A batch counts as under way until its last chunk was handed over, which the next retrieve may be
        // faster than; with the default, half of the memory, it would then be refused.
        let options =
            StoreOptions { load_in_flight_bytes: Some(MEMORY_BYTES as u64), ..StoreOptions::default() };
        let builder = Store::builder(options, ram);
        let store = tier.into_iter().fold(builder, StoreBuilder::local).open()?;
        let namespace = Namespace {
            model: "compare".into(),
            dtype: Dtype::BF16,
            layout: "compare".into(),
            tenant: String::new(),
        };
        let format = ChunkFormat {
            n_layers: N_LAYERS as u32,
            token_layer_bytes: (workload.chunk_bytes / N_LAYERS / CHUNK_TOKENS) as u64,
            n_ranks: 1,
            block_tokens: BlockSize::try_new(16)?,
        };
        let space = store.space(&namespace, format)?;
        Ok(Self { workload, store, space })
    }
}

impl Source for StoreSubject<'_> {
    /// From the tokens on, as for a request whose first chunks are in the engine already.
    fn get(
        &self,
        chunks: Range<usize>,
        _: &mut ReadMemory,
        seen: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<()> {
        let n_in_batch = self.workload.n_in_batch();
        let (batch_idx, first_place) = (chunks.start / n_in_batch, chunks.start % n_in_batch);
        let chain = self.space.chain(&tokens(batch_idx, first_place + chunks.len()));
        let retrieved = self.store.retrieve(&chain, first_place);
        for (chunk_idx, chunk) in chunks.zip(retrieved.chunks()) {
            ensure!(chunk.tier() == TierKind::Nvme, "chunk {chunk_idx} came from {}", chunk.tier());
            seen(chunk_idx, chunk.payload(0));
        }
        Ok(())
    }
}
