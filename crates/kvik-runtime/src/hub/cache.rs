//! Fetched models on disk, in the layout of `huggingface_hub`.
//!
//! Below the cache, a repository has a folder `models--OWNER--NAME`: `blobs/ETAG` are contents, `snapshots/COMMIT/FILE` are
//! links to them, and `refs/REVISION` has the commit of a revision. A blob grows as `ETAG.incomplete`. The lock of a blob is
//! below `.locks`, where `huggingface_hub` takes it too.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::error::HubError;
use super::repository::{Repository, is_word};

/// What the engine needs beside weights.
pub(super) const NEEDED_FILES: [&str; 2] = ["config.json", "tokenizer.json"];
/// The weights of a model that is not split.
pub(super) const SINGLE_WEIGHTS: &str = "model.safetensors";
/// The list of the files that weights are split into.
pub(super) const WEIGHTS_INDEX: &str = "model.safetensors.index.json";
/// Longest list of weights that is read; one takes some 100 bytes a tensor.
const MAX_INDEX_BYTES: u64 = 100_000_000;
/// Time between two looks at a lock that another process holds.
const LOCK_PAUSE: Duration = Duration::from_millis(100);

/// The folders of one repository in a cache.
#[derive(Debug)]
pub(super) struct RepositoryCache {
    folder: PathBuf,
    locks: PathBuf,
}

/// The right to write a blob; ends with its owner, also by its death.
#[derive(Debug)]
pub(super) struct BlobLock {
    _file: File,
}

#[derive(Deserialize)]
struct WeightsIndex {
    weight_map: std::collections::BTreeMap<String, String>,
}

impl RepositoryCache {
    pub(super) fn new(cache: &Path, repository: &Repository) -> Self {
        let name = format!("models--{}", repository.name().replace('/', "--"));
        Self { folder: cache.join(&name), locks: cache.join(".locks").join(name) }
    }

    /// The snapshot of a revision, if it has all that the engine needs.
    pub(super) fn find(&self, revision: &str) -> Option<PathBuf> {
        let named = fs::read_to_string(self.reference(revision)).ok();
        let named = named.map(|commit| commit.trim().to_owned()).filter(|commit| is_word(commit));
        // A commit is its own name.
        let snapshot = self.snapshot(named.as_deref().unwrap_or(revision));
        is_complete(&snapshot).then_some(snapshot)
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// Where a blob grows.
    pub(super) fn incomplete(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(format!("{etag}.incomplete"))
    }

    /// Makes the folders of a snapshot.
    pub(super) fn make_folders(&self, commit: &str) -> Result<(), HubError> {
        let folders = [self.snapshot(commit), self.folder.join("blobs"), self.folder.join("refs")];
        folders.iter().chain([&self.locks]).try_for_each(|folder| {
            fs::create_dir_all(folder).map_err(|source| HubError::io("make", folder, source, 0))
        })
    }

    /// Waits for the right to write a blob.
    pub(super) async fn lock(&self, etag: &str) -> Result<BlobLock, HubError> {
        let path = self.locks.join(format!("{etag}.lock"));
        let opened = File::options().create(true).truncate(false).write(true).open(&path);
        let file = opened.map_err(|source| HubError::io("open", &path, source, 0))?;
        let mut has_told = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(BlobLock { _file: file }),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(source)) => return Err(HubError::io("lock", &path, source, 0)),
            }
            if !has_told {
                tracing::info!(lock = %path.display(), "another process fetches the same file; waiting for it");
                has_told = true;
            }
            tokio::time::sleep(LOCK_PAUSE).await;
        }
    }

    /// Lets a blob appear as a file of a snapshot.
    pub(super) fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), HubError> {
        let path = self.snapshot(commit).join(file);
        let target = Path::new("../../blobs").join(etag);
        let linked = match std::os::unix::fs::symlink(&target, &path) {
            // Another process was first, or a blob was removed and its link was not.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && !path.is_file() => {
                fs::remove_file(&path).and_then(|()| std::os::unix::fs::symlink(&target, &path))
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        };
        linked.map_err(|source| HubError::io("link", &path, source, 0))
    }

    /// Notes the commit of a revision.
    pub(super) fn refer(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if revision == commit {
            return Ok(());
        }
        let path = self.reference(revision);
        // Readers see the old commit or the new one, never half of one.
        let beside = self.folder.join("refs").join(format!(".{revision}.{}", std::process::id()));
        let written = fs::write(&beside, commit).and_then(|()| fs::rename(&beside, &path));
        written.map_err(|source| HubError::io("write", &path, source, commit.len() as u64))
    }

    fn reference(&self, revision: &str) -> PathBuf {
        self.folder.join("refs").join(revision)
    }
}

