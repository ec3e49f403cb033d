//! The endpoint picker: which worker takes a request that Envoy, or another data plane of the Gateway API Inference Extension, sends.
//!
//! A data plane opens a stream of `ext_proc` messages for each HTTP request. The picker holds the request until it is whole, chooses a worker as
//! a gateway would (`kvik_gateway::Picker`: index, loads, ring, admission), names it in a header and in metadata, and hands the request
//! back as it came. The answer passes as it comes; its head and its usage tell how the worker did.
//!
//! Parts: `messages` (the protocol), `exchange` (one request as a state machine without I/O), `stream` (an exchange over a connection, with
//! its hold on a worker), `server` (gRPC) with `health`, `pool` (engines from an `InferencePool`), `epp` (start and end).
//!
//! Invariants:
//!
//! * Load and permit of a request live in its exchange: they are back when the exchange ends, however it does.
//! * A body leaves as it came, byte for byte.
//! * Messages in a wrong order end their exchange and nothing else.
//!
//! `docs/epp.md` says how it is installed.

#![forbid(unsafe_code)]

mod budget;
pub mod config;
mod epp;
mod error;
pub mod exchange;
mod health;
pub mod messages;
mod metrics;
mod pool;
mod server;
mod stream;

pub use config::{EppConfig, InferencePoolConfig, PoolEventsConfig};
pub use epp::Epp;
pub use error::{EppError, ProtocolError, Result};
pub use health::{CHECK_PATH, HealthCheckRequest, HealthCheckResponse, ServingStatus, WATCH_PATH};
pub use messages::{PROCESS_PATH, PROCESS_SERVICE};
