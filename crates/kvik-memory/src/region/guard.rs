//! A guard made of pieces: one zeroed handle, mapped again and again where nothing else is.
//!
//! For devices that have no zeros of their own. Buffers are cut into blocks of the largest piece. An extent
//! cuts the piece of its block into smaller aligned ones around it. They stay so when it goes, so that an
//! extent that comes and goes cuts once; only a block without extents in many pieces becomes one again.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use tracing::warn;

use super::range_of;
use crate::Result;
use crate::geometry::{Geometry, MAX_EXTENT_PAGES, UNIT_BYTES};
use crate::vmm::{Access, Created, PhysicalHandle, VirtualRange, Vmm};

/// The largest piece: with the smallest pages, the size of the largest extent.
const MAX_PIECE_BYTES: u64 = UNIT_BYTES * MAX_EXTENT_PAGES as u64;

/// A block without extents may be in this many pieces: a single page cuts a block of 32 into 6. More would
/// make the next large extent slow, since each costs as much to unmap as a whole block.
const MAX_LOOSE_PIECES: usize = 8;

/// The pieces of all buffers of a region.
#[derive(Debug)]
pub(super) struct GuardBook {
    vmm: Arc<dyn Vmm>,
    geometry: Geometry,
    base_address: u64,
    /// In rising order; one that is large enough serves a piece.
    memories: Vec<GuardMemory>,
    /// By buffer and first page.
    buffers: Vec<BTreeMap<u32, Piece>>,
    /// Blocks, by buffer and first page, in which a call failed.
    holes: BTreeSet<(u32, u32)>,
}

#[derive(Debug)]
struct GuardMemory {
    n_pages: u32,
    handle: PhysicalHandle,
}

#[derive(Debug)]
struct Piece {
    n_pages: u32,
    /// Not before access was set.
    is_readable: bool,
}

/// The most memory that a guard takes: one handle of each size.
pub(super) fn max_bytes(geometry: &Geometry) -> u64 {
    let n_pages = max_piece_pages(geometry);
    geometry.page_bytes() * u64::from(2 * n_pages - 1)
}

impl GuardBook {
    /// Lays the guard over all buffers; nothing where the device cannot have one.
    pub(super) fn try_new(vmm: Arc<dyn Vmm>, geometry: Geometry, base_address: u64) -> Result<Option<Self>> {
        let mut guard = Self {
            vmm,
            geometry,
            base_address,
            memories: Vec::new(),
            buffers: (0..geometry.n_buffers()).map(|_| BTreeMap::new()).collect(),
            holes: BTreeSet::new(),
        };
        match guard.lay() {
            Ok(true) => Ok(Some(guard)),
            Ok(false) => {
                guard.tear_down();
                Ok(None)
            }
            Err(error) => {
                guard.tear_down();
                Err(error)
            }
        }
    }

    pub(super) fn n_pieces(&self) -> usize {
        self.buffers.iter().map(BTreeMap::len).sum()
    }

    pub(super) fn n_holes(&self) -> usize {
        self.holes.len()
    }

    pub(super) fn n_bytes(&self) -> u64 {
        let n_pages: u32 = self.memories.iter().map(|memory| memory.n_pages).sum();
        u64::from(n_pages) * self.geometry.page_bytes()
    }

    /// Takes the guard away from `pages`; the rest of the pieces that lay there is covered again.
    ///
    /// After a failure the caller calls [`close`](Self::close).
    pub(super) fn open(&mut self, buffer: u32, pages: Range<u32>) -> Result<()> {
        let pieces = self.pieces_in(buffer, pages.clone());
        let (Some(first), Some(last)) = (pieces.first().cloned(), pieces.last().cloned()) else {
            return Ok(());
        };
        self.unmap_pieces(buffer, &pieces)?;
        if first.start < pages.start {
            self.put(buffer, first.start..pages.start)?;
        }
        if last.end > pages.end {
            self.put(buffer, pages.end..last.end)?;
        }
        Ok(())
    }

