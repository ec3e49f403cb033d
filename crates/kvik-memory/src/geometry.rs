//! How pages and blocks lie in a region: arithmetic only.

use std::fmt;
use std::ops::Range;

use crate::{MemoryError, Result};

/// Physical memory is granted and counted in units of this size, which every backend can map.
pub const UNIT_BYTES: u64 = 2 << 20;

/// The largest block, so that arithmetic on blocks stays far from the limits of its integers.
pub const MAX_BLOCK_BYTES: u64 = 1 << 36;

/// The most pages that one extent spans.
///
/// With 2 MiB pages that is 64 MiB a handle: a driver call costs the same up to there.
pub const MAX_EXTENT_PAGES: u32 = 32;

/// One page of every buffer of a region, by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

/// One block of every buffer of a region, by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// An aligned run of pages that is mapped as one handle per buffer.
///
/// `n_pages` is a power of two that divides `first_page`, at most [`MAX_EXTENT_PAGES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The first page.
    pub first_page: PageId,
    /// How many pages.
    pub n_pages: u32,
}

/// The shape of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    n_buffers: u32,
    page_bytes: u64,
    capacity_pages: u32,
}

/// How blocks lie on the pages of a region.
///
/// Block `i` lies at `i * block_bytes` in every buffer. A page owns the blocks that lie whole on it; a
/// block that straddles two pages belongs to none. Every page owns at least one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockGeometry {
    page_bytes: u64,
    block_bytes: u64,
    capacity_pages: u32,
    n_blocks: u32,
}

impl fmt::Display for PageId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}+{}", self.first_page, self.n_pages)
    }
}

// === impl Extent ===

impl Extent {
    /// The extent of `n_pages` from `first_page` on.
    ///
    /// Fails where `n_pages` is no power of two up to [`MAX_EXTENT_PAGES`], does not divide `first_page`,
    /// or the extent would end past the largest page id.
    pub fn try_new(first_page: PageId, n_pages: u32) -> Result<Self> {
        let extent = Self { first_page, n_pages };
        if extent.is_well_formed() {
            return Ok(extent);
        }
        Err(MemoryError::Invalid {
            field: "extent",
            value: extent.to_string(),
            allowed: format!("a power of two up to {MAX_EXTENT_PAGES} pages that divides the first page"),
        })
    }

    /// The pages of the extent.
    pub fn pages(&self) -> impl DoubleEndedIterator<Item = PageId> + use<> {
        (self.first_page.0..self.end_page()).map(PageId)
    }

    /// The index after the last page; saturates.
    pub fn end_page(&self) -> u32 {
        self.first_page.0.saturating_add(self.n_pages)
    }

    /// Whether `page` is one of the extent's.
    pub fn contains(&self, page: PageId) -> bool {
        self.first_page <= page && page.0 < self.end_page()
    }

    /// Whether the two have a page in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.first_page.0 < other.end_page() && other.first_page.0 < self.end_page()
    }

    /// Whether the fields, which are public, hold what the type promises.
    pub fn is_well_formed(&self) -> bool {
        self.n_pages.is_power_of_two()
            && self.n_pages <= MAX_EXTENT_PAGES
            && self.first_page.0.is_multiple_of(self.n_pages)
            && self.first_page.0.checked_add(self.n_pages).is_some()
    }
}

// === impl Geometry ===

impl Geometry {
    /// A region of `n_buffers` buffers with `capacity_pages` pages of `page_bytes` each.
    ///
    /// Fails where a number is zero, the page is not a multiple of 2 MiB, or the whole exceeds 2^47
    /// bytes, which is what a process can address.
    pub fn try_new(n_buffers: u32, page_bytes: u64, capacity_pages: u32) -> Result<Self> {
        let invalid = |field, value: u64, allowed: &str| {
            Err(MemoryError::Invalid { field, value: value.to_string(), allowed: allowed.to_owned() })
        };
        if n_buffers == 0 {
            return invalid("n_buffers", 0, "1 or more");
        }
        if page_bytes == 0 || !page_bytes.is_multiple_of(UNIT_BYTES) {
            return invalid("page_bytes", page_bytes, "a multiple of 2 MiB (2097152 bytes)");
        }
        if capacity_pages == 0 {
            return invalid("capacity_pages", 0, "1 or more");
        }
        let total = u128::from(n_buffers) * u128::from(page_bytes) * u128::from(capacity_pages);
        if total > 1 << 47 {
            return invalid(
                "capacity_pages",
                capacity_pages.into(),
                "n_buffers * page_bytes * capacity_pages up to 2^47 bytes",
            );
        }
        Ok(Self { n_buffers, page_bytes, capacity_pages })
    }

