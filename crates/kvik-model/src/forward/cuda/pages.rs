//! The device's memory in which keys and values lie, block by block.

use std::ops::Range;
use std::sync::Arc;

use kvik_memory::geometry::PageId;
use kvik_memory::pool::KvPool;
use kvik_memory::vmm::cuda::{CopyPiece, CopyWay, CudaCopier};
use kvik_types::Dtype;

use crate::config::ModelConfig;
use crate::error::{ModelError, Result};
use crate::paging::{BLOCK_TOKENS, BlockId};

use super::super::LayerKv;
use super::device::{Buffer, Device, Swizzle, TensorMap, TensorShape};

/// Keys and values of all layers.
///
/// A block of one layer holds, for each KV head, the keys `[head_dim, 16]` and then the values `[16, head_dim]`: the bytes that
/// the CPU's pages have for outside, so blocks go out and in as they are.
#[derive(Debug)]
pub(super) struct Pages {
    memory: Arc<PageMemory>,
    n_blocks: usize,
    /// For each layer, where attention fetches blocks by the copy engine.
    maps: Option<Vec<KvMaps>>,
}

/// Names the keys and the values of a layer to the copy engine, as `attention_wide.cu` asks for them.
#[derive(Debug, Clone, Copy)]
pub(super) struct KvMaps {
    /// Of a head's half of a block: a line of sixteen tokens for each dimension.
    pub(super) keys: TensorMap,
    /// Of the same: a line of 64 dimensions for each token, the first 64 before the others.
    pub(super) values: TensorMap,
}

impl KvMaps {
    fn new(address: u64, config: &ModelConfig, n_blocks: usize) -> Result<Self> {
        let head_dim = config.head_dim as u64;
        let n_halves = (n_blocks * config.n_kv_heads) as u64;
        let keys = TensorShape {
            elements: [16, 2 * head_dim, n_halves],
            stride_bytes: [32, 64 * head_dim],
            box_elements: [16, head_dim as u32, 1],
            swizzle: Swizzle::Lines32,
        };
        let values = TensorShape {
            elements: [64, 32 * n_halves, head_dim / 64],
            stride_bytes: [2 * head_dim, 128],
            box_elements: [64, 16, head_dim as u32 / 64],
            swizzle: Swizzle::Lines128,
        };
        Ok(Self { keys: TensorMap::of(address, keys)?, values: TensorMap::of(address, values)? })
    }
}

#[derive(Debug)]
struct PageMemory {
    device: Arc<Device>,
    /// Of blocks that leave.
    copier: CudaCopier,
    layers: Vec<u64>,
    block_bytes: usize,
    n_kv_heads: usize,
    head_dim: usize,
    element_bytes: usize,
    _owner: Owner,
}

/// Whose memory it is.
#[derive(Debug)]
enum Owner {
    Pages {
        _buffer: Buffer,
    },
    /// A region that the pool keeps reserved, mapped where it has handed out blocks.
    Pool {
        _pool: Arc<KvPool>,
    },
}

/// Whether there are instructions of a warpgroup for heads of this kind.
pub(super) fn has_wide_attention(config: &ModelConfig, kv_dtype: Dtype) -> bool {
    kv_dtype != Dtype::F32 && matches!(config.head_dim, 64 | 128)
}

/// Where blocks lie, for a thread that copies them in; the memory stays as long as this does.
#[derive(Debug, Clone)]
pub(super) struct PageAddresses(Arc<PageMemory>);

impl PageAddresses {
    pub(super) fn n_layers(&self) -> usize {
        self.0.layers.len()
    }

    /// Of one block in one layer.
    pub(super) fn block_bytes(&self) -> usize {
        self.0.block_bytes
    }

    pub(super) fn address(&self, layer_idx: usize, block: BlockId) -> u64 {
        self.0.address(layer_idx, block)
    }

    pub(super) fn read_block(&self, layer_idx: usize, block: BlockId, out: &mut [u8]) -> Result<()> {
        self.0.read_block(layer_idx, block, out)
    }

    /// The pieces of `layers` of `blocks` on their way to `target`: layer by layer, and in each block by block.
    pub(super) fn pieces_to(
        &self,
        mut target: u64,
        layers: Range<usize>,
        blocks: &[BlockId],
    ) -> Vec<CopyPiece> {
        let (mut pieces, n_bytes) = (Vec::new(), self.block_bytes());
        for layer_idx in layers {
            for &block in blocks {
                add_piece(&mut pieces, CopyPiece { target, source: self.address(layer_idx, block), n_bytes });
                target += n_bytes as u64;
            }
        }
        pieces
    }

