//! From the events of an engine to scores of prompts, in memory.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod beside;
mod captured;
mod engine;
mod feeds;
mod restarts;
mod scores;
