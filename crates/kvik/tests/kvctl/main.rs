//! Runs `kvctl` as a user does, on real ledgers in a folder of its own.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod govern;
mod look;
mod shell;
mod support;
