//! The way of a request from here to another worker.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt as _};
use kvik_model::LentBlocks;
use kvik_proto::client::ClientError;
use kvik_proto::journal::MoveNotice;
use kvik_proto::moves::{KvTaken, MoveAnswer, Offer};

use crate::engine_thread::{LendRequest, LendWait};
use crate::error::Refusal;
use crate::moves::{Blocks, PeerClient};
use crate::running::{MoveGuard, RunningRequest};
use crate::state::{Loaded, WorkerState};

/// Bytes of KV in one call: few enough that taking them holds the other engine up for less than a step.
const CALL_BYTES: usize = 1 << 20;
/// Bytes of KV that are lent at a time: the engine is asked between two steps, so one call a step would be slow.
const LEND_BYTES: usize = 16 << 20;
/// Calls on their way at a time: one is copied here while the other one is taken there.
const MAX_CALLS: usize = 2;
/// Rounds of copies before the request is frozen although blocks are left: it may grow as fast as they are copied.
const MAX_ROUNDS: usize = 100_000;
/// Blocks that an output has grown by in a round at most if it does not grow as fast as it is copied.
const REST_BLOCKS: usize = 1;
/// Longest time that the end of a block is waited for: a request may wait itself, for its client or for its turn.
const BLOCK_END_WAIT: Duration = Duration::from_millis(500);
/// Times that a request is tried to be frozen whose KV is on its way from the store.
const FREEZE_TRIES: usize = 50;
const FREEZE_INTERVAL: Duration = Duration::from_millis(20);

/// When a request leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Departs {
    /// As soon as its KV is copied.
    Soon,
    /// After its first token: its prompt is computed here, and the KV of that is copied as it is computed.
    AfterFirstToken,
}

/// Copies the KV of a request to the worker at `to` while it runs, then freezes it and tells its gateway.
///
/// What the request computes after the copy of its last full block is computed again there, while its client waits. So the last
/// copy begins when a block becomes full: a few tokens are left then, whatever the length of the sequence.
///
/// # Errors
/// If the other worker does not take it, or the request has ended; it runs on then.
pub(crate) async fn move_request(
    state: &WorkerState,
    loaded: &Loaded,
    guard: &MoveGuard,
    to: &str,
    departs: Departs,
) -> Result<MoveAnswer, Refusal> {
    let request = guard.request();
    let to = to.trim_end_matches('/');
    if departs == Departs::AfterFirstToken {
        // The other worker waits for blocks only so long, and this request may wait for its turn.
        let ticket = *request.tickets.first().ok_or_else(ended)?;
        let wait = LendWait::Prompt;
        let first = LendRequest { ticket, choice: 0, first_block: 0, max_blocks: 1, wait };
        loaded.engine.lend(first).await?.ok_or_else(ended)?;
    }
    let notice = MoveNotice { ticket: random_ticket()?, to: to.to_owned() };
    let offer = Offer {
        ticket: notice.ticket.clone(),
        from: state.id.clone(),
        path: request.path.to_owned(),
        root: loaded.root.clone(),
        layout: loaded.layout.clone(),
        block_layer_bytes: loaded.block_layer_bytes,
    };
    let have =
        state.peers.offer(to, &offer, &request.body).await.map_err(|error| refused(&error))?.have_blocks;
    // Before anything is copied: the request may end at any time.
    request.set_ticket(Some(notice.clone()));
    let departure = Departure { state, loaded, request, notice: &notice };
    let mut moved = departure.copy_and_freeze(&have, departs).await;
    if moved.is_err() && loaded.running.find(&request.id).is_none() {
        // The other worker has forgotten the ticket of a request that has ended: nothing was refused.
        moved = Err(ended());
    }
    if moved.is_err() {
        request.set_ticket(None);
        // The other worker gives the ticket up by itself if this does not arrive.
        let _ = state.peers.forget(to, &notice.ticket).await;
    }
    let (copied_bytes, took) = moved?;
    Ok(MoveAnswer { notice, copied_bytes, copy_ms: took.as_secs_f64() * 1e3 })
}

/// A request that another worker has accepted.
struct Departure<'a> {
    state: &'a WorkerState,
    loaded: &'a Loaded,
    request: &'a RunningRequest,
    notice: &'a MoveNotice,
}

