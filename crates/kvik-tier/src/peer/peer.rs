//! One peer: its connections, and whether it is asked at present.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::connection::{Connection, Dialer};
use super::locations::PeerId;
use crate::decorator::{BreakerOptions, Clock, Gate};
use crate::error::{Result, TierError};

/// A peer that stalls, lies or is gone is left alone after so many failures in a row.
const N_FAILURES: u32 = 2;

/// Where a peer listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerAddress {
    /// A name or an address.
    pub host: String,
    /// Its port.
    pub port: u16,
}

/// A peer.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) id: PeerId,
    pub(super) address: PeerAddress,
    /// For lookups, and for reads: a peer that answers to lookups may still fail to send what it has.
    pub(super) lookups: Gate,
    pub(super) reads: Gate,
    connections: Mutex<Connections>,
    /// Bytes that are asked for and have not arrived.
    pub(super) asked_bytes: AtomicU64,
}

/// The connections to a peer.
#[derive(Debug, Default)]
struct Connections {
    idle: Vec<Connection>,
    /// Those that are idle, and those in use that are not spare.
    n_own: usize,
    /// Those in use that were there to spare when they were borrowed. They never keep a reader from a connection of its own.
    n_spare: usize,
}

/// A connection that is in use; dropping it ends it.
#[derive(Debug)]
pub(super) struct Borrowed {
    peer: Arc<Peer>,
    is_spare: bool,
    /// Connections to be kept, this one included.
    n_allowed: usize,
    /// `None` until it is made, and after it was given back.
    connection: Option<Connection>,
    is_given_back: bool,
}

impl Peer {
    pub(super) fn new(id: PeerId, address: PeerAddress, clock: Arc<dyn Clock>) -> Self {
        let options = BreakerOptions {
            n_failures_to_open: N_FAILURES,
            first_pause: Duration::from_secs(1),
            max_pause: Duration::from_secs(30),
        };
        Self {
            id,
            address,
            lookups: Gate::new(options.clone(), Arc::clone(&clock)),
            reads: Gate::new(options, clock),
            connections: Mutex::default(),
            asked_bytes: AtomicU64::new(0),
        }
    }

    /// Whether it is left alone at present.
    pub(super) fn is_avoided(&self) -> bool {
        !self.lookups.is_closed() || !self.reads.is_closed()
    }

    /// A connection, made by `dialer` where none is idle; `None` where as many as allowed are in use.
    ///
    /// # Errors
    /// If the peer cannot be reached.
    pub(super) fn borrow(
        self: &Arc<Self>,
        dialer: &Dialer,
        n_allowed: usize,
        deadline: Instant,
    ) -> Result<Option<Borrowed>> {
        let idle = {
            let mut connections = self.connections.lock();
            let idle = connections.idle.pop();
            if idle.is_none() {
                if connections.n_own >= n_allowed {
                    return Ok(None);
                }
                // Counted before it is made, so that there are never more.
                connections.n_own += 1;
            }
            idle
        };
        let borrowed = Borrowed::new(self, n_allowed, false);
        borrowed.connected(idle, dialer, deadline).map(Some)
    }

    /// A further connection for a reader that has one; `None` where as many as allowed are in use, or none can be made.
    ///
    /// A reader makes one connection more at most, since that takes a few turns of the network.
    pub(super) fn borrow_spare(
        self: &Arc<Self>,
        dialer: &Dialer,
        n_allowed: usize,
        deadline: Instant,
        has_dialled: &mut bool,
    ) -> Option<Borrowed> {
        let idle = {
            let mut connections = self.connections.lock();
            let n_used = connections.n_own - connections.idle.len() + connections.n_spare;
            let must_dial = connections.idle.is_empty();
            if n_used >= n_allowed || must_dial && *has_dialled {
                return None;
            }
            *has_dialled |= must_dial;
            let idle = connections.idle.pop();
            connections.n_own -= usize::from(idle.is_some());
            connections.n_spare += 1;
            idle
        };
        Borrowed::new(self, n_allowed, true).connected(idle, dialer, deadline).ok()
    }
}

// === impl Borrowed ===

impl Borrowed {
    /// One that is counted and not connected.
    fn new(peer: &Arc<Peer>, n_allowed: usize, is_spare: bool) -> Self {
        Self { peer: Arc::clone(peer), is_spare, n_allowed, connection: None, is_given_back: false }
    }

    /// Takes an idle connection, if it can be used still, or makes one.
    fn connected(mut self, idle: Option<Connection>, dialer: &Dialer, deadline: Instant) -> Result<Self> {
        let mut connection = match idle.filter(Connection::is_quiet) {
            Some(connection) => connection,
            None => dialer.connect(&self.peer.address, deadline)?,
        };
        connection.set_deadline(deadline);
        self.connection = Some(connection);
        Ok(self)
    }

    pub(super) fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// Uses the connection.
    ///
    /// # Errors
    /// Those of `act`.
    pub(super) fn with<R>(&mut self, act: impl FnOnce(&mut Connection) -> io::Result<R>) -> io::Result<R> {
        act(self.connection.as_mut().ok_or(io::ErrorKind::NotConnected)?)
    }

    /// Keeps the connection for others, unless there are enough. Only for one whose answers have all been read.
    pub(super) fn give_back(mut self) {
        let Some(connection) = self.connection.take() else { return };
        let mut connections = self.peer.connections.lock();
        if self.is_spare {
            if connections.n_own >= self.n_allowed {
                return;
            }
            connections.n_spare -= 1;
            connections.n_own += 1;
        }
        connections.idle.push(connection);
        drop(connections);
        self.is_given_back = true;
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if self.is_given_back {
            return;
        }
        let mut connections = self.peer.connections.lock();
        if self.is_spare {
            connections.n_spare -= 1;
        } else {
            connections.n_own -= 1;
        }
    }
}

// === impl PeerAddress ===

impl FromStr for PeerAddress {
    type Err = TierError;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = || TierError::invalid("peer", &text, "host:port, such as node-2:9106 or [::1]:9106");
        let (host, port) = text.rsplit_once(':').ok_or_else(refuse)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = bare.unwrap_or(host);
        let port: u16 = port.parse().map_err(|_| refuse())?;
        // Only an address in brackets has colons.
        let is_possible = !host.is_empty() && port != 0 && (bare.is_some() || !host.contains(':'));
        if !is_possible || host.contains(|letter: char| letter.is_whitespace() || letter == '/') {
            return Err(refuse());
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(formatter, "[{}]:{}", self.host, self.port)
        } else {
            write!(formatter, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_shown() {
        for text in ["node-2:9106", "127.0.0.1:1", "[::1]:65535", "store.example.org:9106"] {
            assert_eq!(text.parse::<PeerAddress>().unwrap().to_string(), text);
        }
        for text in
            ["", "node-2", ":9106", "node-2:0", "node-2:70000", "::1:9106", "a b:1", "http://a:1", "[::1]"]
        {
            let error = text.parse::<PeerAddress>().unwrap_err().to_string();
            assert!(error.contains("host:port"), "{text}: {error}");
        }
    }
}
