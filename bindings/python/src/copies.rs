//! Bytes between an engine's blocks and the chunks of the store.

use std::slice;
use std::sync::Arc;

use kvik_node::{NodeClient, NodeError, OpenChain, RemoteLease};
use kvik_store::{ChunkFormat, Commit, Retention};
use pyo3::prelude::*;

use crate::array::Piece;
use crate::error::invalid;
use crate::gpu::{Direction, Gpu};
use crate::memory::EngineMemory;

/// Chunks that one request to the daemon is about: some are published while the next are copied.
const CHUNKS_A_WRITE: usize = 16;

/// Tokens of a chain from a block of it on, and the blocks of an engine that they lie in, one after the other. They end with
/// a chunk.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) chain: kvik_store::Chain,
    /// The first block's number in the chain.
    pub(crate) first_block: usize,
    pub(crate) memory: Arc<Py<EngineMemory>>,
    pub(crate) blocks: Vec<u32>,
    pub(crate) n_threads: usize,
    /// For memory of a GPU: an event behind which the blocks may be used.
    pub(crate) after: Option<u64>,
    /// How long chunks that are written are kept.
    pub(crate) retention: Retention,
}

impl Transfer {
    /// A transfer of the blocks that are of whole chunks of the chain; nothing has to be waited for, and one thread copies.
    ///
    /// # Errors
    /// If a block of the memory is not one of `format`, or is not there.
    pub(crate) fn try_new(
        format: &ChunkFormat,
        chain: kvik_store::Chain,
        first_block: usize,
        memory: Py<EngineMemory>,
        mut blocks: Vec<u32>,
    ) -> PyResult<Self> {
        let engine = memory.get();
        let block_bytes = format.payload_bytes(format.block_tokens.get());
        if engine.block_tokens != format.block_tokens.get() || engine.block_bytes() != block_bytes {
            let given = format!("{} bytes for {} tokens", engine.block_bytes(), engine.block_tokens);
            let allowed = format!("{block_bytes} bytes for {} tokens", format.block_tokens);
            return Err(invalid("block of the memory", &given, &allowed));
        }
        if let Some(block) = blocks.iter().find(|block| **block as usize >= engine.n_blocks) {
            return Err(invalid("block", block, &format!("less than {}", engine.n_blocks)));
        }
        let chunk_tokens = chain.space().chunk_tokens();
        let chunk_blocks = chunk_tokens / engine.block_tokens;
        let n_chain_blocks = chain.n_tokens() / chunk_tokens * chunk_blocks;
        let end = first_block.saturating_add(blocks.len()).min(n_chain_blocks) / chunk_blocks * chunk_blocks;
        blocks.truncate(end.saturating_sub(first_block));
        // A transfer of nothing begins at the chain's start.
        let first_block = if blocks.is_empty() { 0 } else { first_block };
        let (memory, retention) = (Arc::new(memory), Retention::default());
        Ok(Self { chain, first_block, memory, blocks, n_threads: 1, after: None, retention })
    }

    /// Blocks of a whole chunk.
    fn chunk_blocks(&self) -> usize {
        self.chain.space().chunk_tokens() / self.memory.get().block_tokens
    }

    fn first_chunk(&self) -> usize {
        self.first_block / self.chunk_blocks()
    }

    /// Chunks that the blocks are of.
    pub(crate) fn n_chunks(&self) -> usize {
        (self.first_block + self.blocks.len()) / self.chunk_blocks() - self.first_chunk()
    }

    /// Reads chunks into the blocks; how many blocks came, from the first on.
    pub(crate) fn load(&self, client: &NodeClient) -> Result<usize, NodeError> {
        let Some(lease) = self.lease(client)? else { return Ok(0) };
        let n_chunks = lease.n_chunks().min(self.n_chunks());
        if let Some(gpu) = &self.memory.get().gpu {
            let places = (0..n_chunks).filter_map(|place| Some((place, lease.offset(place)?)));
            self.copy_gpu(client, gpu, Direction::ToGpu, places)?;
            return Ok(self.n_blocks_up_to(n_chunks));
        }
        let chunks = (0..n_chunks)
            .map(|place| self.pieces(place).map(|(start, piece)| (start, piece_mut(piece))).collect())
            .collect();
        lease.copy_all(self.n_threads, chunks)?;
        Ok(self.n_blocks_up_to(n_chunks))
    }

    /// The chunks of a load, as far as they are there; `None` where nothing is to be loaded.
    pub(crate) fn lease(&self, client: &NodeClient) -> Result<Option<RemoteLease>, NodeError> {
        if self.n_chunks() == 0 || !client.space().names_as(self.chain.space()) {
            // A daemon that came back with other settings names chunks otherwise.
            return Ok(None);
        }
        client.open(&self.chain)?.retrieve(self.first_chunk()).map(Some)
    }

    /// Blocks of the first `n_chunks` chunks.
    pub(crate) fn n_blocks_up_to(&self, n_chunks: usize) -> usize {
        ((self.first_chunk() + n_chunks) * self.chunk_blocks()).saturating_sub(self.first_block)
    }

