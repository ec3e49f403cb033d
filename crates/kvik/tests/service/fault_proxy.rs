//! A TCP proxy before a role, which stops at a byte pattern until the test has done its harm, and which can cut the role off.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use crate::process::PATIENCE;

/// Bytes that are read at once.
const READ_BYTES: usize = 64 << 10;

/// A proxy on loopback; its connections end with it.
#[derive(Debug)]
pub(crate) struct FaultProxy {
    /// `host:port`, where the role seems to be.
    pub(crate) address: String,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Where the role is.
    upstream: String,
    is_cut: bool,
    is_over: bool,
    /// Both ends of all connections.
    sockets: Vec<TcpStream>,
    watch: Option<Watch>,
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    ToRole,
    FromRole,
}

/// Where bytes stop.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pattern {
    pub(crate) direction: Direction,
    pub(crate) bytes: &'static str,
    /// How often it has to come, from one on.
    pub(crate) nth: usize,
    /// Bytes from the start of the pattern on that still pass.
    pub(crate) n_passed: usize,
}

#[derive(Debug)]
struct Watch {
    pattern: Pattern,
    n_seen: usize,
    /// Which of the proxies that watch together this is.
    place: usize,
    fired: SyncSender<(usize, Sender<()>)>,
}

/// Tells when the pattern has come.
#[derive(Debug)]
pub(crate) struct Watched(Receiver<(usize, Sender<()>)>);

/// Bytes that wait; they go on when this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    /// Which of the proxies that watch together has them.
    pub(crate) place: usize,
    #[expect(dead_code, reason = "its end is the message")]
    release: Sender<()>,
}

impl FaultProxy {
    /// Listens; the role is told later.
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(Shared::default());
        let accepting = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.accept(&listener))
        };
        Self { address, shared, accepting: Some(accepting) }
    }

    /// Passes connections on to `upstream`.
    pub(crate) fn set_upstream(&self, upstream: &str) {
        upstream.clone_into(&mut self.shared.state.lock().upstream);
    }

    /// Severs all connections and refuses new ones, or takes them again.
    pub(crate) fn set_cut(&self, is_cut: bool) {
        let mut state = self.shared.state.lock();
        state.is_cut = is_cut;
        if is_cut {
            state.sever();
        }
    }

    /// Stops bytes where a pattern comes next at any of `proxies`; the first one counts.
    pub(crate) fn watch(proxies: &[&Self], pattern: Pattern) -> Watched {
        let (fired, watched) = mpsc::sync_channel(proxies.len());
        for (place, proxy) in proxies.iter().enumerate() {
            let watch = Watch { pattern, n_seen: 0, place, fired: fired.clone() };
            proxy.shared.state.lock().watch = Some(watch);
        }
        Watched(watched)
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_over = true;
        state.sever();
        drop(state);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(&self.address);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

impl Watched {
    /// Waits for the pattern; `None` if it did not come in time.
    pub(crate) fn wait(&self) -> Option<Held> {
        self.0.recv_timeout(PATIENCE).ok().map(|(place, release)| Held { place, release })
    }
}

impl State {
    fn sever(&mut self) {
        for socket in self.sockets.drain(..) {
            // The other end may have closed it.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for client in listener.incoming().map_while(Result::ok) {
            let mut state = self.state.lock();
            if state.is_over {
                return;
            }
            state.sockets.retain(|socket| socket.peer_addr().is_ok());
            let role = if state.is_cut { None } else { TcpStream::connect(&state.upstream).ok() };
            let Some(role) = role else { continue };
            for socket in [&client, &role] {
                socket.set_nodelay(true).unwrap();
                state.sockets.push(socket.try_clone().unwrap());
            }
            drop(state);
            for (direction, from, to) in
                [(Direction::ToRole, &client, &role), (Direction::FromRole, &role, &client)]
            {
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                let shared = Arc::clone(self);
                thread::spawn(move || shared.pump(direction, from, to));
            }
        }
    }

    /// Passes bytes on until either end closes; both are closed then.
    fn pump(&self, direction: Direction, mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = vec![0; READ_BYTES];
        // The end of what has passed: a pattern may come in pieces.
        let mut seen: Vec<u8> = Vec::new();
        while let Ok(n_bytes @ 1..) = from.read(&mut bytes) {
            let data = &bytes[..n_bytes];
            let n_first = self.look(direction, &mut seen, data);
            let (first, rest) = data.split_at(n_first.as_ref().map_or(n_bytes, |(n_first, _)| *n_first));
            if to.write_all(first).is_err() {
                break;
            }
            if let Some((_, watch)) = n_first {
                let (held, go_on) = mpsc::channel();
                if watch.fired.send((watch.place, held)).is_ok() {
                    while go_on.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {}
                }
            }
            if to.write_all(rest).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }

    /// Looks for the pattern; how many of the bytes still pass if they have it for the last time.
    fn look(&self, direction: Direction, seen: &mut Vec<u8>, data: &[u8]) -> Option<(usize, Watch)> {
        let mut state = self.state.lock();
        let Some(watch) = state.watch.as_mut().filter(|watch| watch.pattern.direction == direction) else {
            seen.clear();
            return None;
        };
        let pattern = watch.pattern.bytes.as_bytes();
        let n_before = seen.len();
        seen.extend_from_slice(data);
        let found = seen.windows(pattern.len()).enumerate().filter(|(_, window)| *window == pattern);
        for (at, _) in found {
            watch.n_seen += 1;
            if watch.n_seen == watch.pattern.nth {
                let n_passed = (at + watch.pattern.n_passed).saturating_sub(n_before).min(data.len());
                return Some((n_passed, state.watch.take()?));
            }
        }
        let n_kept = seen.len().min(pattern.len() - 1);
        seen.drain(..seen.len() - n_kept);
        None
    }
}
