//! Chunks that a client writes.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use kvik_store::{Chain, Commit};
use kvik_tier::shared::{Checksum, RunningChecksum, combine_checksums};

use super::exchange::{Ticket, broken};
use super::{Handle, offset_of};
use crate::error::{NodeError, Result};
use crate::operation::{Completion, Operation, PRESENT, Status};

/// Parts of chunks begin at multiples of it: two threads never write one line of the processor's cache.
const PART_ALIGNMENT: usize = 4096;

/// The least that a thread copies at a time; smaller parts cost more than they save.
const MIN_PART_BYTES: usize = 256 << 10;

/// A copy has at most one thread for each this many bytes: to start one takes tens of microseconds, to copy this 200.
const MIN_THREAD_BYTES: usize = 1 << 20;

/// Commits are sent together until they cover this many bytes, so that small chunks do not each wake the daemon.
const MIN_SENT_BYTES: usize = 1 << 20;

/// Memory for chunks; what is not committed when it is dropped is given back.
#[derive(Debug)]
pub struct RemoteWrite {
    handle: Handle,
    chain: Chain,
    first_chunk: usize,
    chunks: Vec<WrittenChunk>,
    offsets: Vec<u64>,
}

/// How far a chunk is.
#[derive(Debug, Default)]
struct WrittenChunk {
    /// The checksum of each layer that was written by itself.
    layers: Vec<Option<Checksum>>,
    /// A commit whose answer was not taken.
    commit: Option<(Ticket, Checksum)>,
}

/// The commits of chunks whose parts are made in any order.
struct Commits<'a> {
    writing: &'a RemoteWrite,
    parts: &'a [ChunkPart],
    sums: Vec<Option<Checksum>>,
    /// Parts of chunks that are complete.
    n_complete: usize,
    /// Complete chunks whose commits were not sent.
    waiting: Vec<(usize, Checksum)>,
    n_waiting_bytes: usize,
    sent: Vec<(usize, Ticket, Checksum)>,
}

/// What one of several threads copies of a chunk.
#[derive(Debug)]
struct ChunkPart {
    place: usize,
    range: Range<usize>,
    n_chunk_bytes: usize,
}

impl RemoteWrite {
    pub(super) fn new(handle: Handle, chain: &Chain, first_chunk: usize, offsets: Vec<u64>) -> Self {
        let chunks = offsets.iter().map(|_| WrittenChunk::default()).collect();
        Self { handle, chain: chain.clone(), first_chunk, chunks, offsets }
    }

    /// Number of its chunks.
    pub fn n_chunks(&self) -> usize {
        self.offsets.len()
    }

    /// Whether a chunk is stored already, and needs no bytes.
    pub fn is_present(&self, place: usize) -> bool {
        self.offsets.get(place) == Some(&PRESENT)
    }

    /// Where a chunk lies in the arena; `None` where it is present, and behind the last one.
    pub fn offset(&self, place: usize) -> Option<u64> {
        self.offsets.get(place).copied().filter(|offset| *offset != PRESENT)
    }

    /// Bytes that this rank holds of a chunk.
    pub fn payload_bytes(&self, place: usize) -> usize {
        self.chain.payload_bytes(self.first_chunk.saturating_add(place))
    }

    /// Writes bytes of a chunk, from `start` of what this rank holds on, and returns their checksum.
    ///
    /// # Errors
    /// If there is no such chunk, it is present, or it is not in the arena.
    pub fn copy_in(&self, place: usize, start: usize, source: &[u8]) -> Result<Checksum> {
        let offset = offset_of(&self.offsets, place, start)?;
        Ok(self.handle.client.shared.writing.copy_in(offset, source)?)
    }

    /// Publishes a chunk whose bytes have this checksum; commit in the order of the chain.
    ///
    /// # Errors
    /// If the daemon is gone, or found other bytes than the checksum says.
    pub fn commit(&self, place: usize, checksum: Checksum) -> Result<Commit> {
        let operation = self.commit_operation(place, checksum);
        outcome_of(self.handle.client.exchange().ask(operation)?, checksum)
    }

