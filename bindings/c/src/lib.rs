//! Elastic KV memory for engines in C and C++: `libkvik.so` and `libkvik.a`.
//!
//! [`abi`] has the functions of `include/kvik.h` about pools and their blocks, [`allocations`] those about memory of
//! any size, [`pointers`] and [`layouts`] those about KV inside of blocks, [`ranks`] those about pools of several
//! processes; [`kvcached`] has the functions of
//! `include/kvcached_trtllm.h`. All are thin: they look up a handle ([`handle`]), call the pool behind it, and turn
//! what came of it into a [`status`].
//!
//! # Invariants
//!
//! * No panic leaves the library: it becomes `KVIK_ERROR_INTERNAL`.
//! * A handle is a number, never an address: a null, closed, invented or inherited one is refused.
//! * A call that fails has changed nothing, unless its documentation says what.

#![expect(clippy::doc_markdown, reason = "documentation of the interface becomes comments in C")]
#![expect(non_camel_case_types, reason = "types of the C library are spelled as C spells them")]

pub mod abi;
pub mod allocations;
pub mod config;
pub mod handle;
pub mod kvcached;
pub mod layouts;
pub mod pointers;
pub mod ranks;
pub mod stats;
pub mod status;

mod backend;
mod block_pool;
mod boundary;
mod chunks;
mod environment;
mod grants;
mod heap;
mod plan;
mod planes;
mod pool;
mod rank_region;
mod reclaim;
mod signals;
mod sized;
