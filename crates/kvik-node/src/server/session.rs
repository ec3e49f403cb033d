//! One client's requests, until it or the daemon ends.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvik_store::{Chain, Commit, NamedChain, Retention, Space, Store, Write};
use kvik_tier::TierKind;
use kvik_tier::shared::{Checksum, SharedWords};

use super::Counters;
use super::control::SessionControl;
use super::handles::{Handles, Held, Layers, Writers};
use super::records::Auditor;
use super::sums::SumThreads;
use crate::error::{NodeError, Result};
use crate::operation::{
    Completion, DIGEST_WORDS, NAME_WORDS, Operation, PRESENT, Span, Status, Submission, digest_of, name_of,
    place_word,
};
use crate::ring::{BrokenRing, COMPLETIONS, Consumer, MOVED, PAYLOAD, Producer, SUBMISSIONS};

/// How long a session sleeps at most: what wakes it otherwise is the client's wake-up, or its end.
const LONGEST_SLEEP: Duration = Duration::from_mins(1);

/// A checksum of this many bytes takes longer than the wake-up of a client, so earlier answers are announced before it.
const MIN_SLOW_BYTES: usize = 1 << 20;

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
    sums: Arc<SumThreads>,
    auditor: Auditor,
}

// === impl Session ===

impl Session {
    /// The session of a client of `rank`, with rings of zeros in `words`.
    pub(super) fn new(
        store: Store,
        space: Space,
        rank: u16,
        words: Arc<SharedWords>,
        sums: Arc<SumThreads>,
        auditor: Auditor,
    ) -> Self {
        Self {
            store,
            space,
            rank,
            submissions: Consumer::new(Arc::clone(&words), SUBMISSIONS),
            completions: Producer::new(Arc::clone(&words), COMPLETIONS),
            words,
            handles: Handles::default(),
            sums,
            auditor,
        }
    }

    /// Serves the client until it or the daemon ends, or another daemon takes over and the client holds no memory.
    ///
    /// # Errors
    /// If the client writes what cannot be, or does not read its answers.
    pub(super) fn serve_until(&mut self, control: &SessionControl, counters: &Counters) -> Result<()> {
        loop {
            // Before the look at the flags: what sets one of them after it also ends the wait.
            let seen = self.submissions.wake_ups();
            if control.is_ended() {
                return Ok(());
            }
            let is_moving = control.is_moving();
            if is_moving && self.handles.n_memory() == 0 {
                self.leave();
                return Ok(());
            }
            match self.submissions.pop().map_err(broken)? {
                Some(entry) => {
                    let submission = Submission::decode(entry).ok_or_else(|| {
                        NodeError::invalid("submission", &format!("{entry:?}"), "a request")
                    })?;
                    counters.requests.fetch_add(1, Ordering::Relaxed);
                    if is_moving && submission.operation.begins_something() {
                        self.answer(Completion { status: Status::Moving, ..done(submission.request) })?;
                    } else {
                        self.serve(submission, counters)?;
                    }
                    control.set_n_held(self.handles.n_memory());
                }
                None => self.submissions.wait(seen, LONGEST_SLEEP),
            }
        }
    }