    /// Copies chunks, each with its place in the arena, from or to the GPU.
    fn copy_gpu(
        &self,
        client: &NodeClient,
        gpu: &Gpu,
        direction: Direction,
        places: impl Iterator<Item = (usize, u64)>,
    ) -> Result<(), NodeError> {
        let way = gpu.register(client);
        let (arena, arena_bytes) = client.arena();
        let chunk_bytes = self.chunk_blocks() * self.memory.get().block_bytes();
        // The daemon says where chunks lie; what is not in the arena is not touched.
        let inside = |(_, offset): &(usize, u64)| {
            (*offset as usize).checked_add(chunk_bytes).is_some_and(|end| end <= arena_bytes)
        };
        let pieces = places.filter(inside).flat_map(|(place, offset)| {
            let chunk = arena.as_ptr() as usize + offset as usize;
            self.pieces(place).map(move |(start, (address, n_bytes))| (address, chunk + start, n_bytes))
        });
        // SAFETY: the blocks are the engine's, as in `piece`, behind the event; those of the arena are leased or being
        // written for this client, and mapped as long as the client is.
        let copied = unsafe { gpu.copy(direction, pieces, way, self.after) };
        copied.map_err(|error| NodeError::Io {
            action: "copy between the store and the GPU".to_owned(),
            source: std::io::Error::other(error),
        })
    }

    /// Writes chunks from the blocks, which begin with the chain, from `first_chunk` on; how many blocks are stored, from the
    /// first on.
    ///
    /// A chunk is stored only behind its parent in memory. Where that is gone meanwhile, all chunks are written.
    pub(crate) fn save(&self, client: &NodeClient, first_chunk: usize) -> Result<usize, NodeError> {
        if self.n_chunks() == 0 || !client.space().names_as(self.chain.space()) {
            return Ok(0);
        }
        let opened = client.open(&self.chain)?;
        let mut n_stored = self.save_from(client, &opened, first_chunk)?;
        if n_stored == first_chunk && first_chunk > 0 {
            n_stored = self.save_from(client, &opened, 0)?;
        }
        Ok(n_stored * self.chunk_blocks())
    }

    fn save_from(
        &self,
        client: &NodeClient,
        opened: &OpenChain,
        first_chunk: usize,
    ) -> Result<usize, NodeError> {
        let mut n_stored = first_chunk;
        while n_stored < self.n_chunks() {
            let wanted = CHUNKS_A_WRITE.min(self.n_chunks() - n_stored);
            let mut write = opened.write_kept(n_stored, wanted, self.retention)?;
            let n_begun = write.n_chunks();
            if let Some(gpu) = &self.memory.get().gpu {
                let places = (0..n_begun).filter_map(|place| Some((n_stored + place, write.offset(place)?)));
                self.copy_gpu(client, gpu, Direction::FromGpu, places)?;
                write.commit_written(self.n_threads)?;
            } else {
                write.write_all(self.n_threads, |place| {
                    self.pieces(n_stored + place).map(|(_, bytes)| piece(bytes))
                })?;
            }
            let outcomes = write.finish()?;
            let is_there =
                |outcome: &&Option<Commit>| matches!(outcome, None | Some(Commit::Stored | Commit::Present));
            let n_there = outcomes.iter().take_while(is_there).count();
            n_stored += n_there;
            if n_there < wanted || n_begun < wanted {
                break;
            }
        }
        Ok(n_stored)
    }

    /// Where the pieces of the blocks of a chunk lie, each with its place in the chunk: piece by piece, block by block.
    fn pieces(&self, place: usize) -> impl Iterator<Item = (usize, (usize, usize))> {
        self.layer_pieces(place, 0, 1)
    }

    /// The same for one of `n_layers` layers, which have as many pieces each.
    pub(crate) fn layer_pieces(
        &self,
        place: usize,
        layer_idx: usize,
        n_layers: usize,
    ) -> impl Iterator<Item = (usize, (usize, usize))> {
        let chunk_blocks = self.chunk_blocks();
        // Blocks of the first chunk that come before the transfer.
        let n_before = self.first_block % chunk_blocks;
        let first = (place * chunk_blocks).saturating_sub(n_before);
        let n_skipped = if place == 0 { n_before } else { 0 };
        let blocks = &self.blocks[first..][..chunk_blocks - n_skipped];
        let pieces = &self.memory.get().pieces;
        let n_layer_pieces = pieces.len() / n_layers;
        let (before, pieces) = pieces.split_at(layer_idx * n_layer_pieces);
        let mut start: usize = before.iter().map(|piece| chunk_blocks * piece.block_bytes).sum();
        pieces[..n_layer_pieces].iter().flat_map(move |Piece { address, block_bytes, block_stride }| {
            let piece_start = start;
            start += chunk_blocks * block_bytes;
            blocks.iter().enumerate().map(move |(idx, block)| {
                let at = piece_start + (n_skipped + idx) * block_bytes;
                (at, (address + *block as usize * block_stride, *block_bytes))
            })
        })
    }
}

fn piece<'a>((address, n_bytes): (usize, usize)) -> &'a [u8] {
    // SAFETY: the address lies in a block of `EngineMemory`, whose owner is alive as long as the transfer is, because
    // block numbers are checked when a job is begun. The engine does not write blocks that a save reads.
    unsafe { slice::from_raw_parts(address as *const u8, n_bytes) }
}

pub(crate) fn piece_mut<'a>((address, n_bytes): (usize, usize)) -> &'a mut [u8] {
    // SAFETY: as in `piece`; the engine neither reads nor writes blocks that a load writes, but layers of them that it was told
    // of, which are not written again. The blocks of a load are distinct, which is checked when it is begun, so no two pieces
    // overlap.
    unsafe { slice::from_raw_parts_mut(address as *mut u8, n_bytes) }
}