    /// Lays the guard over `pages` and their surroundings, where `is_mapped` says that nothing is.
    ///
    /// What fails twice is left bare, and tried again by [`mend`](Self::mend).
    pub(super) fn close(&mut self, buffer: u32, pages: Range<u32>, is_mapped: &dyn Fn(Range<u32>) -> bool) {
        for block in self.blocks_of(pages) {
            let key = (buffer, block.start);
            let mended = self
                .mend_block(buffer, block.clone(), is_mapped)
                .or_else(|_| self.mend_block(buffer, block.clone(), is_mapped));
            match mended {
                Ok(()) => {
                    self.holes.remove(&key);
                }
                Err(error) => {
                    if self.holes.insert(key) {
                        warn!(buffer, first_page = block.start, %error, "could not lay the guard");
                    }
                }
            }
        }
    }

    /// Tries again where the guard could not be laid.
    pub(super) fn mend(&mut self, is_mapped: &dyn Fn(u32, Range<u32>) -> bool) {
        for (buffer, first_page) in self.holes.clone() {
            self.close(buffer, first_page..first_page + 1, &|pages| is_mapped(buffer, pages));
        }
    }

    /// Unmaps all pieces and gives their memory back, as far as the device lets it.
    pub(super) fn tear_down(mut self) {
        for buffer in 0..self.geometry.n_buffers() {
            let pieces = self.pieces_in(buffer, 0..self.geometry.capacity_pages());
            if let Err(error) = self.unmap_pieces(buffer, &pieces) {
                warn!(buffer, %error, "could not unmap the guard");
            }
        }
        for memory in &self.memories {
            if let Err(error) = self.vmm.release(memory.handle) {
                warn!(%error, "could not release the guard's memory");
            }
        }
    }

    fn lay(&mut self) -> Result<bool> {
        let mut n_pages = max_piece_pages(&self.geometry);
        while !self.create_zeroed(n_pages)? {
            if n_pages == 1 {
                warn!("no memory for the guard: a stray read faults");
                return Ok(false);
            }
            n_pages /= 2;
        }
        let probe = self.range_of(0, 0..1);
        let largest = self.memories[0].handle;
        if self.vmm.map(probe, largest).is_ok() {
            let readable = self.vmm.set_access(probe, Access::ReadOnly);
            self.vmm.unmap(probe)?;
            if let Err(error) = readable {
                warn!(%error, "no memory that can only be read, so no guard: a stray read faults");
                return Ok(false);
            }
        } else {
            // This driver maps only whole handles: one for each size of a piece.
            while n_pages > 1 {
                n_pages /= 2;
                if !self.create_zeroed(n_pages)? {
                    warn!("no memory for the guard: a stray read faults");
                    return Ok(false);
                }
            }
        }
        for buffer in 0..self.geometry.n_buffers() {
            self.put(buffer, 0..self.geometry.capacity_pages())?;
        }
        Ok(true)
    }

    /// Creates memory for pieces of this size; false where the device has none.
    fn create_zeroed(&mut self, n_pages: u32) -> Result<bool> {
        let n_bytes = u64::from(n_pages) * self.geometry.page_bytes();
        let Created::Memory(handle) = self.vmm.create(n_bytes)? else {
            return Ok(false);
        };
        self.memories.insert(0, GuardMemory { n_pages, handle });
        let range = self.range_of(0, 0..n_pages);
        self.vmm.map(range, handle)?;
        let zeroed = self.vmm.set_access(range, Access::ReadWrite).and_then(|()| self.vmm.fill(range, 0));
        let unmapped = self.vmm.unmap(range);
        zeroed.and(unmapped).map(|()| true)
    }

    fn mend_block(
        &mut self,
        buffer: u32,
        block: Range<u32>,
        is_mapped: &dyn Fn(Range<u32>) -> bool,
    ) -> Result<()> {
        let pieces = self.pieces_in(buffer, block.clone());
        let is_bare =
            |page: &u32| !pieces.iter().any(|piece| piece.contains(page)) && !is_mapped(*page..page + 1);
        let bare: Vec<u32> = block.clone().filter(is_bare).collect();
        let missing: Vec<Range<u32>> = bare
            .chunk_by(|page, next| page + 1 == *next)
            .map(|run| run[0]..run[0] + run.len() as u32)
            .collect();
        let n_new: usize = missing.iter().map(|run| self.cut(run.clone()).len()).sum();
        if pieces.len() + n_new > MAX_LOOSE_PIECES && !is_mapped(block.clone()) {
            self.unmap_pieces(buffer, &pieces)?;
            return self.put(buffer, block);
        }
        for piece in pieces {
            self.make_readable(buffer, piece)?;
        }
        for run in missing {
            self.put(buffer, run)?;
        }
        Ok(())
    }

