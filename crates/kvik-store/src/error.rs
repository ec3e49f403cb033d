//! What can go wrong with the store, by what the caller can do about it.

use std::fmt::Display;
use std::io;

use kvik_tier::TierError;

/// The result of this crate.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// An error of the store.
///
/// Only putting one together fails. Afterwards misses, full tiers, failing tiers and waits that end are values: the
/// cache may always give less, and never takes the engine down.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
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
    /// A tier refused; it is used as it is.
    #[error(transparent)]
    Tier(#[from] TierError),
    /// The operating system gave no thread.
    #[error("start thread {name}: {source}")]
    Thread {
        /// What it was to be called.
        name: String,
        /// Why there is none.
        source: io::Error,
    },
}

impl StoreError {
    /// A value that is not allowed.
    pub fn invalid(field: &'static str, value: &dyn Display, allowed: impl Into<String>) -> Self {
        Self::Invalid { field, value: value.to_string(), allowed: allowed.into() }
    }
}
