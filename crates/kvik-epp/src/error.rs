//! Errors: of the picker's own life, and those that data planes get.

/// Result of this crate's operations.
pub type Result<T, E = EppError> = std::result::Result<T, E>;

/// Why a picker could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EppError {
    /// A field of the configuration has a value that it cannot have.
    #[error("`{field}` is {value}; allowed: {allowed}")]
    InvalidConfig {
        /// The field's path.
        field: String,
        /// The value.
        value: String,
        /// What it may be.
        allowed: String,
    },
    /// What chooses workers cannot be started.
    #[error(transparent)]
    Gateway(#[from] kvik_gateway::GatewayError),
    /// The address or the certificate cannot be used.
    #[error(transparent)]
    Runtime(#[from] kvik_runtime::RuntimeError),
}

impl EppError {
    /// Whether the configuration is at fault.
    pub fn is_refused_setting(&self) -> bool {
        match self {
            Self::InvalidConfig { .. } | Self::Gateway(kvik_gateway::GatewayError::InvalidConfig { .. }) => {
                true
            }
            Self::Gateway(_) => false,
            Self::Runtime(error) => error.is_refused_setting(),
        }
    }
}

/// What is wrong with the messages of a data plane; it ends their exchange.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A message that may not come now.
    #[error("{message} came; allowed now: {expected}")]
    Order {
        /// What came.
        message: &'static str,
        /// What could have come.
        expected: &'static str,
    },
    /// Bodies are sent in a way that is not served.
    #[error("`{field}` is {mode}; allowed: FULL_DUPLEX_STREAMED")]
    Mode {
        /// The field of the data plane's configuration.
        field: &'static str,
        /// What it is.
        mode: String,
    },
    /// The data plane does not read answers, so that nothing can be chosen for it.
    #[error("`observability_mode` is true; allowed: false")]
    Observed,
}