    /// Writes all bytes of a chunk and lets the daemon publish it meanwhile; [`Self::finish`] says what came of it.
    ///
    /// # Errors
    /// If the daemon is gone, or the chunk has another length.
    pub fn write_chunk(&mut self, place: usize, payload: &[u8]) -> Result<()> {
        let n_bytes = self.payload_bytes(place);
        if payload.len() != n_bytes {
            return Err(wrong_length(payload.len(), n_bytes));
        }
        let checksum = self.copy_in(place, 0, payload)?;
        self.begin_commit(place, checksum)
    }

    /// Writes a chunk whose bytes lie in pieces, one after the other, as [`Self::write_chunk`] does.
    ///
    /// # Errors
    /// If the daemon is gone, or the pieces together have another length.
    pub fn write_pieces<'a>(
        &mut self,
        place: usize,
        pieces: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<()> {
        let checksum = self.copy_pieces(place, pieces)?;
        self.begin_commit(place, checksum)
    }

    /// Writes all chunks that are not present, on several threads, as [`Self::write_pieces`] does; `pieces_of` gives the
    /// pieces of a chunk.
    ///
    /// The threads share a chunk, so that the daemon checks it while they copy the next.
    ///
    /// # Errors
    /// If the daemon is gone, or the pieces of a chunk have another length. Chunks before that one are being published.
    pub fn write_all<'a, P: IntoIterator<Item = &'a [u8]>>(
        &mut self,
        n_threads: usize,
        pieces_of: impl Fn(usize) -> P + Sync,
    ) -> Result<()> {
        self.commit_all(n_threads, |writing, part| writing.copy_part(part, pieces_of(part.place)))
    }

    /// Publishes all chunks that are not present, whose bytes were written into their memory by other means, such as by a
    /// GPU: sums them up on several threads, and lets the daemon check one while the next is summed up.
    ///
    /// # Errors
    /// If the daemon is gone. Chunks before that are being published.
    pub fn commit_written(&mut self, n_threads: usize) -> Result<()> {
        self.commit_all(n_threads, |writing, part| {
            let offset = offset_of(&writing.offsets, part.place, part.range.start)?;
            Ok(writing.handle.client.shared.writing.sum(offset, part.range.len())?)
        })
    }

    /// Has the parts of all chunks that are not present made, with their checksums, and commits each chunk after its last.
    fn commit_all(
        &mut self,
        n_threads: usize,
        make: impl Fn(&Self, &ChunkPart) -> Result<Checksum> + Sync,
    ) -> Result<()> {
        let parts = self.parts(n_threads);
        let n_bytes: usize = parts.iter().map(|part| part.range.len()).sum();
        let n_threads = n_threads.min(n_bytes / MIN_THREAD_BYTES).min(parts.len());
        let mut commits = Commits::new(self, &parts);
        let outcome = if n_threads <= 1 {
            parts.iter().enumerate().try_for_each(|(part_idx, part)| commits.add(part_idx, make(self, part)?))
        } else {
            commits.add_all(n_threads, &make)
        };
        let outcome = outcome.and(commits.send());
        for (place, ticket, checksum) in commits.sent {
            self.chunks[place].commit = Some((ticket, checksum));
        }
        outcome
    }

    /// The chunks that are not present, in parts for `n_threads`.
    fn parts(&self, n_threads: usize) -> Vec<ChunkPart> {
        let mut parts = Vec::new();
        for place in (0..self.n_chunks()).filter(|place| !self.is_present(*place)) {
            let n_bytes = self.payload_bytes(place);
            let part_bytes =
                n_bytes.div_ceil(n_threads.max(1)).next_multiple_of(PART_ALIGNMENT).max(MIN_PART_BYTES);
            let starts = (0..n_bytes.max(1)).step_by(part_bytes);
            parts.extend(starts.map(|start| ChunkPart {
                place,
                range: start..n_bytes.min(start + part_bytes),
                n_chunk_bytes: n_bytes,
            }));
        }
        parts
    }

