//! Batches that wait for a book while another thread changes it.
//!
//! The next thread that gets the book applies all waiting batches as one group, which is faster than one by one.
//! Invariant: a batch leaves the queue only by a thread that has the book, and has its verdict when that thread
//! gives the book back. So a thread that queues a batch and then gets the book finds the batch or its verdict.

use std::sync::Arc;

use kvik_index::holders::{Batch, BlockKey, Event, HolderIndex, SourceName, Tier, Verdict};
use parking_lot::Mutex;

use super::super::KeyedBatch;
use super::{MAINTAINED_ENTRIES, source_id};
use crate::error::Result;

/// What became of a batch, once it is applied.
#[derive(Debug, Default)]
pub(super) struct Ticket(Arc<Mutex<Option<Result<Verdict>>>>);

/// The batches that wait.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: Mutex<Vec<Waiting>>,
}

#[derive(Debug)]
struct Waiting {
    source: SourceName,
    epoch: Option<u64>,
    sequence: u64,
    replayed: bool,
    changes: Vec<Change>,
    ticket: Ticket,
}

/// An event that owns its blocks.
#[derive(Debug)]
enum Change {
    Stored { tier: Tier, parent: Option<BlockKey>, keys: Vec<BlockKey> },
    Removed { tier: Tier, keys: Vec<BlockKey> },
    Cleared { tier: Option<Tier> },
}

impl Ticket {
    /// The verdict, if there is one by now.
    pub(super) fn take(&self) -> Option<Result<Verdict>> {
        self.0.lock().take()
    }
}

impl Change {
    fn of(event: &Event<'_>) -> Self {
        match *event {
            Event::Stored { tier, parent, keys } => Self::Stored { tier, parent, keys: keys.to_vec() },
            Event::Removed { tier, keys } => Self::Removed { tier, keys: keys.to_vec() },
            Event::Cleared { tier } => Self::Cleared { tier },
        }
    }

    fn as_event(&self) -> Event<'_> {
        match self {
            Self::Stored { tier, parent, keys } => Event::Stored { tier: *tier, parent: *parent, keys },
            Self::Removed { tier, keys } => Event::Removed { tier: *tier, keys },
            Self::Cleared { tier } => Event::Cleared { tier: *tier },
        }
    }
}

impl Queue {
    /// Enters a batch.
    pub(super) fn add(&self, source: &SourceName, batch: &KeyedBatch<'_>) -> Ticket {
        let ticket = Ticket::default();
        let waiting = Waiting {
            source: source.clone(),
            epoch: batch.epoch,
            sequence: batch.sequence,
            replayed: batch.replayed,
            changes: batch.events.iter().map(Change::of).collect(),
            ticket: Ticket(Arc::clone(&ticket.0)),
        };
        self.waiting.lock().push(waiting);
        ticket
    }

    /// Applies all that wait, in the order in which they came.
    pub(super) fn apply_all(&self, index: &mut HolderIndex) {
        let waiting = std::mem::take(&mut *self.waiting.lock());
        // The previous thread with the book has applied them.
        if waiting.is_empty() {
            return;
        }
        let mut accepted = Vec::with_capacity(waiting.len());
        for waiting in &waiting {
            match source_id(index, &waiting.source) {
                Ok(source) => accepted.push((source, waiting)),
                Err(error) => *waiting.ticket.0.lock() = Some(Err(error)),
            }
        }
        let events: Vec<Vec<Event<'_>>> = accepted
            .iter()
            .map(|(_, waiting)| waiting.changes.iter().map(Change::as_event).collect())
            .collect();
        let batch = |((source, waiting), events): (&(_, &Waiting), _)| Batch {
            source: *source,
            epoch: waiting.epoch,
            sequence: waiting.sequence,
            replayed: waiting.replayed,
            events,
        };
        let batches: Vec<Batch<'_>> =
            accepted.iter().zip(events.iter().map(Vec::as_slice)).map(batch).collect();
        let mut verdicts = Vec::with_capacity(batches.len());
        index.apply_all(&batches, &mut verdicts);
        index.maintain(MAINTAINED_ENTRIES * batches.len());
        for ((_, waiting), verdict) in accepted.iter().zip(verdicts) {
            *waiting.ticket.0.lock() = Some(Ok(verdict));
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.waiting.lock().len()
    }
}
