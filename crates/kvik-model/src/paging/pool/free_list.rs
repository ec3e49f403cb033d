//! The order in which free blocks are taken.

use super::BlockId;

/// The end of the list, on both sides.
const NONE: u32 = u32::MAX;

/// Free blocks from the oldest, which is taken next, to the youngest: linked, so that a block leaves from the middle
/// at once.
#[derive(Debug)]
pub(super) struct FreeList {
    /// Of every block that there can be; those of blocks outside of the list mean nothing.
    links: Vec<Links>,
    oldest: u32,
    youngest: u32,
    n_blocks: usize,
}

#[derive(Debug, Clone, Copy)]
struct Links {
    older: u32,
    younger: u32,
}

impl FreeList {
    /// An empty list for `n_blocks` blocks.
    ///
    /// # Panics
    /// If `n_blocks` is not below `u32::MAX`.
    pub(super) fn new(n_blocks: usize) -> Self {
        assert!(n_blocks < NONE as usize, "block ids are 32 bits");
        let links = vec![Links { older: NONE, younger: NONE }; n_blocks];
        Self { links, oldest: NONE, youngest: NONE, n_blocks: 0 }
    }

    pub(super) fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    pub(super) fn oldest(&self) -> Option<BlockId> {
        block(self.oldest)
    }

    pub(super) fn youngest(&self) -> Option<BlockId> {
        block(self.youngest)
    }

    /// What comes before `of`, which is in the list.
    pub(super) fn older(&self, of: BlockId) -> Option<BlockId> {
        block(self.links[of.index()].older)
    }

    /// What comes after `of`, which is in the list.
    pub(super) fn younger(&self, of: BlockId) -> Option<BlockId> {
        block(self.links[of.index()].younger)
    }

    /// Adds a block where it is taken last.
    pub(super) fn push_youngest(&mut self, block: BlockId) {
        let index = block.index() as u32;
        let older = std::mem::replace(&mut self.youngest, index);
        self.links[block.index()] = Links { older, younger: NONE };
        match self.links.get_mut(older as usize) {
            Some(links) => links.younger = index,
            None => self.oldest = index,
        }
        self.n_blocks += 1;
    }

    /// Adds a block where it is taken first.
    pub(super) fn push_oldest(&mut self, block: BlockId) {
        let index = block.index() as u32;
        let younger = std::mem::replace(&mut self.oldest, index);
        self.links[block.index()] = Links { older: NONE, younger };
        match self.links.get_mut(younger as usize) {
            Some(links) => links.older = index,
            None => self.youngest = index,
        }
        self.n_blocks += 1;
    }

    /// Takes a block out, which is in the list.
    pub(super) fn unlink(&mut self, block: BlockId) {
        let Links { older, younger } = self.links[block.index()];
        match self.links.get_mut(older as usize) {
            Some(links) => links.younger = younger,
            None => self.oldest = younger,
        }
        match self.links.get_mut(younger as usize) {
            Some(links) => links.older = older,
            None => self.youngest = older,
        }
        self.n_blocks -= 1;
    }
}

fn block(index: u32) -> Option<BlockId> {
    (index != NONE).then(|| BlockId::new(index))
}
