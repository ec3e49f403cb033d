//! Why a coordinator cannot run.

use kvik_proto::client::ClientError;
use kvik_runtime::RuntimeError;

/// Result of this crate's operations.
pub type Result<T, E = CoordinatorError> = std::result::Result<T, E>;

/// Why a coordinator cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CoordinatorError {
    /// A field of the configuration has a value that it cannot have.
    #[error("`{field}` is {value}; allowed: {allowed}")]
    InvalidConfig {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// The address cannot be listened on, or a certificate or key cannot be used.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    /// The TLS towards other coordinators or etcd cannot be used.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The file with etcd's password, or with the pod's namespace, cannot be read.
    #[error("read {}: {source}", path.display())]
    Io {
        /// The file.
        path: std::path::PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
}
