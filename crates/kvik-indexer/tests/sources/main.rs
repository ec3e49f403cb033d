//! Sources against engines and API servers that the tests play, well behaved and not.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod api_server;
mod engine;
mod hostile;
mod kubernetes;
mod peer;
mod support;
