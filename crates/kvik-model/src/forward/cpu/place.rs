//! Keys and values that were computed elsewhere in a sequence, or in another one.

use crate::error::{ModelError, Result};
use crate::forward::SegmentPart;
use crate::forward::checked::segment_tokens;
use crate::kernels::{
    Isa, KvElement, KvPages, KvRows, RotaryTable, RowPlan, Span, ThreadPool, for_each_chunk_mut,
};
use crate::paging::BlockId;

use super::{CpuBackend, Pages};

/// Tokens that one thread turns at a time.
const TOKENS_PER_CHUNK: usize = 16;

impl CpuBackend {
    /// See [`Backend::place_kv`](crate::Backend::place_kv).
    pub(super) fn place(
        &mut self,
        layer_idx: usize,
        block_table: &[BlockId],
        first_position: usize,
        turned_by: i64,
        part: SegmentPart<'_>,
    ) -> Result<()> {
        let Some(rotary) = &mut self.rotary else {
            let allowed = "a model with rotary positions: learned ones are part of every value";
            return Err(ModelError::request("segments", "at another position", allowed));
        };
        let width = self.config.n_kv_heads * self.config.head_dim;
        let pages = &mut self.pages;
        let element_bytes = match pages {
            Pages::F32(_) => 4,
            Pages::F16(_) | Pages::Bf16(_) => 2,
        };
        let token_bytes = width * element_bytes;
        let n_rows = segment_tokens(part, token_bytes)?;
        let span = Span { n_rows, first_position, block_table, is_continued: false };
        let n_blocks = match pages {
            Pages::F32(pages) => pages.n_blocks(),
            Pages::F16(pages) => pages.n_blocks(),
            Pages::Bf16(pages) => pages.n_blocks(),
        };
        let Some(plan) = RowPlan::try_new(&[span], n_blocks) else {
            return Err(ModelError::request("block_table", "too short", "a table that covers the segment"));
        };
        rotary.prepare_turn(turned_by);
        let place =
            Place { isa: self.isa, rotary, pool: &mut self.pool, width, layer_idx, plan: &plan, part };
        match pages {
            Pages::F32(pages) => place.write(pages),
            Pages::F16(pages) => place.write(pages),
            Pages::Bf16(pages) => place.write(pages),
        }
        Ok(())
    }
}

/// One layer of one part on its way into the pages.
struct Place<'a> {
    isa: Isa,
    /// Prepared for one row: how far every key is turned.
    rotary: &'a RotaryTable,
    pool: &'a mut ThreadPool,
    width: usize,
    layer_idx: usize,
    plan: &'a RowPlan<'a>,
    part: SegmentPart<'a>,
}

impl Place<'_> {
    fn write<E: KvElement>(self, pages: &mut KvPages<E>) {
        let Self { isa, rotary, pool, width, layer_idx, plan, part } = self;
        let (stride, token_bytes) = (2 * width, width * E::N_BYTES);
        let mut values = vec![0.0; part.keys.len() / token_bytes * stride];
        for_each_chunk_mut(pool, &mut values, TOKENS_PER_CHUNK * stride, |chunk_idx, rows| {
            let start = chunk_idx * TOKENS_PER_CHUNK * token_bytes;
            let bytes = start..start + rows.len() / stride * token_bytes;
            rotary.turn_rows::<E>(isa, width, &part.keys[bytes.clone()], &part.values[bytes], rows);
        });
        let rows = KvRows { values: &values, stride, key_column: 0, value_column: width };
        pages.write(pool, layer_idx, plan, rows);
    }
}
