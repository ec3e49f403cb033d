//! The gateway over real sockets, in front of workers that do as they are told.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "the helpers of tests fail like tests")]

mod api;
mod breaker;
mod coordinator;
mod disconnect;
mod engine;
mod fields;
mod limits;
mod managed;
mod mock;
mod moving_model;
mod nixl;
mod other_protocols;
mod page;
mod predictions;
mod reload;
mod retry;
mod routing;
mod sglang;
mod streaming;
mod support;
mod tls;
