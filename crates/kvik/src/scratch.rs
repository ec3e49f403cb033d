//! Folders for data that ends with the process.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process;

/// A folder in the system's temporary folder, readable by its owner alone; removed when dropped, unless it is kept.
///
/// Its name carries the process id: what a killed process left behind is removed by the next one that makes such a folder.
#[derive(Debug)]
pub(crate) struct ScratchFolder {
    path: PathBuf,
    is_kept: bool,
}

impl ScratchFolder {
    /// Makes a folder for `purpose`, one word.
    ///
    /// # Errors
    /// If the folder exists or cannot be made.
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
        let path = parent.join(format!("{prefix}{mark}{}", process::id()));
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { path, is_kept })
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

/// Removes the folders of processes that are gone.
fn remove_abandoned(parent: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let process_id = name.to_str().and_then(|name| name.strip_prefix(prefix)?.parse::<u32>().ok());
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if let Some(process_id) = process_id.filter(|_| is_folder)
            && !Path::new("/proc").join(process_id.to_string()).is_dir()
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
        drop(ScratchFolder::create_in(parent.path(), "up", false).unwrap());
        assert!(path.is_dir());
    }

    #[test]
    fn folders_of_dead_processes_are_removed_and_others_stay() {
        let parent = tempfile::tempdir().unwrap();
        // Above the largest process id that Linux gives.
        let abandoned = parent.path().join("kvik-up-4194305");
        let foreign = parent.path().join("kvik-up-notes");
        for path in [&abandoned, &foreign] {
            fs::create_dir(path).unwrap();
        }
        drop(ScratchFolder::create_in(parent.path(), "up", false).unwrap());
        assert!(!abandoned.is_dir() && foreign.is_dir());
    }
}
