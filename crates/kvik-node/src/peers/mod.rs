//! The daemon's side towards other nodes: a listener, and one thread for each connection.

mod discovery;
mod hints;
mod listing;
mod source;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvik_tier::peer::{PeerAdmission, PeerSource, serve_peer};
use parking_lot::{Condvar, Mutex, RwLock};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;

use crate::error::{NodeError, Result};
use crate::tenant::Tenant;
pub(crate) use discovery::Discovery;
pub(crate) use hints::IndexHints;
pub(crate) use listing::{Listed, Listing};
use source::StoreSource;

/// Connections at a time: those of a hundred nodes.
const MAX_CONNECTIONS: usize = 1024;

/// Connections of one address at a time, so that no node takes those of the others.
const MAX_CONNECTIONS_BY_ADDRESS: usize = 64;

/// How often leases that have ended are given back where no request does it.
const LEASE_INTERVAL: Duration = Duration::from_millis(500);

/// Other nodes that read from the stores of this one; dropping it ends all connections and joins the threads.
#[derive(Debug)]
pub(crate) struct PeerServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    admission: PeerAdmission,
    /// By the names of tenants; none during a pause.
    sources: RwLock<HashMap<String, Arc<StoreSource>>>,
    wake_event: OwnedFd,
    is_closing: AtomicBool,
    /// Whether connections are to end, and whether the last of them has.
    pause: Mutex<Pause>,
    paused: Condvar,
    n_connections: AtomicU64,
    n_refused: AtomicU64,
}

/// The state of a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Pause {
    #[default]
    None,
    /// Open connections are being closed.
    Begun,
    /// There is no connection, and none is accepted.
    Reached,
}

/// What happened with peers since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PeerStats {
    /// Connections of peers now.
    pub n_connections: u64,
    /// Connections that were refused: too many, a wrong token, wrong frames.
    pub n_refused: u64,
}

/// A connection as the accepting thread knows it.
#[derive(Debug)]
struct RunningConnection {
    address: IpAddr,
    stream: TcpStream,
    thread: JoinHandle<()>,
}

