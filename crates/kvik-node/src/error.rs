//! What can go wrong between a daemon and its clients.

use kvik_store::StoreError;
use kvik_tier::TierError;

/// The result of this crate's functions.
pub type Result<T, E = NodeError> = std::result::Result<T, E>;

/// An error, by what its receiver can do about it.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The operating system refused something: try again, or look at the machine.
    #[error("{action}")]
    Io {
        /// What was tried.
        action: String,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A value that is not allowed: correct it.
    #[error("`{field}` is {value}; allowed: {allowed}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        allowed: String,
    },
    /// The address of a remote tier is wrong: correct it.
    #[error("`store.remote` is {url}: {reason}")]
    InvalidRemote {
        /// The address, without its login.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The settings of a store are not allowed: correct them.
    #[error("open the KV store: {reason}")]
    InvalidStore {
        /// Which one, and what it may be.
        reason: String,
    },
    /// A store cannot be opened: look at the machine, its disks and its files.
    #[error("open the KV store: {reason}")]
    Open {
        /// What it said.
        reason: String,
    },
    /// An address cannot be listened on, or a file cannot be read.
    #[error(transparent)]
    Runtime(#[from] kvik_runtime::RuntimeError),
    /// The daemon does not serve this client, and says why.
    #[error("the store daemon refused: {reason}")]
    Refused {
        /// Its words.
        reason: String,
    },
    /// The daemon is gone or broken: go on without it, and attach again.
    #[error("the store daemon is gone: {reason}")]
    Gone {
        /// How that was noticed.
        reason: &'static str,
    },
    /// Another daemon takes over from the one that was asked: attach again, and ask again.
    #[error("another store daemon takes over")]
    Moving,
    /// One daemon could not take over from another, which goes on.
    #[error("take over: {reason}")]
    TakeOver {
        /// Why not.
        reason: String,
    },
    /// Shared memory could not be mapped or used.
    #[error("use shared memory")]
    Memory(#[from] TierError),
    /// The store refuses a format or a setting.
    #[error("use the store")]
    Store(#[from] StoreError),
}

impl NodeError {
    pub(crate) fn io(action: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }

    /// A store that could not be opened, because of a setting or of something else.
    pub(crate) fn opening(error: impl Into<StoreError>) -> Self {
        Self::opening_with(error, "")
    }

    /// As [`Self::opening`], with `what` before the words of the error.
    pub(crate) fn opening_with(error: impl Into<StoreError>, what: &str) -> Self {
        let error = error.into();
        let reason = format!("{what}{error}");
        match error {
            StoreError::Invalid { .. } | StoreError::Tier(TierError::Invalid { .. }) => {
                Self::InvalidStore { reason }
            }
            _ => Self::Open { reason },
        }
    }

    /// Whether a setting is the reason, so that the same call fails until it is corrected.
    pub fn is_refused_setting(&self) -> bool {
        match self {
            Self::Invalid { .. } | Self::InvalidRemote { .. } | Self::InvalidStore { .. } => true,
            Self::Store(error) => {
                matches!(error, StoreError::Invalid { .. } | StoreError::Tier(TierError::Invalid { .. }))
            }
            Self::Memory(error) => matches!(error, TierError::Invalid { .. }),
            Self::Runtime(error) => error.is_refused_setting(),
            Self::Io { .. }
            | Self::Open { .. }
            | Self::Refused { .. }
            | Self::Gone { .. }
            | Self::Moving
            | Self::TakeOver { .. } => false,
        }
    }

    /// Its text with those of its causes, for a receiver that has only the text.
    pub fn with_causes(&self) -> String {
        kvik_runtime::error::with_causes(self)
    }

    pub(crate) fn invalid(field: &'static str, value: &impl ToString, allowed: impl Into<String>) -> Self {
        Self::Invalid { field, value: value.to_string(), allowed: allowed.into() }
    }
}
