//! Headers: what a client can say in them, and what stays on one side.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::header::{self, HeaderName};
use http::{HeaderMap, HeaderValue};
use kvik_runtime::trust::TOKEN_HEADER;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::config::{GatewayConfig, millis};
use crate::error::Refusal;

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const REQUEST_TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout-ms");
pub(crate) const WORKER: HeaderName = HeaderName::from_static("x-kvik-worker");
const MAX_REQUEST_ID_BYTES: usize = 128;

/// Headers that belong to one connection.
const HOP_BY_HOP: [HeaderName; 7] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// The time that the client gives the request, at most the configured one.
pub(crate) fn request_timeout(headers: &HeaderMap, config: &GatewayConfig) -> Result<Duration, Refusal> {
    let longest = millis(config.timeouts.request_ms);
    let Some(value) = headers.get(REQUEST_TIMEOUT) else { return Ok(longest) };
    let time_ms =
        value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok()).filter(|&time| 0 < time);
    time_ms.map(|time_ms| millis(time_ms).min(longest)).ok_or_else(|| {
        let message = "`x-request-timeout-ms` must be a whole number of milliseconds, 1 or more";
        Refusal::invalid(message, Some("x-request-timeout-ms"))
    })
}

/// Takes out what does not go on to a worker.
pub(crate) fn clean_request_headers(headers: &mut HeaderMap, forward_authorization: bool) {
    clean_connection_headers(headers);
    headers.remove(header::HOST);
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::EXPECT);
    // A compressed stream could not be told to have failed.
    headers.remove(header::ACCEPT_ENCODING);
    headers.remove(header::PROXY_AUTHORIZATION);
    headers.remove(REQUEST_TIMEOUT);
    // Only this gateway speaks for the cluster.
    headers.remove(TOKEN_HEADER);
    if !forward_authorization {
        headers.remove(header::AUTHORIZATION);
    }
}

/// Takes out what belongs to one connection.
pub(crate) fn clean_connection_headers(headers: &mut HeaderMap) {
    if let Some(named) = headers.get(header::CONNECTION).cloned() {
        let named = named.to_str().unwrap_or_default().split(',');
        for name in named.filter_map(|name| HeaderName::try_from(name.trim()).ok()) {
            headers.remove(name);
        }
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

/// The client's request id if it can be put into a log line, or a new one.
pub(crate) fn request_id(headers: &HeaderMap) -> HeaderValue {
    let is_sane = |value: &&HeaderValue| {
        let bytes = value.as_bytes();
        (1..=MAX_REQUEST_ID_BYTES).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic)
    };
    headers.get(REQUEST_ID).filter(is_sane).cloned().unwrap_or_else(new_request_id)
}

pub(crate) fn new_request_id() -> HeaderValue {
    HeaderValue::try_from(format!("{:032x}", unique_id()))
        .unwrap_or_else(|_| HeaderValue::from_static("unknown"))
}

/// A number that no other call returns, here or in another process, and that clients cannot foresee.
pub(crate) fn unique_id() -> u128 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    static SEED: std::sync::LazyLock<u64> = std::sync::LazyLock::new(|| {
        use std::hash::BuildHasher as _;
        // Keyed by the operating system's randomness.
        std::collections::hash_map::RandomState::new().hash_one(std::process::id())
    });
    // Relaxed: an opaque id needs uniqueness only.
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    xxh3_128_with_seed(&number.to_le_bytes(), *SEED)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let pair = |&(name, value): &(&str, &str)| (name.parse().unwrap(), value.parse().unwrap());
        pairs.iter().map(pair).collect::<Vec<(HeaderName, HeaderValue)>>().into_iter().collect()
    }

    #[test]
    fn headers_of_the_connection_and_the_key_stay_here() {
        let mut cleaned = headers(&[
            ("connection", "close, X-Private"),
            ("x-private", "1"),
            ("keep-alive", "5"),
            ("authorization", "Bearer k"),
            ("x-kvik-cluster-token", "t"),
            ("host", "h"),
            ("x-custom", "2"),
        ]);
        clean_request_headers(&mut cleaned, false);
        assert_eq!(cleaned, headers(&[("x-custom", "2")]));
        let mut kept = headers(&[("authorization", "Bearer k")]);
        clean_request_headers(&mut kept, true);
        assert_eq!(kept.len(), 1);
    }

    #[test]
    fn only_a_sane_request_id_is_taken_over() {
        assert_eq!(request_id(&headers(&[("x-request-id", "abc-1")])), "abc-1");
        for insane in ["", "a b", &"x".repeat(200)] {
            assert_eq!(request_id(&headers(&[("x-request-id", insane)])).len(), 32);
        }
        assert_ne!(new_request_id(), new_request_id());
    }
}