    /// Buffers of the region.
    pub fn n_buffers(&self) -> u32 {
        self.n_buffers
    }

    /// Bytes of a page in one buffer.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Pages of the reservation.
    pub fn capacity_pages(&self) -> u32 {
        self.capacity_pages
    }

    /// Bytes from one buffer to the next.
    pub fn buffer_stride_bytes(&self) -> u64 {
        self.page_bytes * u64::from(self.capacity_pages)
    }

    /// Bytes of the whole reservation.
    pub fn region_bytes(&self) -> u64 {
        self.buffer_stride_bytes() * u64::from(self.n_buffers)
    }

    /// Physical bytes behind one page id: a page in every buffer.
    pub fn page_cost_bytes(&self) -> u64 {
        self.page_bytes * u64::from(self.n_buffers)
    }

    /// Physical bytes behind an extent: its pages in every buffer.
    pub fn extent_cost_bytes(&self, extent: Extent) -> u64 {
        self.page_cost_bytes() * u64::from(extent.n_pages)
    }

    /// Bytes from the region's base to `page` of `buffer`.
    ///
    /// Nothing where either is out of range.
    pub fn offset_bytes(&self, buffer: u32, page: PageId) -> Option<u64> {
        (buffer < self.n_buffers && page.0 < self.capacity_pages)
            .then(|| u64::from(buffer) * self.buffer_stride_bytes() + u64::from(page.0) * self.page_bytes)
    }

    /// Fails where the extent is not well formed or does not lie in the reservation.
    pub fn check_extent(&self, extent: Extent) -> Result<()> {
        if extent.is_well_formed() && extent.end_page() <= self.capacity_pages {
            return Ok(());
        }
        Err(MemoryError::Invalid {
            field: "extent",
            value: extent.to_string(),
            allowed: format!(
                "a power of two up to {MAX_EXTENT_PAGES} that divides the first page, inside of {} pages",
                self.capacity_pages,
            ),
        })
    }
}

// === impl BlockGeometry ===

impl BlockGeometry {
    /// Blocks of `block_bytes` on the pages of `geometry`.
    ///
    /// Fails where the size is zero or above [`MAX_BLOCK_BYTES`], where there would be more blocks than
    /// ids, and where a page, now or after any growth, would own no block: the message then has the
    /// smallest page size that works.
    pub fn try_new(geometry: &Geometry, block_bytes: u64) -> Result<Self> {
        let page_bytes = geometry.page_bytes();
        let invalid = |field, value: u64, allowed: String| {
            Err(MemoryError::Invalid { field, value: value.to_string(), allowed })
        };
        if block_bytes == 0 || block_bytes > MAX_BLOCK_BYTES {
            return invalid("block_bytes", block_bytes, format!("1 to {MAX_BLOCK_BYTES}"));
        }
        if !every_page_owns_a_block(page_bytes, block_bytes) {
            let smallest = smallest_page_bytes(block_bytes);
            return invalid(
                "page_bytes",
                page_bytes,
                format!(
                    "{smallest} or another multiple of 2 MiB with a whole block of {block_bytes} on every page"
                ),
            );
        }
        let Ok(n_blocks) = u32::try_from(geometry.buffer_stride_bytes() / block_bytes) else {
            let smallest = geometry.buffer_stride_bytes() / u64::from(u32::MAX) + 1;
            return invalid(
                "block_bytes",
                block_bytes,
                format!("{smallest} or more, for up to 2^32-1 blocks"),
            );
        };
        Ok(Self { page_bytes, block_bytes, capacity_pages: geometry.capacity_pages(), n_blocks })
    }

