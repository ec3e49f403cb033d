//! A listener for clients of other machines, and one thread for each connection.

use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvik_tier::TierError;
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;

use crate::error::{NodeError, Result};

/// How often [`Service::tick`] is called where no client comes or goes.
const TICK: Duration = Duration::from_millis(500);

/// What is done with connections.
pub(crate) trait Service: Send + Sync + 'static {
    /// What a client is called in logs.
    const CLIENT: &'static str;
    /// What the threads are called.
    const THREAD: &'static str;

    /// Serves one client until it or the caller ends the connection.
    ///
    /// # Errors
    /// Why the connection ended, where it was not the client's wish.
    fn serve(&self, stream: TcpStream) -> Result<(), TierError>;

    /// Called now and then.
    fn tick(&self) {}
}

/// How many connections there may be at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectionLimits {
    /// Of all clients.
    pub(crate) n_connections: usize,
    /// Of one address, so that no client takes those of the others.
    pub(crate) n_by_address: usize,
}

/// Connections of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ConnectionCounts {
    /// There are now.
    pub(crate) n_connections: u64,
    /// Were refused, or ended by a mistake of the client, since the start.
    pub(crate) n_refused: u64,
}

/// Accepts connections for a service; dropping it ends all of them and joins the threads.
#[derive(Debug)]
pub(crate) struct Acceptor<S> {
    shared: Arc<Shared<S>>,
    address: SocketAddr,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared<S> {
    service: S,
    limits: ConnectionLimits,
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

/// A connection as the accepting thread knows it.
#[derive(Debug)]
struct RunningConnection {
    address: IpAddr,
    stream: TcpStream,
    thread: JoinHandle<()>,
}

impl<S: Service> Acceptor<S> {
    /// Serves clients at `listener` until it is dropped.
    ///
    /// # Errors
    /// If the operating system refuses.
    pub(crate) fn start(listener: TcpListener, service: S, limits: ConnectionLimits) -> Result<Self> {
        let prepared = listener.set_nonblocking(true).and_then(|()| listener.local_addr());
        let address = prepared.map_err(NodeError::io(format!("listen for a {}", S::CLIENT)))?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake_event = eventfd(0, flags).map_err(|errno| NodeError::io("make an event")(errno.into()))?;
        let shared = Arc::new(Shared {
            service,
            limits,
            wake_event,
            is_closing: AtomicBool::new(false),
            pause: Mutex::default(),
            paused: Condvar::new(),
            n_connections: AtomicU64::new(0),
            n_refused: AtomicU64::new(0),
        });
        let serving = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(S::THREAD.to_owned())
            .spawn(move || accept(&serving, &listener))
            .map_err(NodeError::io("start the thread that accepts clients"))?;
        Ok(Self { shared, address, thread: Mutex::new(Some(thread)) })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// What is done with connections.
    pub(crate) fn service(&self) -> &S {
        &self.shared.service
    }

    pub(crate) fn counts(&self) -> ConnectionCounts {
        ConnectionCounts {
            n_connections: self.shared.n_connections.load(Ordering::Relaxed),
            n_refused: self.shared.n_refused.load(Ordering::Relaxed),
        }
    }

    /// Ends all connections; new ones wait until [`Self::resume`].
    pub(crate) fn pause(&self) {
        let mut pause = self.shared.pause.lock();
        *pause = Pause::Begun;
        self.shared.wake();
        while *pause == Pause::Begun && !self.shared.is_closing.load(Ordering::Acquire) {
            self.shared.paused.wait_for(&mut pause, TICK);
        }
    }

    /// Accepts connections again.
    pub(crate) fn resume(&self) {
        *self.shared.pause.lock() = Pause::None;
        self.shared.wake();
    }
}

impl<S> Acceptor<S> {
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

impl<S> Drop for Acceptor<S> {
    fn drop(&mut self) {
        self.end();
    }
}

impl<S> Shared<S> {
    fn wake(&self) {
        // It can only fail when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake_event, &1_u64.to_le_bytes());
    }
}

fn accept<S: Service>(shared: &Arc<Shared<S>>, listener: &TcpListener) {
    let mut connections: Vec<RunningConnection> = Vec::new();
    while !shared.is_closing.load(Ordering::Acquire) {
        let is_paused = *shared.pause.lock() == Pause::Reached;
        wait(shared, (!is_paused).then_some(listener));
        shared.service.tick();
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
                    tracing::warn!(%error, "refuse a {}", S::CLIENT);
                    break;
                }
            }
        }
    }
    connections.iter().for_each(RunningConnection::end);
    connections.into_iter().for_each(RunningConnection::join);
}

/// Waits for a client, where clients are accepted, for the wake-up event, or for the next tick.
fn wait<S>(shared: &Shared<S>, listener: Option<&TcpListener>) {
    let mut descriptors = vec![PollFd::new(&shared.wake_event, PollFlags::IN)];
    descriptors.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
    let timeout = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as i64 };
    // A signal, too, makes the caller look again.
    let _ = poll(&mut descriptors, Some(&timeout));
    let mut count = [0; 8];
    // Nothing to read is as good: there was no wake-up then.
    let _ = rustix::io::read(&shared.wake_event, &mut count);
}

/// Starts the thread of a client; `None` where there are too many.
fn admit<S: Service>(
    shared: &Arc<Shared<S>>,
    stream: TcpStream,
    address: SocketAddr,
    connections: &[RunningConnection],
) -> Option<RunningConnection> {
    let ip = address.ip();
    let n_same = connections.iter().filter(|connection| connection.address == ip).count();
    let ConnectionLimits { n_connections, n_by_address } = shared.limits;
    if connections.len() >= n_connections || n_same >= n_by_address {
        shared.n_refused.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(%address, n_connections = connections.len(), "refuse a {}: too many", S::CLIENT);
        return None;
    }
    match serve(shared, stream, address) {
        Ok(connection) => Some(connection),
        Err(error) => {
            tracing::warn!(%address, %error, "refuse a {}", S::CLIENT);
            None
        }
    }
}

fn serve<S: Service>(
    shared: &Arc<Shared<S>>,
    stream: TcpStream,
    address: SocketAddr,
) -> io::Result<RunningConnection> {
    stream.set_nonblocking(false)?;
    let served = stream.try_clone()?;
    let serving = Arc::clone(shared);
    let thread = std::thread::Builder::new().name(S::THREAD.to_owned()).spawn(move || {
        serving.n_connections.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = serving.service.serve(served) {
            serving.n_refused.fetch_add(1, Ordering::Relaxed);
            tracing::info!(%address, %error, "end the connection of a {}", S::CLIENT);
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