    fn copy_pieces<'a>(&self, place: usize, pieces: impl IntoIterator<Item = &'a [u8]>) -> Result<Checksum> {
        let n_chunk_bytes = self.payload_bytes(place);
        self.copy_part(&ChunkPart { place, range: 0..n_chunk_bytes, n_chunk_bytes }, pieces)
    }

    /// Copies what a part has of the pieces of its chunk.
    fn copy_part<'a>(
        &self,
        part: &ChunkPart,
        pieces: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<Checksum> {
        let ChunkPart { place, range, n_chunk_bytes } = part;
        let writing = &self.handle.client.shared.writing;
        writing.prepare(offset_of(&self.offsets, *place, range.start)?, range.len())?;
        let (mut start, mut sum) = (0, RunningChecksum::default());
        for piece in pieces {
            let end = start + piece.len();
            if end > *n_chunk_bytes {
                return Err(wrong_length(end, *n_chunk_bytes));
            }
            let (from, to) = (start.max(range.start), end.min(range.end));
            if from < to {
                let offset = offset_of(&self.offsets, *place, from)?;
                writing.copy_in_summed(offset, &piece[from - start..to - start], &mut sum)?;
            }
            start = end;
        }
        if start != *n_chunk_bytes {
            return Err(wrong_length(start, *n_chunk_bytes));
        }
        Ok(sum.finish())
    }

    /// Writes one layer of a chunk, in any order, and lets the daemon publish the chunk after the last one.
    ///
    /// # Errors
    /// If the daemon is gone, or there is no such layer, or it has another length.
    pub fn write_layer(&mut self, place: usize, layer_idx: usize, section: &[u8]) -> Result<()> {
        let n_layers = self.chain.space().format().n_layers as usize;
        let n_bytes = self.chain.section_bytes(self.first_chunk.saturating_add(place));
        if section.len() != n_bytes {
            return Err(NodeError::invalid("length of a layer", &section.len(), n_bytes.to_string()));
        }
        if layer_idx >= n_layers {
            return Err(NodeError::invalid("layer", &layer_idx, format!("less than {n_layers}")));
        }
        let checksum = self.copy_in(place, layer_idx * n_bytes, section)?;
        let layers = &mut self.chunks[place].layers;
        layers.resize(n_layers, None);
        layers[layer_idx] = Some(checksum);
        let Some(layers) = layers.iter().copied().collect::<Option<Vec<_>>>() else { return Ok(()) };
        let whole = layers.into_iter().reduce(|whole, layer| combine_checksums(whole, layer, n_bytes));
        whole.map_or(Ok(()), |whole| self.begin_commit(place, whole))
    }

    /// Waits for the chunks whose last byte was written; what became of each chunk, `None` for those that were present
    /// or are not complete.
    ///
    /// # Errors
    /// If the daemon is gone, or found other bytes than were written.
    pub fn finish(mut self) -> Result<Vec<Option<Commit>>> {
        let exchange = self.handle.client.exchange();
        let chunks = std::mem::take(&mut self.chunks);
        let outcome = |chunk: WrittenChunk| {
            chunk.commit.map(|(ticket, checksum)| outcome_of(exchange.take(ticket)?, checksum)).transpose()
        };
        // All are taken before the first failure is reported.
        let outcomes: Vec<Result<Option<Commit>>> = chunks.into_iter().map(outcome).collect();
        outcomes.into_iter().collect()
    }

    fn begin_commit(&mut self, place: usize, checksum: Checksum) -> Result<()> {
        if self.chunks[place].commit.is_some() {
            return Err(NodeError::invalid("chunk", &place, "one that is not complete"));
        }
        let ticket = self.handle.client.exchange().send(self.commit_operation(place, checksum))?;
        self.chunks[place].commit = Some((ticket, checksum));
        Ok(())
    }

    fn commit_operation(&self, place: usize, checksum: Checksum) -> Operation {
        Operation::Commit { write: self.handle.number, place: place as u32, checksum: checksum.0 }
    }
}

impl<'a> Commits<'a> {
    fn new(writing: &'a RemoteWrite, parts: &'a [ChunkPart]) -> Self {
        Self {
            writing,
            parts,
            sums: vec![None; parts.len()],
            n_complete: 0,
            waiting: Vec::new(),
            n_waiting_bytes: 0,
            sent: Vec::new(),
        }
    }