    /// Bytes of a page in one buffer.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Bytes of a block in one buffer.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Pages of the reservation.
    pub fn capacity_pages(&self) -> u32 {
        self.capacity_pages
    }

    /// How many block ids there are, those of blocks that belong to no page included.
    pub fn n_blocks(&self) -> u32 {
        self.n_blocks
    }

    /// The most blocks that any page owns.
    pub fn max_blocks_per_page(&self) -> u32 {
        // Page 0 starts where a block starts, so no page owns more; at most `n_blocks`.
        (self.page_bytes / self.block_bytes) as u32
    }

    /// The blocks that lie whole on `page`; at least one, or none where the page is out of range.
    pub fn blocks_of_page(&self, page: PageId) -> Range<BlockId> {
        if page.0 >= self.capacity_pages {
            return BlockId(0)..BlockId(0);
        }
        let start_bytes = u64::from(page.0) * self.page_bytes;
        let end_bytes = start_bytes + self.page_bytes;
        // Both are at most `n_blocks`.
        let first = start_bytes.div_ceil(self.block_bytes) as u32;
        let end = (end_bytes / self.block_bytes) as u32;
        BlockId(first)..BlockId(end)
    }

    /// The page that owns `block`; nothing for a block that straddles two pages or is out of range.
    pub fn page_of_block(&self, block: BlockId) -> Option<PageId> {
        if block.0 >= self.n_blocks {
            return None;
        }
        let start_bytes = self.offset_bytes(block);
        let page = start_bytes / self.page_bytes;
        let is_whole = start_bytes + self.block_bytes <= (page + 1) * self.page_bytes;
        // Below `capacity_pages`, as the block is in range.
        is_whole.then_some(PageId(page as u32))
    }

    /// Bytes from the start of its buffer to `block`.
    pub fn offset_bytes(&self, block: BlockId) -> u64 {
        u64::from(block.0) * self.block_bytes
    }
}

/// Whether each page of an endless buffer owns a block.
///
/// Pages start at all multiples of the greatest common divisor `d` within a block. The worst start is `d`
/// after a block's: the rest of that block is lost and a whole one must follow.
fn every_page_owns_a_block(page_bytes: u64, block_bytes: u64) -> bool {
    let divisor = greatest_common_divisor(page_bytes, block_bytes);
    page_bytes >= 2 * block_bytes - divisor
}

