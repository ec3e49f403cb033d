//! The arena of another process.

use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, ProtFlags, madvise};

use super::mapping::SealedMapping;
use super::stream::copy_summed;
use super::{Checksum, RunningChecksum};
use crate::error::{Result, TierError};

/// Bytes of a page, or of several: advice begins at one.
const PAGE_BYTES: usize = 64 << 10;

/// Bytes of a part whose pages are mapped at a time. One call maps 512 pages several times faster than 512 faults do.
const PART_BYTES: usize = 2 << 20;

/// Bytes that are summed up at a time: they stay in the processor's first cache.
const SUMMED_BYTES: usize = 16 << 10;

/// What a view may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ViewAccess {
    /// Only read: the kernel refuses writes.
    Read,
    /// Read and write.
    Write,
}

/// A mapping of the memory file of an [`Arena`](crate::Arena) that another process owns.
///
/// Its owner says which bytes may be read or written at present; a view cannot know. Bytes that the owner gives to
/// another reader or writer meanwhile are mixed ones, and a checksum tells.
#[derive(Debug)]
pub struct ArenaView {
    mapping: SealedMapping,
    access: ViewAccess,
    /// Parts whose pages this process has mapped, one bit for each part of [`PART_BYTES`].
    mapped_parts: Box<[AtomicU64]>,
}

impl ArenaView {
    /// Maps the first `n_bytes` of an arena's file.
    ///
    /// # Errors
    /// If the file is shorter, can still be made shorter, or was not opened for `access`.
    pub fn map(file: impl AsFd, n_bytes: u64, access: ViewAccess) -> Result<Self> {
        let protection = match access {
            ViewAccess::Read => ProtFlags::READ,
            ViewAccess::Write => ProtFlags::READ | ProtFlags::WRITE,
        };
        let n_bytes = usize::try_from(n_bytes).unwrap_or(usize::MAX);
        let mapping = SealedMapping::new(file, n_bytes, protection)?;
        let n_words = n_bytes.div_ceil(PART_BYTES).div_ceil(u64::BITS as usize);
        let mapped_parts = (0..n_words).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { mapping, access, mapped_parts })
    }

    /// Its size.
    pub fn n_bytes(&self) -> usize {
        self.mapping.n_bytes()
    }

    /// Where it is mapped in this process, for a device that copies by itself.
    pub fn address(&self) -> NonNull<u8> {
        self.mapping.address()
    }

    /// Copies the bytes from `offset` on into `target`.
    ///
    /// # Errors
    /// If the arena has no such bytes.
    pub fn copy_out(&self, offset: u64, target: &mut [u8]) -> Result<()> {
        let source = self.range(offset, target.len())?;
        // SAFETY: the range lies inside of the mapping, which outlives the call, and `target` is memory of this process
        // that the mapping does not overlap, because it is borrowed. Another process may write the source meanwhile,
        // which makes the bytes arbitrary: any are valid.
        unsafe { std::ptr::copy_nonoverlapping(source.cast_const(), target.as_mut_ptr(), target.len()) };
        Ok(())
    }

    /// The checksum of `n_bytes` from `offset` on.
    ///
    /// # Errors
    /// If the arena has no such bytes.
    pub fn sum(&self, offset: u64, n_bytes: usize) -> Result<Checksum> {
        // By way of a small copy: another process may write the bytes, so no reference to them can be made.
        let mut copy = vec![0; SUMMED_BYTES.min(n_bytes)];
        let mut sum = RunningChecksum::default();
        self.range(offset, n_bytes)?;
        for start in (0..n_bytes).step_by(SUMMED_BYTES) {
            let part = &mut copy[..SUMMED_BYTES.min(n_bytes - start)];
            self.copy_out(offset + start as u64, part)?;
            sum.update(part);
        }
        Ok(sum.finish())
    }

    /// Copies `source` to the bytes from `offset` on, and returns its checksum.
    ///
    /// # Errors
    /// If the arena has no such bytes, or the view is for reading.
    pub fn copy_in(&self, offset: u64, source: &[u8]) -> Result<Checksum> {
        let mut sum = RunningChecksum::default();
        self.copy_in_summed(offset, source, &mut sum)?;
        Ok(sum.finish())
    }

    /// Maps the pages of bytes that will be copied in pieces. It is done for whole ranges of pages, and once for each: a
    /// piece alone would leave the pages around it to be mapped one by one.
    ///
    /// # Errors
    /// If the bytes are not inside of the arena.
    pub fn prepare(&self, offset: u64, n_bytes: usize) -> Result<()> {
        self.range(offset, n_bytes).map(drop)
    }

    /// Copies bytes to the arena as [`Self::copy_in`] does, and adds them to a checksum.
    ///
    /// # Errors
    /// If the view is for reading, or the bytes are not inside of the arena.
    pub fn copy_in_summed(&self, offset: u64, source: &[u8], sum: &mut RunningChecksum) -> Result<()> {
        if self.access != ViewAccess::Write {
            return Err(refused("write to", offset, source.len(), "the view is for reading"));
        }
        let target = self.range(offset, source.len())?;
        // SAFETY: as in `copy_out`; the mapping is writable, and this process makes no references to its bytes.
        unsafe { copy_summed(source, target, sum) };
        Ok(())
    }

    /// Maps the pages of the parts that a range lies in, once for each part.
    fn map_parts(&self, start: usize, n_bytes: usize) {
        let end = start + n_bytes;
        for part in start / PART_BYTES..end.div_ceil(PART_BYTES) {
            let (word, bit) = (&self.mapped_parts[part / 64], 1 << (part % 64));
            // Relaxed: a page that is not mapped yet is mapped by the first touch.
            if word.load(Ordering::Relaxed) & bit != 0 || word.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
                continue;
            }
            // Only what belongs to the range: the rest may have no memory yet, and must not get any. A part that two
            // chunks share is mapped by faults for the second one.
            let from = (part * PART_BYTES).max(start).next_multiple_of(PAGE_BYTES);
            let to = ((part + 1) * PART_BYTES).min(end);
            if from >= to {
                continue;
            }
            let advice = match self.access {
                ViewAccess::Read => Advice::LinuxPopulateRead,
                ViewAccess::Write => Advice::LinuxPopulateWrite,
            };
            // SAFETY: the range lies inside of the mapping and begins at a page. The advice changes no byte.
            let mapped = unsafe {
                let address = self.mapping.address().as_ptr().add(from);
                madvise(address.cast(), to - from, advice)
            };
            // A kernel that does not know the advice maps pages at their first touch.
            let _ = mapped;
        }
    }

    fn range(&self, offset: u64, n_bytes: usize) -> Result<*mut u8> {
        let start = usize::try_from(offset)
            .ok()
            .filter(|start| start.checked_add(n_bytes).is_some_and(|end| end <= self.n_bytes()));
        let Some(start) = start else {
            return Err(refused("use", offset, n_bytes, "the arena is shorter"));
        };
        self.map_parts(start, n_bytes);
        // SAFETY: the start lies inside of the mapping, or one past its end where the range is empty.
        Ok(unsafe { self.mapping.address().as_ptr().add(start) })
    }
}

