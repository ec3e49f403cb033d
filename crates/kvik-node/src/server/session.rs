//! One client: its attachment, and its requests until one of the two ends.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvik_memory::socket::{Connection, FrameBuffer, wait_ready};
use kvik_store::{Chain, Commit, Space, Store, Write};
use kvik_tier::shared::{SharedWords, checksum};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};

use super::Shared;
use super::handles::{Handles, Held};
use crate::error::{NodeError, Result};
use crate::frame::{Attach, Attached, refusal};
use crate::operation::{Completion, NAME_WORDS, Operation, PRESENT, Span, Status, Submission, name_of};
use crate::ring::{BrokenRing, COMPLETIONS, Consumer, PAYLOAD, Producer, SESSION_WORDS, SUBMISSIONS};

/// Time for a client to say what it is.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a session sleeps at most: what wakes it otherwise is the client's wake-up, or its end.
const LONGEST_SLEEP: Duration = Duration::from_mins(1);

/// Tells a session's thread that it is over.
#[derive(Debug, Default)]
pub(super) struct SessionEnd {
    is_set: AtomicBool,
    /// Where the thread sleeps, once it has rings.
    words: Mutex<Option<Arc<SharedWords>>>,
}

/// The state of one client.
#[derive(Debug)]
pub(super) struct Session {
    store: Store,
    space: Space,
    rank: u16,
    words: Arc<SharedWords>,
    submissions: Consumer,
    completions: Producer,
    handles: Handles,
}

// === impl SessionEnd ===

impl SessionEnd {
    pub(super) fn set(&self) {
        self.is_set.store(true, Ordering::Release);
        if let Some(words) = &*self.words.lock() {
            Consumer::interrupt(words, SUBMISSIONS);
        }
    }

    fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Acquire)
    }
}

// === impl Session ===

impl Session {
    /// Serves a client until it or the daemon ends; `is_full` says that there are too many.
    pub(super) fn run(
        shared: &Shared,
        connection: &Connection,
        end: &SessionEnd,
        is_full: bool,
    ) -> Result<()> {
        let mut session = match Self::attach(shared, connection, end, is_full) {
            Ok(session) => session,
            Err(error) => {
                // A client that is gone does not need to know.
                let _ = connection.send(&refusal(&error.to_string()));
                return Err(error);
            }
        };
        while !end.is_set() {
            match session.submissions.pop().map_err(broken)? {
                Some(entry) => {
                    let submission = Submission::decode(entry).ok_or_else(|| {
                        NodeError::invalid("submission", &format!("{entry:?}"), "a request")
                    })?;
                    session.serve(submission)?;
                }
                None => session.submissions.wait(LONGEST_SLEEP),
            }
        }
        Ok(())
    }

    fn attach(shared: &Shared, connection: &Connection, end: &SessionEnd, is_full: bool) -> Result<Self> {
        let attach = Attach::decode(&receive(connection)?)?;
        if is_full {
            let n_sessions = shared.options.max_sessions;
            return Err(NodeError::invalid("sessions", &(n_sessions + 1), format!("at most {n_sessions}")));
        }
        let Shared { store, options, .. } = shared;
        let tenant = options.tenant.clone();
        let namespace = kvik_types::Namespace { tenant: tenant.clone(), ..attach.namespace };
        let space = store.space(&namespace, attach.format)?;
        let words = Arc::new(SharedWords::create(SESSION_WORDS)?);
        let arena = store.arena();
        let answer = Attached {
            tenant,
            chunk_tokens: store.options().chunk_tokens,
            stores_tails: store.options().stores_tails,
            digest_key: shared.digest_key.clone(),
            arena_bytes: arena.stat().capacity_bytes,
        };
        let readable = read_only(arena.as_fd())?;
        let descriptors = [words.as_fd(), readable.as_fd(), arena.as_fd()];
        *end.words.lock() = Some(Arc::clone(&words));
        let is_sent = connection
            .send_with_descriptors(&answer.encode(), &descriptors)
            .map_err(NodeError::io("answer a client"))?;
        if !is_sent {
            return Err(NodeError::Gone { reason: "the client does not read" });
        }
        Ok(Self {
            store: store.clone(),
            space,
            rank: attach.rank,
            submissions: Consumer::new(Arc::clone(&words), SUBMISSIONS),
            completions: Producer::new(Arc::clone(&words), COMPLETIONS),
            words,
            handles: Handles::default(),
        })
    }

    fn serve(&mut self, submission: Submission) -> Result<()> {
        let done = Completion {
            request: submission.request,
            status: Status::Done,
            n_chunks: 0,
            handle: 0,
            n_tokens: 0,
        };
        let completion = match submission.operation {
            Operation::Open { span, n_tokens } => {
                let chain = self.chain_of(span, n_tokens)?;
                let found = self.store.lookup(&chain);
                let kept = self.keep(Held::Chain(chain), done);
                Completion { n_chunks: found.n_chunks as u32, n_tokens: found.n_tokens as u64, ..kept }
            }
            Operation::Retrieve { chain, first_chunk, span } => {
                self.retrieve(chain, first_chunk, span, done)?
            }
            Operation::Write { chain, first_chunk, span } => self.write(chain, first_chunk, span, done)?,
            Operation::Commit { write, place, checksum } => {
                Completion { status: self.commit(write, place as usize, checksum)?, ..done }
            }
            Operation::Note { chain, n_generated } => {
                self.store.note_request(self.chain(chain)?, u32::try_from(n_generated).ok());
                done
            }
            Operation::Release { handle } => {
                self.handles.remove(handle).ok_or_else(|| unknown(handle))?;
                done
            }
        };
        // A client has room for the answers to all that it asks.
        if self.completions.push(completion.encode()).map_err(broken)? {
            Ok(())
        } else {
            Err(NodeError::Gone { reason: "the client does not read its answers" })
        }
    }

