//! The daemon's side: one thread that accepts clients and sees them leave, and one for each session.

mod attach;
mod client_file;
mod control;
mod hand_over;
mod handles;
mod manage;
mod records;
mod session;
mod sums;
mod watch;

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_memory::socket::{Connection, Listener};
use kvik_store::Store;
use parking_lot::{MappedRwLockReadGuard, Mutex, RwLock, RwLockReadGuard};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;

use crate::audit::AuditLog;
use crate::error::{NodeError, Result};
use crate::kv_log::KvListener;
use crate::kv_streams::{KvStreams, NotHeard, StreamName};
use crate::take_over::TenantOpener;
use crate::tenant::Tenant;
use control::SessionControl;
use hand_over::Successor;
use records::Auditor;
use sums::SumThreads;

/// Time for a daemon that takes over to open its stores: its disks read what describes their segments.
pub(crate) const SUCCESSOR_TIMEOUT: Duration = Duration::from_mins(2);

/// How a store is served.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// Where clients attach.
    pub socket: SocketAddress,
    /// Whose chunks the clients see.
    pub tenants: Vec<Tenant>,
    /// Clients at a time; more are refused. Default: 64.
    pub max_sessions: usize,
    /// How the stores are opened again if a take-over fails. Default: none, and no other daemon can take over.
    pub opener: Option<Arc<dyn TenantOpener>>,
    /// Time for clients to give back what they hold when another daemon takes over; after it the other one is refused.
    /// Default: 10 s.
    pub take_over_grace: Duration,
    /// Time for a daemon that takes over to open its stores. Default: 2 min; clients go on without a store after 5 s of it.
    pub successor_timeout: Duration,
    /// Where is said what clients do. Default: nowhere.
    pub audit_log: Option<PathBuf>,
}

/// A store that the engines of this machine attach to; dropping it ends all sessions and joins its threads.
#[derive(Debug)]
pub struct NodeServer {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What all threads of a server have.
#[derive(Debug)]
struct Shared {
    max_sessions: usize,
    opener: Option<Arc<dyn TenantOpener>>,
    take_over_grace: Duration,
    successor_timeout: Duration,
    /// None while another daemon takes over, and after that.
    tenants: RwLock<Vec<Tenant>>,
    /// A daemon whose terms are accepted and that waits to take over.
    successor: Mutex<Option<Successor>>,
    counters: Counters,
    audit: Option<Arc<AuditLog>>,
    sums: Arc<SumThreads>,
    streams: KvStreams,
    /// Wakes the accepting thread.
    wake_event: OwnedFd,
    is_closing: AtomicBool,
}

/// What happened since the start.
#[derive(Debug, Default)]
struct Counters {
    sessions: AtomicU64,
    attached: AtomicU64,
    managers: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
    requests: AtomicU64,
    corrupt: AtomicU64,
}

/// What happened since the start, and how many clients there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeStats {
    /// Clients that are attached now.
    pub n_sessions: u64,
    /// Managing connections that are open now.
    pub n_managers: u64,
    /// Clients that have attached.
    pub n_attached: u64,
    /// Clients that were refused: too many, a wrong token, a wrong frame.
    pub n_refused: u64,
    /// Sessions that ended by a mistake of the client, such as garbage in its ring.
    pub n_failed: u64,
    /// Requests that were answered.
    pub n_requests: u64,
    /// Chunks that were not published because their bytes were not those of their checksum.
    pub n_corrupt: u64,
    /// Lines that the audit log has lost, because too many came at a time or the file could not be written.
    pub n_audit_lost: u64,
}

/// How a client was served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Served {
    /// Until it or the daemon ended.
    ToTheEnd,
    /// It is a daemon that takes over.
    AsSuccessor,
}

/// A session as the accepting thread knows it.
#[derive(Debug)]
struct RunningSession {
    connection: Arc<Connection>,
    control: Arc<SessionControl>,
    thread: JoinHandle<()>,
}

// === impl NodeOptions ===

impl NodeOptions {
    /// The defaults for one store, at a socket.
    pub fn new(socket: SocketAddress, store: Store) -> Self {
        Self {
            socket,
            tenants: vec![Tenant::only(store)],
            max_sessions: 64,
            opener: None,
            take_over_grace: Duration::from_secs(10),
            successor_timeout: SUCCESSOR_TIMEOUT,
            audit_log: None,
        }
    }
}