fn refused(action: &str, offset: u64, n_bytes: usize, reason: &str) -> TierError {
    let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, reason.to_owned());
    TierError::io(format!("{action} {n_bytes} bytes at {offset} of a shared arena"), source)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::checksum;
    use crate::{Arena, ArenaOptions};

    #[test]
    fn a_view_reads_and_writes_the_slots_of_the_arena_and_nothing_else() {
        let arena = Arena::new(ArenaOptions::new(1 << 20)).unwrap();
        let n_bytes = arena.stat().capacity_bytes;
        let mut slot = arena.allocate(5000).unwrap();
        slot.fill(7);
        let view = ArenaView::map(arena.as_fd(), n_bytes, ViewAccess::Write).unwrap();
        let mut bytes = vec![0; 5000];
        view.copy_out(slot.offset(), &mut bytes).unwrap();
        assert_eq!(bytes, vec![7; 5000]);
        assert_eq!(view.copy_in(slot.offset(), &[9; 5000]).unwrap(), checksum(&[9; 5000]));
        assert_eq!(*slot, [9; 5000]);
        assert_eq!(view.sum(slot.offset(), 5000).unwrap(), checksum(&[9; 5000]));
        assert!(view.sum(n_bytes - 4999, 5000).is_err());
        for offset in [n_bytes - 4999, n_bytes, u64::MAX - 10] {
            assert!(view.copy_out(offset, &mut bytes).is_err(), "{offset}");
            assert!(view.copy_in(offset, &bytes).is_err(), "{offset}");
        }
        assert!(ArenaView::map(arena.as_fd(), n_bytes + 1, ViewAccess::Read).is_err());
        let reader = ArenaView::map(arena.as_fd(), n_bytes, ViewAccess::Read).unwrap();
        assert!(reader.copy_in(slot.offset(), &[1]).is_err());
    }
}
