//! Requests and their answers.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvik_memory::socket::Connection;
use kvik_tier::TokenDigest;
use kvik_tier::shared::SharedWords;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::{NodeError, Result};
use crate::operation::{Completion, DIGEST_WORDS, Operation, Span, Status, Submission, digest_words};
use crate::ring::{COMPLETIONS, Consumer, MOVED, N_ENTRIES, PAYLOAD, Producer, SUBMISSIONS};

/// How often a waiting client looks whether the daemon is still there.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(100);

/// Times that a client that is not patient looks for its answer before it sleeps: longer than a lookup takes, shorter than a sleep costs.
const SPINS: u32 = 2_000;

/// Requests without a payload that may be under way at a time. Their answers and one more fit into the ring, so the
/// daemon always has room for an answer.
const MAX_UNDER_WAY: usize = N_ENTRIES as usize / 2;

/// The rings of a session, and the connection whose end is the end of the session.
#[derive(Debug)]
pub(super) struct Exchange {
    connection: Connection,
    words: Arc<SharedWords>,
    timeout: Duration,
    /// Times that it looks for an answer before it sleeps.
    n_spins: u32,
    rings: Mutex<Rings>,
}

/// A request that was sent and whose answer is taken later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "the answer says whether it was done"]
pub(super) struct Ticket(u64);

#[derive(Debug)]
struct Rings {
    submissions: Producer,
    completions: Consumer,
    next_request: u64,
    /// Requests whose answer is taken later and has not come.
    under_way: HashSet<u64>,
    /// Answers that came while another one was waited for.
    arrived: HashMap<u64, Completion>,
    /// Whether a request was given up. The daemon may still write its answer into the payload, so no other request may
    /// use the payload.
    is_given_up: bool,
}

impl Exchange {
    pub(super) fn new(
        connection: Connection,
        words: Arc<SharedWords>,
        timeout: Duration,
        is_patient: bool,
    ) -> Self {
        let rings = Rings {
            submissions: Producer::new(Arc::clone(&words), SUBMISSIONS),
            completions: Consumer::new(Arc::clone(&words), COMPLETIONS),
            next_request: 0,
            under_way: HashSet::new(),
            arrived: HashMap::new(),
            is_given_up: false,
        };
        let n_spins = if is_patient { 0 } else { SPINS };
        Self { connection, words, timeout, n_spins, rings: Mutex::new(rings) }
    }

    /// Sends a request without a payload and waits for its answer.
    pub(super) fn ask(&self, operation: Operation) -> Result<Completion> {
        self.ask_with(0, |_| {}, |_| operation, 0).map(|(completion, _)| completion)
    }

    /// Sends a request with digests and waits for its answer, with offsets of at most `n_offsets` chunks.
    pub(super) fn ask_with_digests(
        &self,
        digests: &[TokenDigest],
        operation: impl FnOnce(Span) -> Operation,
        n_offsets: usize,
    ) -> Result<(Completion, Vec<u64>)> {
        let fill = |payload: &[AtomicU64]| {
            let (places, _) = payload.as_chunks::<DIGEST_WORDS>();
            for (place, digest) in places.iter().zip(digests) {
                write_words(place, digest_words(*digest));
            }
        };
        self.ask_with(digests.len(), fill, operation, n_offsets)
    }

    /// Sends a request about `n_chunks`, whose payload `fill` writes, and waits for its answer, with the offsets of at
    /// most `n_offsets` chunks.
    pub(super) fn ask_with(
        &self,
        n_chunks: usize,
        fill: impl FnOnce(&[AtomicU64]),
        operation: impl FnOnce(Span) -> Operation,
        n_offsets: usize,
    ) -> Result<(Completion, Vec<u64>)> {
        let mut rings = self.rings.lock();
        self.check(&rings)?;
        let payload = &self.words.words()[PAYLOAD..];
        // Requests that are under way have no payload.
        fill(payload);
        let span = Span { first_word: 0, n_chunks: n_chunks as u32 };
        let request = rings.send(operation(span))?;
        let completion = self.wait(&mut rings, request)?;
        if completion.status == Status::Moving {
            return Err(NodeError::Moving);
        }
        if completion.n_chunks as usize > n_chunks.max(n_offsets) || completion.status == Status::TooMany {
            return Err(NodeError::Gone { reason: "its answer is not to the request" });
        }
        // The daemon wrote them before the completion, which was acquired.
        let offsets = payload[..n_offsets.min(completion.n_chunks as usize)].iter();
        Ok((completion, offsets.map(|word| word.load(Ordering::Relaxed)).collect()))
    }

