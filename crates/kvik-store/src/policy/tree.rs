//! The resident blocks as a tree: which hang on which, and which are leaves.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::BlockId;

/// A map by block id. Ids are hashes or small numbers; one multiplication spreads either.
pub(super) type BlockMap<V> = HashMap<BlockId, V, BuildHasherDefault<IdHasher>>;

const NO_SLOT: u32 = u32::MAX;

/// The resident blocks as a forest.
///
/// Blocks live in slots that are used again, so that a policy can keep what it knows of a block in a
/// vector beside the tree. A leaf is a resident block without resident children and without pins.
#[derive(Debug, Default)]
pub struct Tree {
    slots: BlockMap<u32>,
    nodes: Vec<Node>,
    free: Vec<u32>,
    n_bytes: u64,
    n_copies: usize,
}

/// What a change to the tree did to the block above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Inserted {
    /// Where the new block is.
    pub(super) slot: u32,
    /// Its parent, if that was a leaf until now.
    pub(super) covered: Option<u32>,
}

#[derive(Debug, Default)]
pub(super) struct IdHasher(u64);

#[derive(Debug, Clone, Copy)]
struct Node {
    id: BlockId,
    parent: u32,
    n_children: u32,
    n_pins: u32,
    is_copy: bool,
    bytes: u64,
}

impl Tree {
    /// Says whether a block is resident.
    pub fn contains(&self, id: BlockId) -> bool {
        self.slots.contains_key(&id)
    }

    /// How many blocks are resident.
    pub fn n_blocks(&self) -> usize {
        self.slots.len()
    }

    /// What the resident blocks occupy.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// How many resident blocks hang on a block; 0 where it is not resident.
    pub fn n_children(&self, id: BlockId) -> usize {
        self.slot(id).map_or(0, |slot| self.nodes[slot as usize].n_children as usize)
    }

    /// What a block hangs on; `None` where it hangs on none, or is not resident.
    pub fn parent(&self, id: BlockId) -> Option<BlockId> {
        let parent = self.nodes[self.slot(id)? as usize].parent;
        (parent != NO_SLOT).then(|| self.id(parent))
    }

    /// How many resident blocks are copies.
    pub fn n_copies(&self) -> usize {
        self.n_copies
    }

    /// Whether another place has the block too.
    pub(super) fn is_copy(&self, slot: u32) -> bool {
        self.nodes[slot as usize].is_copy
    }

    pub(super) fn set_copy(&mut self, slot: u32, is_copy: bool) {
        let was_copy = std::mem::replace(&mut self.nodes[slot as usize].is_copy, is_copy);
        self.n_copies = self.n_copies + usize::from(is_copy) - usize::from(was_copy);
    }

    pub(super) fn slot(&self, id: BlockId) -> Option<u32> {
        self.slots.get(&id).copied()
    }

    pub(super) fn id(&self, slot: u32) -> BlockId {
        self.nodes[slot as usize].id
    }

    pub(super) fn is_leaf(&self, slot: u32) -> bool {
        let node = &self.nodes[slot as usize];
        node.n_children == 0 && node.n_pins == 0
    }

    /// Adds a block under its parent; `None` if it is there already or the parent is not.
    pub(super) fn insert(&mut self, id: BlockId, parent: Option<BlockId>, bytes: u64) -> Option<Inserted> {
        if self.contains(id) {
            return None;
        }
        let (parent_slot, covered) = match parent {
            None => (NO_SLOT, None),
            Some(parent_id) => {
                let parent_slot = self.slot(parent_id)?;
                let covered = self.is_leaf(parent_slot).then_some(parent_slot);
                self.nodes[parent_slot as usize].n_children += 1;
                (parent_slot, covered)
            }
        };
        let node = Node { id, parent: parent_slot, n_children: 0, n_pins: 0, is_copy: false, bytes };
        let slot = if let Some(slot) = self.free.pop() {
            self.nodes[slot as usize] = node;
            slot
        } else {
            self.nodes.push(node);
            (self.nodes.len() - 1) as u32
        };
        self.slots.insert(id, slot);
        self.n_bytes += bytes;
        Some(Inserted { slot, covered })
    }

    /// Takes a leaf out and returns its parent if that is a leaf now. The caller has checked that it is one.
    pub(super) fn remove_leaf(&mut self, slot: u32) -> Option<u32> {
        debug_assert!(self.is_leaf(slot), "only leaves leave the tree");
        let Node { id, parent, bytes, is_copy, .. } = self.nodes[slot as usize];
        self.n_copies -= usize::from(is_copy);
        self.slots.remove(&id);
        self.free.push(slot);
        self.n_bytes -= bytes;
        if parent == NO_SLOT {
            return None;
        }
        self.nodes[parent as usize].n_children -= 1;
        self.is_leaf(parent).then_some(parent)
    }

    /// Adds a pin and says whether the block was a leaf until now.
    pub(super) fn pin(&mut self, slot: u32) -> bool {
        let was_leaf = self.is_leaf(slot);
        self.nodes[slot as usize].n_pins += 1;
        was_leaf
    }

    /// Takes a pin away; `None` if there is none, otherwise whether the block is a leaf now.
    pub(super) fn unpin(&mut self, slot: u32) -> Option<bool> {
        let node = &mut self.nodes[slot as usize];
        node.n_pins = node.n_pins.checked_sub(1)?;
        Some(self.is_leaf(slot))
    }
}

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        // The map takes its bucket from the low bits and its tag from the high ones, so both halves of
        // the product are folded together.
        let product = u128::from(self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }
}
