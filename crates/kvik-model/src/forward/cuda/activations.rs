//! What a pass keeps on the device between its kernels.

use std::sync::Arc;

use crate::checkpoint::WeightDtype;
use crate::config::{Activation, ModelConfig};
use crate::error::Result;

use super::device::{Buffer, Device, HostBuffer};
use super::kernels::CHUNK_QUERIES;
use super::products::InputMaps;
use super::weights::padded_inputs;

/// Bytes of the most likely token of a row, as the kernel writes it: the token, and whether all logits are numbers.
pub(super) const BEST_BYTES: usize = 8;

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
    n_rows: usize,
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
    /// The most likely token of each row of logits.
    pub(super) best: Buffer,
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
            best: Buffer::zeroed(device, 0)?,
            host_logits: HostBuffer::zeroed(device, 0)?,
        })
    }

    /// Rows that there is room for.
    pub(super) fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Writes the lists of a pass to where the device fetches them. The caller has waited for the pass before.
    pub(super) fn put_lists(&mut self, words: &[u32]) -> Result<()> {
        grow(&self.device, &mut self.lists, size_of_val(words))?;
        if self.host_lists.n_bytes() < self.lists.n_bytes() {
            self.host_lists = HostBuffer::zeroed(&self.device, self.lists.n_bytes())?;
        }
        self.host_lists.put_words(words);
        Ok(())
    }

    /// Makes room for the partial sums of so many chunks.
    pub(super) fn reserve_partials(&mut self, config: &ModelConfig, n_chunks: usize) -> Result<()> {
        let slot_bytes = config.n_kv_heads * CHUNK_QUERIES * (config.head_dim + 2) * 4;
        grow(&self.device, &mut self.partials, n_chunks * slot_bytes)
    }

    /// Makes room for the logits of so many rows.
    pub(super) fn reserve_logits(&mut self, config: &ModelConfig, n_logits: usize) -> Result<()> {
        let n_bytes = n_logits * config.vocab_size * 4;
        grow(&self.device, &mut self.logits, n_bytes)?;
        grow(&self.device, &mut self.best, n_logits * BEST_BYTES)?;
        if self.host_logits.n_bytes() < n_bytes {
            self.host_logits = HostBuffer::zeroed(&self.device, n_bytes)?;
        }
        Ok(())
    }
}

/// Makes a buffer larger; what was in it is lost.
fn grow(device: &Arc<Device>, buffer: &mut Buffer, n_bytes: usize) -> Result<()> {
    if buffer.n_bytes() < n_bytes {
        *buffer = Buffer::zeroed(device, n_bytes.next_power_of_two())?;
    }
    Ok(())
}
