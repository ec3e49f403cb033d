//! Requests whose prompts are put together, while their segments come.
//!
//! A segment comes from the store, or else from the engine, which computes it once for all requests that wait for it. A request
//! is in the engine when all its segments are there; one that could not be had is computed as part of the prompt.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use kvik_model::{RequestId, SegmentKv, Selectors};
use kvik_types::{CacheSalt, TokenId};
use tokio::sync::oneshot;

use super::loads::Arrival;
use crate::store::SegmentLoad;

/// What a segment is found by.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct SegmentKey {
    pub(super) tokens: Vec<TokenId>,
    pub(super) salt: Option<CacheSalt>,
}

/// A request whose segments come.
#[derive(Debug)]
pub(super) struct Gathering {
    pub(super) arrival: Arrival,
    pub(super) selectors: Selectors,
    pub(super) segments: Vec<WantedSegment>,
    pub(super) n_missing: usize,
}

/// A segment of a prompt.
#[derive(Debug)]
pub(super) struct WantedSegment {
    pub(super) first_token: usize,
    pub(super) kv: Option<Arc<dyn SegmentKv>>,
}

/// A segment on its way.
#[derive(Debug)]
pub(super) struct Coming {
    pub(super) source: Source,
    pub(super) waiters: Vec<Waiter>,
}

/// What waits for a segment.
#[derive(Debug)]
pub(super) enum Waiter {
    /// A request, and which of its segments it is.
    Request(u64, usize),
    /// A client that wants it kept.
    Client(oneshot::Sender<AddedSegment>),
}

/// What became of a segment that a client wants kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddedSegment {
    Computed,
    /// It was there.
    Present,
    /// The engine cannot compute it.
    Refused,
}

/// Where a segment comes from.
#[derive(Debug)]
pub(super) enum Source {
    Store(SegmentLoad),
    Engine(RequestId),
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Blends {
    pub(super) by_ticket: BTreeMap<u64, Gathering>,
    pub(super) coming: HashMap<SegmentKey, Coming>,
}

impl SegmentKey {
    pub(crate) fn new(tokens: Vec<TokenId>, salt: Option<CacheSalt>) -> Self {
        Self { tokens, salt }
    }
}

impl Blends {
    pub(super) fn len(&self) -> usize {
        self.by_ticket.len()
    }

    pub(super) fn contains(&self, ticket: u64) -> bool {
        self.by_ticket.contains_key(&ticket)
    }

    /// When the first segment is waited for no longer.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let loads = self.coming.values().filter_map(|coming| match &coming.source {
            Source::Store(load) => Some(load.deadline()),
            Source::Engine(_) => None,
        });
        loads.min()
    }

    /// Takes a request out; its segments come all the same, for others.
    pub(super) fn remove(&mut self, ticket: u64) -> Option<Arrival> {
        self.by_ticket.remove(&ticket).map(|gathering| gathering.arrival)
    }

    /// Forgets everything.
    pub(super) fn drain(&mut self) -> (Vec<Arrival>, Vec<RequestId>) {
        let computing = self.coming.drain().filter_map(|(_, coming)| match coming.source {
            Source::Engine(id) => Some(id),
            Source::Store(_) => None,
        });
        let computing = computing.collect();
        let gathering = std::mem::take(&mut self.by_ticket).into_values();
        (gathering.map(|gathering| gathering.arrival).collect(), computing)
    }

    /// The segments of the store that are waited for no longer.
    pub(super) fn late(&self, now: Instant) -> Vec<SegmentKey> {
        let is_late =
            |coming: &Coming| matches!(&coming.source, Source::Store(load) if load.deadline() <= now);
        let late = self.coming.iter().filter(|(_, coming)| is_late(coming));
        late.map(|(key, _)| key.clone()).collect()
    }

    /// The segment that a request of the engine computes.
    pub(super) fn key_of(&self, id: RequestId) -> Option<SegmentKey> {
        let is_it = |coming: &Coming| matches!(coming.source, Source::Engine(computed) if computed == id);
        self.coming.iter().find(|(_, coming)| is_it(coming)).map(|(key, _)| key.clone())
    }
}
