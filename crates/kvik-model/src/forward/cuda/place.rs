//! Keys and values that were computed elsewhere in a sequence, or in another one.

use crate::config::Position;
use crate::error::{ModelError, Result};
use crate::forward::checked::segment_tokens;
use crate::forward::{Backend as _, SegmentPart};
use crate::kernels::RotaryTable;
use crate::paging::{BLOCK_TOKENS, BlockId};

use super::CudaBackend;
use super::device::Buffer;
use super::kernels::SegmentArguments;

impl CudaBackend {
    /// See [`Backend::place_kv`](crate::Backend::place_kv).
    pub(super) fn place(
        &mut self,
        layer_idx: usize,
        block_table: &[BlockId],
        first_position: usize,
        turned_by: i64,
        part: SegmentPart<'_>,
    ) -> Result<()> {
        let Position::Rope(rope) = &self.config.position else {
            return Err(ModelError::request(
                "segments",
                "learned positions",
                "a model with rotary positions",
            ));
        };
        let token_bytes = self.config.n_kv_heads * self.config.head_dim * self.kv_dtype.size_bytes();
        let n_tokens = segment_tokens(part, token_bytes)?;
        let n_blocks = (first_position + n_tokens).div_ceil(BLOCK_TOKENS);
        if block_table.len() < n_blocks || block_table.iter().any(|block| self.n_blocks() <= block.index()) {
            return Err(ModelError::request("block_table", "too short", "a table that covers the segment"));
        }
        let mut rotary = RotaryTable::new(rope.inverse_frequencies(self.config.head_dim));
        rotary.prepare_turn(turned_by);
        let turn: Vec<u8> = rotary
            .first_row()
            .flat_map(|(cosine, sine)| [cosine.to_le_bytes(), sine.to_le_bytes()])
            .flatten()
            .collect();
        let table: Vec<u8> =
            block_table.iter().flat_map(|block| (block.index() as u32).to_le_bytes()).collect();
        let keys = Buffer::holding(&self.device, part.keys)?;
        let values = Buffer::holding(&self.device, part.values)?;
        let turn = Buffer::holding(&self.device, &turn)?;
        let table = Buffer::holding(&self.device, &table)?;
        let segment = SegmentArguments {
            keys: keys.address(),
            values: values.address(),
            rotation: turn.address(),
            pages: self.pages.layer_address(layer_idx),
            table: table.address(),
            n_kv_heads: self.config.n_kv_heads as i32,
            first_position: first_position as i32,
        };
        // SAFETY: the buffers are as long as the numbers say and live until the stream was waited for; the table names blocks of
        // the pages.
        let queued = unsafe { self.kernels.queue_place_segment(n_tokens, segment) };
        self.device.synchronize().and(queued)
    }
}
