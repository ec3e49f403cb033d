//! Chunks from and to the blocks of an engine: 2048 tokens of a model with 32 layers and 4 KiB a token and layer, whose
//! blocks of 16 tokens lie anywhere in the engine's memory.

use std::thread;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use kvik_node::NodeClient;
use parking_lot::Mutex;

use super::{CHUNK_BYTES, Daemon, MIB, NodeBenchOptions, attach_options};
use crate::report::{Baseline, Measurement};

const N_CHUNKS: usize = 8;
const N_LAYERS: usize = 32;
const TOKEN_LAYER_BYTES: usize = 4096;
const BLOCK_TOKENS: usize = 16;
const BLOCK_BYTES: usize = BLOCK_TOKENS * TOKEN_LAYER_BYTES;
const CHUNK_BLOCKS: usize = CHUNK_BYTES / N_LAYERS / BLOCK_BYTES;

/// Blocks of the engine: four times those of the prompt.
const N_BLOCKS: usize = 4 * N_CHUNKS * CHUNK_BLOCKS;

/// An engine's KV memory, and where the blocks of a prompt lie in it.
struct PagedMemory {
    /// Layer by layer, block by block.
    bytes: Vec<u8>,
    /// The block of each 16 tokens.
    blocks: Vec<usize>,
}

/// Stores and reads a prompt that others have not stored, several times, each beside a plain copy of the same blocks.
pub(super) fn measure(options: NodeBenchOptions) -> anyhow::Result<Vec<Measurement>> {
    let n_repeats = if options.is_quick { 3 } else { 9 };
    let n_threads = options.n_threads;
    // The first rounds touch all of the memory; later ones take that of the oldest.
    let n_warm_up = 4;
    let ram_bytes = 3 * N_CHUNKS * (CHUNK_BYTES + MIB);
    let daemon = Daemon::start("paged", ram_bytes, &[])?;
    let attach = attach_options(daemon.socket(), N_LAYERS as u32, TOKEN_LAYER_BYTES as u64);
    let client = NodeClient::attach(&attach).context("attach")?;
    let mut source = PagedMemory::new(1);
    let mut target = PagedMemory::new(2);
    source.bytes.iter_mut().enumerate().for_each(|(place, byte)| *byte = ((place * 31) >> 7) as u8);
    // What a plain copy brings them to and takes them from.
    let mut flat = vec![3; N_CHUNKS * CHUNK_BYTES];
    let (mut stores, mut retrieves) = (Vec::new(), Vec::new());
    let (mut copies_in, mut copies_out) = (Vec::new(), Vec::new());
    for round in 0..n_repeats + n_warm_up {
        let n_tokens = (N_CHUNKS * client.space().chunk_tokens()) as u32;
        let tokens: Vec<u32> = (0..n_tokens).map(|place| place ^ (round as u32) << 16).collect();
        let store = rate_of(|| source.store(&client, &tokens, n_threads))?;
        let copy_in = source.copy_to(&mut flat, n_threads)?;
        let copy_out = target.copy_from(&flat, n_threads)?;
        target.bytes.fill(0);
        let retrieve = rate_of(|| target.retrieve(&client, &tokens, n_threads))?;
        if round >= n_warm_up {
            stores.push(store);
            retrieves.push(retrieve);
            copies_in.push(copy_in);
            copies_out.push(copy_out);
        }
        ensure!(source.holds_same(&target), "other bytes came back");
    }
    let row = |name: &str, rates| Measurement::from_repeats(name.to_owned(), "GB/s", rates);
    let beside = |name, rates, copies: &[f64]| {
        row(name, rates).map(|row| row.compared_with(Baseline::new("memcpy", copies.to_vec()), None))
    };
    let rows = [
        beside("store_256mib", stores, &copies_in),
        beside("retrieve_256mib", retrieves, &copies_out),
        row("store_256mib_copied", copies_in),
        row("retrieve_256mib_copied", copies_out),
    ];
    Ok(rows.into_iter().flatten().collect())
}

/// Copies the blocks of all chunks, each thread a chunk at a time; GB/s.
fn copy_all(n_threads: usize, chunks: Vec<Vec<(&[u8], &mut [u8])>>) -> anyhow::Result<f64> {
    let chunks = Mutex::new(chunks.into_iter());
    let copy_next = || {
        loop {
            let next = chunks.lock().next();
            let Some(blocks) = next else { return };
            for (source, target) in blocks {
                target.copy_from_slice(source);
            }
        }
    };
    rate_of(|| {
        thread::scope(|scope| {
            for _ in 1..n_threads {
                scope.spawn(copy_next);
            }
            copy_next();
        });
        Ok(())
    })
}

