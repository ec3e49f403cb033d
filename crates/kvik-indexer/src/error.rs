//! What can go wrong, by what the caller can do about it.

/// Result of this crate's operations.
pub type Result<T, E = IndexerError> = std::result::Result<T, E>;

/// Why an operation of the index failed. A prompt that nobody has is an answer, not an error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexerError {
    /// A field of the configuration or of a request has a value that it cannot have.
    #[error("`{field}` is {value}; allowed: {allowed}")]
    Invalid {
        /// The field's path.
        field: String,
        /// The value, shortened.
        value: String,
        /// What it may be.
        allowed: String,
    },
    /// The index has no room for another source; see its bounds.
    #[error(transparent)]
    Index(#[from] kvik_index::holders::IndexError),
    /// The server that keeps the index cannot be reached or refuses; try again later. The request goes on
    /// without the index.
    #[error("{operation}: {reason}")]
    Unavailable {
        /// What was tried, as verb and object.
        operation: &'static str,
        /// What the server or the connection said.
        reason: String,
    },
}
