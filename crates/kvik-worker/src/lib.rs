//! The worker: the built-in engine behind HTTP.
//!
//! A worker serves one model. Clients, mostly gateways, reach it over an OpenAI-compatible API;
//! tests, debuggers and other schedulers over one that steps sequences and moves their KV.
//!
//! Parts, from the inside out:
//! - `engine_thread` owns the engine on a thread of its own; all other parts send it commands.
//! - `generation` is one request to it: `events` out, credits in, cancelled when dropped.
//! - `sequences` are outputs that clients advance step by step; `staging` is KV that arrives layer
//!   by layer.
//! - `api` is what is served; `registration` tells coordinators that the worker lives; `drain` ends
//!   it without losing a request.
//!
//! Invariants:
//! - The engine waits for no client: an output that is not read pauses after a window of tokens.
//! - What a request holds (a place in the queue, blocks, a name) belongs to a guard in its answer's
//!   body, so that a client that goes away frees it.
//! - Whatever bytes come in, the answer is a status that names the field; the process goes on.
//!
//! ```no_run
//! # async fn example() -> kvik_worker::Result<()> {
//! use kvik_runtime::shutdown::Shutdown;
//! use kvik_worker::{Worker, WorkerConfig};
//!
//! let shutdown = Shutdown::new();
//! let running = Worker::start(WorkerConfig::default(), &shutdown).await?;
//! println!("{} serves on {}", running.id(), running.address());
//! running.closed().await;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod admission;
mod api;
mod block_groups;
mod clock;
mod config;
mod departure;
mod drain;
mod engine_thread;
mod error;
mod events;
mod generation;
mod hand_over;
mod idle;
mod key_page;
mod metrics;
mod moves;
mod plan;
mod prompt;
mod registration;
mod running;
mod sequences;
mod snapshot;
mod staging;
mod state;
mod store;
mod store_admin;
mod worker;

pub use config::{SharedMemoryConfig, StoreConfig, WorkerConfig};
pub use error::{Result, WorkerError};
pub use worker::{Running, Worker};
