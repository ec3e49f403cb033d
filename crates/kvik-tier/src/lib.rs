//! Places that hold chunks of KV, behind one trait.
//!
//! A [`Tier`] is a map from [`ChunkKey`] to bytes that are written once and read whole or in ranges. It
//! works in batches and blocks its caller's thread; who needs many operations at a time brings the threads.
//! A tier decides nothing: when it is full it says so, and its owner chooses what leaves.
//!
//! Invariants:
//!
//! * A read gives the bytes that were put under that key, or none. Tiers whose medium can lose, tear or
//!   mix bytes are wrapped in a decorator that proves it.
//! * A chunk is found only after all of its bytes are there.
//! * A buffer that was handed to a read that did not hit has undefined content, and its outcome says so.

#![deny(unsafe_code)]

mod error;
mod key;
mod tier;

pub use error::{Result, TierError};
pub use key::{ChunkKey, NamespaceId};
pub use tier::{GetItem, GetOutcome, PutItem, PutOutcome, Tier, TierExt, TierHealth, TierKind, TierStat};
