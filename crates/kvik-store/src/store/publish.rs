//! What becomes visible in memory, and what turns out not to be in a lower tier.

use std::sync::Arc;

use kvik_tier::{GetOutcome, Lease, TierKind};

use super::core::Core;
use crate::chain::Chain;
use crate::counters::Counter;
use crate::directory::Entry;
use crate::flight::{Flight, FlightEnd};
use crate::lower::Lower;
use crate::residents::{ResidentPin, Residents};
use crate::retention::{KeptUntil, NEVER_MS};
use crate::tiers::{RAM, TierIdx};

/// What became of a chunk that was to be made visible in memory.
#[derive(Debug)]
pub(crate) enum Published {
    /// It is there; the lease is the one that all see.
    Stored(Lease),
    /// It was there before.
    Present,
    /// Its parent is not there.
    NoParent,
    /// Its namespace was cleared since.
    Stale,
    /// A chunk of other tokens has its name.
    Collision,
}

/// What is to be made visible in memory.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) lease: Lease,
    pub(crate) origin: Origin,
}

/// Where the bytes of a chunk come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A writer has stored them, and says how long they are kept.
    Writer(KeptUntil),
    /// They were read from a tier.
    Tier(TierKind),
}

impl Origin {
    /// How long the chunk is kept, if that says anything new: what a tier has is kept as memory has it already.
    fn kept_until(self, was_there: bool) -> Option<KeptUntil> {
        match self {
            Self::Writer(kept) => Some(kept),
            Self::Tier(_) if was_there => None,
            Self::Tier(_) => Some(KeptUntil { end_ms: NEVER_MS, is_low: false }),
        }
    }
}

impl Core {
    /// Makes what a rank holds of a chunk resident and visible, unless its namespace was cleared since
    /// `generation`.
    pub(crate) fn publish(
        &self,
        chain: &Chain,
        chunk_idx: usize,
        rank: u16,
        generation: u64,
        arrival: Arrival,
    ) -> Published {
        let mut residents = self.ram_residents.lock();
        self.publish_among(&mut residents, chain, chunk_idx, rank, generation, arrival)
    }

    /// As [`Self::publish`], and pins the chunk if it is there then: it cannot leave in between.
    pub(crate) fn publish_and_pin(
        &self,
        chain: &Chain,
        chunk_idx: usize,
        rank: u16,
        generation: u64,
        arrival: Arrival,
    ) -> (Published, Option<ResidentPin>) {
        let mut residents = self.ram_residents.lock();
        let published = self.publish_among(&mut residents, chain, chunk_idx, rank, generation, arrival);
        let is_there = matches!(published, Published::Stored(_) | Published::Present);
        let is_pinned = is_there && residents.pin(chain.id(chunk_idx));
        drop(residents);
        let pin = is_pinned.then(|| ResidentPin::of_pinned(&self.ram_residents, chain.id(chunk_idx)));
        (published, pin)
    }

    fn publish_among(
        &self,
        residents: &mut Residents,
        chain: &Chain,
        chunk_idx: usize,
        rank: u16,
        generation: u64,
        arrival: Arrival,
    ) -> Published {
        if !self.has_parent_in(RAM, chain, chunk_idx, rank)
            || !residents.insert(self.now_ms(), chain, chunk_idx)
        {
            return Published::NoParent;
        }
        let bit = 1 << rank;
        let parent_end_ms = self.parent_end_ms(chain, chunk_idx);
        let mut leaves_early = None;
        let published = self.directory.update(chain, chunk_idx, |entry| {
            if chain.namespace().generation() != generation {
                return Published::Stale;
            }
            let (was_there, was_any_there) = (entry.ranks[RAM] & bit != 0, entry.ranks[RAM] != 0);
            let (key, digest) = (chain.key_of(chunk_idx, rank), chain.digest_of(chunk_idx));
            let Some(visible) = self.ram.publish(key, digest, arrival.lease) else {
                return Published::Collision;
            };
            self.note_origin(entry, arrival.origin, was_there);
            if let Some(kept) = arrival.origin.kept_until(was_any_there) {
                self.note_kept_until(entry, kept, chain, chunk_idx, parent_end_ms, was_any_there);
            }
            leaves_early = Some(entry.leaves_early());
            entry.used_s = self.now_s();
            entry.ranks[RAM] |= bit;
            if was_there { Published::Present } else { Published::Stored(visible) }
        });
        // Another chunk with the same half of a hash has the place, or the namespace was cleared.
        let published = published.unwrap_or(Published::Stale);
        if matches!(published, Published::Stale) && self.directory.ranks(chain.id(chunk_idx), RAM) == 0 {
            residents.remove(chain.id(chunk_idx));
        } else if let Some(leaves_early) = leaves_early {
            residents.set_copy(chain.id(chunk_idx), leaves_early);
        }
        published
    }

