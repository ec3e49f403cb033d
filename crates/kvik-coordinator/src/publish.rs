//! The snapshot that this coordinator holds and shows.
//!
//! There is one, the newest: readers and watchers that are slow skip what came between. It is made
//! ready for all of them once: its ring is built and its event is encoded.

use std::sync::Arc;

use bytes::Bytes;
use kvik_index::ring::{Loads, Ring, RingError, choose, explain};
use kvik_proto::coordinator::{
    RingHash, RingShare, RingView, RouteCandidate, RouteExplanation, RouteResponse, Snapshot, WatchEvent,
    WorkerState,
};
use kvik_proto::sse;
use tokio::sync::watch;

use crate::metrics;

/// Size of the request that `/route` asks for: the key's owner with the loads as they are.
const ROUTE_TOKENS: u64 = 1;

/// A snapshot and what is made of it.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) snapshot: Snapshot,
    /// The event of `/watch`, encoded.
    pub(crate) frame: Bytes,
    ring: Arc<Ring>,
}

/// Holds the newest snapshot.
#[derive(Debug, Clone)]
pub(crate) struct Publisher {
    sender: Arc<watch::Sender<Option<Arc<Published>>>>,
}

// === impl Publisher ===

impl Publisher {
    pub(crate) fn new() -> Self {
        Self { sender: Arc::new(watch::Sender::new(None)) }
    }

    /// Holds `snapshot` unless it is older than or equal to the one held.
    pub(crate) fn offer(&self, snapshot: Snapshot) {
        let held = self.current();
        let held_ring =
            held.as_ref().filter(|held| held.has_ring_of(&snapshot)).map(|held| Arc::clone(&held.ring));
        let ring = match held_ring.map_or_else(|| build_ring(&snapshot).map(Arc::new), Ok) {
            Ok(ring) => ring,
            Err(error) => {
                tracing::warn!(%error, "passed over a snapshot that gives no ring");
                return;
            }
        };
        let event = WatchEvent::Snapshot(snapshot);
        let frame = encode(&event);
        let WatchEvent::Snapshot(snapshot) = event else { return };
        let mut published = Some(Arc::new(Published { snapshot, frame, ring }));
        self.sender.send_if_modified(|held| {
            let is_news = match (&*held, &published) {
                (Some(held), Some(new)) => held.order() <= new.order() && held.snapshot != new.snapshot,
                _ => true,
            };
            if is_news {
                std::mem::swap(held, &mut published);
                if let Some(held) = held {
                    metrics::snapshot(&held.snapshot);
                }
            }
            is_news
        });
    }

    /// The snapshot held; `None` before the first one.
    pub(crate) fn current(&self) -> Option<Arc<Published>> {
        self.sender.borrow().clone()
    }

    /// Tells of the snapshot held and of each later one.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Option<Arc<Published>>> {
        let mut receiver = self.sender.subscribe();
        receiver.mark_changed();
        receiver
    }
}

// === impl Published ===

impl Published {
    /// The ring for people.
    pub(crate) fn ring_view(&self) -> RingView {
        let shares = self.ring.shares();
        let members = self.ring.members().iter().zip(shares).enumerate().map(|(member, (id, share))| {
            RingShare { id: id.clone(), virtual_nodes: self.ring.virtual_nodes(member), share }
        });
        let Snapshot { term, version, ring, .. } = self.snapshot;
        RingView { term, version, ring, members: members.collect() }
    }

    /// The worker that `key` belongs to; `None` if none is ready.
    pub(crate) fn route(&self, key: &[u8], with_explanation: bool) -> Option<RouteResponse> {
        let members = &self.snapshot.members;
        let tokens: Vec<u64> = members.iter().map(|member| member.load.outstanding_tokens).collect();
        let weights: Vec<f64> = members.iter().map(|member| member.ring_weight).collect();
        let loads = Loads { tokens: &tokens, weights: &weights };
        let load_factor = self.snapshot.ring.load_factor;
        let usable = |member: usize| members[member].state == WorkerState::Ready;
        let (choice, explanation) = if with_explanation {
            let explanation = explain(&self.ring, key, loads, load_factor, ROUTE_TOKENS, usable);
            let choice = explanation.choice?;
            let candidates = explanation.candidates.iter().map(|candidate| RouteCandidate {
                worker_id: members[candidate.member].worker.id.clone(),
                load: candidate.load,
                bound: candidate.bound,
                skipped: candidate.skipped.map(|skip| skip.as_str().to_owned()),
            });
            let explanation = RouteExplanation {
                key_hash: explanation.position,
                reason: choice.reason.as_str().to_owned(),
                candidates: candidates.collect(),
            };
            (choice, Some(explanation))
        } else {
            (choose(&self.ring, key, loads, load_factor, ROUTE_TOKENS, usable)?, None)
        };
        let worker = &members[choice.member].worker;
        Some(RouteResponse {
            worker_id: worker.id.clone(),
            address: worker.address.clone(),
            explain: explanation,
        })
    }

    fn order(&self) -> (u64, u64) {
        (self.snapshot.term, self.snapshot.version)
    }

    /// Says whether `snapshot` differs in loads at most.
    fn has_ring_of(&self, snapshot: &Snapshot) -> bool {
        self.order() == (snapshot.term, snapshot.version)
    }
}

/// Encodes an event of `/watch`.
pub(crate) fn encode(event: &WatchEvent) -> Bytes {
    let mut frame = Vec::new();
    // Numbers, strings and lists: nothing that JSON cannot say.
    sse::encode(&serde_json::to_string(event).unwrap_or_default(), &mut frame);
    frame.into()
}

/// Builds the ring of a snapshot. Its members are in the order of ids, as the snapshot's are.
fn build_ring(snapshot: &Snapshot) -> Result<Ring, RingError> {
    let members: Vec<(&str, f64)> =
        snapshot.members.iter().map(|member| (member.worker.id.as_str(), member.ring_weight)).collect();
    let hash = match snapshot.ring.hash {
        RingHash::Xxh3 => kvik_index::ring::RingHash::Xxh3,
        RingHash::Md5 => kvik_index::ring::RingHash::Md5,
    };
    Ring::build(hash, snapshot.ring.virtual_nodes, &members)
}
