//! What can go wrong with a tier, by what the caller can do about it.

use std::fmt::Display;
use std::io;
use std::sync::Arc;

/// The result of this crate.
pub type Result<T, E = TierError> = std::result::Result<T, E>;

/// An error of a tier.
///
/// A miss, a full tier and a tier that is not asked because it fails are none of these: they are outcomes.
/// Errors are cheap to clone, because one failure often is the outcome of a whole batch.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// A value is outside of what is allowed: correct it.
    #[error("`{field}` is {value}; allowed: {allowed}")]
    Invalid {
        /// The setting or argument.
        field: &'static str,
        /// What was given.
        value: String,
        /// What would have been taken.
        allowed: String,
    },
    /// The operating system refused; trying again may help, going on without this tier always does.
    #[error("{action}: {source}")]
    Io {
        /// What was tried, verb and object.
        action: String,
        /// Why it failed.
        source: Arc<io::Error>,
    },
    /// The server behind a remote tier refused, failed or did not answer in time.
    #[error("{action}: {reason}")]
    Remote {
        /// What was tried, verb and object.
        action: String,
        /// The client library's words.
        reason: String,
        /// Whether the same call may succeed later without intervention.
        is_transient: bool,
    },
}

impl TierError {
    /// A value that is not allowed.
    pub fn invalid(field: &'static str, value: &dyn Display, allowed: impl Into<String>) -> Self {
        Self::Invalid { field, value: value.to_string(), allowed: allowed.into() }
    }

    /// A failure of the operating system while doing `action`.
    pub fn io(action: impl Into<String>, source: io::Error) -> Self {
        Self::Io { action: action.into(), source: Arc::new(source) }
    }

    /// A failure of a remote server while doing `action`.
    pub fn remote(action: impl Into<String>, reason: &dyn Display, is_transient: bool) -> Self {
        Self::Remote { action: action.into(), reason: reason.to_string(), is_transient }
    }

    /// Whether the same call may succeed later without intervention.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Invalid { .. } => false,
            Self::Io { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::Interrupted | io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
            ),
            Self::Remote { is_transient, .. } => *is_transient,
        }
    }
}
