//! A picker over real sockets, asked by a client that plays Envoy.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod api_server;
mod concurrency;
mod data_plane;
mod engine;
mod health;
mod index;
mod parts;
#[path = "../../../../tests/support/poll.rs"]
mod poll;
mod pool;
mod sequences;
mod support;
mod tls;
