//! One peer: its connections, and whether it is asked at present.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
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
    idle: Mutex<Vec<Connection>>,
    n_connections: AtomicUsize,
    /// Bytes that are asked for and have not arrived.
    pub(super) asked_bytes: AtomicU64,
}

/// A connection that is in use; dropping it ends it.
#[derive(Debug)]
pub(super) struct Borrowed {
    peer: Arc<Peer>,
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
            idle: Mutex::default(),
            n_connections: AtomicUsize::new(0),
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
        while let Some(connection) = self.take_idle() {
            let is_quiet = connection.is_quiet();
            let borrowed = Borrowed::new(self, Some(connection), deadline);
            if is_quiet {
                return Ok(Some(borrowed));
            }
        }
        // Counted before it is made, so that there are never more.
        if self.n_connections.fetch_add(1, Ordering::Relaxed) >= n_allowed {
            self.n_connections.fetch_sub(1, Ordering::Relaxed);
            return Ok(None);
        }
        // Counts down where it cannot be made.
        let counted = Borrowed::new(self, None, deadline);
        let connection = dialer.connect(&self.address, deadline)?;
        Ok(Some(counted.with_connection(connection, deadline)))
    }

    fn take_idle(&self) -> Option<Connection> {
        self.idle.lock().pop()
    }
}

// === impl Borrowed ===

impl Borrowed {
    fn new(peer: &Arc<Peer>, connection: Option<Connection>, deadline: Instant) -> Self {
        let borrowed = Self { peer: Arc::clone(peer), connection: None, is_given_back: false };
        match connection {
            Some(connection) => borrowed.with_connection(connection, deadline),
            None => borrowed,
        }
    }

    fn with_connection(mut self, mut connection: Connection, deadline: Instant) -> Self {
        connection.set_deadline(deadline);
        self.connection = Some(connection);
        self
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

    /// Keeps the connection for others. Only for one whose answers have all been read.
    pub(super) fn give_back(mut self) {
        if let Some(connection) = self.connection.take() {
            self.is_given_back = true;
            self.peer.idle.lock().push(connection);
        }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if !self.is_given_back {
            self.peer.n_connections.fetch_sub(1, Ordering::Relaxed);
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
