//! The engine's side: what it asks of the daemon, and the bytes that it copies itself.

mod chain;
mod exchange;
mod layers;
mod lease;
mod manage;
mod session;
mod survey;
mod watch;
mod write;

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_memory::socket::{Connection, FrameBuffer, wait_ready};
use kvik_store::{Chain, ChunkFormat, Space};
use kvik_tier::shared::{ArenaView, SharedWords, ViewAccess};
use kvik_types::Namespace;
use rustix::event::{PollFd, PollFlags};

use crate::error::{NodeError, Result};
use crate::frame::{Attach, Attached, Purpose};
use crate::ring::SESSION_WORDS;
use crate::tenant::ClientToken;

pub use chain::OpenChain;
use exchange::Exchange;
pub use layers::RemoteLayers;
pub use lease::RemoteLease;
pub use manage::{NodeManager, RemotePrefetch};
pub use session::NodeSession;
pub use survey::survey;
pub use watch::NodeWatch;
pub use write::RemoteWrite;

/// What an engine says when it attaches.
#[derive(Debug, Clone)]
pub struct AttachOptions {
    /// Where the daemon listens.
    pub socket: SocketAddress,
    /// Model, element type and layout; the daemon sets the tenant.
    pub namespace: Namespace,
    /// The bytes of its chunks.
    pub format: ChunkFormat,
    /// Its rank.
    pub rank: u16,
    /// What it proves its tenant with. Default: none, for a daemon with a tenant that needs none.
    pub token: Option<ClientToken>,
    /// Time for the daemon to answer a request, the attachment too. Default: 10 s.
    pub timeout: Duration,
    /// Whether it sleeps as soon as it waits for an answer, and does not look for it for some microseconds before: for work
    /// that is not urgent, on processors that others need. Default: false.
    pub is_patient: bool,
    /// Whether its chunks are segments: their tails are kept whatever the daemon's settings say, and no index gets events of
    /// them. A daemon that does not know of segments refuses the session. Default: false.
    pub is_for_segments: bool,
}

/// An engine's session with the store of its node. Clones share it.
///
/// May be used from any thread; requests go one after the other. After a request without an answer every call fails:
/// attach again. While another daemon takes over, calls that begin something fail with [`NodeError::Moving`]; what is held
/// stays valid, and the other daemon waits for it. The session ends when the last clone is dropped, and the last lease or write that came from it; the
/// daemon takes back all that it held.
#[derive(Debug, Clone)]
pub struct NodeClient {
    shared: Arc<ClientShared>,
}

#[derive(Debug)]
struct ClientShared {
    exchange: Exchange,
    space: Space,
    rank: u16,
    peer_address: Option<String>,
    reading: ArenaView,
    writing: ArenaView,
}

/// Something that the daemon holds for this client; dropping it gives it back.
#[derive(Debug)]
struct Handle {
    client: NodeClient,
    number: u32,
}

// === impl AttachOptions ===

impl AttachOptions {
    /// The only rank of an engine, with the default timeout.
    pub fn new(socket: SocketAddress, namespace: Namespace, format: ChunkFormat) -> Self {
        let timeout = Duration::from_secs(10);
        Self {
            socket,
            namespace,
            format,
            rank: 0,
            token: None,
            timeout,
            is_patient: false,
            is_for_segments: false,
        }
    }
}

// === impl NodeClient ===

