//! What can go wrong, by what the caller can do about it.

/// Result of this crate's operations.
pub type Result<T, E = IndexerError> = std::result::Result<T, E>;

/// Why an operation of the index failed. A prompt that no worker has is an answer, not an error.
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
    /// The prompt cannot be turned into tokens.
    #[error(transparent)]
    Tokens(#[from] kvik_tokens::TokensError),
    /// An address cannot be listened on.
    #[error(transparent)]
    Runtime(#[from] kvik_runtime::RuntimeError),
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

/// Longest part of a refused value that is repeated.
const MAX_SHOWN_CHARS: usize = 80;

impl IndexerError {
    /// The same for a field of something that is itself a field.
    pub(crate) fn below(self, parent: &str) -> Self {
        match self {
            Self::Invalid { field, value, allowed } => {
                Self::Invalid { field: format!("{parent}.{field}"), value, allowed }
            }
            error => error,
        }
    }

    pub(crate) fn invalid(field: &str, value: impl std::fmt::Display, allowed: &str) -> Self {
        let shown: String = value.to_string().chars().take(MAX_SHOWN_CHARS).collect();
        // What is empty or has spaces would not be seen without marks.
        let is_plain = !shown.is_empty() && !shown.contains(char::is_whitespace);
        let value = if is_plain { shown } else { format!("`{shown}`") };
        Self::Invalid { field: field.to_owned(), value, allowed: allowed.to_owned() }
    }
}
