//! The one error type of the crate.

use std::fmt::Display;

use crate::dtype::Dtype;

/// Result of this crate's operations.
pub type Result<T, E = TypesError> = std::result::Result<T, E>;

/// Why a value could not be built, parsed, hashed or converted.
///
/// Nothing is half applied: a function that returns one of these has left its outputs as they were.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TypesError {
    /// A value given by the caller is outside of what is allowed.
    #[error("`{field}` is {value}; allowed: {allowed}")]
    InvalidValue {
        /// What the value was given for.
        field: &'static str,
        /// The value as it was given.
        value: String,
        /// What would have been taken.
        allowed: String,
    },
    /// A buffer does not have the length that its layout and shape ask for.
    #[error("`{field}` has {found} bytes; allowed: exactly {expected}")]
    BufferSize {
        /// Which buffer.
        field: &'static str,
        /// Its length in bytes.
        found: usize,
        /// The length in bytes that it must have.
        expected: usize,
    },
    /// The two layouts hold different things, so that no copy can turn one into the other.
    #[error("{source_layout} cannot become {dest_layout}: {reason}")]
    IncompatibleLayouts {
        /// The layout that was to be read.
        source_layout: String,
        /// The layout that was to be written.
        dest_layout: String,
        /// Why they do not fit.
        reason: &'static str,
    },
    /// Elements of one type cannot be turned into elements of the other without a scale.
    #[error("{from} elements cannot become {to}; allowed: equal types, or any two of f32, f16 and bf16")]
    UnsupportedDtypeConversion {
        /// The element type of the source.
        from: Dtype,
        /// The element type of the destination.
        to: Dtype,
    },
    /// The engine's hash depends on more than the values given, so it can be carried but not computed.
    #[error("the engine's hash cannot be recomputed from values: {reason}")]
    NotReproducible {
        /// What else it depends on.
        reason: String,
    },
    /// Stored bytes are not what was written; a reader treats this as a miss.
    #[error("corrupt KV frame: `{field}` is {value}; allowed: {allowed}")]
    Corrupt {
        /// The part of the frame that is wrong.
        field: &'static str,
        /// What was found there.
        value: String,
        /// What would have been right.
        allowed: String,
    },
}

impl TypesError {
    pub(crate) fn invalid(field: &'static str, value: &dyn Display, allowed: impl Into<String>) -> Self {
        Self::InvalidValue { field, value: value.to_string(), allowed: allowed.into() }
    }

    pub(crate) fn corrupt(field: &'static str, value: &dyn Display, allowed: impl Into<String>) -> Self {
        Self::Corrupt { field, value: value.to_string(), allowed: allowed.into() }
    }
}