// === impl NodeServer ===

impl NodeServer {
    /// Listens, and serves the stores of the tenants until it is dropped.
    ///
    /// # Errors
    /// If tenants cannot be told apart, the socket cannot be opened, or another daemon listens there.
    pub fn start(options: NodeOptions) -> Result<Self> {
        Tenant::check_all(&options.tenants)?;
        let listener = Listener::open(&options.socket)
            .map_err(NodeError::io(format!("listen on {}", options.socket)))?;
        Self::serve(options, move || Ok(listener))
    }

    /// Serves the clients of the socket that `listen` gives, on a thread of its own.
    ///
    /// # Errors
    /// If there is no thread, or `listen` fails.
    pub(crate) fn serve(
        options: NodeOptions,
        listen: impl FnOnce() -> Result<Listener> + Send + 'static,
    ) -> Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake_event = eventfd(0, flags).map_err(|errno| NodeError::io("make an event")(errno.into()))?;
        let NodeOptions {
            tenants, max_sessions, opener, take_over_grace, successor_timeout, audit_log, ..
        } = options;
        let audit = audit_log.as_deref().map(AuditLog::open).transpose()?.map(Arc::new);
        let shared = Arc::new(Shared {
            max_sessions,
            opener,
            take_over_grace,
            successor_timeout,
            tenants: RwLock::new(tenants),
            successor: Mutex::new(None),
            counters: Counters::default(),
            audit,
            sums: Arc::new(SumThreads::start()?),
            streams: KvStreams::default(),
            wake_event,
            is_closing: AtomicBool::new(false),
        });
        let serving = Arc::clone(&shared);
        let (listening, is_listening) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("kvik-node".to_owned())
            .spawn(move || {
                let (listener, outcome) = match listen() {
                    Ok(listener) => (Some(listener), Ok(())),
                    Err(error) => (None, Err(error)),
                };
                // The starting thread waits for it.
                let _ = listening.send(outcome);
                if let Some(listener) = listener {
                    accept(&serving, listener);
                }
            })
            .map_err(NodeError::io("start the accepting thread"))?;
        let server = Self { shared, thread: Mutex::new(Some(thread)) };
        match is_listening.recv() {
            Ok(outcome) => outcome.map(|()| server),
            Err(_) => Err(NodeError::Gone { reason: "the accepting thread ended" }),
        }
    }

    /// Ends all sessions and joins the threads; nothing is served after it.
    pub fn end(&self) {
        self.shared.is_closing.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.lock().take() {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
        // All sessions have said what they had to say.
        if let Some(audit) = &self.shared.audit {
            audit.close();
        }
    }

    /// The tenants that it serves; none while another daemon takes over, and after that.
    ///
    /// A clone of a store that is kept keeps another daemon from taking over.
    pub fn tenants(&self) -> MappedRwLockReadGuard<'_, [Tenant]> {
        RwLockReadGuard::map(self.shared.tenants.read(), Vec::as_slice)
    }

    /// Begins to listen which chunks of a tenant's model there are.
    pub(crate) fn listen_to(
        &self,
        tenant: &str,
        model: &str,
        resume: Option<(u64, u64)>,
    ) -> Result<KvListener, NotHeard> {
        let tenants = self.tenants();
        let Tenant { name, store, .. } =
            tenants.iter().find(|known| known.name == tenant).ok_or(NotHeard::UnknownTenant)?;
        self.shared.streams.listen(&StreamName::new(name, model), store, resume)
    }

    /// What happened since the start.
    pub fn stats(&self) -> NodeStats {
        let counters = &self.shared.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        NodeStats {
            n_sessions: read(&counters.sessions),
            n_managers: read(&counters.managers),
            n_attached: read(&counters.attached),
            n_refused: read(&counters.refused),
            n_failed: read(&counters.failed),
            n_requests: read(&counters.requests),
            n_corrupt: read(&counters.corrupt),
            n_audit_lost: self.shared.audit.as_ref().map_or(0, |audit| audit.n_lost()),
        }
    }
}