    fn serve(&mut self, submission: Submission, counters: &Counters) -> Result<()> {
        let done = done(submission.request);
        if !submission.operation.is_short() {
            self.completions.wake_sleeper();
        }
        let completion = match submission.operation {
            Operation::Open { span, n_tokens } => {
                let chain = self.chain_of(span, n_tokens)?;
                let found = self.store.lookup_named(&chain);
                let kept = self.keep(Held::Chain(chain), done);
                let slowest = found.slowest_tier.unwrap_or(TierKind::Ram);
                Completion {
                    n_chunks: found.n_chunks as u32,
                    n_tokens: found.n_tokens as u64,
                    tier: slowest,
                    n_memory_tokens: found.tokens_in(TierKind::Ram) as u64,
                    ..kept
                }
            }
            Operation::Retrieve { chain, first_chunk, span } => {
                self.retrieve(chain, first_chunk, span, done)?
            }
            Operation::Write { chain, first_chunk, span, retention } => {
                self.write(chain, first_chunk, span, retention, done)?
            }
            Operation::Commit { write, place, checksum } => {
                let status = self.commit(write, place as usize, checksum)?;
                counters.corrupt.fetch_add((status == Status::Corrupt).into(), Ordering::Relaxed);
                Completion { status, ..done }
            }
            Operation::Note { chain, n_generated } => {
                self.store.note_named_request(self.chain(chain)?, u32::try_from(n_generated).ok());
                done
            }
            Operation::Release { handle } => {
                self.handles.remove(handle).ok_or_else(|| unknown(handle))?;
                done
            }
            Operation::ReadLayers { chain, first_chunk, span } => {
                let chain = self.proven_chain(chain, span)?;
                let reader = self.store.retrieve_layers(&chain, first_chunk as usize);
                let n_chunks = reader.n_chunks() as u32;
                let record = self.auditor.reads_layers(&chain, first_chunk as usize, &reader);
                Completion { n_chunks, ..self.keep(Held::Layers(Layers::new(reader), record), done) }
            }
            Operation::NextLayer { reader, span } => {
                let (layers, record) = self.handles.layers(reader).ok_or_else(|| unknown(reader))?;
                let mut offsets = layers.next_offsets(self.rank);
                record.add_bytes(|| layers.n_current_bytes(self.rank));
                offsets.truncate(span.n_chunks as usize);
                self.write_payload(span, &offsets);
                Completion { n_chunks: offsets.len() as u32, ..done }
            }
        };
        self.answer(completion)
    }

    fn answer(&mut self, completion: Completion) -> Result<()> {
        // A client has room for the answers to all that it asks.
        if !self.completions.push_quietly(completion.encode()).map_err(broken)? {
            return Err(NodeError::Gone { reason: "the client does not read its answers" });
        }
        // A client that has sent several requests is woken once, behind the last, or before one that may take long.
        if !self.submissions.has_entry() {
            self.completions.wake_sleeper();
        }
        Ok(())
    }

    /// Tells the client that another daemon takes over, after the last answer.
    fn leave(&self) {
        self.words.words()[MOVED].store(1, Ordering::Release);
        Consumer::interrupt(&*self.words, COMPLETIONS);
    }

    fn retrieve(&mut self, chain: u32, first_chunk: u32, span: Span, done: Completion) -> Result<Completion> {
        let chain = self.proven_chain(chain, span)?;
        let retrieved = self.store.retrieve(&chain, first_chunk as usize);
        let offsets: Vec<u64> = retrieved
            .chunks()
            .iter()
            .take(span.n_chunks as usize)
            .map_while(|chunk| Some(place_word(chunk.offset(self.rank)?, chunk.tier())))
            .collect();
        self.write_payload(span, &offsets);
        let record = self.auditor.reads(&chain, first_chunk as usize, &retrieved, self.rank);
        let kept = self.keep(Held::Lease(retrieved, record), done);
        Ok(Completion { n_chunks: offsets.len() as u32, ..kept })
    }

