//! Folders for data that ends with the process.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process;

/// Names that are tried: another container may use the same process id, and a kept folder keeps its name.
const MAX_NAMES: usize = 100;

/// A folder in the system's temporary folder, readable by its owner alone; removed when dropped, unless it is kept.
///
/// The process holds a lock on it, which ends with the process: what a killed process left behind is removed by the next one that
/// makes such a folder, also in another container and under the same process id.
#[derive(Debug)]
pub(crate) struct ScratchFolder {
    path: PathBuf,
    is_kept: bool,
    _lock: File,
}

impl ScratchFolder {
    /// Makes a folder for `purpose`, one word.
    ///
    /// # Errors
    /// If the folder cannot be made or locked.
    pub(crate) fn create(purpose: &str, is_kept: bool) -> io::Result<Self> {
        Self::create_in(&std::env::temp_dir(), purpose, is_kept)
    }

    /// As [`Self::create`], in another folder.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub(crate) fn create_in(parent: &Path, purpose: &str, is_kept: bool) -> io::Result<Self> {
        let prefix = format!("kvik-{purpose}-");
        remove_abandoned(parent, &prefix);
        // A kept folder does not have the form of name that the next process removes.
        let mark = if is_kept { "kept-" } else { "" };
        let name = format!("{prefix}{mark}{}", process::id());
        for number in 0..MAX_NAMES {
            let path = parent.join(if number == 0 { name.clone() } else { format!("{name}-{number}") });
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            }
            // Another process may take it for an abandoned one before it is locked.
            if let Some(lock) = lock_folder(&path)? {
                return Ok(Self { path, is_kept, _lock: lock });
            }
        }
        let taken = format!("{name} and {} names more are taken in {}", MAX_NAMES - 1, parent.display());
        Err(io::Error::new(io::ErrorKind::AlreadyExists, taken))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        if !self.is_kept {
            // What cannot be removed now is removed by the next process.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Locks a folder; none while another process holds it, or where it was removed meanwhile.
///
/// # Errors
/// If it cannot be opened or locked.
fn lock_folder(path: &Path) -> io::Result<Option<File>> {
    let locked = File::open(path).and_then(|folder| match folder.try_lock() {
        Ok(()) => {
            let (found, locked) = (fs::symlink_metadata(path)?, folder.metadata()?);
            Ok(((found.dev(), found.ino()) == (locked.dev(), locked.ino())).then_some(folder))
        }
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    });
    match locked {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        locked => locked,
    }
}

/// Removes the folders of processes that are gone.
fn remove_abandoned(parent: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let rest = name.to_str().and_then(|name| name.strip_prefix(prefix));
        // The process id, and the number of a name that was taken.
        let has_process_id = rest.is_some_and(|rest| rest.split('-').all(|part| part.parse::<u32>().is_ok()));
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if has_process_id
            && is_folder
            && let Ok(Some(_lock)) = lock_folder(&entry.path())
        {
            // Another user's folder stays.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_ends_with_its_owner_unless_it_is_kept() {
        let parent = tempfile::tempdir().unwrap();
        let folder = ScratchFolder::create_in(parent.path(), "up", false).unwrap();
        let path = folder.path().to_owned();
        fs::write(path.join("segment"), b"KV").unwrap();
        drop(folder);
        assert!(!path.is_dir());
        let kept = ScratchFolder::create_in(parent.path(), "up", true).unwrap();
        let path = kept.path().to_owned();
        drop(kept);
        // As after another start with the same process id.
        drop(ScratchFolder::create_in(parent.path(), "up", true).unwrap());
        drop(ScratchFolder::create_in(parent.path(), "up", false).unwrap());
        assert!(path.is_dir());
    }

    #[test]
    fn folders_of_dead_processes_are_removed_and_others_stay() {
        let parent = tempfile::tempdir().unwrap();
        let abandoned = parent.path().join("kvik-up-4194305");
        // Its process may have another process id here: that of another container, or one that is not used here.
        let owned = parent.path().join("kvik-up-4194306");
        let foreign = parent.path().join("kvik-up-notes");
        for path in [&abandoned, &owned, &foreign] {
            fs::create_dir(path).unwrap();
        }
        let owner = lock_folder(&owned).unwrap();
        assert!(owner.is_some());
        drop(ScratchFolder::create_in(parent.path(), "up", false).unwrap());
        assert!(!abandoned.is_dir() && owned.is_dir() && foreign.is_dir());
        drop(owner);
        drop(ScratchFolder::create_in(parent.path(), "up", false).unwrap());
        assert!(!owned.is_dir());
    }

    #[test]
    fn a_folder_that_a_killed_process_with_the_same_id_left_is_replaced() {
        let parent = tempfile::tempdir().unwrap();
        let left = parent.path().join(format!("kvik-up-{}", process::id()));
        fs::create_dir(&left).unwrap();
        fs::write(left.join("segment"), b"KV").unwrap();
        let folder = ScratchFolder::create_in(parent.path(), "up", false).unwrap();
        assert_eq!(folder.path(), left);
        assert!(!left.join("segment").try_exists().unwrap());
        // One that is in use under the same process id, as that of another container, stays.
        let other = ScratchFolder::create_in(parent.path(), "up", false).unwrap();
        assert!(other.path() != left && left.is_dir());
        fs::create_dir(parent.path().join(format!("kvik-up-{}-7", process::id()))).unwrap();
        drop((folder, other));
        drop(ScratchFolder::create_in(parent.path(), "up", false).unwrap());
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
