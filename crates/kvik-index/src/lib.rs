//! The global index and placement: pure state machines that answer which worker.
//!
//! [`holders`] is the global KV index: which worker has how much of a prompt, exactly, from the events
//! of all workers. [`ring`] is consistent hashing with bounded loads. A ring is built from the members
//! and their weights; a key has an owner on it and a fixed order of further members, and
//! [`ring::choose`] walks that order to the first member that is usable and not overloaded. [`placement`] is
//! the choice with what the index knows.
//!
//! The crate does no I/O and reads no clock: everything is a function of its arguments. That is what
//! lets every gateway decide by itself and all of them decide alike.
//!
//! Invariants:
//!
//! * Equal members give an equal ring, in whatever order they are listed.
//! * A member that joins takes keys and a member that leaves gives its own; no other key moves.
//! * Some member is chosen whenever one is usable.
//! * The index names a block for a worker only if the worker said that it has it.
//!
//! ```
//! use kvik_index::ring::{Loads, Reason, Ring, RingHash, choose};
//!
//! let ring = Ring::build(RingHash::Xxh3, 160, &[("a", 1.0), ("b", 1.0), ("c", 2.0)])?;
//! let loads = Loads { tokens: &[0, 0, 0], weights: &[1.0, 1.0, 2.0] };
//! let choice = choose(&ring, b"session-1", loads, 0.25, 100, |_| true).expect("all are usable");
//! assert_eq!(choice.reason, Reason::Owner);
//! assert_eq!(Some(choice.member), ring.walk(b"session-1").next());
//! # Ok::<(), kvik_index::ring::RingError>(())
//! ```

#![deny(unsafe_code)]

pub mod holders;
mod kernels;
pub mod placement;
pub mod ring;