    /// Sends a request without a payload, whose answer [`Self::take`] gives.
    pub(super) fn send(&self, operation: Operation) -> Result<Ticket> {
        let mut rings = self.rings.lock();
        self.check(&rings)?;
        if let Some(oldest) = rings.oldest_beyond(MAX_UNDER_WAY) {
            let completion = self.wait(&mut rings, oldest)?;
            rings.arrived.insert(oldest, completion);
        }
        let request = rings.send(operation)?;
        rings.under_way.insert(request);
        Ok(Ticket(request))
    }

    /// Waits for the answer to a request that was sent.
    pub(super) fn take(&self, Ticket(request): Ticket) -> Result<Completion> {
        let mut rings = self.rings.lock();
        match rings.arrived.remove(&request) {
            Some(completion) => Ok(completion),
            None => self.wait(&mut rings, request),
        }
    }

    /// Gives a handle back; a daemon that is gone has it back already.
    pub(super) fn release(&self, handle: u32) {
        let _ = self.ask(Operation::Release { handle });
    }

    /// Waits for one answer. Those to requests that are under way are kept; after a failure all requests are given up.
    fn wait(&self, rings: &mut Rings, request: u64) -> Result<Completion> {
        let completion = self.wait_for(rings, request);
        rings.is_given_up |= completion.is_err();
        completion
    }

    fn wait_for(&self, rings: &mut Rings, request: u64) -> Result<Completion> {
        let mut n_looks = 0;
        let mut deadline = None;
        loop {
            let seen = rings.completions.wake_ups();
            // Before the look at the ring: the daemon sets it after its last answer.
            let has_moved = self.has_moved();
            if let Some(entry) = rings.completions.pop().map_err(|_| broken())? {
                let completion = Completion::decode(entry).ok_or_else(broken)?;
                rings.under_way.remove(&completion.request);
                if completion.request == request {
                    return Ok(completion);
                }
                // Answers come in the order of the requests, so this one is to an earlier request.
                if completion.request > request {
                    return Err(broken());
                }
                rings.arrived.insert(completion.request, completion);
                continue;
            }
            if has_moved {
                return Err(NodeError::Moving);
            }
            n_looks += 1;
            if n_looks < self.n_spins {
                std::hint::spin_loop();
                continue;
            }
            rings.completions.wait(seen, LIVENESS_INTERVAL);
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + self.timeout);
            if self.is_hung_up() && !self.has_moved() {
                return Err(NodeError::Gone { reason: "its connection ended" });
            }
            if Instant::now() >= deadline {
                return Err(NodeError::Gone { reason: "it does not answer" });
            }
        }
    }

    /// Whether the daemon has ended the session because another one takes over.
    pub(super) fn has_moved(&self) -> bool {
        self.words.words()[MOVED].load(Ordering::Acquire) != 0
    }

    fn check(&self, rings: &Rings) -> Result<()> {
        if self.has_moved() {
            return Err(NodeError::Moving);
        }
        if rings.is_given_up {
            return Err(NodeError::Gone { reason: "an earlier request had no answer" });
        }
        Ok(())
    }

    /// Whether the daemon has ended the connection, or has itself ended. Does not wait for requests that are under way.
    pub(super) fn is_hung_up(&self) -> bool {
        let mut descriptors = [PollFd::from_borrowed_fd(self.connection.as_fd(), PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut descriptors, Some(&now)).is_ok_and(|n_ready| n_ready > 0)
    }
}

impl Rings {
    fn send(&mut self, operation: Operation) -> Result<u64> {
        let request = self.next_request;
        self.next_request += 1;
        let is_sent = self.submissions.push(Submission { request, operation }.encode());
        // Fewer requests are under way than the ring has entries.
        if is_sent.map_err(|_| broken())? { Ok(request) } else { Err(broken()) }
    }

    /// The oldest request under way, where there are `limit` of them.
    fn oldest_beyond(&self, limit: usize) -> Option<u64> {
        (self.under_way.len() >= limit).then(|| self.under_way.iter().copied().min()).flatten()
    }
}

pub(super) fn broken() -> NodeError {
    NodeError::Gone { reason: "its ring is broken" }
}

pub(super) fn write_words<const N: usize>(place: &[AtomicU64; N], values: [u64; N]) {
    // Relaxed: the entry that names them is released after them.
    place.iter().zip(values).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
}
