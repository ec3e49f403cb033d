//! A worker, asked over real sockets.

#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

mod chat;
mod codecs;
mod completions;
mod compress;
#[cfg(feature = "cuda-tests")]
mod cuda;
mod errors;
mod kv;
mod kv_events;
mod lifecycle;
mod memory;
mod moves;
mod planner;
mod registration;
mod salts;
mod segments;
mod sequences;
mod store;
mod support;
mod tiers;
