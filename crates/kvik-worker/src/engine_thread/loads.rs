//! Requests whose KV is on its way from the store.
//!
//! They are not in the engine yet: it takes them when their KV has come or is waited for no longer.

use std::collections::BTreeMap;
use std::time::Instant;

use kvik_model::PreparedRequest;

use super::{BegunPart, Origin};
use crate::store::{Load, PromptKv};

/// A request on its way into the engine.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) origin: Origin,
    pub(super) prepared: PreparedRequest,
    pub(super) begun: Option<BegunPart>,
}

/// All of them, by ticket.
#[derive(Debug, Default)]
pub(super) struct Loads {
    by_ticket: BTreeMap<u64, (Arrival, Load)>,
}

impl Loads {
    pub(super) fn len(&self) -> usize {
        self.by_ticket.len()
    }

    pub(super) fn contains(&self, ticket: u64) -> bool {
        self.by_ticket.contains_key(&ticket)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_ticket.is_empty()
    }

    /// When the first of them is waited for no longer.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.by_ticket.values().map(|(_, load)| load.deadline()).min()
    }

    pub(super) fn insert(&mut self, arrival: Arrival, load: Load) {
        self.by_ticket.insert(arrival.origin.ticket, (arrival, load));
    }

    /// Takes one out, with what has arrived for it.
    pub(super) fn finish(&mut self, ticket: u64) -> Option<(Arrival, Option<PromptKv>)> {
        let (arrival, load) = self.by_ticket.remove(&ticket)?;
        Some((arrival, load.finish()))
    }

    /// Takes one out; its load is dropped.
    pub(super) fn remove(&mut self, ticket: u64) -> Option<Arrival> {
        self.by_ticket.remove(&ticket).map(|(arrival, _)| arrival)
    }

    /// The tickets of those that are waited for no longer, oldest first.
    pub(super) fn late(&self, now: Instant) -> Vec<u64> {
        let is_late =
            |(ticket, (_, load)): (&u64, &(Arrival, Load))| (load.deadline() <= now).then_some(*ticket);
        self.by_ticket.iter().filter_map(is_late).collect()
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = Arrival> {
        std::mem::take(&mut self.by_ticket).into_values().map(|(arrival, _)| arrival)
    }
}
