//! The global KV index against a model, under threads, within its budget and from hostile bytes.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod bounds;
mod bridge;
mod exactness;
mod groups;
mod listing;
mod model;
mod readers;
mod replace;
mod snapshot;
mod support;