    /// Maps pieces over bare pages.
    fn put(&mut self, buffer: u32, pages: Range<u32>) -> Result<()> {
        for piece in self.cut(pages.clone()) {
            let n_pages = piece.end - piece.start;
            let memory = self.memories.iter().find(|memory| memory.n_pages >= n_pages);
            // `cut` makes no piece that is larger than the largest memory.
            let Some(handle) = memory.map(|memory| memory.handle) else { continue };
            self.vmm.map(self.range_of(buffer, piece.clone()), handle)?;
            self.buffers[buffer as usize].insert(piece.start, Piece { n_pages, is_readable: false });
        }
        self.make_readable(buffer, pages)
    }

    /// Sets access for a run of pieces.
    fn make_readable(&mut self, buffer: u32, pages: Range<u32>) -> Result<()> {
        let pieces = &mut self.buffers[buffer as usize];
        if pieces.range(pages.clone()).all(|(_, piece)| piece.is_readable) {
            return Ok(());
        }
        let range = range_of(&self.geometry, self.base_address, buffer, pages.clone());
        self.vmm.set_access(range, Access::ReadOnly)?;
        for (_, piece) in pieces.range_mut(pages) {
            piece.is_readable = true;
        }
        Ok(())
    }

    /// Unmaps sorted pieces, adjacent ones in one call.
    fn unmap_pieces(&mut self, buffer: u32, pieces: &[Range<u32>]) -> Result<()> {
        for run in pieces.chunk_by(|piece, next| piece.end == next.start) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
            self.vmm.unmap(self.range_of(buffer, first.start..last.end))?;
            for piece in run {
                self.buffers[buffer as usize].remove(&piece.start);
            }
        }
        Ok(())
    }

    /// The pieces that have a page in `pages`, in order.
    fn pieces_in(&self, buffer: u32, pages: Range<u32>) -> Vec<Range<u32>> {
        let earliest = pages.start.saturating_sub(MAX_EXTENT_PAGES - 1);
        self.buffers[buffer as usize]
            .range(earliest..pages.end)
            .map(|(&first_page, piece)| first_page..first_page + piece.n_pages)
            .filter(|piece| piece.end > pages.start)
            .collect()
    }

    /// The blocks that have a page in `pages`, in order.
    fn blocks_of(&self, pages: Range<u32>) -> impl Iterator<Item = Range<u32>> + use<> {
        let capacity_pages = self.geometry.capacity_pages();
        let block_pages = self.block_pages();
        (pages.start / block_pages..pages.end.div_ceil(block_pages)).map(move |block| {
            let first_page = block * block_pages;
            first_page..capacity_pages.min(first_page.saturating_add(block_pages))
        })
    }

    /// `pages` as the largest aligned pieces.
    fn cut(&self, pages: Range<u32>) -> Vec<Range<u32>> {
        let block_pages = self.block_pages();
        let mut pieces = Vec::new();
        let mut first_page = pages.start;
        while first_page < pages.end {
            let aligned = 1 << first_page.trailing_zeros().min(31);
            let fitting = 1 << (pages.end - first_page).ilog2();
            let n_pages = block_pages.min(aligned).min(fitting);
            pieces.push(first_page..first_page + n_pages);
            first_page += n_pages;
        }
        pieces
    }

    /// Pages of the largest piece.
    fn block_pages(&self) -> u32 {
        self.memories.last().map_or(1, |memory| memory.n_pages)
    }

    fn range_of(&self, buffer: u32, pages: Range<u32>) -> VirtualRange {
        range_of(&self.geometry, self.base_address, buffer, pages)
    }
}

/// Pages of the largest piece that the region has room and the device patience for.
fn max_piece_pages(geometry: &Geometry) -> u32 {
    let by_bytes = (MAX_PIECE_BYTES / geometry.page_bytes()).clamp(1, MAX_EXTENT_PAGES.into()) as u32;
    1 << by_bytes.min(geometry.capacity_pages()).ilog2()
}
