//! The way of a request from here to another worker.

use std::time::Duration;

use kvik_proto::client::ClientError;
use kvik_proto::journal::MoveNotice;
use kvik_proto::moves::Offer;

use crate::error::Refusal;
use crate::running::{MoveGuard, RunningRequest};
use crate::state::{Loaded, WorkerState};

/// Bytes of KV in one call: few enough that taking them holds the other engine up for less than a step.
const ROUND_BYTES: usize = 2 << 20;
/// Rounds of copies before the request is frozen although blocks are left: it may grow as fast as they are copied.
const MAX_ROUNDS: usize = 100_000;
/// Blocks that may be left when the request is frozen: the other worker computes them with the tail, in one step.
const REST_BLOCKS: usize = 1;
/// Times that a request is tried to be frozen whose KV is on its way from the store.
const FREEZE_TRIES: usize = 50;
const FREEZE_INTERVAL: Duration = Duration::from_millis(20);

/// Copies the KV of a request to the worker at `to` while it runs, then freezes it and tells its gateway.
///
/// # Errors
/// If the other worker does not take it, or the request has ended; it runs on then.
pub(crate) async fn move_request(
    state: &WorkerState,
    loaded: &Loaded,
    guard: &MoveGuard,
    to: &str,
) -> Result<MoveNotice, Refusal> {
    let request = guard.request();
    let to = to.trim_end_matches('/');
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
    let moved = copy_and_freeze(state, loaded, request, &notice, &have).await;
    if moved.is_err() {
        // The other worker gives the ticket up by itself if it does not hear of this.
        let _ = state.peers.forget(to, &notice.ticket).await;
    }
    moved.map(|()| notice)
}

async fn copy_and_freeze(
    state: &WorkerState,
    loaded: &Loaded,
    request: &RunningRequest,
    notice: &MoveNotice,
    have_blocks: &[usize],
) -> Result<(), Refusal> {
    let n_choices = request.n_choices as usize;
    let mut sent: Vec<Sent> = (0..request.tickets.len() * n_choices)
        .map(|number| Sent {
            n_blocks: have_blocks.get(number / n_choices).copied().unwrap_or(0),
            is_full: false,
        })
        .collect();
    let block_bytes = loaded.shape.n_layers * loaded.block_layer_bytes;
    let max_blocks = (ROUND_BYTES / block_bytes.max(1)).max(1);
    for _ in 0..MAX_ROUNDS {
        let mut n_sent = 0;
        for (number, sent) in sent.iter_mut().enumerate() {
            let output = (number / n_choices, (number % n_choices) as u32);
            n_sent = n_sent.max(sent.round(state, loaded, request, notice, output, max_blocks).await?);
        }
        if is_rest(n_sent, max_blocks) {
            break;
        }
    }
    for _ in 0..FREEZE_TRIES {
        if loaded.engine.freeze(request.tickets.clone(), Some(notice.clone())).await? {
            return Ok(());
        }
        // Its KV may be on its way from the store; a request that has ended is not listed any more.
        if loaded.running.find(&request.id).is_none() {
            break;
        }
        tokio::time::sleep(FREEZE_INTERVAL).await;
    }
    Err(Refusal::conflict("the request has ended", None))
}

/// What the other worker has of one output.
#[derive(Debug)]
struct Sent {
    n_blocks: usize,
    is_full: bool,
}

impl Sent {
    /// Sends the blocks that have become full; the number of blocks that were sent.
    async fn round(
        &mut self,
        state: &WorkerState,
        loaded: &Loaded,
        request: &RunningRequest,
        notice: &MoveNotice,
        (part, choice): (usize, u32),
        max_blocks: usize,
    ) -> Result<usize, Refusal> {
        let Some(&ticket) = request.tickets.get(part).filter(|_| !self.is_full) else { return Ok(0) };
        let Some(lent) = loaded.engine.lend(ticket, choice, self.n_blocks, max_blocks).await? else {
            return Ok(0);
        };
        let n_blocks = lent.n_blocks();
        // A copy of megabytes does not belong on a thread that serves sockets.
        let copying = tokio::task::spawn_blocking(move || {
            let mut body = Vec::new();
            body.extend_from_slice(&(lent.tokens().len() as u32).to_le_bytes());
            body.extend(lent.tokens().iter().flat_map(|token| token.to_le_bytes()));
            lent.read(&mut body);
            body
        });
        let body = copying.await.map_err(|_| Refusal::failed("the blocks could not be copied"))?;
        let place = (part, choice, self.n_blocks);
        let taken = state
            .peers
            .put_blocks(&notice.to, &notice.ticket, place, body)
            .await
            .map_err(|error| refused(&error))?;
        self.n_blocks = taken.have_blocks;
        self.is_full = taken.is_full;
        Ok(n_blocks)
    }
}

/// Whether a round that sent `n_sent` blocks left none that were full before it: a round has at most `max_blocks`.
fn is_rest(n_sent: usize, max_blocks: usize) -> bool {
    n_sent <= REST_BLOCKS && n_sent < max_blocks
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_a_large_model_are_sent_until_none_is_left() {
        // One block of such a model fills a round.
        assert!(!is_rest(1, 1) && is_rest(0, 1));
        assert!(is_rest(1, 2) && is_rest(0, 2) && !is_rest(2, 2));
    }
}