impl Drop for NodeServer {
    fn drop(&mut self) {
        self.end();
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

fn accept(shared: &Arc<Shared>, listener: Listener) {
    let mut sessions: Vec<RunningSession> = Vec::new();
    while !shared.is_closing.load(Ordering::Acquire) {
        wait(shared, Some(&listener), &sessions, None);
        // An error concerns one client; the next is accepted all the same.
        while let Some(connection) = listener.accept().unwrap_or_else(|error| {
            tracing::warn!(%error, "refuse a client of the store");
            Auditor::unknown(shared.audit.as_ref()).refused(&error);
            None
        }) {
            let n_running = sessions.iter().filter(|session| !session.thread.is_finished()).count();
            match start_session(shared, connection, n_running) {
                Ok(session) => sessions.push(session),
                Err(error) => tracing::warn!(%error, "refuse a client of the store"),
            }
        }
        sessions = reap(sessions);
        let successor = shared.successor.lock().take();
        if let Some(successor) = successor
            && hand_over::run(shared, &listener, &mut sessions, &successor)
        {
            // The socket and its file are the successor's.
            listener.leave();
            return;
        }
    }
    listener.close();
    sessions.iter().for_each(RunningSession::end);
    sessions.into_iter().for_each(RunningSession::join);
}

/// Ends the sessions whose client is gone; returns those that have not ended yet.
fn reap(sessions: Vec<RunningSession>) -> Vec<RunningSession> {
    // Told, not waited for: a session may be in a slow read, and others must not wait for it.
    sessions.iter().filter(|session| session.has_hung_up()).for_each(RunningSession::end);
    let (ended, running): (Vec<_>, Vec<_>) =
        sessions.into_iter().partition(|session| session.thread.is_finished());
    ended.into_iter().for_each(RunningSession::join);
    running
}

/// Waits for a client that comes to `listener` or goes, for the wake-up event, or for `timeout`.
fn wait(
    shared: &Shared,
    listener: Option<&Listener>,
    sessions: &[RunningSession],
    timeout: Option<&Timespec>,
) {
    let mut descriptors = vec![PollFd::new(&shared.wake_event, PollFlags::IN)];
    descriptors.extend(listener.map(|socket| PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)));
    // Only the end of a connection counts; frames are the session's to read. A session that is notified of it wakes this
    // thread when it has ended.
    let connections = sessions
        .iter()
        .filter(|session| !session.control.is_ended())
        .map(|session| PollFd::from_borrowed_fd(session.connection.as_fd(), PollFlags::RDHUP));
    descriptors.extend(connections);
    // A signal, too, makes the caller look again.
    let _ = poll(&mut descriptors, timeout);
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
    let control = Arc::new(SessionControl::default());
    let is_full = n_sessions >= shared.max_sessions;
    let (serving, served, told) = (Arc::clone(shared), Arc::clone(&connection), Arc::clone(&control));
    let thread = std::thread::Builder::new().name("kvik-session".to_owned()).spawn(move || {
        match attach::serve(&serving, &served, &told, is_full) {
            Ok(Served::ToTheEnd) => served.close(),
            // The accepting thread goes on with the connection.
            Ok(Served::AsSuccessor) => {}
            Err(error) => {
                served.close();
                tracing::info!(%error, "end the session of a client of the store");
            }
        }
        serving.wake();
    })?;
    Ok(RunningSession { connection, control, thread })
}

// === impl RunningSession ===

impl RunningSession {
    fn has_hung_up(&self) -> bool {
        let mut descriptors = [PollFd::from_borrowed_fd(self.connection.as_fd(), PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut descriptors, Some(&now)).is_ok_and(|n_ready| n_ready > 0)
    }

    /// Tells the session's thread that it is over.
    fn end(&self) {
        self.control.end();
        self.connection.close();
    }

    /// Waits for the thread, which gives back what the client held.
    fn join(self) {
        let begin = Instant::now();
        // A thread that panicked has said so.
        let _ = self.thread.join();
        let took = begin.elapsed();
        if took > Duration::from_secs(1) {
            tracing::warn!(took_ms = took.as_millis() as u64, "a session of the store ended slowly");
        }
    }
}
