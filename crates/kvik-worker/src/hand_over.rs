//! Sequences that clients step, on their way from a worker that drains.
//!
//! Such a sequence has no stream over which a gateway could be notified. The worker itself gives each to the worker that owns its name on the ring
//! now, with its KV: the offer and the copies are those of every move, and the sequence then waits there for its next step.
//! From the moment the resume request is sent, the sequence is unknown here, also if the answer is lost: two
//! copies of it would not do harm, but a step must not find the one that is behind.

use std::sync::Arc;

use http::Method;
use kvik_proto::client::{ClientError, CoordinatorClient};

use crate::departure::{Departs, move_request};
use crate::error::Refusal;
use crate::running::End;
use crate::sequences::LeavingSequence;
use crate::state::{Loaded, WorkerState};

/// Gives all sequences that clients step to other workers; those that no other worker takes stay.
pub(crate) async fn hand_over(state: &WorkerState, loaded: &Arc<Loaded>, coordinators: &[CoordinatorClient]) {
    for seq_id in loaded.sequences.names() {
        let Some(leaving) = loaded.sequences.leave(&seq_id).await else { continue };
        match give(state, loaded, coordinators, &seq_id, &leaving).await {
            Ok(()) => {
                loaded.running.count_drained(End::Migrated);
                loaded.metrics.moved(true);
                loaded.sequences.end_left(leaving);
            }
            Err(refusal) => {
                loaded.metrics.moved(false);
                let reason = &refusal.body.error.message;
                tracing::warn!(worker = %state.id, reason, "a sequence that a client steps stays");
            }
        }
    }
}

async fn give(
    state: &WorkerState,
    loaded: &Arc<Loaded>,
    coordinators: &[CoordinatorClient],
    seq_id: &str,
    leaving: &LeavingSequence,
) -> Result<(), Refusal> {
    let to = owner(coordinators, seq_id).await?;
    let request = leaving.request();
    let moving = request.begin_move().ok_or_else(|| Refusal::conflict("the sequence moves already", None))?;
    let notice = move_request(state, loaded, &moving, &to, Departs::Soon).await?.notice;
    let mut body = serde_json::to_vec(&leaving.head(notice.ticket))
        .map_err(|error| Refusal::failed(error.to_string()))?;
    body.push(b'\n');
    body.extend_from_slice(&request.body);
    let url = format!("{}/sequences/resume", notice.to);
    match state.peers.call::<serde_json::Value>(Method::POST, url, body.into(), None).await {
        Err(error @ ClientError::Refused { .. }) => {
            request.engine.thaw(request.tickets.clone());
            Err(Refusal::unavailable(format!("the other worker did not go on with it: {error}"), 1))
        }
        // Without an answer it may be there.
        Ok(_) | Err(_) => Ok(()),
    }
}

/// The address of the worker that owns a name.
async fn owner(coordinators: &[CoordinatorClient], seq_id: &str) -> Result<String, Refusal> {
    let mut last = "the worker has no coordinator".to_owned();
    for coordinator in coordinators {
        match coordinator.route(seq_id, false).await {
            Ok(route) => return Ok(route.address),
            Err(error) => last = error.to_string(),
        }
    }
    Err(Refusal::unavailable(format!("no other worker is known: {last}"), 1))
}
