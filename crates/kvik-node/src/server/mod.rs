//! The daemon's side: one thread that accepts clients and sees them leave, and one for each session.

mod handles;
mod session;

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_memory::socket::{Connection, Listener};
use kvik_store::{DigestKey, Store};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;

use crate::error::{NodeError, Result};
use session::{Session, SessionEnd};

/// How a store is served.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// Where clients attach.
    pub socket: SocketAddress,
    /// Whose chunks the clients see. Default: empty, shared.
    pub tenant: String,
    /// Clients at a time; more are refused. Default: 64.
    pub max_sessions: usize,
}

/// A store that the engines of this machine attach to; dropping it ends all sessions and joins its threads.
#[derive(Debug)]
pub struct NodeServer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What all threads of a server have.
#[derive(Debug)]
struct Shared {
    store: Store,
    options: NodeOptions,
    digest_key: Option<DigestKey>,
    /// Wakes the accepting thread.
    wake_event: OwnedFd,
    is_closing: AtomicBool,
}

/// A session as the accepting thread knows it.
#[derive(Debug)]
struct RunningSession {
    connection: Arc<Connection>,
    end: Arc<SessionEnd>,
    thread: JoinHandle<()>,
}

// === impl NodeOptions ===

impl NodeOptions {
    /// The defaults, at a socket.
    pub fn new(socket: SocketAddress) -> Self {
        Self { socket, tenant: String::new(), max_sessions: 64 }
    }
}

// === impl NodeServer ===

impl NodeServer {
    /// Listens, and serves `store` until it is dropped.
    ///
    /// # Errors
    /// If the socket cannot be opened, or another daemon listens there.
    pub fn start(store: Store, options: NodeOptions) -> Result<Self> {
        let listener = Listener::open(&options.socket)
            .map_err(NodeError::io(format!("listen on {}", options.socket)))?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake_event = eventfd(0, flags).map_err(|errno| NodeError::io("make an event")(errno.into()))?;
        let digest_key = store.options().digest_key.clone();
        let shared =
            Arc::new(Shared { store, options, digest_key, wake_event, is_closing: AtomicBool::new(false) });
        let serving = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("kvik-node".to_owned())
            .spawn(move || accept(&serving, &listener))
            .map_err(NodeError::io("start the accepting thread"))?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Drop for NodeServer {
    fn drop(&mut self) {
        self.shared.is_closing.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

// === impl Shared ===

impl Shared {
    /// Makes the accepting thread look again.
    fn wake(&self) {
        // Any number but 0 wakes it. It can only fail when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake_event, &1_u64.to_le_bytes());
    }
}

fn accept(shared: &Arc<Shared>, listener: &Listener) {
    let mut sessions: Vec<RunningSession> = Vec::new();
    while !shared.is_closing.load(Ordering::Acquire) {
        wait(shared, listener, &sessions);
        // An error concerns one client; the next is accepted all the same.
        while let Some(connection) = listener.accept().unwrap_or_else(|error| {
            tracing::warn!(%error, "refuse a client of the store");
            None
        }) {
            match start_session(shared, connection, sessions.len()) {
                Ok(session) => sessions.push(session),
                Err(error) => tracing::warn!(%error, "refuse a client of the store"),
            }
        }
        let (gone, staying): (Vec<_>, Vec<_>) =
            sessions.into_iter().partition(|session| session.thread.is_finished() || session.has_hung_up());
        sessions = staying;
        gone.into_iter().for_each(RunningSession::end_and_join);
    }
    listener.close();
    sessions.into_iter().for_each(RunningSession::end_and_join);
}

/// Waits for a client that comes or goes, or for the wake-up event.
fn wait(shared: &Shared, listener: &Listener, sessions: &[RunningSession]) {
    let mut descriptors = vec![
        PollFd::new(&shared.wake_event, PollFlags::IN),
        PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
    ];
    // Only the end of a connection counts; frames are the session's to read.
    let connections =
        sessions.iter().map(|session| PollFd::from_borrowed_fd(session.connection.as_fd(), PollFlags::RDHUP));
    descriptors.extend(connections);
    // A signal, too, makes the caller look again.
    let _ = poll(&mut descriptors, None);
    let mut count = [0; 8];
    // Nothing to read is as good: there was no wake-up then.
    let _ = rustix::io::read(&shared.wake_event, &mut count);
}

fn start_session(
    shared: &Arc<Shared>,
    connection: Connection,
    n_sessions: usize,
) -> io::Result<RunningSession> {
    let connection = Arc::new(connection);
    let end = Arc::new(SessionEnd::default());
    let is_full = n_sessions >= shared.options.max_sessions;
    let (serving, served, ending) = (Arc::clone(shared), Arc::clone(&connection), Arc::clone(&end));
    let thread = std::thread::Builder::new().name("kvik-session".to_owned()).spawn(move || {
        if let Err(error) = Session::run(&serving, &served, &ending, is_full) {
            tracing::info!(%error, "end the session of a client of the store");
        }
        served.close();
        serving.wake();
    })?;
    Ok(RunningSession { connection, end, thread })
}

// === impl RunningSession ===

impl RunningSession {
    fn has_hung_up(&self) -> bool {
        let mut descriptors = [PollFd::from_borrowed_fd(self.connection.as_fd(), PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut descriptors, Some(&now)).is_ok_and(|n_ready| n_ready > 0)
    }

    /// Ends the session and waits for its thread, which gives back what the client held.
    fn end_and_join(self) {
        self.end.set();
        self.connection.close();
        let begin = Instant::now();
        // A thread that panicked has said so.
        let _ = self.thread.join();
        let took = begin.elapsed();
        if took > Duration::from_secs(1) {
            tracing::warn!(took_ms = took.as_millis() as u64, "a session of the store ended slowly");
        }
    }
}
