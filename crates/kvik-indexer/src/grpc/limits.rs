//! What the gRPC service allows its clients.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{IndexerError, Result};

/// Longest time that can be configured: a day.
const MAX_MS: u64 = 86_400_000;

/// Calls that run take this much times `max_message_bytes` of memory at most.
const MAX_CALLS: u64 = 65_536;

/// The bounds of the gRPC service. They take effect at the start only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GrpcLimits {
    /// The largest message in either direction, 1 KiB to 1 GiB; a larger one is refused with `OUT_OF_RANGE`.
    /// Default: 16 777 216 bytes (16 MiB).
    pub max_message_bytes: u64,
    /// Calls that run at a time, 1 to 65 536; more are refused with `RESOURCE_EXHAUSTED`. Each can hold a message.
    /// Default: 64.
    pub max_calls: u64,
    /// Calls of one connection at a time, 1 to 65 536; a client that keeps to HTTP/2 waits with more. Default: 64.
    pub max_connection_calls: u64,
    /// Connections at a time, 1 to 1 000 000; more wait to be accepted. A client needs one for any number of calls.
    /// Default: 1024.
    pub max_connections: u64,
    /// Time for a whole call, its message included; then `DEADLINE_EXCEEDED`. Default: 30 000 ms.
    pub call_ms: u64,
    /// Time for a TLS handshake. Default: 10 000 ms.
    pub handshake_ms: u64,
}

impl Default for GrpcLimits {
    fn default() -> Self {
        Self {
            max_message_bytes: 16 << 20,
            max_calls: 64,
            max_connection_calls: 64,
            max_connections: 1024,
            call_ms: 30_000,
            handshake_ms: 10_000,
        }
    }
}

impl GrpcLimits {
    /// Checks every value.
    ///
    /// # Errors
    /// [`IndexerError::Invalid`] names the first that is not allowed, as a part of `grpc`.
    pub fn validate(&self) -> Result<()> {
        let bounds = [
            ("grpc.max_message_bytes", self.max_message_bytes, 1 << 10, 1 << 30),
            ("grpc.max_calls", self.max_calls, 1, MAX_CALLS),
            ("grpc.max_connection_calls", self.max_connection_calls, 1, MAX_CALLS),
            ("grpc.max_connections", self.max_connections, 1, 1_000_000),
            ("grpc.call_ms", self.call_ms, 1, MAX_MS),
            ("grpc.handshake_ms", self.handshake_ms, 1, MAX_MS),
        ];
        for (field, value, least, most) in bounds {
            if !(least..=most).contains(&value) {
                return Err(IndexerError::invalid(field, value, &format!("{least} to {most}")));
            }
        }
        Ok(())
    }

    pub(super) fn message_bytes(&self) -> usize {
        usize::try_from(self.max_message_bytes).unwrap_or(usize::MAX)
    }

    pub(super) fn call_timeout(&self) -> Duration {
        Duration::from_millis(self.call_ms)
    }

    pub(super) fn handshake_timeout(&self) -> Duration {
        Duration::from_millis(self.handshake_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_a_bad_value_is_named() {
        GrpcLimits::default().validate().unwrap();
        let refusal = |change: fn(&mut GrpcLimits)| {
            let mut limits = GrpcLimits::default();
            change(&mut limits);
            limits.validate().unwrap_err().to_string()
        };
        let error = refusal(|limits| limits.max_message_bytes = 1000);
        assert!(error.contains("`grpc.max_message_bytes` is 1000; allowed: 1024 to 1073741824"), "{error}");
        for (field, error) in [
            ("max_calls", refusal(|limits| limits.max_calls = 0)),
            ("max_connection_calls", refusal(|limits| limits.max_connection_calls = 1 << 20)),
            ("max_connections", refusal(|limits| limits.max_connections = 0)),
            ("call_ms", refusal(|limits| limits.call_ms = 0)),
            ("handshake_ms", refusal(|limits| limits.handshake_ms = u64::MAX)),
        ] {
            assert!(error.contains(&format!("`grpc.{field}`")), "{error}");
        }
    }
}
