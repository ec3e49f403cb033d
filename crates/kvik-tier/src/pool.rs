//! One server and the connections to it, whichever protocol they speak.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::error::{Result, TierError};

/// Makes connections to servers.
pub(crate) trait Dial {
    /// Names a server.
    type Endpoint: fmt::Display;
    /// A connection that requests can be sent over.
    type Connection;

    /// Connects, until `deadline` at the latest.
    ///
    /// # Errors
    /// If the server cannot be reached or refuses.
    fn connect(&self, endpoint: &Self::Endpoint, deadline: Instant) -> Result<Self::Connection>;

    /// Whether a connection whose replies were all read can be used again.
    fn is_reusable(connection: &Self::Connection) -> bool;
}

/// A server with a bounded number of connections, each lent to one caller at a time.
pub(crate) struct Node<D: Dial> {
    endpoint: D::Endpoint,
    dialer: Arc<D>,
    n_connections: usize,
    pool: Mutex<Pool<D::Connection>>,
    returned: Condvar,
    is_suspect: AtomicBool,
    n_connects: AtomicU64,
}

struct Pool<C> {
    idle: Vec<C>,
    n_lent: usize,
}

/// A connection in the hands of a caller. It is closed when dropped, unless it was given back.
pub(crate) struct Lent<'n, D: Dial> {
    node: &'n Node<D>,
    connection: Option<D::Connection>,
    is_used: bool,
}

impl<D: Dial> Node<D> {
    pub(crate) fn new(endpoint: D::Endpoint, dialer: Arc<D>, n_connections: usize) -> Self {
        Self {
            endpoint,
            dialer,
            n_connections,
            pool: Mutex::new(Pool { idle: Vec::new(), n_lent: 0 }),
            returned: Condvar::new(),
            is_suspect: AtomicBool::new(false),
            n_connects: AtomicU64::new(0),
        }
    }

    pub(crate) fn endpoint(&self) -> &D::Endpoint {
        &self.endpoint
    }

    /// Whether the last call to the server got no answer.
    pub(crate) fn is_suspect(&self) -> bool {
        // Relaxed: it only decides which server is asked first.
        self.is_suspect.load(Ordering::Relaxed)
    }

    pub(crate) fn set_suspect(&self, is_suspect: bool) {
        self.is_suspect.store(is_suspect, Ordering::Relaxed);
    }

    /// Connections that were made since the start.
    pub(crate) fn n_connects(&self) -> u64 {
        self.n_connects.load(Ordering::Relaxed)
    }

    /// Idle connections, open or not; at least one, for which a caller would wait.
    pub(crate) fn n_free(&self) -> usize {
        self.n_connections.saturating_sub(self.pool.lock().n_lent).max(1)
    }

    /// Lends a connection that was used before, or a new one.
    ///
    /// # Errors
    /// If all are lent until `deadline`, or the server cannot be reached.
    pub(crate) fn lend(&self, deadline: Instant) -> Result<Lent<'_, D>> {
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

    fn connect(&self, deadline: Instant) -> Result<D::Connection> {
        self.n_connects.fetch_add(1, Ordering::Relaxed);
        self.dialer.connect(&self.endpoint, deadline).inspect_err(|_| self.set_suspect(true))
    }
}

impl<D: Dial> Lent<'_, D> {
    /// Whether the connection was open before, so that its server may have closed it long ago.
    pub(crate) fn is_used(&self) -> bool {
        self.is_used
    }

    /// Replaces the connection, which failed, by a new one. Idle ones are closed: they are as old.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub(crate) fn replace(&mut self, deadline: Instant) -> Result<()> {
        self.connection = None;
        let closed = std::mem::take(&mut self.node.pool.lock().idle);
        drop(closed);
        self.connection = Some(self.node.connect(deadline)?);
        self.is_used = false;
        Ok(())
    }

    pub(crate) fn connection(&mut self) -> Option<&mut D::Connection> {
        self.connection.as_mut()
    }

    /// Gives the connection back: all its replies were read.
    pub(crate) fn give_back(mut self) {
        self.node.set_suspect(false);
        let connection = self.connection.take().filter(D::is_reusable);
        self.node.pool.lock().idle.extend(connection);
    }
}

impl<D: Dial> Drop for Lent<'_, D> {
    fn drop(&mut self) {
        self.node.pool.lock().n_lent -= 1;
        self.node.returned.notify_one();
    }
}

impl<D: Dial> fmt::Debug for Node<D> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Node({})", self.endpoint)
    }
}
