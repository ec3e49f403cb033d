//! Models by the names that they have on a model hub.
//!
//! [`find_model`] turns what a user calls a model into a folder: a folder that exists, else a snapshot in the cache that
//! `huggingface_hub` and the programs on it share, else a download into that cache. [`HubClient`] is how files come from a
//! hub, for models and for tokenizers alone.
//!
//! Invariants: a file appears under its name only when its size and its checksum are those that the hub says; processes that
//! fetch the same file wait for each other; the token goes to the hub and to no other server.

mod cache;
mod client;
mod config;
mod download;
mod error;
mod model;
mod repository;

pub use client::{HubClient, TimeLimit};
pub use config::ModelHubConfig;
pub use error::HubError;
pub use model::{FoundModel, find_model};
pub use repository::{REPOSITORY_FORM, Repository};
