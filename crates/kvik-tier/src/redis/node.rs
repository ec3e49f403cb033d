//! One server and the connections to it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use kvik_types::RedisEndpoint as Endpoint;
use parking_lot::{Condvar, Mutex};

use super::connection::{Connection, Dialer};
use crate::error::{Result, TierError};

/// A server with a bounded number of connections, each lent to one caller at a time.
pub(super) struct Node {
    endpoint: Endpoint,
    dialer: Arc<Dialer>,
    n_connections: usize,
    pool: Mutex<Pool>,
    returned: Condvar,
    is_suspect: AtomicBool,
    n_connects: AtomicU64,
}

#[derive(Default)]
struct Pool {
    idle: Vec<Connection>,
    n_lent: usize,
}

/// A connection in the hands of a caller. It is closed when dropped, unless it was given back.
pub(super) struct Lent<'n> {
    node: &'n Node,
    connection: Option<Connection>,
    is_used: bool,
}

impl Node {
    pub(super) fn new(endpoint: Endpoint, dialer: Arc<Dialer>, n_connections: usize) -> Self {
        Self {
            endpoint,
            dialer,
            n_connections,
            pool: Mutex::default(),
            returned: Condvar::new(),
            is_suspect: AtomicBool::new(false),
            n_connects: AtomicU64::new(0),
        }
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Whether the last that was heard of the server is that it did not answer.
    pub(super) fn is_suspect(&self) -> bool {
        // Relaxed: it only decides which server is asked first.
        self.is_suspect.load(Ordering::Relaxed)
    }

    pub(super) fn set_suspect(&self, is_suspect: bool) {
        self.is_suspect.store(is_suspect, Ordering::Relaxed);
    }

    /// Connections that were made since the start.
    pub(super) fn n_connects(&self) -> u64 {
        self.n_connects.load(Ordering::Relaxed)
    }

    /// Idle connections, open or not; at least one, for which a caller would wait.
    pub(super) fn n_free(&self) -> usize {
        self.n_connections.saturating_sub(self.pool.lock().n_lent).max(1)
    }

    /// Lends a connection that was used before, or a new one.
    ///
    /// # Errors
    /// If all are lent until `deadline`, or the server cannot be reached.
    pub(super) fn lend(&self, deadline: Instant) -> Result<Lent<'_>> {
        let mut pool = self.pool.lock();
        while pool.n_lent >= self.n_connections {
            if self.returned.wait_until(&mut pool, deadline).timed_out() {
                let action = format!("wait for a connection to {}", self.endpoint);
                return Err(TierError::remote(action, &"all are in use", true));
            }
        }
        pool.n_lent += 1;
        let idle = pool.idle.pop();
        drop(pool);
        let mut lent = Lent { node: self, is_used: idle.is_some(), connection: idle };
        if lent.connection.is_none() {
            lent.connection = Some(self.connect(deadline)?);
        }
        Ok(lent)
    }

    fn connect(&self, deadline: Instant) -> Result<Connection> {
        self.n_connects.fetch_add(1, Ordering::Relaxed);
        self.dialer.connect(&self.endpoint, deadline).inspect_err(|_| self.set_suspect(true))
    }
}

impl Lent<'_> {
    /// Whether the connection was open before, so that its server may have closed it long ago.
    pub(super) fn is_used(&self) -> bool {
        self.is_used
    }

    /// Replaces the connection, which failed, by a new one. Idle ones are closed: they are as old.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub(super) fn replace(&mut self, deadline: Instant) -> Result<()> {
        self.connection = None;
        let closed = std::mem::take(&mut self.node.pool.lock().idle);
        drop(closed);
        self.connection = Some(self.node.connect(deadline)?);
        self.is_used = false;
        Ok(())
    }

    pub(super) fn connection(&mut self) -> Option<&mut Connection> {
        self.connection.as_mut()
    }

    /// Gives the connection back: all its replies were read.
    pub(super) fn give_back(mut self) {
        self.node.set_suspect(false);
        let connection = self.connection.take().filter(|connection| !connection.has_leftover());
        self.node.pool.lock().idle.extend(connection);
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.node.pool.lock().n_lent -= 1;
        self.node.returned.notify_one();
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Node({})", self.endpoint)
    }
}