    /// Whether the copy engine reaches all of `bytes` by itself.
    pub(super) fn is_registered(&self, bytes: &[u8]) -> bool {
        let range = bytes.as_ptr_range();
        let registered = self.0.device.registered_around(bytes);
        registered.is_some_and(|known| known.start <= range.start.addr() && range.end.addr() <= known.end)
    }

    /// Copies pieces of blocks that leave, beside the passes, and waits for the end.
    ///
    /// # Safety
    /// As for [`CudaCopier::copy`].
    pub(super) unsafe fn copy_out(&self, pieces: &[CopyPiece], way: CopyWay) -> Result<()> {
        // SAFETY: the caller answers for the pieces.
        unsafe { self.0.copier.copy(pieces, way, None) }.map_err(|error| ModelError::Memory(Box::new(error)))
    }
}

/// Bytes of one block in one layer.
pub(super) fn block_bytes(config: &ModelConfig, kv_dtype: Dtype) -> usize {
    2 * config.n_kv_heads * config.head_dim * BLOCK_TOKENS * kv_dtype.size_bytes()
}

impl Pages {
    /// Memory of its own.
    pub(super) fn new(
        device: &Arc<Device>,
        config: &ModelConfig,
        kv_dtype: Dtype,
        n_blocks: usize,
    ) -> Result<Self> {
        let layer_bytes = block_bytes(config, kv_dtype) * n_blocks;
        let buffer = Buffer::zeroed(device, layer_bytes * config.n_layers)?;
        let layers =
            (0..config.n_layers).map(|layer| buffer.address() + (layer * layer_bytes) as u64).collect();
        Self::on(device, config, kv_dtype, n_blocks, layers, Owner::Pages { _buffer: buffer })
    }

    /// The blocks of `pool`, a buffer for each layer.
    ///
    /// # Errors
    /// If the pool has no region, or one with fewer buffers.
    pub(super) fn on_pool(
        device: &Arc<Device>,
        config: &ModelConfig,
        kv_dtype: Dtype,
        pool: &Arc<KvPool>,
    ) -> Result<Self> {
        let n_blocks = pool.block_geometry().n_blocks() as usize;
        let address = |layer: usize| pool.region()?.address_of(u32::try_from(layer).ok()?, PageId(0));
        let layers = (0..config.n_layers).map(address).collect::<Option<Vec<u64>>>();
        let layers = layers.ok_or_else(|| {
            ModelError::request("memory", "a pool without a region", "a pool with one buffer a layer")
        })?;
        let owner = Owner::Pool { _pool: Arc::clone(pool) };
        Self::on(device, config, kv_dtype, n_blocks, layers, owner)
    }

    fn on(
        device: &Arc<Device>,
        config: &ModelConfig,
        kv_dtype: Dtype,
        n_blocks: usize,
        layers: Vec<u64>,
        owner: Owner,
    ) -> Result<Self> {
        let maps = has_wide_attention(config, kv_dtype).then(|| {
            layers.iter().map(|address| KvMaps::new(*address, config, n_blocks)).collect::<Result<Vec<_>>>()
        });
        let maps = maps.transpose()?;
        let copier = CudaCopier::open(device.ordinal());
        let memory = PageMemory {
            device: Arc::clone(device),
            copier: copier.map_err(|error| ModelError::Memory(Box::new(error)))?,
            layers,
            block_bytes: block_bytes(config, kv_dtype),
            n_kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            element_bytes: kv_dtype.size_bytes(),
            _owner: owner,
        };
        Ok(Self { memory: Arc::new(memory), n_blocks, maps })
    }

