//! What can go wrong with a codec, by what the caller can do about it.

use std::fmt::Display;

/// The result of this crate.
pub type Result<T, E = CodecError> = std::result::Result<T, E>;

/// An error of a codec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
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
    /// The bytes are not what a codec wrote: the chunk is lost.
    #[error("coded bytes are wrong: {what}")]
    Corrupt {
        /// What does not hold.
        what: &'static str,
    },
}

impl CodecError {
    /// A value that is not allowed.
    pub(crate) fn invalid(field: &'static str, value: &dyn Display, allowed: impl Into<String>) -> Self {
        Self::Invalid { field, value: value.to_string(), allowed: allowed.into() }
    }

    /// Bytes that no codec wrote.
    pub(crate) fn corrupt(what: &'static str) -> Self {
        Self::Corrupt { what }
    }
}
