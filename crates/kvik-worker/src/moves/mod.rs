//! Requests that go on at another worker, with their KV; docs/moving.md is the design.
//!
//! The source ([`departure`](crate::departure)) copies full blocks while its request runs, then freezes it and tells the gateway, which continues
//! it at the destination ([`arrivals`]). Neither worker decides where a request runs: a frozen one runs where the gateway
//! continues it.

mod arrivals;
mod client;
mod unused;

pub(crate) use arrivals::{Arrival, Arrivals};
pub(crate) use client::{Blocks, PeerClient};
pub(crate) use unused::forget_tickets;
