//! A pass that removes holders from all sets.

use super::sets::SetRef;

/// A pass over all extents that takes the bits of some holders out.
#[derive(Debug)]
pub(super) struct Sweep {
    /// Holders whose bits are gone when the pass ends.
    pub(super) holders: Vec<u16>,
    /// Sources whose holders those were.
    pub(super) sources: Vec<u32>,
    /// Extents still to visit; what is written later is clean.
    pub(super) slots: Vec<u32>,
    /// Entries of the last of them that are done.
    pub(super) offset: usize,
    /// The last change of a set.
    pub(super) change: (SetRef, SetRef),
}
