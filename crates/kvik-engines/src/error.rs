//! Why the controller cannot do what it was asked for.

use std::io;
use std::path::PathBuf;

/// Result of this crate's operations.
pub type Result<T, E = EnginesError> = std::result::Result<T, E>;

/// Why engines could not be configured, started or reached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnginesError {
    /// The file is not YAML, or not of one of the two forms.
    #[error("{}: {reason}", path.display())]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A field has a value that it cannot have; nothing was changed.
    #[error("`{field}` is {value}; allowed: {allowed}")]
    InvalidField {
        /// The field's path.
        field: String,
        /// The value.
        value: String,
        /// What it may be.
        allowed: String,
    },
    /// A file or folder cannot be used.
    #[error("{what} {}", path.display())]
    Io {
        /// What was tried, such as `read`.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// Another controller has the state folder.
    #[error("a controller{} runs with the state folder {}; stop it with `kvik engines stop`, or choose another folder with --state", pid.map_or(String::new(), |pid| format!(" (process {pid})")), state.display())]
    AlreadyRunning {
        /// The state folder.
        state: PathBuf,
        /// The other controller's process, if its file says so.
        pid: Option<u32>,
    },
    /// No controller answers at the state folder.
    #[error("no controller runs with the state folder {}; start one with `kvik engines up`, or name its folder with --state", state.display())]
    NotRunning {
        /// The state folder.
        state: PathBuf,
    },
    /// An address that an engine should listen on has another listener.
    #[error("`{field}` is {port}, which another process listens on at {host}; allowed: a port that is free")]
    PortInUse {
        /// The field's path.
        field: String,
        /// The host.
        host: String,
        /// The port.
        port: u16,
    },
    /// The controller refused what it was asked for.
    #[error("{message}")]
    Refused {
        /// Why.
        message: String,
    },
    /// The controller's answer cannot be read.
    #[error("the controller's answer cannot be read: {0}")]
    Answer(String),
    /// The settings of the gateway cannot be read.
    #[error(transparent)]
    Runtime(#[from] kvik_runtime::RuntimeError),
    /// The gateway cannot be started.
    #[error(transparent)]
    Gateway(#[from] kvik_gateway::GatewayError),
    /// A group of the ledger cannot be set.
    #[error(transparent)]
    Memory(#[from] kvik_memory::MemoryError),
    /// The client for engines cannot be made.
    #[error(transparent)]
    Client(#[from] kvik_proto::client::ClientError),
}

impl EnginesError {
    /// Whether what was given is at fault, and not the work.
    pub fn is_refused_setting(&self) -> bool {
        match self {
            Self::InvalidFile { .. } | Self::InvalidField { .. } => true,
            Self::Gateway(error) => matches!(error, kvik_gateway::GatewayError::InvalidConfig { .. }),
            Self::Runtime(error) => error.is_refused_setting(),
            _ => false,
        }
    }

    pub(crate) fn invalid(
        field: impl Into<String>,
        value: impl std::fmt::Display,
        allowed: impl Into<String>,
    ) -> Self {
        Self::InvalidField { field: field.into(), value: value.to_string(), allowed: allowed.into() }
    }

    pub(crate) fn io(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { what, path, source }
    }
}
