//! Words that two processes read and write.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, Timespec, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::ProtFlags;
use rustix::thread::futex;

use super::mapping::SealedMapping;
use crate::error::{Result, TierError};

const WORD_BYTES: usize = size_of::<AtomicU64>();

/// A memory file of 64-bit words that two processes have mapped, on whose words threads can wait.
#[derive(Debug)]
pub struct SharedWords {
    mapping: SealedMapping,
    file: OwnedFd,
}

impl SharedWords {
    /// Makes a file of `n_words` zeros whose size cannot change.
    ///
    /// # Errors
    /// If the kernel gives no memory file.
    pub fn create(n_words: usize) -> Result<Self> {
        let failed = |action: &str| {
            let action = action.to_owned();
            move |errno: Errno| TierError::io(action, errno.into())
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("kvik-words", flags).map_err(failed("create a file of words"))?;
        ftruncate(&file, (n_words * WORD_BYTES) as u64).map_err(failed("size a file of words"))?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(failed("seal a file of words"))?;
        Self::map(file, n_words)
    }

    /// Maps the file that another process created.
    ///
    /// # Errors
    /// If it has fewer words, or can still be made shorter.
    pub fn map(file: OwnedFd, n_words: usize) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        Ok(Self { mapping: SealedMapping::new(&file, n_words * WORD_BYTES, protection)?, file })
    }

    /// The words. Another process may write any of them at any time.
    pub fn words(&self) -> &[AtomicU64] {
        let first = self.mapping.address().cast::<AtomicU64>();
        // SAFETY: mappings are aligned to pages, the words lie inside of the mapping, which lives as long as this
        // value, and atomics have no invalid bytes and may be shared with other processes.
        unsafe { std::slice::from_raw_parts(first.as_ptr(), self.mapping.n_bytes() / WORD_BYTES) }
    }

    /// Waits until the word `index` is woken, as long as its lower half is that of `seen`; at most `timeout`. May
    /// return earlier for no reason.
    pub fn wait(&self, index: usize, seen: u64, timeout: Duration) {
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // Every outcome, a signal too, sends the caller back to look at the word.
        let _ = futex::wait(self.lower_half(index), futex::Flags::empty(), seen as u32, Some(&timeout));
    }

    /// Wakes all threads, of both processes, that wait on the word `index`.
    pub fn wake(&self, index: usize) {
        // It fails for addresses that are not mapped, which this one is.
        let _ = futex::wake(self.lower_half(index), futex::Flags::empty(), u32::MAX >> 1);
    }

    fn lower_half(&self, index: usize) -> &AtomicU32 {
        let word: *const AtomicU64 = &raw const self.words()[index];
        let halves = word.cast::<AtomicU32>();
        let half = if cfg!(target_endian = "little") { halves } else { halves.wrapping_add(1) };
        // SAFETY: the half lies inside of the word, which is mapped as long as this value lives and is aligned to more
        // than it needs; it is only handed to the kernel, which compares it.
        unsafe { &*half }
    }
}

impl AsFd for SharedWords {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn a_second_mapping_sees_the_words_of_the_first_and_wakes_its_waiters() {
        let first = SharedWords::create(64).unwrap();
        let second = SharedWords::map(first.as_fd().try_clone_to_owned().unwrap(), 64).unwrap();
        assert_eq!(second.words().len(), 64);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while second.words()[7].load(Ordering::Acquire) == 0 {
                    second.wait(7, 0, Duration::from_mins(1));
                }
            });
            first.words()[7].store(1, Ordering::Release);
            first.wake(7);
        });
    }

    #[test]
    fn a_file_that_is_too_short_or_can_shrink_is_refused() {
        let words = SharedWords::create(64).unwrap();
        let file = || words.as_fd().try_clone_to_owned().unwrap();
        assert!(SharedWords::map(file(), 1024).is_err());
        assert!(SharedWords::map(file(), 0).is_err());
        let unsealed = memfd_create("unsealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, 4096).unwrap();
        let error = SharedWords::map(unsealed, 8).unwrap_err();
        assert!(error.to_string().contains("shared bytes"), "{error}");
    }
}
