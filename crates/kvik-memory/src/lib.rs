//! Elastic KV memory: several engines on one device share its memory by what they need now.
//!
//! From the outside in: a [`pool::KvPool`] is one engine's KV memory. It hands out blocks
//! ([`blocks`]) that lie on pages ([`pages`]) of a virtual region ([`region`]), which a backend
//! ([`vmm`]) backs with physical memory: the CUDA driver's, or the host's with the same semantics.
//! Before memory is created it is granted by the [`ledger`] that all engines of the device share.
//! The design, its invariants and its failure cases are in `docs/memory.md`.
//!
//! # Invariants
//!
//! * The ledger never says less than what is held: a grant comes before its memory and goes after it.
//! * A page id is handed out once until it is freed, and lies inside of the reservation.
//! * The death of a process at any instruction leaves a ledger whose sums are right after one reap.
//! * "Not enough memory" is a value; an error means that something is broken or misused.

pub mod blocks;
pub mod config;
pub mod geometry;
pub mod ledger;
pub mod machine;
pub mod pages;
pub mod pool;
pub mod ranks;
pub mod region;
pub mod service;
pub mod socket;
pub mod vmm;

mod error;
mod wire;

pub use error::{MemoryError, Result};
pub use geometry::{BlockId, Extent, Geometry, PageId};
pub use socket::SocketAddress;
