//! What a controller leaves on disk for the next one: which engines run, and with what they were started.
//!
//! One small file an engine, replaced as a whole. A lock keeps a second controller out; the kernel lets it go with the
//! process, however that ends.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use kvik_runtime::config::variable;
use serde::{Deserialize, Serialize};
use tokio::net::UnixListener;

use crate::error::{EnginesError, Result};
use crate::process::ProcessId;

/// The folder of a controller's state, locked.
#[derive(Debug)]
pub(crate) struct StateFolder {
    path: PathBuf,
    /// Let go when dropped.
    _lock: File,
}

/// An engine that runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EngineRecord {
    pub(crate) name: String,
    pub(crate) process: ProcessId,
    /// Of what it was started with.
    pub(crate) digest: String,
    /// Whether it was put to sleep with its process.
    pub(crate) is_asleep: bool,
}

/// Where the state is kept if it is not said: in the user's folder for such files, or in that of the system.
pub fn default_state_folder() -> PathBuf {
    match variable("XDG_RUNTIME_DIR") {
        Some(folder) => Path::new(&folder).join("kvik/engines"),
        None => PathBuf::from("/run/kvik/engines"),
    }
}

/// The socket at which a controller is asked.
pub(crate) fn socket_path(folder: &Path) -> PathBuf {
    folder.join("control.sock")
}

impl StateFolder {
    /// Makes the folder if it is missing, and locks it.
    ///
    /// # Errors
    /// If it cannot be used, others may write to it, or another controller has it.
    pub(crate) fn lock(path: &Path) -> Result<Self> {
        let folder = path.join("engines");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)
            .map_err(EnginesError::io("make", &folder))?;
        let metadata = fs::metadata(path).map_err(EnginesError::io("read", path))?;
        let user = rustix::process::getuid().as_raw();
        if metadata.uid() != user || metadata.mode() & 0o022 != 0 {
            let source = io::Error::new(io::ErrorKind::PermissionDenied, "another user can write to it");
            return Err(EnginesError::Io { what: "use", path: path.to_owned(), source });
        }
        let file = path.join("lock");
        let mut lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&file)
            .map_err(EnginesError::io("open", &file))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => {
                let pid = fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok());
                return Err(EnginesError::AlreadyRunning { state: path.to_owned(), pid });
            }
            Err(fs::TryLockError::Error(source)) => {
                return Err(EnginesError::Io { what: "lock", path: file, source });
            }
        }
        lock.set_len(0)
            .and_then(|()| writeln!(lock, "{}", std::process::id()))
            .map_err(EnginesError::io("write", &file))?;
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// Listens at its socket; one that an earlier controller has left is removed.
    ///
    /// # Errors
    /// If it cannot be listened at.
    pub(crate) fn listen(&self) -> Result<UnixListener> {
        let path = socket_path(&self.path);
        // The folder is locked: no other controller listens there.
        let _ = fs::remove_file(&path);
        UnixListener::bind(&path).map_err(EnginesError::io("listen at", path))
    }

    /// What the marks of its processes begin with.
    pub(crate) fn mark_prefix(&self) -> String {
        let path = fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone());
        format!("{} ", path.display())
    }

    /// The engines that an earlier controller has left. A file that cannot be read is removed: its process is found by
    /// its mark.
    pub(crate) fn records(&self) -> Vec<EngineRecord> {
        let Ok(entries) = fs::read_dir(self.path.join("engines")) else { return Vec::new() };
        let mut records = Vec::new();
        for path in entries.flatten().map(|entry| entry.path()) {
            let record =
                fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<EngineRecord>(&bytes).ok());
            if let Some(record) = record.filter(|record| path == self.record_path(&record.name)) {
                records.push(record);
            } else {
                tracing::warn!(path = %path.display(), "removed a file of the state folder that cannot be read");
                let _ = fs::remove_file(&path);
            }
        }
        records.sort_by(|left, right| left.name.cmp(&right.name));
        records
    }

    /// Writes down an engine; a reader sees the file as it was or as it is.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn write(&self, record: &EngineRecord) -> Result<()> {
        let path = self.record_path(&record.name);
        let new = self.path.join(format!("{}.new", record.name));
        let text = serde_json::to_vec(record).map_err(|error| EnginesError::Answer(error.to_string()))?;
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&new)
            .map_err(EnginesError::io("write", &new))?;
        file.write_all(&text).map_err(EnginesError::io("write", &new))?;
        fs::rename(&new, &path).map_err(EnginesError::io("write", &path))
    }

    /// Forgets an engine that does not run.
    pub(crate) fn forget(&self, name: &str) {
        // It may be gone.
        let _ = fs::remove_file(self.record_path(name));
    }

    fn record_path(&self, name: &str) -> PathBuf {
        self.path.join("engines").join(format!("{name}.json"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str) -> EngineRecord {
        let process = serde_json::json!({"pid": 1, "start_ticks": 2, "boot_id": "b"});
        let process = serde_json::from_value(process).unwrap();
        EngineRecord { name: name.to_owned(), process, digest: "d".to_owned(), is_asleep: false }
    }

    #[test]
    fn a_folder_has_one_controller() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let held = StateFolder::lock(&path).unwrap();
        let error = StateFolder::lock(&path).unwrap_err();
        let pid = std::process::id();
        assert!(
            matches!(error, EnginesError::AlreadyRunning { pid: Some(other), .. } if other == pid),
            "{error}"
        );
        drop(held);
        StateFolder::lock(&path).unwrap();
    }

    #[test]
    fn records_are_read_again_and_garbage_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateFolder::lock(&folder.path().join("state")).unwrap();
        for name in ["b", "a", "gone"] {
            state.write(&record(name)).unwrap();
        }
        state.forget("gone");
        let engines = state.path.join("engines");
        fs::write(engines.join("c.json"), "{").unwrap();
        // A record under another name is no record of that engine.
        fs::copy(engines.join("a.json"), engines.join("d.json")).unwrap();
        assert_eq!(state.records(), [record("a"), record("b")]);
        for removed in ["c.json", "d.json"] {
            assert!(!engines.join(removed).try_exists().unwrap(), "{removed}");
        }
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let error = StateFolder::lock(folder.path()).unwrap_err().to_string();
        assert!(error.starts_with("use "), "{error}");
    }
}
