//! The cache engine against tiers that block, fail, lie and forget.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod clears;
mod collisions;
mod direct;
mod direct_writes;
mod disks;
mod failures;
mod flights;
mod hits;
mod keys;
mod layers;
mod model;
mod moves;
mod observer;
mod restarts;
mod stress;
mod support;
mod surveys;
mod times;
mod writes;
