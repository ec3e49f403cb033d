//! Why a model of a hub cannot be had, by what its user can do.

use std::path::{Path, PathBuf};

use kvik_types::ByteSize;

/// Why a model is not found or not fetched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// A setting of the hub has a value that it cannot have.
    #[error("`{field}` is {value}; allowed: {allowed}")]
    InvalidConfig {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// The hub has no such repository, revision or file.
    #[error(
        "{hub} has no {name} (404: {reason}); check the name and the revision, or the path if a folder was meant"
    )]
    NotFound {
        /// What was asked for.
        name: String,
        /// The hub.
        hub: String,
        /// What the hub said.
        reason: String,
    },
    /// The hub wants a token, or another one; hubs say this of repositories that do not exist, too.
    #[error(
        "{hub} does not give {name} without a valid token (401); check the name, or the path if a folder was meant, or set HF_TOKEN or `token_file`"
    )]
    Unauthorized {
        /// What was asked for.
        name: String,
        /// The hub.
        hub: String,
    },
    /// The token is known and not allowed to read the repository.
    #[error(
        "{hub} does not give {name} to the owner of this token (403); ask for access at {hub}/{repository}"
    )]
    Forbidden {
        /// What was asked for.
        name: String,
        /// The hub.
        hub: String,
        /// The repository without its revision.
        repository: String,
    },
    /// The model is not in the cache, and fetching is switched off.
    #[error("{name} is no folder and is not in {}, and nothing is fetched (HF_HUB_OFFLINE or `hub.offline`)", cache.display())]
    Offline {
        /// What was asked for.
        name: String,
        /// The cache.
        cache: PathBuf,
    },
    /// The repository lacks files that the engine needs.
    #[error("{name} has no {what}")]
    Incomplete {
        /// The repository and its revision.
        name: String,
        /// What is missing.
        what: String,
    },
    /// A fetched file is not the one that the hub says; it was removed.
    #[error(
        "{file} of {name} was damaged on its way and removed: its checksum is {found} instead of {expected}; try again"
    )]
    Checksum {
        /// The repository and its revision.
        name: String,
        /// The file.
        file: String,
        /// The checksum that the hub says.
        expected: String,
        /// That of what came.
        found: String,
    },
    /// The disk of the cache has too little room.
    #[error("no room in {}: {} are needed{}", folder.display(), ByteSize(*n_bytes), free(*n_free_bytes))]
    DiskFull {
        /// A folder on the disk.
        folder: PathBuf,
        /// Bytes that were to be written.
        n_bytes: u64,
        /// Bytes that there are, where that is known.
        n_free_bytes: Option<u64>,
    },
    /// A file or folder of the cache cannot be used.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The hub cannot be reached or fails; trying again later may help.
    #[error("{operation}: {reason}")]
    Unavailable {
        /// What was tried, as verb and object.
        operation: &'static str,
        /// What the hub or the connection said.
        reason: String,
    },
    /// The process ends; what was fetched is kept for the next attempt.
    #[error("the process ends before the model is fetched")]
    Stopped,
}

impl HubError {
    /// Whether what was asked for is refused, as opposed to work that failed and may be tried again.
    pub fn is_refused_input(&self) -> bool {
        match self {
            Self::InvalidConfig { .. }
            | Self::NotFound { .. }
            | Self::Unauthorized { .. }
            | Self::Forbidden { .. }
            | Self::Offline { .. }
            | Self::Incomplete { .. } => true,
            Self::Checksum { .. }
            | Self::DiskFull { .. }
            | Self::Io { .. }
            | Self::Unavailable { .. }
            | Self::Stopped => false,
        }
    }

    pub(crate) fn unavailable(operation: &'static str, reason: impl std::fmt::Display) -> Self {
        Self::Unavailable { operation, reason: reason.to_string() }
    }

    /// An error of the file system; `n_bytes` were to be written, if any.
    pub(crate) fn io(what: &'static str, path: &Path, source: std::io::Error, n_bytes: u64) -> Self {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        if matches!(source.kind(), StorageFull | QuotaExceeded) {
            let folder = path.parent().unwrap_or(path).to_owned();
            return Self::DiskFull { folder, n_bytes, n_free_bytes: None };
        }
        Self::Io { what, path: path.to_owned(), source }
    }
}

fn free(n_free_bytes: Option<u64>) -> String {
    n_free_bytes.map(|n_bytes| format!(", {} are free", ByteSize(n_bytes))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_by_its_folder_and_what_is_needed() {
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        let error = HubError::io("write", Path::new("/cache/blobs/x"), full, 3 << 30);
        assert_eq!(error.to_string(), "no room in /cache/blobs: 3.0 GiB are needed");
        assert!(!error.is_refused_input());
        let denied = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        let error = HubError::io("write", Path::new("/cache/x"), denied, 1);
        assert_eq!(error.to_string(), "write /cache/x: permission denied");
    }
}
