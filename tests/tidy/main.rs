//! Rules about the tree that neither the compiler nor clippy can check.
//!
//! Each rule is one test, and a failing test lists every offending place at once. A rule that
//! stands in the way is changed here, in the open, together with what ARCHITECTURE.md or
//! CONTRIBUTING.md says about it.

#![forbid(unsafe_code)]

mod code;
mod crates;
mod sources;
mod workspace;