/// Bytes a second of `act`, in GB/s.
fn rate_of(act: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let begin = Instant::now();
    act()?;
    Ok((N_CHUNKS * CHUNK_BYTES) as f64 / begin.elapsed().as_nanos() as f64)
}

impl PagedMemory {
    /// Memory with blocks in an order that `seed` says.
    fn new(seed: usize) -> Self {
        let mut order: Vec<usize> = (0..N_BLOCKS).collect();
        let mut state = seed as u64;
        for place in (1..N_BLOCKS).rev() {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            order.swap(place, (state >> 33) as usize % (place + 1));
        }
        order.truncate(N_CHUNKS * CHUNK_BLOCKS);
        Self { bytes: vec![seed as u8; N_LAYERS * N_BLOCKS * BLOCK_BYTES], blocks: order }
    }

    /// Where the pieces of a chunk lie, in the order of the chunk: layer by layer, block by block.
    fn pieces(&self, chunk_idx: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
        let blocks = &self.blocks[chunk_idx * CHUNK_BLOCKS..][..CHUNK_BLOCKS];
        (0..N_LAYERS).flat_map(move |layer_idx| {
            blocks.iter().map(move |block| {
                let start = (layer_idx * N_BLOCKS + block) * BLOCK_BYTES;
                start..start + BLOCK_BYTES
            })
        })
    }

    fn store(&self, client: &NodeClient, tokens: &[u32], n_threads: usize) -> anyhow::Result<()> {
        let opened = client.open(&client.space().chain(tokens))?;
        opened.note_request(None)?;
        let mut write = opened.write(0, N_CHUNKS)?;
        ensure!(write.n_chunks() == N_CHUNKS, "there is room for {} chunks", write.n_chunks());
        write.write_all(n_threads, |chunk_idx| self.pieces(chunk_idx).map(|piece| &self.bytes[piece]))?;
        let outcomes = write.finish()?;
        ensure!(outcomes.iter().all(Option::is_some), "chunks were not stored: {outcomes:?}");
        Ok(())
    }

    fn retrieve(&mut self, client: &NodeClient, tokens: &[u32], n_threads: usize) -> anyhow::Result<()> {
        let lease = client.open(&client.space().chain(tokens))?.retrieve(0)?;
        ensure!(lease.n_chunks() == N_CHUNKS, "only {} chunks were there", lease.n_chunks());
        let chunks = self.blocks_mut().into_iter().map(|blocks| {
            blocks.into_iter().enumerate().map(|(idx, block)| (idx * BLOCK_BYTES, block)).collect()
        });
        Ok(lease.copy_all(n_threads, chunks.collect())?)
    }

    /// Copies the blocks of all chunks into `flat`; GB/s.
    fn copy_to(&self, flat: &mut [u8], n_threads: usize) -> anyhow::Result<f64> {
        let chunks = flat.chunks_mut(CHUNK_BYTES).enumerate().map(|(chunk_idx, chunk)| {
            let blocks = self.pieces(chunk_idx).map(|piece| &self.bytes[piece]);
            blocks.zip(chunk.chunks_mut(BLOCK_BYTES)).collect()
        });
        copy_all(n_threads, chunks.collect())
    }

    /// Copies `flat` into the blocks of all chunks; GB/s.
    fn copy_from(&mut self, flat: &[u8], n_threads: usize) -> anyhow::Result<f64> {
        let chunks = flat.chunks(CHUNK_BYTES).zip(self.blocks_mut());
        copy_all(
            n_threads,
            chunks.map(|(chunk, blocks)| chunk.chunks(BLOCK_BYTES).zip(blocks).collect()).collect(),
        )
    }

    /// The blocks of each chunk, in the order of the chunk.
    fn blocks_mut(&mut self) -> Vec<Vec<&mut [u8]>> {
        let places: Vec<Vec<usize>> = (0..N_CHUNKS)
            .map(|chunk_idx| self.pieces(chunk_idx).map(|piece| piece.start / BLOCK_BYTES).collect())
            .collect();
        let mut blocks: Vec<Option<&mut [u8]>> = self.bytes.chunks_mut(BLOCK_BYTES).map(Some).collect();
        let blocks_of =
            |places: Vec<usize>| places.into_iter().filter_map(|place| blocks[place].take()).collect();
        places.into_iter().map(blocks_of).collect()
    }

    /// Whether the blocks of the prompt have the same bytes as those of another memory.
    fn holds_same(&self, other: &Self) -> bool {
        (0..N_CHUNKS).all(|chunk_idx| {
            let pairs = self.pieces(chunk_idx).zip(other.pieces(chunk_idx));
            pairs.into_iter().all(|(ours, theirs)| self.bytes[ours] == other.bytes[theirs])
        })
    }
}
