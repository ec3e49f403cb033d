//! The global KV index as a service: which worker already has how much of this prompt.
//!
//! [`sources`] subscribe to engines and pass their events to a [`Feed`](feed::Feed), one for each worker and
//! rank. Behind the feeds stand the books of a model: one for each way in which its engines name
//! blocks, each on a [`Backend`](backend::Backend) that keeps the holders of every block.
//!
//! `docs/index.md` is the design.

#![forbid(unsafe_code)]

pub mod backend;
pub mod book;
pub mod catalog;
pub mod config;
mod durable;
mod engine_feed;
pub mod error;
pub mod feed;
pub mod grpc;
pub mod hub;
mod indexer;
mod ingest;
pub mod keys;
mod prompt_holders;
pub mod score;
pub mod sources;
mod storage;
mod tasks;

pub use catalog::Catalog;
pub use config::IndexConfig;
pub use error::{IndexerError, Result};
pub use indexer::{Indexer, Prompt, is_same_worker, tier_name};
pub use kvik_tokens::{ChatOptions, Json, Tokenizer};
pub use score::{ScorerKind, WorkerScore};
