//! What a listener allows its clients.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// Longest time that can be configured: a day.
const MAX_MS: u64 = 86_400_000;
/// More connections than one process can have.
const MAX_CONNECTIONS: usize = 1_000_000;
/// Smallest budget for bodies: a few prompts.
const MIN_BODY_BYTES: usize = 1 << 20;

/// The limits of one listener; the same for every role. They take effect at the start only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ListenLimits {
    /// Connections open at a time, 1 to 1 000 000. When a client comes on top, the connections that have had no
    /// request for the longest time are closed, then those whose request body has been arriving for the
    /// longest time; while every connection has a request that runs, new clients wait. Default: 8192.
    pub max_connections: usize,
    /// Time for a TLS handshake. Default: 10 000 ms.
    pub handshake_ms: u64,
    /// Time from the first byte of a request to the end of its head, and from a connection's start to its first
    /// byte. Default: 15 000 ms.
    pub header_ms: u64,
    /// Time from the end of a request's head to the end of its body; then 408. Default: 60 000 ms.
    pub body_ms: u64,
    /// Bytes of request bodies that are arriving, all together; a request beyond is refused with 503. Bodies
    /// above 64 KiB have three quarters of it, so that small ones are read while large ones fill the rest.
    /// Default: 268 435 456 bytes (256 MiB).
    pub max_body_bytes_in_flight: usize,
    /// Time without a request after which a connection is closed. Default: 75 000 ms.
    pub idle_ms: u64,
    /// Time that a client which does not read may block a write; then its connection is closed. Default: 60 000 ms.
    pub write_stall_ms: u64,
}

/// A limit that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidLimit {
    /// Path of the field.
    pub field: &'static str,
    /// The value given.
    pub value: String,
    /// What it may be.
    pub allowed: &'static str,
}

/// Limits of one answer, as an extension of its response; they hold whether or not its body is polled. After
/// the `deadline`, or `max_stall` after the last byte that the client took, a connection whose client does not
/// read is closed, and the body is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnswerLimits {
    /// When the whole answer must have been taken.
    pub deadline: Instant,
    /// Longest time that a write may be blocked; the listener's limit holds too.
    pub max_stall: Duration,
}

impl Default for ListenLimits {
    fn default() -> Self {
        Self {
            max_connections: 8192,
            handshake_ms: 10_000,
            header_ms: 15_000,
            body_ms: 60_000,
            max_body_bytes_in_flight: 256 << 20,
            idle_ms: 75_000,
            write_stall_ms: 60_000,
        }
    }
}

impl ListenLimits {
    /// Checks every value; fields are named as parts of `limits`.
    ///
    /// # Errors
    /// The first value that is not allowed.
    pub fn validate(&self) -> Result<(), InvalidLimit> {
        let times = [
            ("limits.handshake_ms", self.handshake_ms),
            ("limits.header_ms", self.header_ms),
            ("limits.body_ms", self.body_ms),
            ("limits.idle_ms", self.idle_ms),
            ("limits.write_stall_ms", self.write_stall_ms),
        ];
        for (field, value) in times {
            check((1..=MAX_MS).contains(&value), field, value, "1 to 86400000 (a day)")?;
        }
        let connections = self.max_connections;
        let fits = (1..=MAX_CONNECTIONS).contains(&connections);
        check(fits, "limits.max_connections", connections as u64, "1 to 1000000")?;
        let bytes = self.max_body_bytes_in_flight;
        check(
            MIN_BODY_BYTES <= bytes,
            "limits.max_body_bytes_in_flight",
            bytes as u64,
            "1048576 (1 MiB) or more",
        )
    }

    pub(super) fn handshake(&self) -> Duration {
        Duration::from_millis(self.handshake_ms)
    }

    pub(super) fn header(&self) -> Duration {
        Duration::from_millis(self.header_ms)
    }

    pub(super) fn body(&self) -> Duration {
        Duration::from_millis(self.body_ms)
    }

    pub(super) fn idle(&self) -> Duration {
        Duration::from_millis(self.idle_ms)
    }

    pub(super) fn write_stall(&self) -> Duration {
        Duration::from_millis(self.write_stall_ms)
    }
}

fn check(fits: bool, field: &'static str, value: u64, allowed: &'static str) -> Result<(), InvalidLimit> {
    if fits { Ok(()) } else { Err(InvalidLimit { field, value: value.to_string(), allowed }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_a_bad_value_is_named() {
        ListenLimits::default().validate().unwrap();
        let invalid = |change: fn(&mut ListenLimits)| {
            let mut limits = ListenLimits::default();
            change(&mut limits);
            limits.validate().unwrap_err()
        };
        let error = invalid(|limits| limits.header_ms = 0);
        assert_eq!((error.field, error.value.as_str()), ("limits.header_ms", "0"));
        assert_eq!(invalid(|limits| limits.idle_ms = u64::MAX).field, "limits.idle_ms");
        assert_eq!(invalid(|limits| limits.max_connections = 0).field, "limits.max_connections");
        let error = invalid(|limits| limits.max_body_bytes_in_flight = 1000);
        assert_eq!(error.allowed, "1048576 (1 MiB) or more");
    }
}
