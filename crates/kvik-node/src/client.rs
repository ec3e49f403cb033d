//! The engine's side: what it asks of the daemon, and the bytes that it copies itself.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_memory::socket::{Connection, FrameBuffer, wait_ready};
use kvik_store::{Chain, ChunkFormat, Commit, Space, StoreOptions};
use kvik_tier::shared::{ArenaView, SharedWords, ViewAccess};
use kvik_types::Namespace;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::{NodeError, Result};
use crate::frame::{Attach, Attached};
use crate::operation::{
    Completion, MAX_CHAIN_CHUNKS, NAME_WORDS, Operation, PRESENT, Span, Status, Submission, name_words,
};
use crate::ring::{COMPLETIONS, Consumer, PAYLOAD, Producer, SESSION_WORDS, SUBMISSIONS};

/// How often a waiting client looks whether the daemon is still there.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(100);

/// Times that a client looks for its answer before it sleeps: longer than a lookup takes, shorter than a sleep costs.
const SPINS: u32 = 2_000;

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
    /// Time for the daemon to answer a request, the attachment too. Default: 10 s.
    pub timeout: Duration,
}

/// An engine's connection to the store of its node.
///
/// May be used from any thread; requests go one after the other. After a request without an answer every call fails:
/// attach again. Dropping it ends the session, and the daemon takes
/// back all that it held.
#[derive(Debug)]
pub struct NodeClient {
    connection: Connection,
    space: Space,
    rank: u16,
    timeout: Duration,
    words: Arc<SharedWords>,
    reading: ArenaView,
    writing: ArenaView,
    rings: Mutex<Rings>,
}

#[derive(Debug)]
struct Rings {
    submissions: Producer,
    completions: Consumer,
    next_request: u64,
    /// Whether a request was given up. The daemon may still write its answer into the payload, so no other request may
    /// use the payload.
    is_given_up: bool,
}

/// A chain that the daemon knows; dropping it makes the daemon forget it.
#[derive(Debug)]
pub struct OpenChain<'a> {
    client: &'a NodeClient,
    chain: &'a Chain,
    handle: u32,
    n_found: usize,
    n_found_tokens: usize,
}

/// Chunks that stay as they are until this is dropped.
#[derive(Debug)]
pub struct RemoteLease<'a> {
    client: &'a NodeClient,
    handle: u32,
    offsets: Vec<u64>,
}

/// Memory for chunks; what is not committed when it is dropped is given back.
#[derive(Debug)]
pub struct RemoteWrite<'a> {
    client: &'a NodeClient,
    handle: u32,
    offsets: Vec<u64>,
}

// === impl AttachOptions ===

impl AttachOptions {
    /// The only rank of an engine, with the default timeout.
    pub fn new(socket: SocketAddress, namespace: Namespace, format: ChunkFormat) -> Self {
        Self { socket, namespace, format, rank: 0, timeout: Duration::from_secs(10) }
    }
}

// === impl NodeClient ===

impl NodeClient {
    /// Attaches to the daemon.
    ///
    /// # Errors
    /// If no daemon listens, the daemon does not answer in time, or the daemon refuses the client.
    pub fn attach(options: &AttachOptions) -> Result<Self> {
        let AttachOptions { socket, namespace, format, rank, timeout } = options;
        let connection = Connection::open(socket).map_err(NodeError::io(format!("connect to {socket}")))?;
        let attach = Attach { namespace: namespace.clone(), format: *format, rank: *rank };
        connection.send(&attach.encode()).map_err(NodeError::io(format!("attach to {socket}")))?;
        let mut buffer = FrameBuffer::new();
        let deadline = Instant::now() + *timeout;
        let (frame, descriptors) = loop {
            let received = connection.receive_with_descriptors(&mut buffer);
            if let Some((frame, descriptors)) =
                received.map_err(NodeError::io(format!("attach to {socket}")))?
            {
                break (frame.to_vec(), descriptors);
            }
            let mut waiting = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
            if !wait_ready(&mut waiting, Some(deadline))
                .map_err(NodeError::io(format!("attach to {socket}")))?
            {
                return Err(NodeError::Gone { reason: "it does not answer" });
            }
        };
        let attached = Attached::decode(&frame)?;
        let Ok([words, readable, writable]) = <[_; 3]>::try_from(descriptors) else {
            return Err(NodeError::invalid("descriptors", &"another number", "3"));
        };
        let words = Arc::new(SharedWords::map(words, SESSION_WORDS)?);
        let store_options = StoreOptions {
            chunk_tokens: attached.chunk_tokens,
            stores_tails: attached.stores_tails,
            digest_key: attached.digest_key,
            ..StoreOptions::default()
        };
        let namespace = Namespace { tenant: attached.tenant, ..namespace.clone() };
        Ok(Self {
            space: Space::detached(&namespace, *format, &store_options)?,
            rank: *rank,
            timeout: *timeout,
            reading: ArenaView::map(readable, attached.arena_bytes, ViewAccess::Read)?,
            writing: ArenaView::map(writable, attached.arena_bytes, ViewAccess::Write)?,
            rings: Mutex::new(Rings {
                submissions: Producer::new(Arc::clone(&words), SUBMISSIONS),
                completions: Consumer::new(Arc::clone(&words), COMPLETIONS),
                next_request: 0,
                is_given_up: false,
            }),
            words,
            connection,
        })
    }

