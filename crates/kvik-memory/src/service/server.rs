//! The memory service: listens, and gives every connection a session.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::session::{self, ServerState};
use crate::ledger::Ledger;
use crate::socket::SocketAddress;
use crate::socket::{Connection, Listener, is_readable, wait_ready};
use crate::{MemoryError, Result};

/// The most connections: a ledger has 64 slots, and some more may wait for the refusal.
const MAX_CONNECTIONS: usize = 128;

/// How long the server waits after it could not accept, so that a lack of descriptors costs no core.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// How often ended sessions are looked after while no client connects.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// Where a [`MemoryServer`] listens, and the default group of its sessions.
#[derive(Debug, Clone)]
pub struct MemoryServerOptions {
    /// The socket, in a folder that only this user can enter; the folder is made if it is missing.
    pub socket: PathBuf,
    /// The group of sessions that name none; without one they are refused.
    pub default_ipc_name: Option<String>,
}

/// Serves the grants of a ledger at a socket.
///
/// Dropping it ends all sessions, whose grants go back, and waits for their threads.
pub struct MemoryServer {
    socket: PathBuf,
    listener: Arc<Listener>,
    server: Arc<ServerState>,
    thread: Option<JoinHandle<()>>,
}

/// A session's thread, and the connection that ends it.
struct SessionThread {
    connection: Arc<Connection>,
    thread: JoinHandle<()>,
}

impl fmt::Debug for MemoryServer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("MemoryServer").field("socket", &self.socket).finish_non_exhaustive()
    }
}

// === impl MemoryServer ===

impl MemoryServer {
    /// Listens, and serves `ledger` from then on.
    ///
    /// Fails where the socket cannot be listened at, another server does already, or the folder is not
    /// safe from other users.
    pub fn start(options: &MemoryServerOptions, ledger: Ledger) -> Result<Self> {
        let failed = |source: io::Error| MemoryError::Segment {
            action: "listen at",
            path: options.socket.clone(),
            source,
        };
        let address = SocketAddress::Path(options.socket.clone());
        let listener = Arc::new(Listener::open(&address).map_err(failed)?);
        let default_ipc_name = options.default_ipc_name.clone();
        let server = Arc::new(ServerState { ledger, default_ipc_name, is_stopping: AtomicBool::new(false) });
        let thread = thread::Builder::new()
            .name("kvik-memory".to_owned())
            .spawn({
                let (listener, server) = (Arc::clone(&listener), Arc::clone(&server));
                move || accept_all(&listener, &server)
            })
            .map_err(failed)?;
        Ok(Self { socket: options.socket.clone(), listener, server, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for MemoryServer {
    fn drop(&mut self) {
        self.server.is_stopping.store(true, Ordering::SeqCst);
        self.listener.close();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the memory service panicked");
        }
    }
}

/// Accepts until the listener is closed, then ends all sessions.
fn accept_all(listener: &Listener, server: &Arc<ServerState>) {
    let mut sessions: Vec<SessionThread> = Vec::new();
    loop {
        let mut descriptors = [PollFd::new(listener, PollFlags::IN)];
        let waited = wait_ready(&mut descriptors, Some(Instant::now() + SWEEP_EVERY));
        let is_closed = waited.is_err() || descriptors[0].revents().contains(PollFlags::HUP);
        if is_closed || server.is_stopping.load(Ordering::SeqCst) {
            break;
        }
        for session in sessions.extract_if(.., |session| session.thread.is_finished()) {
            join(session);
        }
        if is_readable(&descriptors[0])
            && let Some(connection) = accept(listener)
        {
            if sessions.len() < MAX_CONNECTIONS {
                sessions.extend(start_session(connection, server));
            } else {
                tracing::warn!(n_connections = sessions.len(), "refused a connection: there are too many");
            }
        }
    }
    for session in sessions {
        session.connection.close();
        join(session);
    }
}

fn accept(listener: &Listener) -> Option<Connection> {
    match listener.accept() {
        Ok(connection) => connection,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            tracing::warn!(%error, "refused a connection");
            None
        }
        Err(error) => {
            tracing::warn!(%error, "could not accept a connection");
            thread::park_timeout(ACCEPT_PAUSE);
            None
        }
    }
}

fn start_session(connection: Connection, server: &Arc<ServerState>) -> Option<SessionThread> {
    let connection = Arc::new(connection);
    let thread = thread::Builder::new().name("kvik-session".to_owned()).spawn({
        let (connection, server) = (Arc::clone(&connection), Arc::clone(server));
        move || {
            session::serve(&server, &connection);
            // The client sees the end at once, even if another process has the descriptor.
            connection.close();
        }
    });
    match thread {
        Ok(thread) => Some(SessionThread { connection, thread }),
        Err(error) => {
            tracing::warn!(%error, "refused a connection: there is no thread for it");
            None
        }
    }
}

fn join(session: SessionThread) {
    if session.thread.join().is_err() {
        tracing::error!("the thread of a session panicked");
    }
}
