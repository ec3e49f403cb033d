//! Messages on the wire and typed clients.
//!
//! The only crate that knows how the services of kvik speak to each other and to their users:
//! servers and clients depend on it and never on each other. Fields may be added with a default;
//! a field that changes its meaning gets a new name.
//!
//! Parts: [`coordinator`] and [`worker`] hold the messages of the two services' own APIs, [`cache`] those
//! of a worker's store, [`openai`] those of the compatible one, [`events`] the KV events of engines, [`index`] the
//! API of the global KV index, [`journal`] what continues a stream elsewhere, [`kv_stream`] what a worker reports of its KV,
//! [`moves`] sequences that move, [`route`] how a gateway explains its routing, [`sse`] the framing of streams, [`stores`] the
//! store daemons that a coordinator lists, [`client`] the clients.
//!
//! ```
//! use kvik_proto::coordinator::{Snapshot, WatchEvent};
//!
//! let line = r#"{"type":"snapshot","term":1,"version":4,"ring":{"hash":"xxh3","virtual_nodes":160,"load_factor":0.25},"members":[]}"#;
//! let event: WatchEvent = serde_json::from_str(line)?;
//! assert!(matches!(event, WatchEvent::Snapshot(Snapshot { version: 4, .. })));
//! # Ok::<(), serde_json::Error>(())
//! ```

#![forbid(unsafe_code)]

pub mod cache;
pub mod client;
pub mod coordinator;
pub mod events;
pub mod index;
pub mod journal;
pub mod kv_stream;
pub mod memory;
pub mod moves;
pub mod openai;
pub mod route;
pub mod sse;
pub mod stores;
pub mod worker;