    /// Where chains are made for this client.
    pub fn space(&self) -> &Space {
        &self.space
    }

    /// Its rank.
    pub fn rank(&self) -> u16 {
        self.rank
    }

    /// Tells the daemon of a chain, and asks how much of it is there.
    ///
    /// # Errors
    /// If the daemon is gone, or the chain has more chunks than a request may have.
    pub fn open<'a>(&'a self, chain: &'a Chain) -> Result<OpenChain<'a>> {
        let n_chunks = chain.n_chunks();
        if n_chunks > MAX_CHAIN_CHUNKS {
            return Err(NodeError::invalid("chunks", &n_chunks, format!("at most {MAX_CHAIN_CHUNKS}")));
        }
        let operation = |span| Operation::Open { span, n_tokens: chain.n_tokens() as u64 };
        let write_names = |words: &[std::sync::atomic::AtomicU64]| {
            let (places, _) = words.as_chunks::<NAME_WORDS>();
            for (place, name) in places.iter().zip(chain.names()) {
                for (word, value) in place.iter().zip(name_words(name)) {
                    word.store(value, Ordering::Relaxed);
                }
            }
        };
        let (completion, _) = self.ask(n_chunks, write_names, operation, 0)?;
        Ok(OpenChain {
            client: self,
            chain,
            handle: completion.handle,
            n_found: completion.n_chunks as usize,
            n_found_tokens: completion.n_tokens as usize,
        })
    }

    /// Sends a request about `n_chunks` and waits for its answer, with the first `n_offsets` words of the payload.
    fn ask(
        &self,
        n_chunks: usize,
        fill: impl FnOnce(&[std::sync::atomic::AtomicU64]),
        operation: impl FnOnce(Span) -> Operation,
        n_offsets: usize,
    ) -> Result<(Completion, Vec<u64>)> {
        let mut rings = self.rings.lock();
        if rings.is_given_up {
            return Err(NodeError::Gone { reason: "an earlier request had no answer" });
        }
        let payload = &self.words.words()[PAYLOAD..];
        fill(payload);
        let request = rings.next_request;
        rings.next_request += 1;
        let span = Span { first_word: 0, n_chunks: n_chunks as u32 };
        let submission = Submission { request, operation: operation(span) };
        let is_sent = rings.submissions.push(submission.encode()).map_err(|_| broken())?;
        if !is_sent {
            return Err(broken());
        }
        let completion = self.wait(&mut rings.completions, request);
        rings.is_given_up = completion.is_err();
        let completion = completion?;
        if completion.n_chunks as usize > n_chunks || completion.status == Status::TooMany {
            return Err(NodeError::Gone { reason: "its answer is not to the request" });
        }
        // The daemon wrote them before the completion, which was acquired.
        let offsets = payload[..n_offsets.min(completion.n_chunks as usize)].iter();
        Ok((completion, offsets.map(|word| word.load(Ordering::Relaxed)).collect()))
    }

    fn wait(&self, completions: &mut Consumer, request: u64) -> Result<Completion> {
        let mut n_looks = 0;
        let mut deadline = None;
        loop {
            if let Some(entry) = completions.pop().map_err(|_| broken())? {
                let completion = Completion::decode(entry).ok_or_else(broken)?;
                return if completion.request == request { Ok(completion) } else { Err(broken()) };
            }
            n_looks += 1;
            if n_looks < SPINS {
                std::hint::spin_loop();
                continue;
            }
            completions.wait(LIVENESS_INTERVAL);
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + self.timeout);
            if self.is_hung_up() {
                return Err(NodeError::Gone { reason: "its connection ended" });
            }
            if Instant::now() >= deadline {
                return Err(NodeError::Gone { reason: "it does not answer" });
            }
        }
    }

    fn is_hung_up(&self) -> bool {
        let mut descriptors = [PollFd::from_borrowed_fd(self.connection.as_fd(), PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut descriptors, Some(&now)).is_ok_and(|n_ready| n_ready > 0)
    }

    /// Gives a handle back; a daemon that is gone has it back already.
    fn release(&self, handle: u32) {
        let _ = self.ask(0, |_| {}, |_| Operation::Release { handle }, 0);
    }
}

fn broken() -> NodeError {
    NodeError::Gone { reason: "its ring is broken" }
}

// === impl OpenChain ===

