//! Reading from a lower tier.

use std::sync::Arc;

use kvik_tier::{GetItem, Slot};

use super::core::Core;
use crate::counters::Counter;
use crate::flight::{Flight, FlightEnd};
use crate::lower::{Batch, Lower, QueueGuard, ReadJob};
use crate::tiers::TierIdx;

/// A flight whose read has begun. One that has no end when this is dropped is lost, also when the tier panics.
struct Started {
    flight: Arc<Flight>,
    goes_on: bool,
}

impl Core {
    /// Works on a tier's reads until its queue ends.
    pub(crate) fn run_reads(self: &Arc<Self>, tier: TierIdx) {
        let Some(lower) = self.lower(tier) else { return };
        let _guard = QueueGuard(lower);
        while let Some(mut batch) = lower.reads.pop(lower.batch_bytes(self.options.batch_bytes)) {
            let mut flights = Vec::new();
            for job in batch.jobs.drain(..) {
                match job {
                    ReadJob::Load(flight) => flights.extend(flight.upgrade()),
                    ReadJob::Task(task) => task(lower),
                }
            }
            self.load(lower, flights, batch);
        }
    }

    /// Puts a flight into the queue of the next tier that may have its chunk; it is lost where there is none.
    pub(crate) fn launch(&self, flight: &Arc<Flight>) {
        while let Some(tier) = flight.next_source() {
            let Some(lower) = self.lower(tier) else { continue };
            let job = ReadJob::Load(Arc::downgrade(flight));
            if lower.reads.push(flight.n_bytes() as u64, job).is_ok() {
                return;
            }
            self.counters.add(Counter::FailedLoads(tier), 1);
        }
        flight.end(&FlightEnd::Lost);
    }

    /// Reads what flights want. The batch they came in leaves the queue before the waiters wake: a waiter
    /// that asks for the next chunks finds room for as many.
    fn load(self: &Arc<Self>, lower: &Lower, flights: Vec<Arc<Flight>>, batch: Batch<'_, ReadJob>) {
        let mut loads: Vec<(Started, Slot)> = Vec::with_capacity(flights.len());
        for flight in flights {
            let started = Started { flight, goes_on: false };
            let flight = &started.flight;
            if flight.is_stale() {
                continue;
            }
            match self.reserve(flight.n_bytes()) {
                Some(slot) => loads.push((started, slot)),
                None => self.counters.add(Counter::Refused, 1),
            }
        }
        if loads.is_empty() {
            return;
        }
        let items = loads.iter_mut().map(|(started, slot)| {
            let flight = &started.flight;
            GetItem::whole(flight.key(), &mut slot[..]).for_tokens(flight.digest())
        });
        let outcomes = lower.read(items.collect());
        drop(batch);
        for ((mut started, slot), outcome) in loads.into_iter().zip(outcomes) {
            let flight = &started.flight;
            self.note_outcome(lower, &flight.chain, flight.chunk_idx, flight.rank, &outcome);
            if outcome.is_hit() {
                self.arrive(lower, &started.flight, slot);
            } else {
                // The memory goes before another tier asks for as much.
                drop(slot);
                started.goes_on = true;
                self.launch(&started.flight);
            }
        }
    }

    fn arrive(self: &Arc<Self>, lower: &Lower, flight: &Arc<Flight>, slot: Slot) {
        if flight.is_stale() {
            return;
        }
        let lease = slot.freeze();
        // Before the waiters wake, so that the next reader finds it in memory.
        self.keep_one(flight, &lease, lower.tier_idx);
        flight.end(&FlightEnd::Arrived { lease, tier: lower.tier_idx });
        // And after: its parent, or a child that came first, may have been kept in between.
        self.keep(flight);
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if !self.goes_on {
            self.flight.end(&FlightEnd::Lost);
        }
    }
}
