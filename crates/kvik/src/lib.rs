//! What the binaries of kvik share: the tools for elastic memory.
//!
//! `kvctl` is wholly in here, and `kvik top` shows its screen; everything else of the `kvik` binary is
//! in the binary itself.

#![forbid(unsafe_code)]

pub mod kvctl;