    /// Notes the checksum of a part, and commits in the order of the chain: a chunk is stored only behind the one before it.
    fn add(&mut self, part_idx: usize, sum: Checksum) -> Result<()> {
        self.sums[part_idx] = Some(sum);
        while let Some((place, n_parts, checksum)) =
            joined_chunk(&self.parts[self.n_complete..], &self.sums[self.n_complete..])
        {
            let n_chunk_bytes = self.parts[self.n_complete].n_chunk_bytes;
            self.waiting.push((place, checksum));
            self.n_waiting_bytes += n_chunk_bytes;
            self.n_complete += n_parts;
        }
        if self.n_waiting_bytes < MIN_SENT_BYTES { Ok(()) } else { self.send() }
    }

    /// Adds all parts, which several threads make.
    fn add_all(
        &mut self,
        n_threads: usize,
        make: &(impl Fn(&RemoteWrite, &ChunkPart) -> Result<Checksum> + Sync),
    ) -> Result<()> {
        let next = AtomicUsize::new(0);
        let (sender, made) = mpsc::channel();
        let (writing, parts) = (self.writing, self.parts);
        std::thread::scope(|scope| {
            for _ in 0..n_threads {
                let (sender, next) = (sender.clone(), &next);
                scope.spawn(move || {
                    while let part_idx = next.fetch_add(1, Ordering::Relaxed)
                        && let Some(part) = parts.get(part_idx)
                    {
                        let sum = make(writing, part);
                        // The receiver is gone after a failure.
                        if sender.send((part_idx, sum)).is_err() {
                            return;
                        }
                    }
                });
            }
            drop(sender);
            made.into_iter().try_for_each(|(part_idx, sum)| self.add(part_idx, sum?))
        })
    }

    /// Sends the commits of all complete chunks.
    fn send(&mut self) -> Result<()> {
        self.n_waiting_bytes = 0;
        for (place, checksum) in self.waiting.drain(..) {
            let operation = self.writing.commit_operation(place, checksum);
            let ticket = self.writing.handle.client.exchange().send(operation)?;
            self.sent.push((place, ticket, checksum));
        }
        Ok(())
    }
}

impl Drop for RemoteWrite {
    fn drop(&mut self) {
        // Answers that no caller takes would be kept for ever.
        for (ticket, _) in self.chunks.drain(..).filter_map(|chunk| chunk.commit) {
            let _ = self.handle.client.exchange().take(ticket);
        }
    }
}

/// The first chunk of `parts`, the number of its parts, and its checksum, if all of them have been summed up.
fn joined_chunk(parts: &[ChunkPart], sums: &[Option<Checksum>]) -> Option<(usize, usize, Checksum)> {
    let place = parts.first()?.place;
    let n_parts = parts.iter().take_while(|part| part.place == place).count();
    let sums: Vec<Checksum> = sums[..n_parts].iter().copied().collect::<Option<_>>()?;
    let joined = sums.into_iter().zip(parts);
    let whole =
        joined.reduce(|(whole, first), (sum, part)| (combine_checksums(whole, sum, part.range.len()), first));
    whole.map(|(whole, _)| (place, n_parts, whole))
}

fn wrong_length(n_bytes: usize, n_allowed: usize) -> NodeError {
    NodeError::invalid("length of a chunk", &n_bytes, n_allowed.to_string())
}

fn outcome_of(completion: Completion, checksum: Checksum) -> Result<Commit> {
    match completion.status {
        Status::Done => Ok(Commit::Stored),
        Status::Present => Ok(Commit::Present),
        Status::NoParent => Ok(Commit::NoParent),
        Status::Cleared => Ok(Commit::Cleared),
        Status::Collision => Ok(Commit::Collision),
        Status::Corrupt => {
            Err(NodeError::invalid("checksum", &format!("{:016x}", checksum.0), "that of the bytes"))
        }
        Status::Moving => Err(NodeError::Moving),
        Status::NoRoom | Status::TooMany => Err(broken()),
    }
}
