//! What every program of kvik shares.
//!
//! - [`config`]: one struct a service, filled from its defaults, a YAML file, the environment and
//!   flags, in this order; every value knows where it came from. The only place that reads the
//!   environment.
//! - [`secret`]: values of the configuration that are never printed.
//! - [`telemetry`]: logs, metrics and traces.
//! - [`shutdown`]: drain, then stop; every task has an owner that waits for it.
//! - [`http`]: the server loop, plain or TLS, that lets connections finish.
//! - [`hub`]: models by the names that they have on a model hub.
//! - [`tls`]: the files of TLS towards other services.
//! - [`terminal`]: tables, bars and colors. [`machine`]: cores and memory.
//! - [`trust`]: which callers a listener serves.
//!
//! ```
//! use kvik_runtime::shutdown::Shutdown;
//!
//! let shutdown = Shutdown::new();
//! assert!(!shutdown.is_draining());
//! shutdown.drain();
//! assert!(shutdown.is_draining() && !shutdown.is_stopping());
//! ```

#![forbid(unsafe_code)]

pub mod config;
pub mod error;
pub mod http;
pub mod hub;
pub mod machine;
pub mod secret;
pub mod shutdown;
pub mod telemetry;
pub mod terminal;
pub mod tls;
pub mod trust;

pub use error::{Result, RuntimeError};
