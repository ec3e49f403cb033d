//! A memory file in which a client hands over bytes, or is handed some.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;

use rustix::fs::fcntl_get_seals;

use crate::error::{NodeError, Result};

/// A file of a client, which may change while it is read.
#[derive(Debug)]
pub(super) struct ClientFile(File);

impl ClientFile {
    /// Takes a file that is all in memory: no read or write of it waits for anything.
    ///
    /// # Errors
    /// If there is none, or it is of another kind, such as a pipe.
    pub(super) fn try_new(file: Option<OwnedFd>) -> Result<Self> {
        let refused = |value: &str| NodeError::invalid("descriptor of the request", &value, "a memory file");
        let file = file.ok_or_else(|| refused("none"))?;
        // Only files in memory have seals.
        fcntl_get_seals(&file).map_err(|_| refused("another kind of file"))?;
        Ok(Self(file.into()))
    }

    /// Writes chunks one behind the other, up to the first that is refused; returns how many.
    pub(super) fn write_all<'a>(&self, payloads: impl Iterator<Item = &'a [u8]>) -> usize {
        let mut offset = 0;
        let is_written = |payload: &&[u8]| {
            let is_written = self.0.write_all_at(payload, offset).is_ok();
            offset += payload.len() as u64;
            is_written
        };
        payloads.take_while(is_written).count()
    }

    /// So many bytes; `None` where there are fewer.
    pub(super) fn read(&self, offset: u64, n_bytes: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; n_bytes];
        self.0.read_exact_at(&mut bytes, offset).ok()?;
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    use super::*;

    fn memory_file() -> OwnedFd {
        memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap()
    }

    #[test]
    fn files_on_which_a_read_may_wait_are_refused() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let on_disk = File::open("/proc/self/exe").unwrap();
        for file in [Some(reader.into()), Some(on_disk.into()), None] {
            assert!(ClientFile::try_new(file).is_err());
        }
        assert!(ClientFile::try_new(Some(memory_file())).is_ok());
    }

    #[test]
    fn chunks_are_read_as_they_were_written_and_whole_or_not_at_all() {
        let file = ClientFile::try_new(Some(memory_file())).unwrap();
        assert_eq!(file.write_all([&b"one"[..], b"three"].into_iter()), 2);
        assert_eq!(file.read(3, 5).unwrap(), b"three");
        assert!(file.read(3, 6).is_none() && file.read(u64::MAX, 1).is_none());
        let sealed = memory_file();
        fcntl_add_seals(&sealed, SealFlags::GROW).unwrap();
        assert_eq!(ClientFile::try_new(Some(sealed)).unwrap().write_all([&b"one"[..]].into_iter()), 0);
    }
}
