//! The errors of the engine, by what the caller can do about them.

use std::path::PathBuf;

/// Result of the engine's operations.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;

/// Why the engine could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file of the model folder could not be read.
    #[error("read {}", path.display())]
    Io {
        /// The file that was asked for.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The model folder lacks a file that the engine needs.
    #[error("{} has no {what}", folder.display())]
    MissingFile {
        /// The model folder.
        folder: PathBuf,
        /// The file, or the alternatives, that would have been taken.
        what: String,
    },
    /// The architecture named by `config.json` is not one the engine runs.
    #[error("architecture `{found}` is not supported; supported: {supported}")]
    UnsupportedArchitecture {
        /// What `config.json` names.
        found: String,
        /// The architectures that exist, separated by commas.
        supported: String,
    },
    /// A field of the model's configuration is missing or has a value the engine cannot honor.
    #[error("config.json: `{field}` is {value}; allowed: {allowed}")]
    InvalidConfig {
        /// The field's path inside `config.json`.
        field: String,
        /// The value found, or `missing`.
        value: String,
        /// What the engine takes.
        allowed: String,
    },
    /// A safetensors file is damaged, or a tensor is missing or has the wrong shape.
    #[error("weights: {what}: {reason}")]
    InvalidWeights {
        /// The file or tensor.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The tokenizer cannot be used, or refuses what the request asks of it.
    #[error(transparent)]
    Tokens(#[from] kvik_tokens::TokensError),
    /// A request carries a value the engine cannot honor; other requests are not affected.
    #[error("`{field}` is {value}; allowed: {allowed}")]
    InvalidRequest {
        /// The request's field.
        field: &'static str,
        /// The value given.
        value: String,
        /// What the engine takes.
        allowed: String,
    },
    /// Running sequences hold the blocks that are needed; they come back when those end.
    #[error("{n_blocks} KV blocks are needed and running sequences leave {n_free}")]
    NoRoom {
        /// Blocks needed.
        n_blocks: usize,
        /// Blocks that can be had now.
        n_free: usize,
    },
    /// Other engines hold the memory that is needed, or a limit is too low for it; it was waited for.
    #[error("{n_blocks} KV blocks are needed and the shared memory gave {n_given} in time")]
    NoMemory {
        /// Blocks needed.
        n_blocks: usize,
        /// Blocks that the engine has.
        n_given: usize,
    },
    /// The memory for KV cannot be used: its ledger, its addresses or a limit.
    #[error("KV memory: {0}")]
    Memory(#[source] Box<kvik_memory::MemoryError>),
    /// The device cannot be used: no driver, no such device, or one that the kernels are not made for.
    #[error("{device}: {reason}")]
    NoDevice {
        /// The device that was asked for.
        device: String,
        /// What is missing.
        reason: String,
    },
    /// The device or its compiler refused a call.
    #[error("{call}: {reason}")]
    Device {
        /// The call.
        call: &'static str,
        /// What driver or compiler said.
        reason: String,
    },
    /// The device failed while it computed or copied: nothing that is on it can be trusted, and the engine does nothing more.
    #[error("the device is lost: {reason}")]
    DeviceLost {
        /// The call that failed, and what the driver said.
        reason: String,
    },
    /// The forward pass gave logits that are not numbers; the weights are damaged.
    #[error("the model's logits are not finite at position {position}; the weights are damaged")]
    NotFinite {
        /// The position whose logits were not finite.
        position: usize,
    },
}

impl ModelError {
    /// An [`ModelError::InvalidConfig`] for `field`.
    pub fn config(
        field: impl Into<String>,
        value: impl std::fmt::Display,
        allowed: impl Into<String>,
    ) -> Self {
        Self::InvalidConfig { field: field.into(), value: value.to_string(), allowed: allowed.into() }
    }

    /// An [`ModelError::InvalidRequest`] for `field`.
    pub fn request(field: &'static str, value: impl std::fmt::Display, allowed: impl Into<String>) -> Self {
        Self::InvalidRequest { field, value: value.to_string(), allowed: allowed.into() }
    }

    /// An [`ModelError::InvalidWeights`] for the tensor or file `what`.
    pub fn weights(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::InvalidWeights { what: what.into(), reason: reason.into() }
    }
}