    /// Takes note of whether another node has a chunk too. What is read from there counts as a copy where this node has
    /// nothing of the chunk; what a writer stores may be the last.
    fn note_origin(&self, entry: &mut Entry, origin: Origin, was_there: bool) {
        match origin {
            Origin::Writer(_) if !was_there => entry.is_copy = false,
            Origin::Tier(TierKind::Peer) if !entry.is_local(self.directory.local_tiers()) => {
                entry.is_copy = self.options.spares_last_copy;
            }
            _ => {}
        }
    }

    /// Makes what a flight brought resident if that is worth it, and what waited for it to be.
    pub(crate) fn keep(self: &Arc<Self>, flight: &Arc<Flight>) {
        let mut next = Some(Arc::clone(flight));
        while let Some(flight) = next.take() {
            let Some(FlightEnd::Arrived { lease, tier }) = flight.ended() else { return };
            if !self.keep_one(&flight, &lease, tier) || flight.chunk_idx + 1 >= flight.chain.n_chunks() {
                return;
            }
            next = self.flights.find(&flight.chain, flight.chunk_idx + 1, flight.rank, flight.generation);
        }
    }

    /// Makes what flights brought, in the order of their chain, resident as far as that is worth it.
    ///
    /// A chunk that arrived before its parent was kept is found by its parent's thread only as long as
    /// its flight is held; the caller holds them all.
    pub(crate) fn keep_all(self: &Arc<Self>, flights: &[Arc<Flight>]) {
        for flight in flights {
            if let Some(FlightEnd::Arrived { lease, tier }) = flight.ended() {
                self.keep_one(flight, &lease, tier);
            }
        }
    }

    /// Makes what a flight brought resident if that is worth it; says whether it is.
    pub(crate) fn keep_one(self: &Arc<Self>, flight: &Flight, lease: &Lease, tier: TierIdx) -> bool {
        let (chain, chunk_idx) = (&flight.chain, flight.chunk_idx);
        if !self.is_worth_keeping(chain, chunk_idx, lease.len(), flight.may_displace()) {
            return false;
        }
        let arrival = Arrival { lease: lease.clone(), origin: Origin::Tier(self.kind_of(tier)) };
        let published = self.publish(chain, chunk_idx, flight.rank, flight.generation, arrival);
        if let Published::Stored(_) = published {
            self.counters.add(Counter::PromotedChunks, 1);
        }
        let is_kept = matches!(published, Published::Stored(_) | Published::Present);
        if is_kept {
            // Its memory is leased: as a victim it would give no room.
            flight.hold(|| ResidentPin::new(&self.ram_residents, chain.id(chunk_idx)));
        }
        is_kept
    }

    /// Whether a chunk of a lower tier should stay in memory: there is room, or it may displace others and the
    /// policy takes it.
    pub(crate) fn is_worth_keeping(
        &self,
        chain: &Chain,
        chunk_idx: usize,
        n_bytes: usize,
        may_displace: bool,
    ) -> bool {
        self.has_spare_room(n_bytes)
            || (may_displace && self.ram_residents.lock().admits(self.now_ms(), chain, chunk_idx))
    }

    /// Whether a rank of a chunk may push others out of memory: the chunk was used before, or no local tier
    /// has it, so that only the policy may know.
    pub(crate) fn may_displace(&self, entry: &Entry, rank: u16) -> bool {
        let is_only_remote = self
            .lowers
            .iter()
            .all(|lower| !lower.is_local() || entry.ranks[lower.tier_idx] & (1 << rank) == 0);
        entry.was_used || is_only_remote
    }

    /// Takes note of what became of a read from a lower tier: what it does not have is forgotten, and what is
    /// wrong is deleted there.
    pub(crate) fn note_outcome(
        &self,
        lower: &Lower,
        chain: &Chain,
        chunk_idx: usize,
        rank: u16,
        outcome: &GetOutcome,
    ) {
        let count = if outcome.is_hit() { Counter::Loaded } else { Counter::FailedLoads };
        self.counters.add(count(lower.tier_idx), 1);
        let is_mismatch = matches!(outcome, GetOutcome::TokenMismatch);
        let is_wrong = is_mismatch || matches!(outcome, GetOutcome::Corrupt(_));
        if is_wrong || matches!(outcome, GetOutcome::Miss) {
            self.forget_lower(lower.tier_idx, chain, chunk_idx, rank);
        }
        if is_wrong {
            // Where that fails, the next read finds it wrong again.
            let _ = lower.tier.delete(&[chain.key_of(chunk_idx, rank)]);
        }
        if is_mismatch {
            self.counters.add(Counter::TokenMismatches(lower.tier_idx), 1);
        }
    }

    /// Forgets what a lower tier turned out not to have.
    fn forget_lower(&self, tier: TierIdx, chain: &Chain, chunk_idx: usize, rank: u16) {
        let mut residents = self.residents(tier).map(|residents| residents.lock());
        let is_gone = self.directory.update(chain, chunk_idx, |entry| {
            entry.ranks[tier] &= !(1 << rank);
            entry.ranks[tier] == 0
        });
        if let Some(residents) = &mut residents
            && is_gone == Some(true)
        {
            residents.remove(chain.id(chunk_idx));
        }
    }
}
