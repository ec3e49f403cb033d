//! Grants of a device's ledger for processes that cannot link this library.
//!
//! A [`MemoryServer`] listens at a unix socket. A process that connects and opens a session is a member of
//! the ledger like any engine: it claims grants before it creates memory and gives them back after it
//! released it, under the same limits and shares, and gets notices when others need what it holds.
//! [`MemoryClient`] is the other end in Rust; [`frame`] has the bytes for other languages.
//!
//! # Protocol
//!
//! A `SOCK_SEQPACKET` socket, one frame a packet, little-endian and versioned. A request is answered by
//! one reply with its number; the first one opens the session. A claim that waits is answered when it is
//! granted or its time is over, and other requests are served meanwhile. Notices come unasked between
//! replies.
//!
//! # Invariants
//!
//! * Grants belong to the connection: when it ends, whatever the reason, all go back at once.
//! * Only processes of the server's user are served; the socket lies in a folder that only it can enter.
//! * Bytes from a client never cause a panic, and a frame that cannot be read ends only its connection.
//! * A client that does not read loses its session; the server does not wait for it.

pub mod frame;

mod client;
mod server;
mod session;

pub use client::{MemoryClient, SessionOptions};
pub use frame::{DeviceStanding, Notice, Standing};
pub use server::{MemoryServer, MemoryServerOptions};