/// The smallest multiple of [`UNIT_BYTES`] that is a page size for `block_bytes`, which is at most
/// [`MAX_BLOCK_BYTES`].
fn smallest_page_bytes(block_bytes: u64) -> u64 {
    let largest = (2 * block_bytes).next_multiple_of(UNIT_BYTES);
    (block_bytes.next_multiple_of(UNIT_BYTES)..largest)
        .step_by(UNIT_BYTES as usize)
        .find(|&page_bytes| every_page_owns_a_block(page_bytes, block_bytes))
        .unwrap_or(largest)
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks_on(page_bytes: u64, block_bytes: u64, capacity_pages: u32) -> Result<BlockGeometry> {
        BlockGeometry::try_new(&Geometry::try_new(1, page_bytes, capacity_pages)?, block_bytes)
    }

    #[test]
    fn a_page_owns_exactly_the_blocks_that_lie_whole_on_it() {
        for block_bytes in [1 << 20, 640 << 10, 700_001, UNIT_BYTES, (1 << 20) - 1] {
            for page_bytes in [UNIT_BYTES, 2 * UNIT_BYTES, 3 * UNIT_BYTES] {
                let blocks = blocks_on(page_bytes, block_bytes, 9).unwrap();
                let mut owner = vec![None; blocks.n_blocks() as usize];
                for page in 0..9 {
                    let owned = blocks.blocks_of_page(PageId(page));
                    assert!(owned.start < owned.end, "page {page} owns a block");
                    assert!(owned.end.0 - owned.start.0 <= blocks.max_blocks_per_page());
                    for block in owned.start.0..owned.end.0 {
                        assert_eq!(owner[block as usize].replace(PageId(page)), None, "owned twice");
                    }
                }
                for (block, owner) in (0..).map(BlockId).zip(owner) {
                    let first_byte = u64::from(block.0) * block_bytes;
                    let last_byte = first_byte + block_bytes - 1;
                    let is_whole = first_byte / page_bytes == last_byte / page_bytes;
                    assert_eq!(owner, is_whole.then_some(PageId((first_byte / page_bytes) as u32)));
                    assert_eq!(blocks.page_of_block(block), owner);
                }
                assert_eq!(blocks.page_of_block(BlockId(blocks.n_blocks())), None);
                assert_eq!(blocks.page_of_block(BlockId(u32::MAX)), None);
                assert!(blocks.blocks_of_page(PageId(9)).is_empty());
            }
        }
    }

    #[test]
    fn a_page_without_a_block_is_refused_with_the_smallest_size_that_works() {
        for (page_units, block_bytes, smallest_units) in [
            (1, 3 << 19, 2),
            (1, UNIT_BYTES + 1, 3),
            (2, 3 * UNIT_BYTES, 3),
            (4, 5 << 20, 5),
            (1, 3 << 20, 3),
        ] {
            let MemoryError::Invalid { field, allowed, .. } =
                blocks_on(page_units * UNIT_BYTES, block_bytes, 64).unwrap_err()
            else {
                panic!("another error");
            };
            assert_eq!(field, "page_bytes");
            let smallest: u64 = allowed.split(' ').next().unwrap().parse().unwrap();
            assert_eq!(smallest, smallest_units * UNIT_BYTES, "block of {block_bytes}: {allowed}");
            // The block that is just above a page needs a million pages to drift to the worst place.
            let owns_blocks = |page_bytes: u64| {
                (0..2_000_000_u64).all(|page| {
                    (page * page_bytes).div_ceil(block_bytes) < (page + 1) * page_bytes / block_bytes
                })
            };
            assert!(owns_blocks(smallest), "what the message says works");
            assert!(
                (1..smallest_units).all(|units| !owns_blocks(units * UNIT_BYTES)),
                "nothing smaller does"
            );
            blocks_on(smallest, block_bytes, 64).unwrap();
        }
    }

    #[test]
    fn sizes_at_the_limits_are_refused_and_never_overflow() {
        blocks_on(UNIT_BYTES, 0, 1).unwrap_err();
        blocks_on(UNIT_BYTES, MAX_BLOCK_BYTES + 1, 1).unwrap_err();
        blocks_on(UNIT_BYTES, u64::MAX, 1).unwrap_err();
        blocks_on(UNIT_BYTES, MAX_BLOCK_BYTES, 1).unwrap_err();
        blocks_on(UNIT_BYTES, 1, 1 << 12).unwrap_err();
        let most = blocks_on(UNIT_BYTES, 1, (1 << 11) - 1).unwrap();
        assert_eq!(most.page_of_block(BlockId(most.n_blocks() - 1)), Some(PageId((1 << 11) - 2)));
        let largest = blocks_on(MAX_BLOCK_BYTES, MAX_BLOCK_BYTES, 1 << 11).unwrap();
        assert_eq!(largest.blocks_of_page(PageId((1 << 11) - 1)), BlockId((1 << 11) - 1)..BlockId(1 << 11));
    }

    #[test]
    fn an_extent_is_an_aligned_power_of_two_inside_of_the_reservation() {
        let geometry = Geometry::try_new(2, UNIT_BYTES, 48).unwrap();
        for (first_page, n_pages, fits) in [
            (0, 32, true),
            (32, 16, true),
            (32, 32, false),
            (2, 4, false),
            (0, 3, false),
            (0, 64, false),
            (0, 0, false),
        ] {
            let extent = Extent { first_page: PageId(first_page), n_pages };
            assert_eq!(geometry.check_extent(extent).is_ok(), fits, "{extent}");
        }
        geometry.check_extent(Extent { first_page: PageId(u32::MAX), n_pages: 1 }).unwrap_err();
        assert!(Extent::try_new(PageId(4), 4).unwrap().pages().eq((4..8).map(PageId)));
        assert_eq!(geometry.offset_bytes(1, PageId(3)), Some(51 * UNIT_BYTES));
        assert_eq!(geometry.offset_bytes(2, PageId(0)), None);
        assert_eq!(geometry.offset_bytes(0, PageId(48)), None);
    }
}
