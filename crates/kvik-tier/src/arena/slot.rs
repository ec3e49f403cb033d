//! Memory of the arena that is in use: slots and leases.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::slice;
use std::sync::Arc;

use super::Shared;
use super::run::Run;
use super::slab::SlotId;
use super::slabs::SlabId;

/// Memory of an arena that one owner writes.
///
/// It derefs to exactly the bytes that were asked for. They start at a multiple of 4096, and their content is
/// undefined: whatever lay there before. Dropping it gives the memory back; [`Slot::freeze`] makes it
/// readable by many.
pub struct Slot(Held);

/// Memory of an arena that any number of readers hold, and no writer.
///
/// A clone is cheap. The memory returns to the arena when the last clone is dropped.
#[derive(Clone)]
pub struct Lease(Arc<Held>);

/// A run of the arena with its owner; dropping it gives the run back.
pub(super) struct Held {
    pub(super) shared: Arc<Shared>,
    pub(super) run: Run,
    pub(super) home: Home,
    pub(super) n_bytes: usize,
}

/// Where a run goes back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    /// To the buddy allocator.
    Own,
    /// To its slab.
    Slab(SlabId, SlotId),
}

// === impl Slot ===

impl Slot {
    pub(super) fn new(held: Held) -> Self {
        debug_assert!(held.n_bytes <= held.run.n_bytes());
        Self(held)
    }

    /// Ends the writing: what was written is what every reader sees.
    ///
    /// The bytes between the end of the slot and the next multiple of 4096 become zero.
    pub fn freeze(mut self) -> Lease {
        let n_bytes = self.0.n_bytes;
        self.padded_mut()[n_bytes..].fill(0);
        Lease::new(self.0)
    }

    /// Where the slot starts in the arena's memory file.
    pub fn offset(&self) -> u64 {
        self.0.offset()
    }

    /// The slot up to the next multiple of 4096, for readers of devices that write whole blocks.
    ///
    /// What is written past the slot's length is lost in [`Self::freeze`].
    pub fn padded_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

impl Deref for Slot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.bytes()[..self.0.n_bytes]
    }
}

impl DerefMut for Slot {
    fn deref_mut(&mut self) -> &mut [u8] {
        let n_bytes = self.0.n_bytes;
        &mut self.0.bytes_mut()[..n_bytes]
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt_as("Slot", formatter)
    }
}

// === impl Lease ===

impl Lease {
    pub(super) fn new(held: Held) -> Self {
        debug_assert!(held.n_bytes <= held.run.n_bytes());
        Self(Arc::new(held))
    }

    /// Where the memory starts in the arena's memory file.
    ///
    /// It does not change while this lease is held.
    pub fn offset(&self) -> u64 {
        self.0.offset()
    }

    /// The bytes up to the next multiple of 4096, for devices that are written in whole blocks.
    ///
    /// What lies past the lease's own length is zero.
    pub fn padded(&self) -> &[u8] {
        self.0.bytes()
    }

    /// The run, if this is the only clone now and it lies in this arena.
    pub(super) fn movable_run(&self, shared: &Arc<Shared>) -> Option<Run> {
        let is_movable = Arc::strong_count(&self.0) == 1 && Arc::ptr_eq(&self.0.shared, shared);
        is_movable.then_some(self.0.run)
    }

    /// What is leased, if this is the only clone.
    pub(super) fn exclusive(&mut self) -> Option<&mut Held> {
        Arc::get_mut(&mut self.0)
    }
}

impl Deref for Lease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.bytes()[..self.0.n_bytes]
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt_as("Lease", formatter)
    }
}

// === impl Held ===

impl Held {
    fn offset(&self) -> u64 {
        self.run.byte_range().start as u64
    }

    /// All bytes of the run.
    fn bytes(&self) -> &[u8] {
        let start = self.shared.mapping.at(self.run.byte_range().start);
        // SAFETY: the run lies inside of the mapping, which `shared` keeps; its memory is committed, here or by the
        // arena that left its file to this one, so it is readable, and bytes of a memory file are always
        // initialized. The allocator hands out a unit once until it is given back, which only the drop of this value
        // does, so a writer of these bytes borrows this value mutably, which the returned borrow excludes. A run, too,
        // changes only through such a borrow.
        unsafe { slice::from_raw_parts(start.as_ptr(), self.run.n_bytes()) }
    }

    /// All bytes of the run, to be written.
    fn bytes_mut(&mut self) -> &mut [u8] {
        let start = self.shared.mapping.at(self.run.byte_range().start);
        // SAFETY: as in `bytes`; the borrow of this value is exclusive, and no other value has these units.
        unsafe { slice::from_raw_parts_mut(start.as_ptr(), self.run.n_bytes()) }
    }

    fn fmt_as(&self, name: &str, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct(name).field("offset", &self.offset()).field("n_bytes", &self.n_bytes).finish()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shared.give(self.run, self.home);
    }
}
