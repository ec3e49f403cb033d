//! How a value of the configuration is refused.

use crate::error::{GatewayError, Result};

/// Largest number in the configuration: milliseconds of decades, bytes of a terabyte.
pub(super) const MAX_VALUE: u64 = 1 << 40;

/// Refuses `value` of `field` unless it `holds`.
pub(super) fn check(holds: bool, field: &str, value: impl std::fmt::Display, allowed: &str) -> Result<()> {
    if holds {
        return Ok(());
    }
    Err(GatewayError::InvalidConfig {
        field: field.to_owned(),
        value: value.to_string(),
        allowed: allowed.to_owned(),
    })
}
