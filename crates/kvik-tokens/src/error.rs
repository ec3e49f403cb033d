//! The errors of this crate, by what the caller can do about them.

use std::path::PathBuf;

/// Result of this crate's operations.
pub type Result<T, E = TokensError> = std::result::Result<T, E>;

/// Why there are no tokens, or no text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokensError {
    /// A file of the model folder could not be read.
    #[error("read {}", path.display())]
    Io {
        /// The file that was asked for.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The model folder lacks a file that a tokenizer needs.
    #[error("{} has no {what}", folder.display())]
    MissingFile {
        /// The model folder.
        folder: PathBuf,
        /// The file.
        what: String,
    },
    /// `tokenizer.json` or the chat template cannot be used.
    #[error("tokenizer: {0}")]
    InvalidTokenizer(String),
    /// A request carries a value that cannot be honored; other requests are not affected.
    #[error("`{field}` is {value}; allowed: {allowed}")]
    InvalidRequest {
        /// The request's field.
        field: &'static str,
        /// The value given.
        value: String,
        /// What is taken.
        allowed: String,
    },
    /// There is no tokenizer for the model; it is looked for again after some seconds.
    #[error("model `{model}` has no tokenizer; looked in: {searched}")]
    NoTokenizer {
        /// The model asked for.
        model: String,
        /// Where its tokenizer would have been taken from.
        searched: String,
    },
    /// The tokenizer of the model cannot be used; it is tried again after some seconds.
    #[error("the tokenizer of model `{model}` cannot be used: {reason}")]
    BrokenTokenizer {
        /// The model asked for.
        model: String,
        /// What is wrong with it.
        reason: String,
    },
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
    /// A thread of the pool cannot be started.
    #[error("start a tokenizer thread")]
    Thread(#[source] std::io::Error),
    /// The pool ended before the request had its turn.
    #[error("the tokenizer pool has stopped")]
    Stopped,
}

impl TokensError {
    /// An [`TokensError::InvalidRequest`] for `field`.
    pub fn request(field: &'static str, value: impl std::fmt::Display, allowed: impl Into<String>) -> Self {
        Self::InvalidRequest { field, value: value.to_string(), allowed: allowed.into() }
    }
}
