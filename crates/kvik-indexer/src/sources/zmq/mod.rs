//! The client's half of `ZeroMQ` that listening to an engine takes: SUB and DEALER over TCP and unix sockets.
//!
//! Protocol: ZMTP 3.1 (RFC 37) with the NULL mechanism. Both sides send a greeting of 64 bytes, then a READY
//! command that names the type of their socket. After that a message is a row of frames, each with one byte of flags
//! (1 more frames follow, 2 the length has eight bytes, 4 a command) and its length. A subscription is
//! a message of the byte 1 and a prefix, the form of 3.0, which publishers of 3.1 take too. A command PING is
//! answered by PONG; peers of 3.1 answer ours, which is how a peer is missed that went away without a word.
//!
//! Why not a crate: what comes from an engine's port is not to be trusted with memory. The one in Rust
//! (`zeromq` 0.7) reserves whatever length a frame announces and takes frames of a message without end;
//! libzmq would bring a C++ build. Here memory grows with what has come, up to a bound.

mod connection;
mod endpoint;
mod wire;

pub(super) use connection::{Connection, WireLimits};
pub(super) use endpoint::Endpoint;
pub(super) use wire::SocketType;

/// Why a connection is of no more use; all of them ask for a new one.
#[derive(Debug, thiserror::Error)]
pub(super) enum ZmtpError {
    /// The operating system said so.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer did not answer in time.
    #[error("no {0} in time")]
    TimedOut(&'static str),
    /// The peer does not speak the protocol, or not the part of it that is spoken here.
    #[error("the peer {0}")]
    Protocol(&'static str),
    /// The peer said why it does not go on.
    #[error("the peer refused: {0}")]
    Refused(String),
}
