//! What a pass keeps on the device between its kernels.

use std::sync::Arc;

use crate::checkpoint::WeightDtype;
use crate::config::{Activation, ModelConfig};
use crate::error::Result;

use super::device::{Buffer, Device, HostBuffer};
use super::kernels::CHUNK_QUERIES;
use super::products::InputMaps;
use super::weights::padded_inputs;

/// Bytes of the token of a row, as the kernel writes it: the token, and whether all logits are numbers.
pub(super) const CHOSEN_BYTES: usize = 8;

/// Activations that a product reads.
#[derive(Debug)]
pub(super) struct Inputs {
    buffer: Buffer,
    pub(super) n_padded: usize,
    /// For 16-bit weights.
    pub(super) maps: Option<InputMaps>,
}

/// Buffers for so many rows, and for what rows ask for.
#[derive(Debug)]
pub(super) struct Activations {
    device: Arc<Device>,
    /// Rows that there is room for.
    n_rows: usize,
    /// Counts the buffers that were replaced.
    n_moves: u64,
    /// The residual stream.
    pub(super) hidden: Buffer,
    pub(super) normalized: Inputs,
    pub(super) qkv: Buffer,
    pub(super) attended: Inputs,
    pub(super) activated: Inputs,
    pub(super) rotations: Buffer,
    pub(super) lists: Buffer,
    /// Where the device fetches the lists of a pass.
    pub(super) host_lists: HostBuffer,
    pub(super) partials: Buffer,
    pub(super) logits: Buffer,
    /// The token of each row of logits, written by the kernel itself: the copy engine would do it behind the copies of
    /// KV that are queued there.
    pub(super) chosen: HostBuffer,
    /// Where logits arrive on the host.
    pub(super) host_logits: HostBuffer,
}

impl Inputs {
    fn new(device: &Arc<Device>, n_rows: usize, n_inputs: usize, dtype: WeightDtype) -> Result<Self> {
        let n_padded = padded_inputs(n_inputs);
        let n_groups = n_rows.div_ceil(8);
        let buffer = Buffer::zeroed(device, n_groups * 8 * n_padded * dtype.size())?;
        let maps = match dtype {
            WeightDtype::F32 => None,
            WeightDtype::F16 | WeightDtype::BF16 => {
                Some(InputMaps::new(buffer.address(), n_groups, n_padded)?)
            }
        };
        Ok(Self { buffer, n_padded, maps })
    }

    pub(super) fn address(&self) -> u64 {
        self.buffer.address()
    }
}

/// Elements of a row of queries, keys and values.
pub(super) fn qkv_width(config: &ModelConfig) -> usize {
    (config.n_query_heads + 2 * config.n_kv_heads) * config.head_dim
}

impl Activations {
    /// Buffers for passes of up to `n_rows` rows.
    pub(super) fn new(
        device: &Arc<Device>,
        config: &ModelConfig,
        dtype: WeightDtype,
        n_rows: usize,
    ) -> Result<Self> {
        // Of gates and ups whole turns of eight are written.
        let n_activated = match config.activation {
            Activation::SiluGated => config.intermediate_size.next_multiple_of(8),
            Activation::GeluTanh => config.intermediate_size,
        };
        let query_width = config.n_query_heads * config.head_dim;
        Ok(Self {
            device: Arc::clone(device),
            n_rows,
            n_moves: 0,
            hidden: Buffer::zeroed(device, n_rows * config.hidden_size * 4)?,
            normalized: Inputs::new(device, n_rows, config.hidden_size, dtype)?,
            qkv: Buffer::zeroed(device, n_rows * qkv_width(config) * 4)?,
            attended: Inputs::new(device, n_rows, query_width, dtype)?,
            activated: Inputs::new(device, n_rows, n_activated, dtype)?,
            rotations: Buffer::zeroed(device, n_rows * config.head_dim * 4)?,
            lists: Buffer::zeroed(device, 0)?,
            host_lists: HostBuffer::zeroed(device, 0)?,
            partials: Buffer::zeroed(device, 0)?,
            logits: Buffer::zeroed(device, 0)?,
            chosen: HostBuffer::zeroed(device, 0)?,
            host_logits: HostBuffer::zeroed(device, 0)?,
        })
    }

    /// How often a buffer came to lie elsewhere.
    pub(super) fn n_moves(&self) -> u64 {
        self.n_moves
    }

    /// Makes room for passes of `n_rows` rows.
    pub(super) fn reserve_rows(
        &mut self,
        config: &ModelConfig,
        dtype: WeightDtype,
        n_rows: usize,
    ) -> Result<()> {
        if self.n_rows < n_rows {
            let n_moves = self.n_moves + 1;
            *self = Self::new(&self.device, config, dtype, n_rows.next_power_of_two())?;
            self.n_moves = n_moves;
        }
        Ok(())
    }

    /// Writes the lists of a pass to where the device fetches them. The caller has waited for the pass before.
    pub(super) fn put_lists(&mut self, words: &[u32]) -> Result<()> {
        let n_bytes = size_of_val(words);
        self.n_moves += grow(&self.device, &mut self.lists, n_bytes)?;
        self.n_moves += grow_host(&self.device, &mut self.host_lists, n_bytes)?;
        self.host_lists.put_words(words);
        Ok(())
    }

    /// Makes room for the partial sums of so many chunks.
    pub(super) fn reserve_partials(&mut self, config: &ModelConfig, n_chunks: usize) -> Result<()> {
        let slot_bytes = config.n_kv_heads * CHUNK_QUERIES * (config.head_dim + 2) * 4;
        self.n_moves += grow(&self.device, &mut self.partials, n_chunks * slot_bytes)?;
        Ok(())
    }

    /// Makes room for the logits of so many rows.
    pub(super) fn reserve_logits(&mut self, config: &ModelConfig, n_logits: usize) -> Result<()> {
        let n_bytes = n_logits * config.vocab_size * 4;
        self.n_moves += grow(&self.device, &mut self.logits, n_bytes)?;
        self.n_moves += grow_host(&self.device, &mut self.chosen, n_logits * CHOSEN_BYTES)?;
        self.n_moves += grow_host(&self.device, &mut self.host_logits, n_bytes)?;
        Ok(())
    }
}

/// Makes a buffer larger where it must be; what was in it is lost then. Returns how many buffers were replaced.
fn grow(device: &Arc<Device>, buffer: &mut Buffer, n_bytes: usize) -> Result<u64> {
    if n_bytes <= buffer.n_bytes() {
        return Ok(0);
    }
    *buffer = Buffer::zeroed(device, n_bytes.next_power_of_two())?;
    Ok(1)
}

/// As [`grow`], for memory of the host.
fn grow_host(device: &Arc<Device>, buffer: &mut HostBuffer, n_bytes: usize) -> Result<u64> {
    if n_bytes <= buffer.n_bytes() {
        return Ok(0);
    }
    *buffer = HostBuffer::zeroed(device, n_bytes.next_power_of_two())?;
    Ok(1)
}