/// What the other worker has of one output.
#[derive(Debug)]
struct Sent {
    part: usize,
    choice: u32,
    n_blocks: usize,
    /// Whether it takes no more.
    is_full: bool,
}

/// Blocks of one call.
#[derive(Debug)]
struct Piece {
    /// The first of them in its output.
    first_block: usize,
    /// Those of `lent`.
    blocks: Range<usize>,
    lent: Arc<LentBlocks>,
}

impl Departure<'_> {
    /// The bytes that were copied while the request ran, and the time that they took.
    async fn copy_and_freeze(
        &self,
        have_blocks: &[usize],
        departs: Departs,
    ) -> Result<(u64, Duration), Refusal> {
        let begin = Instant::now();
        let parts = 0..self.request.tickets.len();
        let mut outputs: Vec<Sent> = parts
            .flat_map(|part| {
                let n_blocks = have_blocks.get(part).copied().unwrap_or(0);
                (0..self.request.n_choices).map(move |choice| Sent { part, choice, n_blocks, is_full: false })
            })
            .collect();
        if departs == Departs::AfterFirstToken {
            for sent in &mut outputs {
                self.send_full(sent, LendWait::Prompt).await?;
            }
        }
        for _ in 0..MAX_ROUNDS {
            if self.round(&mut outputs).await? <= REST_BLOCKS {
                break;
            }
        }
        let n_had: usize = outputs.iter().map(|sent| have_blocks.get(sent.part).copied().unwrap_or(0)).sum();
        let n_blocks = outputs.iter().map(|sent| sent.n_blocks).sum::<usize>().saturating_sub(n_had);
        let copied = ((n_blocks * self.block_bytes()) as u64, begin.elapsed());
        // A worker for prompts has others to compute: what is left over is few tokens of the other one's.
        if departs == Departs::Soon {
            self.send_at_block_end(&mut outputs).await?;
        }
        self.freeze().await?;
        Ok(copied)
    }

    /// Sends what is full of all outputs; the most blocks of one of them.
    async fn round(&self, outputs: &mut [Sent]) -> Result<usize, Refusal> {
        let mut n_most = 0;
        for sent in outputs {
            n_most = n_most.max(self.send_full(sent, LendWait::No).await?);
        }
        Ok(n_most)
    }

    /// Sends the full blocks of an output, and those that are waited for; how many.
    async fn send_full(&self, sent: &mut Sent, wait: LendWait) -> Result<usize, Refusal> {
        let (part, choice, first_block) = (sent.part, sent.choice, sent.n_blocks);
        let Some(&ticket) = self.request.tickets.get(part) else { return Ok(0) };
        let (engine, max_blocks) = (self.loaded.engine.clone(), self.blocks_in(LEND_BYTES));
        let lending = move |first_block: usize| {
            let engine = engine.clone();
            async move {
                let request = LendRequest { ticket, choice, first_block, max_blocks, wait };
                // What follows an error is not looked at.
                let lent = engine.lend(request).await.transpose()?;
                let n_blocks = lent.as_ref().map_or(0, LentBlocks::n_blocks);
                Some((lent.map(|lent| (first_block, Arc::new(lent))), first_block + n_blocks))
            }
        };
        let call_blocks = self.blocks_in(CALL_BYTES);
        let pieces = stream::unfold(first_block, lending).flat_map(move |lent| {
            let pieces: Vec<Result<Piece, Refusal>> = match lent {
                Ok((first_block, lent)) => pieces(&lent, first_block, call_blocks).map(Ok).collect(),
                Err(refusal) => vec![Err(refusal)],
            };
            stream::iter(pieces)
        });
        let (peers, notice) = (self.state.peers.clone(), self.notice.clone());
        let calls = pieces.map(move |piece| {
            let (peers, notice) = (peers.clone(), notice.clone());
            async move {
                let piece = piece?;
                let end_block = piece.first_block + piece.blocks.len();
                Ok::<_, Refusal>((end_block, put(&peers, &notice, (part, choice), piece).await?))
            }
        });
        let mut calls = calls.buffered(MAX_CALLS).boxed();
        while !sent.is_full
            && let Some(call) = calls.next().await
        {
            let (end_block, taken) = call?;
            sent.note(taken);
            if taken.have_blocks != end_block {
                // What follows has a gap before it, or is there already; the next round goes on from what is there.
                break;
            }
        }
        Ok(sent.n_blocks.saturating_sub(first_block))
    }

    /// Waits until a block becomes full, and sends it with those of the other outputs.
    async fn send_at_block_end(&self, outputs: &mut [Sent]) -> Result<(), Refusal> {
        for number in 0..outputs.len() {
            let sent = &mut outputs[number];
            if sent.is_full {
                continue;
            }
            let Some(&ticket) = self.request.tickets.get(sent.part) else { continue };
            let (choice, first_block) = (sent.choice, sent.n_blocks);
            let (max_blocks, wait) = (self.blocks_in(CALL_BYTES), LendWait::Block);
            let lending =
                self.loaded.engine.lend(LendRequest { ticket, choice, first_block, max_blocks, wait });
            match tokio::time::timeout(BLOCK_END_WAIT, lending).await {
                Ok(Ok(Some(lent))) => {
                    let piece = Piece { first_block, blocks: 0..lent.n_blocks(), lent: Arc::new(lent) };
                    sent.note(put(&self.state.peers, self.notice, (sent.part, choice), piece).await?);
                    // Choices of one prompt grow together.
                    return self.round(&mut outputs[number + 1..]).await.map(drop);
                }
                // The output has ended, or does not advance.
                Ok(Ok(None)) => {}
                Ok(Err(refusal)) => return Err(refusal),
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    /// Blocks that have so many bytes; at least one.
    fn blocks_in(&self, n_bytes: usize) -> usize {
        (n_bytes / self.block_bytes().max(1)).max(1)
    }

    /// Of one block in all layers.
    fn block_bytes(&self) -> usize {
        self.loaded.shape.n_layers * self.loaded.block_layer_bytes
    }

    /// Freezes the request, with the notice to its gateway.
    async fn freeze(&self) -> Result<(), Refusal> {
        for _ in 0..FREEZE_TRIES {
            let notice = Some(self.notice.clone());
            if self.loaded.engine.freeze(self.request.tickets.clone(), notice).await? {
                return Ok(());
            }
            // Its KV may be on its way from the store; a request that has ended is not listed any more.
            if self.loaded.running.find(&self.request.id).is_none() {
                break;
            }
            tokio::time::sleep(FREEZE_INTERVAL).await;
        }
        Err(ended())
    }
}

impl Sent {
    fn note(&mut self, taken: KvTaken) {
        (self.n_blocks, self.is_full) = (taken.have_blocks, taken.is_full);
    }
}

/// Lent blocks in pieces of at most `call_blocks`; the first is the block `first_block` of its output.
fn pieces(
    lent: &Arc<LentBlocks>,
    first_block: usize,
    call_blocks: usize,
) -> impl Iterator<Item = Piece> + use<'_> {
    let n_blocks = lent.n_blocks();
    (0..n_blocks).step_by(call_blocks).map(move |start| Piece {
        first_block: first_block + start,
        blocks: start..n_blocks.min(start + call_blocks),
        lent: Arc::clone(lent),
    })
}

/// Sends blocks of an output.
async fn put(
    peers: &PeerClient,
    notice: &MoveNotice,
    (part, choice): (usize, u32),
    piece: Piece,
) -> Result<KvTaken, Refusal> {
    let Piece { first_block, blocks, lent } = piece;
    // A copy of a megabyte does not belong on a thread that serves sockets.
    let copying = tokio::task::spawn_blocking(move || Blocks::read(&lent, blocks));
    let blocks = copying.await.map_err(|_| Refusal::failed("the blocks could not be copied"))??;
    let place = (part, choice, first_block);
    peers.put_blocks(&notice.to, &notice.ticket, place, blocks).await.map_err(|error| refused(&error))
}

fn ended() -> Refusal {
    Refusal::conflict("the request has ended", None)
}

fn refused(error: &ClientError) -> Refusal {
    Refusal::unavailable(format!("the other worker did not take the request: {error}"), 1)
}

/// 128 random bits in hexadecimal digits: a ticket cannot be guessed.
fn random_ticket() -> Result<String, Refusal> {
    use std::io::Read as _;
    let mut bytes = [0; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut bytes))
        .map_err(|error| Refusal::failed(format!("read random bytes: {error}")))?;
    Ok(format!("{:032x}", u128::from_le_bytes(bytes)))
}
