//! Blocks of ended sequences on their way out of the device.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use kvik_memory::vmm::cuda::{CopyPiece, CopyWay};

use super::super::{PinnedKv, no_file_writes};
use super::files::FileMover;
use super::pages::PageAddresses;
use crate::error::Result;
use crate::paging::BlockId;

/// Blocks that stay as they are until this is dropped: the engine writes none of them before.
#[derive(Debug)]
pub(super) struct PinnedBlocks {
    pages: PageAddresses,
    blocks: Vec<BlockId>,
    /// Where the device moves KV between files and blocks.
    files: Option<Arc<FileMover>>,
}

impl PinnedBlocks {
    pub(super) fn new(pages: PageAddresses, blocks: &[BlockId], files: Option<&Arc<FileMover>>) -> Self {
        Self { pages, blocks: blocks.to_vec(), files: files.cloned() }
    }
}

impl PinnedKv for PinnedBlocks {
    fn read_block(&self, layer_idx: usize, block_idx: usize, out: &mut [u8]) -> Result<()> {
        self.pages.read_block(layer_idx, self.blocks[block_idx], out)
    }

    fn read_blocks(&self, layers: Range<usize>, blocks: Range<usize>, out: &mut [u8]) -> Result<()> {
        let blocks = &self.blocks[blocks];
        let n_bytes = layers.len() * blocks.len() * self.pages.block_bytes();
        assert!(out.len() == n_bytes, "a buffer that is not as long as blocks");
        let way = if self.pages.is_registered(out) { CopyWay::Batch } else { CopyWay::Single };
        let pieces = self.pages.pieces_to(out.as_mut_ptr().expose_provenance() as u64, layers, blocks);
        // SAFETY: `out` is borrowed until this returns and as long as the pieces; the blocks stay as they are while they are pinned.
        unsafe { self.pages.copy_out(&pieces, way) }
    }

    fn write_file(
        &self,
        layers: Range<usize>,
        blocks: Range<usize>,
        file: BorrowedFd<'_>,
        offset: u64,
    ) -> Result<Vec<u64>> {
        let Some(files) = &self.files else { return Err(no_file_writes()) };
        let copy = |pieces: &[CopyPiece]| {
            // SAFETY: the blocks stay as they are while they are pinned, and the targets are the mover's until this returns.
            unsafe { self.pages.copy_out(pieces, CopyWay::Inside) }
        };
        files.write(layers, &self.blocks[blocks], &self.pages, &copy, (file, offset))
    }
}
