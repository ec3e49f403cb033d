//! One pool spread over the processes of a tensor- or pipeline-parallel group.
//!
//! The scheduler's process is the **leader**: it keeps the state of all pages and blocks. Every **rank** has
//! a region on its own device, and all regions have the same extents mapped. [`RankMapper`] is the
//! leader's [`PageMapper`](crate::pages::PageMapper): it takes a map or unmap to all ranks in two
//! phases. [`RankWorker`] serves a rank's region in the rank's process. A rank in the leader's own process
//! is called directly.
//!
//! # Protocol
//!
//! [`frame`] has the bytes. One request is answered by one reply, over a `SOCK_SEQPACKET` socket that
//! stays open; both sides check that the other runs as the same user. A transaction is one or more
//! `Prepare` frames and then `Commit` or `Abort`. It is named by a number that rises for the life of a
//! leader, and every request can be repeated: a rank does it once and gives the same answer again.
//!
//! # Invariants
//!
//! * A map is answered [`MapOutcome::Mapped`](crate::pages::MapOutcome::Mapped) only if every rank
//!   has mapped and committed all of it. In any other case each rank has undone it, or the extents are
//!   reported as stuck.
//! * A rank undoes what is prepared and not committed when its leader's connection ends, whatever the
//!   reason. What is committed stays until a leader unmaps it or a new leader begins.
//! * A leader never resumes with a rank that has been started anew or has served another leader in
//!   between: pages that it believes in would not be there.
//! * Bytes from a socket never cause a panic, and nothing is mapped before they are checked whole.

pub mod frame;

mod leader;
mod participant;
mod worker;

pub use leader::{RankLeaderOptions, RankMapper, RankPeer};
pub use worker::{RankWorker, RankWorkerOptions};