    pub(super) fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.memory.block_bytes
    }

    /// Where the blocks of a layer begin.
    pub(super) fn layer_address(&self, layer_idx: usize) -> u64 {
        self.memory.layers[layer_idx]
    }

    /// How the copy engine fetches the blocks of a layer, where it does.
    pub(super) fn maps(&self, layer_idx: usize) -> Option<&KvMaps> {
        self.maps.as_ref()?.get(layer_idx)
    }

    /// Where all blocks lie.
    pub(super) fn addresses(&self) -> PageAddresses {
        PageAddresses(Arc::clone(&self.memory))
    }

    pub(super) fn copy_block(&self, from: BlockId, to: BlockId) -> Result<()> {
        if from == to {
            return Ok(());
        }
        let memory = &self.memory;
        (0..memory.layers.len()).try_for_each(|layer_idx| {
            let (from, to) = (memory.address(layer_idx, from), memory.address(layer_idx, to));
            memory.device.queue_copy(from, to, memory.block_bytes)
        })
    }

    pub(super) fn read_block(&self, layer_idx: usize, block: BlockId, out: &mut [u8]) -> Result<()> {
        self.memory.read_block(layer_idx, block, out)
    }

    pub(super) fn write_block(&self, layer_idx: usize, block: BlockId, bytes: &[u8]) -> Result<()> {
        self.memory.device.write(self.memory.address(layer_idx, block), bytes)
    }

    /// The keys and values of the first `n_tokens` tokens of a table, token by token.
    pub(super) fn export(&self, layer_idx: usize, table: &[BlockId], n_tokens: usize) -> Result<LayerKv> {
        let memory = &*self.memory;
        let token_bytes = memory.n_kv_heads * memory.head_dim * memory.element_bytes;
        let mut kv = LayerKv {
            n_tokens,
            keys: vec![0; n_tokens * token_bytes],
            values: vec![0; n_tokens * token_bytes],
        };
        let mut bytes = vec![0; memory.block_bytes];
        for (idx, block) in table.iter().enumerate().take(n_tokens.div_ceil(BLOCK_TOKENS)) {
            memory.read_block(layer_idx, *block, &mut bytes)?;
            let first = idx * BLOCK_TOKENS;
            for token in first..n_tokens.min(first + BLOCK_TOKENS) {
                let row = token * token_bytes..(token + 1) * token_bytes;
                memory.for_each_element(token - first, |place, in_row| {
                    let size = memory.element_bytes;
                    kv.keys[row.start + in_row..][..size].copy_from_slice(&bytes[place.key..][..size]);
                    kv.values[row.start + in_row..][..size].copy_from_slice(&bytes[place.value..][..size]);
                });
            }
        }
        Ok(kv)
    }

    /// Puts keys and values under the first tokens of a table; what else is in the last block stays.
    pub(super) fn import(&self, layer_idx: usize, table: &[BlockId], kv: &LayerKv) -> Result<()> {
        let memory = &*self.memory;
        let token_bytes = memory.n_kv_heads * memory.head_dim * memory.element_bytes;
        let mut bytes = vec![0; memory.block_bytes];
        for (idx, block) in table.iter().enumerate().take(kv.n_tokens.div_ceil(BLOCK_TOKENS)) {
            let first = idx * BLOCK_TOKENS;
            memory.read_block(layer_idx, *block, &mut bytes)?;
            for token in first..kv.n_tokens.min(first + BLOCK_TOKENS) {
                let row = token * token_bytes;
                memory.for_each_element(token - first, |place, in_row| {
                    let size = memory.element_bytes;
                    bytes[place.key..][..size].copy_from_slice(&kv.keys[row + in_row..][..size]);
                    bytes[place.value..][..size].copy_from_slice(&kv.values[row + in_row..][..size]);
                });
            }
            self.write_block(layer_idx, *block, &bytes)?;
        }
        Ok(())
    }
}

/// Where an element of a token lies in the bytes of its block.
struct Place {
    key: usize,
    value: usize,
}

impl PageMemory {
    fn address(&self, layer_idx: usize, block: BlockId) -> u64 {
        self.layers[layer_idx] + (block.index() * self.block_bytes) as u64
    }

    fn read_block(&self, layer_idx: usize, block: BlockId, out: &mut [u8]) -> Result<()> {
        assert!(out.len() == self.block_bytes, "a buffer that is not as long as a block");
        self.device.read_beside(self.address(layer_idx, block), out)
    }

    /// Calls `visit` with the place of every element of the token `lane` of a block, and its offset in a row of the token.
    fn for_each_element(&self, lane: usize, mut visit: impl FnMut(Place, usize)) {
        let size = self.element_bytes;
        let half_bytes = self.head_dim * BLOCK_TOKENS * size;
        for head in 0..self.n_kv_heads {
            let start = head * 2 * half_bytes;
            for dim in 0..self.head_dim {
                let place = Place {
                    key: start + (dim * BLOCK_TOKENS + lane) * size,
                    value: start + half_bytes + (lane * self.head_dim + dim) * size,
                };
                visit(place, (head * self.head_dim + dim) * size);
            }
        }
    }
}

/// Adds a piece; one that goes on where the last ends makes that longer.
pub(super) fn add_piece(pieces: &mut Vec<CopyPiece>, piece: CopyPiece) {
    match pieces.last_mut() {
        Some(last)
            if last.target + last.n_bytes as u64 == piece.target
                && last.source + last.n_bytes as u64 == piece.source =>
        {
            last.n_bytes += piece.n_bytes;
        }
        _ => pieces.push(piece),
    }
}