impl OpenChain<'_> {
    /// Chunks that are there, from the start of the chain on.
    pub fn n_found(&self) -> usize {
        self.n_found
    }

    /// Their tokens.
    pub fn n_found_tokens(&self) -> usize {
        self.n_found_tokens
    }

    /// Leases what is there from `first_chunk` on; chunks of lower tiers are read for it.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn retrieve(&self, first_chunk: usize) -> Result<RemoteLease<'_>> {
        let n_chunks = self.chain.n_chunks().saturating_sub(first_chunk);
        let (chain, first_chunk) = (self.handle, first_chunk as u32);
        let operation = |span| Operation::Retrieve { chain, first_chunk, span };
        let (completion, offsets) = self.client.ask(n_chunks, |_| {}, operation, n_chunks)?;
        Ok(RemoteLease { client: self.client, handle: completion.handle, offsets })
    }

    /// Takes memory for at most `n_chunks` from `first_chunk` on, as far as there is room.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn write(&self, first_chunk: usize, n_chunks: usize) -> Result<RemoteWrite<'_>> {
        let n_chunks = n_chunks.min(self.chain.n_chunks().saturating_sub(first_chunk));
        let (chain, first_chunk) = (self.handle, first_chunk as u32);
        let operation = |span| Operation::Write { chain, first_chunk, span };
        let (completion, offsets) = self.client.ask(n_chunks, |_| {}, operation, n_chunks)?;
        Ok(RemoteWrite { client: self.client, handle: completion.handle, offsets })
    }

    /// Tells the eviction policies of a request with this chain, once for each.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn note_request(&self, n_generated_tokens: Option<u32>) -> Result<()> {
        let n_generated = n_generated_tokens.map_or(u64::MAX, u64::from);
        let chain = self.handle;
        self.client.ask(0, |_| {}, |_| Operation::Note { chain, n_generated }, 0).map(drop)
    }
}

impl Drop for OpenChain<'_> {
    fn drop(&mut self) {
        self.client.release(self.handle);
    }
}

// === impl RemoteLease ===

impl RemoteLease<'_> {
    /// Number of its chunks.
    pub fn n_chunks(&self) -> usize {
        self.offsets.len()
    }

    /// Copies bytes of a chunk, from `start` of what this rank holds on.
    ///
    /// # Errors
    /// If there is no such chunk, or it is not in the arena.
    pub fn copy_out(&self, place: usize, start: usize, target: &mut [u8]) -> Result<()> {
        let offset = offset_of(&self.offsets, place, start)?;
        Ok(self.client.reading.copy_out(offset, target)?)
    }
}

impl Drop for RemoteLease<'_> {
    fn drop(&mut self) {
        self.client.release(self.handle);
    }
}

// === impl RemoteWrite ===

impl RemoteWrite<'_> {
    /// Number of its chunks.
    pub fn n_chunks(&self) -> usize {
        self.offsets.len()
    }

    /// Whether a chunk is stored already, and needs no bytes.
    pub fn is_present(&self, place: usize) -> bool {
        self.offsets.get(place) == Some(&PRESENT)
    }

    /// Writes bytes of a chunk, from `start` of what this rank holds on.
    ///
    /// # Errors
    /// If there is no such chunk, it is present, or it is not in the arena.
    pub fn copy_in(&self, place: usize, start: usize, source: &[u8]) -> Result<()> {
        let offset = offset_of(&self.offsets, place, start)?;
        Ok(self.client.writing.copy_in(offset, source)?)
    }

    /// Publishes a chunk whose bytes have this [checksum](kvik_tier::shared::checksum); commit in the order of the chain.
    ///
    /// # Errors
    /// If the daemon is gone, or found other bytes than the checksum says.
    pub fn commit(&self, place: usize, checksum: u64) -> Result<Commit> {
        let (write, place) = (self.handle, place as u32);
        let (completion, _) =
            self.client.ask(0, |_| {}, |_| Operation::Commit { write, place, checksum }, 0)?;
        match completion.status {
            Status::Done => Ok(Commit::Stored),
            Status::Present => Ok(Commit::Present),
            Status::NoParent => Ok(Commit::NoParent),
            Status::Cleared => Ok(Commit::Cleared),
            Status::Collision => Ok(Commit::Collision),
            Status::Corrupt => {
                Err(NodeError::invalid("checksum", &format!("{checksum:016x}"), "that of the bytes"))
            }
            Status::NoRoom | Status::TooMany => Err(broken()),
        }
    }
}

impl Drop for RemoteWrite<'_> {
    fn drop(&mut self) {
        self.client.release(self.handle);
    }
}

fn offset_of(offsets: &[u64], place: usize, start: usize) -> Result<u64> {
    let offset = offsets.get(place).filter(|offset| **offset != PRESENT);
    let offset = offset.and_then(|offset| offset.checked_add(start as u64));
    offset.ok_or_else(|| NodeError::invalid("chunk", &place, "one of the chunks that are held"))
}