impl NodeClient {
    /// Attaches to the daemon.
    ///
    /// # Errors
    /// If no daemon listens, the daemon does not answer in time, or the daemon refuses the client.
    pub fn attach(options: &AttachOptions) -> Result<Self> {
        let purpose = if options.is_for_segments { Purpose::Segments } else { Purpose::Session };
        let (connection, attached, descriptors) = connect(options, purpose)?;
        let AttachOptions { namespace, format, rank, timeout, is_patient, .. } = options;
        let Ok([words, readable, writable]) = <[_; 3]>::try_from(descriptors) else {
            return Err(NodeError::invalid("descriptors", &"another number", "3"));
        };
        let words = Arc::new(SharedWords::map(words, SESSION_WORDS)?);
        let shared = ClientShared {
            exchange: Exchange::new(connection, words, *timeout, *is_patient),
            space: attached.space(namespace, *format)?,
            rank: *rank,
            peer_address: attached.peer_address,
            reading: ArenaView::map(readable, attached.arena_bytes, ViewAccess::Read)?,
            writing: ArenaView::map(writable, attached.arena_bytes, ViewAccess::Write)?,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Where chains are made for this client.
    pub fn space(&self) -> &Space {
        &self.shared.space
    }

    /// Its rank.
    pub fn rank(&self) -> u16 {
        self.shared.rank
    }

    /// The arena where it is mapped for writing, for a device that copies by itself. It is mapped as long as the client is.
    ///
    /// Only bytes of chunks that are leased may be read, and only those of chunks that are being written may be written.
    pub fn arena(&self) -> (NonNull<u8>, usize) {
        (self.shared.writing.address(), self.shared.writing.n_bytes())
    }

    /// Where other nodes read the daemon's chunks, `host:port`; `None` where they do not.
    pub fn peer_address(&self) -> Option<&str> {
        self.shared.peer_address.as_deref()
    }

    /// Whether the daemon has ended the session, or is gone.
    pub fn is_gone(&self) -> bool {
        self.shared.exchange.is_hung_up() || self.shared.exchange.has_moved()
    }

    /// The error of a client that [is gone](Self::is_gone).
    fn why_gone(&self) -> NodeError {
        if self.shared.exchange.has_moved() {
            NodeError::Moving
        } else {
            NodeError::Gone { reason: "its connection ended" }
        }
    }

    /// Tells the daemon of a chain, and asks how much of it is there.
    ///
    /// # Errors
    /// If the daemon is gone, or the chain has more chunks than a request may have.
    pub fn open(&self, chain: &Chain) -> Result<OpenChain> {
        OpenChain::open(self, chain)
    }

    fn exchange(&self) -> &Exchange {
        &self.shared.exchange
    }

    fn handle(&self, number: u32) -> Handle {
        Handle { client: self.clone(), number }
    }
}

/// Connects to a daemon and says what this client is; its answer, with descriptors.
fn connect(options: &AttachOptions, purpose: Purpose) -> Result<(Connection, Attached, Vec<OwnedFd>)> {
    let AttachOptions { socket, namespace, format, rank, token, timeout, .. } = options;
    let failed = || NodeError::io(format!("attach to {socket}"));
    let connection = Connection::open(socket).map_err(NodeError::io(format!("connect to {socket}")))?;
    let token = token.as_ref().map_or("", ClientToken::expose).to_owned();
    let attach = Attach { namespace: namespace.clone(), format: *format, rank: *rank, token, purpose };
    connection.send(&attach.encode()).map_err(failed())?;
    let mut buffer = FrameBuffer::new();
    let deadline = Instant::now() + *timeout;
    loop {
        if let Some((frame, descriptors)) =
            connection.receive_with_descriptors(&mut buffer).map_err(failed())?
        {
            let attached = Attached::decode(frame)?;
            return Ok((connection, attached, descriptors));
        }
        let mut waiting = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
        if !wait_ready(&mut waiting, Some(deadline)).map_err(failed())? {
            return Err(NodeError::Gone { reason: "it does not answer" });
        }
    }
}

// === impl Handle ===

impl Drop for Handle {
    fn drop(&mut self) {
        self.client.exchange().release(self.number);
    }
}

fn offset_of(offsets: &[u64], place: usize, start: usize) -> Result<u64> {
    let offset = offsets.get(place).and_then(|offset| offset.checked_add(start as u64));
    offset.ok_or_else(|| NodeError::invalid("chunk", &place, format!("one of {}", offsets.len())))
}