    fn retrieve(&mut self, chain: u32, first_chunk: u32, span: Span, done: Completion) -> Result<Completion> {
        let retrieved = self.store.retrieve(self.chain(chain)?, first_chunk as usize);
        let offsets: Vec<u64> = retrieved
            .chunks()
            .iter()
            .take(span.n_chunks as usize)
            .map_while(|chunk| chunk.offset(self.rank))
            .collect();
        self.write_payload(span, &offsets);
        let kept = self.keep(Held::Lease(retrieved), done);
        Ok(Completion { n_chunks: offsets.len() as u32, ..kept })
    }

    fn write(&mut self, chain: u32, first_chunk: u32, span: Span, done: Completion) -> Result<Completion> {
        let chain = self.chain(chain)?;
        let (mut writers, mut offsets, mut status) = (Vec::new(), Vec::new(), Status::Done);
        let first_chunk = first_chunk as usize;
        let end = chain.n_chunks().min(first_chunk.saturating_add(span.n_chunks as usize));
        for chunk_idx in first_chunk..end {
            match self.store.begin_write(chain, chunk_idx, self.rank) {
                Write::Slot(writer) => {
                    offsets.push(writer.offset());
                    writers.push(Some(writer));
                }
                Write::Present => {
                    offsets.push(PRESENT);
                    writers.push(None);
                }
                Write::NoRoom => status = Status::NoRoom,
                Write::NoParent => status = Status::NoParent,
                Write::Collision => status = Status::Collision,
            }
            if status != Status::Done {
                break;
            }
        }
        self.write_payload(span, &offsets);
        let kept = self.keep(Held::Write(writers), Completion { status, ..done });
        Ok(Completion { n_chunks: offsets.len() as u32, ..kept })
    }

    fn commit(&mut self, write: u32, place: usize, expected: u64) -> Result<Status> {
        let mut writer = self.handles.take_writer(write, place).ok_or_else(|| unknown(write))?;
        if checksum(writer.payload_mut()) != expected {
            return Ok(Status::Corrupt);
        }
        Ok(match writer.commit() {
            Commit::Stored => Status::Done,
            Commit::Present => Status::Present,
            Commit::NoParent => Status::NoParent,
            Commit::Cleared => Status::Cleared,
            Commit::Collision => Status::Collision,
        })
    }

    fn keep(&mut self, held: Held, completion: Completion) -> Completion {
        match self.handles.add(held) {
            Some(handle) => Completion { handle, ..completion },
            None => Completion { status: Status::TooMany, ..completion },
        }
    }

    fn chain(&self, handle: u32) -> Result<&Chain> {
        self.handles.chain(handle).ok_or_else(|| unknown(handle))
    }

    /// Reads each word of the names once: the client may change them meanwhile.
    fn chain_of(&self, span: Span, n_tokens: u64) -> Result<Chain> {
        let first = PAYLOAD + span.first_word as usize;
        let words = &self.words.words()[first..][..span.n_chunks as usize * NAME_WORDS];
        let (names, _) = words.as_chunks::<NAME_WORDS>();
        let names: Vec<_> = names
            .iter()
            .map(|name| name_of(std::array::from_fn(|place| name[place].load(Ordering::Relaxed))))
            .collect();
        let chain =
            usize::try_from(n_tokens).ok().and_then(|n_tokens| self.space.chain_of_names(&names, n_tokens));
        chain.ok_or_else(|| {
            NodeError::invalid("n_tokens", &n_tokens, format!("those of {} chunks", names.len()))
        })
    }

    /// Writes offsets for the client, before the completion that says so.
    fn write_payload(&self, span: Span, offsets: &[u64]) {
        let first = PAYLOAD + span.first_word as usize;
        let words = &self.words.words()[first..][..span.n_chunks as usize];
        words.iter().zip(offsets).for_each(|(word, offset)| word.store(*offset, Ordering::Relaxed));
    }
}

fn broken(_: BrokenRing) -> NodeError {
    NodeError::invalid("position of a ring", &"out of bounds", "at most its entries apart")
}

fn unknown(handle: u32) -> NodeError {
    NodeError::invalid("handle", &handle, "one that the session has given")
}

/// Another descriptor of a memory file that can only be read.
fn read_only(file: BorrowedFd<'_>) -> Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::open(path).map(OwnedFd::from).map_err(NodeError::io("open the arena for reading"))
}

/// The first frame of a client.
fn receive(connection: &Connection) -> Result<Vec<u8>> {
    let deadline = Instant::now() + ATTACH_TIMEOUT;
    let mut buffer = FrameBuffer::new();
    loop {
        let frame = connection.receive(&mut buffer).map_err(NodeError::io("read the frame of a client"))?;
        if let Some(frame) = frame {
            return Ok(frame.to_vec());
        }
        let mut descriptors = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
        if !wait_ready(&mut descriptors, Some(deadline)).map_err(NodeError::io("wait for a client"))? {
            return Err(NodeError::Gone { reason: "the client says nothing" });
        }
    }
}