impl PeerServer {
    /// Serves the stores of the tenants at `listener` until it is dropped.
    ///
    /// # Errors
    /// If the operating system refuses.
    pub(crate) fn start(listener: TcpListener, tenants: &[Tenant], admission: PeerAdmission) -> Result<Self> {
        let failed = NodeError::io("listen for peers");
        let prepared = listener.set_nonblocking(true).and_then(|()| listener.local_addr());
        let address = prepared.map_err(failed)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake_event = eventfd(0, flags).map_err(|errno| NodeError::io("make an event")(errno.into()))?;
        let sources = RwLock::new(sources_of(tenants));
        let shared = Arc::new(Shared {
            admission,
            sources,
            wake_event,
            is_closing: AtomicBool::new(false),
            pause: Mutex::default(),
            paused: Condvar::new(),
            n_connections: AtomicU64::new(0),
            n_refused: AtomicU64::new(0),
        });
        let serving = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("kvik-peers".to_owned())
            .spawn(move || accept(&serving, &listener))
            .map_err(NodeError::io("start the thread for peers"))?;
        Ok(Self { shared, address, thread: Mutex::new(Some(thread)) })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn stats(&self) -> PeerStats {
        PeerStats {
            n_connections: self.shared.n_connections.load(Ordering::Relaxed),
            n_refused: self.shared.n_refused.load(Ordering::Relaxed),
        }
    }

    /// Ends all connections and lets go of the stores; new connections wait until [`Self::resume`].
    pub(crate) fn pause(&self) {
        self.shared.sources.write().clear();
        let mut pause = self.shared.pause.lock();
        *pause = Pause::Begun;
        self.shared.wake();
        while *pause == Pause::Begun && !self.shared.is_closing.load(Ordering::Acquire) {
            self.shared.paused.wait_for(&mut pause, LEASE_INTERVAL);
        }
    }

    /// Serves the stores of the tenants again.
    pub(crate) fn resume(&self, tenants: &[Tenant]) {
        *self.shared.sources.write() = sources_of(tenants);
        *self.shared.pause.lock() = Pause::None;
        self.shared.wake();
    }

    /// Ends all connections and joins the threads.
    pub(crate) fn end(&self) {
        self.shared.is_closing.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.lock().take() {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

impl Drop for PeerServer {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn wake(&self) {
        // It can only fail when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake_event, &1_u64.to_le_bytes());
    }
}

fn sources_of(tenants: &[Tenant]) -> HashMap<String, Arc<StoreSource>> {
    let source = |tenant: &Tenant| (tenant.name.clone(), Arc::new(StoreSource::new(tenant.store.clone())));
    tenants.iter().map(source).collect()
}

fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    let mut connections: Vec<RunningConnection> = Vec::new();
    while !shared.is_closing.load(Ordering::Acquire) {
        let is_paused = *shared.pause.lock() == Pause::Reached;
        wait(shared, (!is_paused).then_some(listener));
        for source in shared.sources.read().values() {
            source.end_leases(Instant::now());
        }
        if *shared.pause.lock() != Pause::None {
            connections.drain(..).for_each(|connection| {
                connection.end();
                connection.join();
            });
            *shared.pause.lock() = Pause::Reached;
            shared.paused.notify_all();
            continue;
        }
        let (ended, running): (Vec<_>, Vec<_>) =
            connections.into_iter().partition(|connection| connection.thread.is_finished());
        connections = running;
        ended.into_iter().for_each(RunningConnection::join);
        loop {
            match listener.accept() {
                Ok((stream, address)) => connections.extend(admit(shared, stream, address, &connections)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // It concerns one client, such as one that is gone again; or there are no descriptors, which may
                // take a while, and the next wait is bounded.
                Err(error) => {
                    tracing::warn!(%error, "refuse a peer of the store");
                    break;
                }
            }
        }
    }
    connections.iter().for_each(RunningConnection::end);
    connections.into_iter().for_each(RunningConnection::join);
}

/// Waits for a client, where clients are accepted, for the wake-up event, or until leases may have ended.
fn wait(shared: &Shared, listener: Option<&TcpListener>) {
    let mut descriptors = vec![PollFd::new(&shared.wake_event, PollFlags::IN)];
    descriptors.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
    let timeout = Timespec { tv_sec: 0, tv_nsec: LEASE_INTERVAL.as_nanos() as i64 };
    // A signal, too, makes the caller look again.
    let _ = poll(&mut descriptors, Some(&timeout));
    let mut count = [0; 8];
    // Nothing to read is as good: there was no wake-up then.
    let _ = rustix::io::read(&shared.wake_event, &mut count);
}

/// Starts the thread of a client; `None` where there are too many.
fn admit(
    shared: &Arc<Shared>,
    stream: TcpStream,
    address: SocketAddr,
    connections: &[RunningConnection],
) -> Option<RunningConnection> {
    let ip = address.ip();
    let n_same = connections.iter().filter(|connection| connection.address == ip).count();
    if connections.len() >= MAX_CONNECTIONS || n_same >= MAX_CONNECTIONS_BY_ADDRESS {
        shared.n_refused.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(peer = %address, n_connections = connections.len(), "refuse a peer of the store");
        return None;
    }
    match serve(shared, stream, address) {
        Ok(connection) => Some(connection),
        Err(error) => {
            tracing::warn!(peer = %address, %error, "refuse a peer of the store");
            None
        }
    }
}

fn serve(shared: &Arc<Shared>, stream: TcpStream, address: SocketAddr) -> io::Result<RunningConnection> {
    stream.set_nonblocking(false)?;
    let served = stream.try_clone()?;
    let serving = Arc::clone(shared);
    let thread = std::thread::Builder::new().name("kvik-peer".to_owned()).spawn(move || {
        serving.n_connections.fetch_add(1, Ordering::Relaxed);
        let source_of = |tenant: &str| {
            serving.sources.read().get(tenant).map(|source| Arc::clone(source) as Arc<dyn PeerSource>)
        };
        if let Err(error) = serve_peer(served, &serving.admission, source_of) {
            serving.n_refused.fetch_add(1, Ordering::Relaxed);
            tracing::info!(peer = %address, %error, "end the connection of a peer");
        }
        serving.n_connections.fetch_sub(1, Ordering::Relaxed);
        serving.wake();
    })?;
    Ok(RunningConnection { address: address.ip(), stream, thread })
}

impl RunningConnection {
    /// Ends the connection, and with it what its thread waits for.
    fn end(&self) {
        // One that has ended is as good.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn join(self) {
        // A thread that panicked has said so.
        let _ = self.thread.join();
    }
}
