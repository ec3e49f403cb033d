//! Elastic KV memory for engines in C and C++: `libkvik.so` and `libkvik.a`.
//!
//! [`abi`] has the functions of `include/kvik.h`, [`kvcached`] the eight of `include/kvcached_trtllm.h`.
//! Both are thin: they look up a handle ([`handle`]), call the pool behind it, and turn what came of it
//! into a [`status`].
//!
//! # Invariants
//!
//! * No panic leaves the library: it becomes `KVIK_ERROR_INTERNAL`.
//! * A handle is a number, never an address: a null, closed, invented or inherited one is refused.
//! * A call that fails has changed nothing, unless its documentation says what.

#![expect(clippy::doc_markdown, reason = "documentation of the interface becomes comments in C")]
#![expect(non_camel_case_types, reason = "types of the C library are spelled as C spells them")]

pub mod abi;
pub mod config;
pub mod handle;
pub mod kvcached;
pub mod stats;
pub mod status;

mod backend;
mod block_pool;
mod chunks;

mod environment;
mod grants;
mod plan;
mod pool;
mod reclaim;
mod signals;
