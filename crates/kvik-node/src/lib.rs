//! One store for the engines of a node: a daemon, and the client that an engine has.
//!
//! A [`NodeServer`] owns a store and listens on a unix socket. A [`NodeClient`] attaches to it and is sent two
//! descriptors: the words of two rings, and the arena in which all chunks lie. From then on requests and answers go
//! through the rings, and the client copies the bytes of chunks itself. `docs/node.md` is the design.
//!
//! # Invariants
//!
//! * Leased chunks stay unchanged until the client releases them or its session ends.
//! * A chunk that a client writes is found by others only after its commit, with the checksum of its bytes.
//! * The end of a client, by whatever death, gives back all that its session held; the kernel tells.
//! * No byte that a client writes, into a ring or anywhere, does more than end its own session.
//! * A daemon that is gone costs hits: every call of a client returns an error within a bounded time.

#![forbid(unsafe_code)]

mod client;
mod error;
mod frame;
mod operation;
mod ring;
mod server;

pub use client::{AttachOptions, NodeClient, OpenChain, RemoteLease, RemoteWrite};
pub use error::{NodeError, Result};
pub use frame::{Attach, Attached};
pub use server::{NodeOptions, NodeServer};