/// The files that the list of weights in a folder names, each a name without folders.
pub(super) fn weight_files(folder: &Path) -> Result<BTreeSet<String>, String> {
    let path = folder.join(WEIGHTS_INDEX);
    let n_bytes = fs::metadata(&path).map_err(|error| error.to_string())?.len();
    if MAX_INDEX_BYTES < n_bytes {
        return Err(format!("{n_bytes} bytes; allowed: at most {MAX_INDEX_BYTES}"));
    }
    let bytes = fs::read(&path).map_err(|error| error.to_string())?;
    let index: WeightsIndex = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    let files: BTreeSet<String> = index.weight_map.into_values().collect();
    match files.iter().find(|file| !is_word(file)) {
        Some(file) => Err(format!("it names `{file}`; allowed: files beside it")),
        None => Ok(files),
    }
}

/// Whether a snapshot has all that the engine needs. Weights are fetched last: what else the repository has is there then.
fn is_complete(snapshot: &Path) -> bool {
    let has = |file: &str| snapshot.join(file).is_file();
    let has_weights = || {
        has(SINGLE_WEIGHTS)
            || weight_files(snapshot)
                .is_ok_and(|files| !files.is_empty() && files.iter().all(|file| has(file)))
    };
    NEEDED_FILES.iter().all(|file| has(file)) && has_weights()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_found_by_branch_and_by_commit_once_its_weights_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let repository: Repository = "owner/name".parse().unwrap();
        let cache = RepositoryCache::new(folder.path(), &repository);
        cache.make_folders("c0ffee").unwrap();
        let snapshot = folder.path().join("models--owner--name/snapshots/c0ffee");
        let write = |file: &str, text: &str| fs::write(snapshot.join(file), text).unwrap();
        cache.refer("main", "c0ffee").unwrap();
        for file in NEEDED_FILES {
            write(file, "{}");
        }
        assert_eq!(cache.find("main"), None);
        write(WEIGHTS_INDEX, r#"{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}"#);
        write("1.safetensors", "");
        assert_eq!(cache.find("main"), None);
        write("2.safetensors", "");
        assert_eq!(cache.find("main").as_ref(), Some(&snapshot));
        assert_eq!(cache.find("c0ffee").as_ref(), Some(&snapshot));
        assert_eq!(cache.find("other"), None);
        write(WEIGHTS_INDEX, r#"{"weight_map": {"a": "../../escape"}}"#);
        assert_eq!(cache.find("main"), None);
        assert!(weight_files(&snapshot).unwrap_err().contains("../../escape"));
    }

    #[test]
    fn a_link_whose_blob_is_gone_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = RepositoryCache::new(folder.path(), &"owner/name".parse().unwrap());
        cache.make_folders("c").unwrap();
        cache.link("c", "config.json", "gone").unwrap();
        fs::write(cache.blob("there"), "text").unwrap();
        for _ in 0..2 {
            cache.link("c", "config.json", "there").unwrap();
            assert_eq!(fs::read_to_string(cache.snapshot("c").join("config.json")).unwrap(), "text");
        }
    }
}
