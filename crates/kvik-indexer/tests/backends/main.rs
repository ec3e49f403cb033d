//! Every backend of a book against one model; those on servers also while the servers die, hang and move.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod cluster;
mod conformance;
mod faults;
mod memory;
mod model;
#[path = "../../../../tests/support/poll.rs"]
mod poll;
mod redis;
#[path = "../../../../tests/support/redis.rs"]
mod server;
