//! The errors of the shared parts.

use std::path::PathBuf;

/// Result of this crate's operations.
pub type Result<T, E = RuntimeError> = std::result::Result<T, E>;

/// Why a service could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// A file could not be read.
    #[error("read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A file of the configuration is not YAML.
    #[error("{}: {reason}", path.display())]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A field of the configuration has a value that it cannot have, or does not exist.
    #[error("{origin}: `{field}` is {value}; allowed: {allowed}")]
    InvalidField {
        /// Where the value comes from.
        origin: String,
        /// The field's path.
        field: String,
        /// The value.
        value: String,
        /// What it may be.
        allowed: String,
    },
    /// An address could not be listened on.
    #[error("listen on {address}")]
    Listen {
        /// The address.
        address: String,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A certificate or key cannot be used.
    #[error("TLS: {0}")]
    Tls(String),
    /// Telemetry could not be set up.
    #[error("telemetry: {0}")]
    Telemetry(String),
}

impl RuntimeError {
    /// Whether what was given is at fault, and not the work.
    pub fn is_refused_setting(&self) -> bool {
        match self {
            Self::InvalidField { .. } | Self::InvalidFile { .. } => true,
            // An address that is none.
            Self::Listen { source, .. } => source.kind() == std::io::ErrorKind::InvalidInput,
            _ => false,
        }
    }
}

/// The text of an error with those of its causes, outermost first, for a receiver that has only the text: the outermost
/// alone often says no more than that a connection failed.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_an_error_ends_with_its_cause() {
        let source = std::io::Error::from(std::io::ErrorKind::AddrInUse);
        let error = RuntimeError::Listen { address: "127.0.0.1:80".to_owned(), source };
        assert_eq!(with_causes(&error), "listen on 127.0.0.1:80: address in use");
    }
}
