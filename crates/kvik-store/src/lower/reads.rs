//! Reading from a lower tier.

use std::sync::{Arc, Weak};

use kvik_tier::{GetItem, GetOutcome, Slot};

use super::queue::Batch;
use super::{Lower, QueueGuard, ReadJob};
use crate::directory::TierIdx;
use crate::flight::{Flight, Landing};
use crate::store::core::Core;
use crate::store::stats::Counter;

/// A flight that has begun. One that ends here without a landing is lost, also when the tier panics.
struct Airborne {
    flight: Arc<Flight>,
    goes_on: bool,
}

impl Core {
    /// Works on a tier's reads until its queue ends.
    pub(crate) fn run_reads(self: &Arc<Self>, tier: TierIdx) {
        let Some(lower) = self.lower(tier) else { return };
        let _guard = QueueGuard(lower);
        while let Some(mut batch) = lower.reads.pop(self.options.batch_bytes) {
            let mut flights = Vec::new();
            for job in batch.jobs.drain(..) {
                match job {
                    ReadJob::Load(flight) => flights.extend(flight.upgrade()),
                    ReadJob::Task(task) => task(self, lower),
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
        flight.land(&Landing::Lost);
    }

    /// Reads what flights want. The batch they came in leaves the queue before anybody hears of them: who
    /// has its chunks and asks for the next finds room for as many.
    fn load(self: &Arc<Self>, lower: &Lower, flights: Vec<Arc<Flight>>, batch: Batch<'_, ReadJob>) {
        let mut loads: Vec<(Airborne, Slot)> = Vec::with_capacity(flights.len());
        for flight in flights {
            let airborne = Airborne { flight, goes_on: false };
            let flight = &airborne.flight;
            if flight.is_stale() {
                continue;
            }
            match self.reserve(flight.n_bytes()) {
                Some(slot) => loads.push((airborne, slot)),
                None => self.counters.add(Counter::Refused, 1),
            }
        }
        if loads.is_empty() {
            return;
        }
        let mut items: Vec<GetItem<'_>> = loads
            .iter_mut()
            .map(|(airborne, slot)| GetItem::whole(airborne.flight.key(), &mut slot[..]))
            .collect();
        lower.tier.get(&mut items);
        let outcomes: Vec<GetOutcome> = items.into_iter().map(|item| item.outcome).collect();
        drop(batch);
        for ((mut airborne, slot), outcome) in loads.into_iter().zip(outcomes) {
            self.note_outcome(lower, &airborne.flight, &outcome);
            if outcome.is_hit() {
                self.counters.add(Counter::Loaded(lower.tier_idx), 1);
                self.arrive(lower, &airborne.flight, slot);
            } else {
                self.counters.add(Counter::FailedLoads(lower.tier_idx), 1);
                // The memory goes before another tier asks for as much.
                drop(slot);
                airborne.goes_on = true;
                self.launch(&airborne.flight);
            }
        }
    }

    fn arrive(self: &Arc<Self>, lower: &Lower, flight: &Arc<Flight>, slot: Slot) {
        if flight.is_stale() {
            return;
        }
        let lease = slot.freeze();
        // Before anybody hears of it, so that who comes next finds it in memory.
        self.keep_one(flight, &lease);
        flight.land(&Landing::Arrived { lease, tier: lower.kind });
        // And after: its parent, or a child that came first, may have been kept in between.
        self.keep(flight);
    }

    fn note_outcome(&self, lower: &Lower, flight: &Flight, outcome: &GetOutcome) {
        let is_corrupt = matches!(outcome, GetOutcome::Corrupt(_));
        if is_corrupt || matches!(outcome, GetOutcome::Miss) {
            self.forget_lower(lower.tier_idx, &flight.chain, flight.chunk_idx, flight.rank);
        }
        if is_corrupt {
            // Where that fails, the next read finds it corrupt again.
            let _ = lower.tier.delete(&[flight.key()]);
        }
    }
}

impl Drop for Airborne {
    fn drop(&mut self) {
        if !self.goes_on {
            self.flight.land(&Landing::Lost);
        }
    }
}

/// Ends the flights of a queue that is closed.
pub(crate) fn lose(jobs: Vec<ReadJob>) {
    for job in jobs {
        if let ReadJob::Load(flight) = job
            && let Some(flight) = Weak::upgrade(&flight)
        {
            flight.land(&Landing::Lost);
        }
    }
}
