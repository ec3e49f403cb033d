//! The shape of a pool, from what its engine asks for.

use kvik_memory::geometry::{BlockGeometry, Geometry, MAX_BLOCK_BYTES, UNIT_BYTES};

use crate::config::{KVIK_FLAG_NULL_BLOCK, kvik_config};
use crate::status::Failure;

#[cfg(test)]
mod tests;

/// The shape of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) geometry: Geometry,
    pub(crate) block_bytes: u64,
    /// Whether there are blocks; without, the pool has one page of addresses and never maps it.
    pub(crate) has_blocks: bool,
}

impl Plan {
    /// The smallest shape that holds what `config` asks for, on pages of `default_page_bytes` or more.
    pub(crate) fn try_new(config: &kvik_config, default_page_bytes: u64) -> Result<Self, Failure> {
        let has_null_block = config.has_flag(KVIK_FLAG_NULL_BLOCK);
        if config.n_blocks == 0 {
            if has_null_block {
                return Err(Failure::invalid("`config.n_blocks` is 0; allowed with a null block: 1 or more"));
            }
            let page_bytes = if config.page_bytes == 0 { default_page_bytes } else { config.page_bytes };
            let geometry = Geometry::try_new(config.n_buffers, page_bytes, 1)?;
            return Ok(Self { geometry, block_bytes: page_bytes, has_blocks: false });
        }
        let block_bytes = config.block_bytes;
        let page_bytes = match config.page_bytes {
            0 => page_for(config.n_buffers, block_bytes, default_page_bytes)?,
            page_bytes => page_bytes,
        };
        // Checks that every page has a block before the number of pages is reckoned.
        BlockGeometry::try_new(&Geometry::try_new(config.n_buffers, page_bytes, 1)?, block_bytes)?;
        let n_blocks = config.n_blocks.saturating_add(u64::from(has_null_block));
        let n_pages = n_blocks.div_ceil(min_blocks_per_page(page_bytes, block_bytes));
        let Ok(capacity_pages) = u32::try_from(n_pages) else {
            return Err(Failure::invalid(format!(
                "`config.n_blocks` is {}; allowed: as many as fit on 2^32-1 pages",
                config.n_blocks
            )));
        };
        let geometry = Geometry::try_new(config.n_buffers, page_bytes, capacity_pages)?;
        BlockGeometry::try_new(&geometry, block_bytes)?;
        Ok(Self { geometry, block_bytes, has_blocks: true })
    }

    /// The shape of a pool with such pages that has none of them.
    pub(crate) fn without_pages(&self) -> Result<Geometry, Failure> {
        Ok(Geometry::try_new(self.geometry.n_buffers(), self.geometry.page_bytes(), 1)?)
    }
}

/// The smallest page from `default_page_bytes` on that has a whole block wherever it starts.
fn page_for(n_buffers: u32, block_bytes: u64, default_page_bytes: u64) -> Result<u64, Failure> {
    // Two blocks long, a page has a whole one whatever comes before it. No page helps a block that is too
    // large for any.
    let enough_bytes = if block_bytes > MAX_BLOCK_BYTES { 0 } else { 2 * block_bytes + UNIT_BYTES };
    let mut page_bytes = default_page_bytes;
    loop {
        let geometry = Geometry::try_new(n_buffers, page_bytes, 1)?;
        match BlockGeometry::try_new(&geometry, block_bytes) {
            Ok(_) => return Ok(page_bytes),
            Err(error) if page_bytes >= enough_bytes => return Err(error.into()),
            Err(_) => page_bytes += UNIT_BYTES,
        }
    }
}

/// How many whole blocks any page has.
///
/// Blocks start at multiples of the greatest common divisor on a page, so at most one block less that is
/// lost at its start.
fn min_blocks_per_page(page_bytes: u64, block_bytes: u64) -> u64 {
    let (mut divisor, mut rest) = (page_bytes, block_bytes);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    ((page_bytes + divisor).saturating_sub(block_bytes) / block_bytes).max(1)
}