    fn write(
        &mut self,
        chain: u32,
        first_chunk: u32,
        span: Span,
        retention: Retention,
        done: Completion,
    ) -> Result<Completion> {
        let chain = self.proven_chain(chain, span)?;
        let (mut writers, mut offsets, mut status) = (Vec::new(), Vec::new(), Status::Done);
        for chunk_idx in first_chunk as usize..chain.n_chunks() {
            match self.store.begin_write_kept(&chain, chunk_idx, self.rank, retention) {
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
        let record = self.auditor.writes(&chain, first_chunk as usize, &writers, status);
        let kept = self.keep(Held::Write(Writers::new(writers), record), Completion { status, ..done });
        Ok(Completion { n_chunks: offsets.len() as u32, ..kept })
    }

    fn commit(&mut self, write: u32, place: usize, expected: u64) -> Result<Status> {
        let writer = self.handles.take_writer(write, place).ok_or_else(|| unknown(write))?;
        let n_bytes = writer.payload().len();
        if n_bytes >= MIN_SLOW_BYTES {
            self.completions.wake_sleeper();
        }
        // The client waits for an answer, or has sent the next request.
        let is_urgent = || self.completions.has_sleeper() || self.submissions.has_entry();
        let summed = self.sums.sum(writer, is_urgent);
        let (writer, sum) = summed.ok_or(NodeError::Gone { reason: "a chunk could not be summed up" })?;
        let status = if sum == Checksum(expected) {
            let (outcome, committed) = writer.commit_and_keep();
            self.handles.keep_committed(write, committed);
            match outcome {
                Commit::Stored => Status::Done,
                Commit::Present => Status::Present,
                Commit::NoParent => Status::NoParent,
                Commit::Cleared => Status::Cleared,
                Commit::Collision => Status::Collision,
            }
        } else {
            Status::Corrupt
        };
        if let Some(record) = self.handles.record_of_write(write) {
            record.add_commit(status, n_bytes, self.space.format());
        }
        Ok(status)
    }

    fn keep(&mut self, held: Held, completion: Completion) -> Completion {
        match self.handles.add(held) {
            Some(handle) => Completion { handle, ..completion },
            None => Completion { status: Status::TooMany, ..completion },
        }
    }

    fn chain(&self, handle: u32) -> Result<&NamedChain> {
        self.handles.chain(handle).ok_or_else(|| unknown(handle))
    }

    fn chain_of(&self, span: Span, n_tokens: u64) -> Result<NamedChain> {
        let names: Vec<_> = self.read_payload::<NAME_WORDS>(span).map(name_of).collect();
        let n_names = names.len();
        let chain =
            usize::try_from(n_tokens).ok().and_then(|n_tokens| self.space.named_chain(names, n_tokens));
        chain.ok_or_else(|| NodeError::invalid("n_tokens", &n_tokens, format!("those of {n_names} chunks")))
    }

    /// The first chunks of a chain with the digests that the client sends.
    fn proven_chain(&self, handle: u32, span: Span) -> Result<Chain> {
        let named = self.chain(handle)?;
        let proven = named.proven(self.read_payload::<DIGEST_WORDS>(span).map(digest_of).collect());
        proven.ok_or_else(|| {
            NodeError::invalid("digests", &span.n_chunks, format!("at most {}", named.n_chunks()))
        })
    }

    /// Reads each word of the payload once: the client may change them meanwhile.
    fn read_payload<const N: usize>(&self, span: Span) -> impl Iterator<Item = [u64; N]> {
        let first = PAYLOAD + span.first_word as usize;
        let (places, _) = self.words.words()[first..][..span.n_chunks as usize * N].as_chunks::<N>();
        places.iter().map(|place| std::array::from_fn(|idx| place[idx].load(Ordering::Relaxed)))
    }

    /// Writes offsets for the client, before the completion that says so.
    fn write_payload(&self, span: Span, offsets: &[u64]) {
        let first = PAYLOAD + span.first_word as usize;
        let words = &self.words.words()[first..][..span.n_chunks as usize];
        words.iter().zip(offsets).for_each(|(word, offset)| word.store(*offset, Ordering::Relaxed));
    }
}

fn done(request: u64) -> Completion {
    Completion {
        request,
        status: Status::Done,
        n_chunks: 0,
        handle: 0,
        n_tokens: 0,
        tier: TierKind::Ram,
        n_memory_tokens: 0,
    }
}

fn broken(_: BrokenRing) -> NodeError {
    NodeError::invalid("position of a ring", &"out of bounds", "at most its entries apart")
}

fn unknown(handle: u32) -> NodeError {
    NodeError::invalid("handle", &handle, "one that the session has given")
}
