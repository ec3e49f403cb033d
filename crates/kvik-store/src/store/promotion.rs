//! Chunks that are read layer by layer and stay in memory as a whole.

use kvik_tier::{Lease, Slot, TierKind};
use parking_lot::{Mutex, RwLock};

use super::core::Core;
use super::publish::{Arrival, Origin, Published};
use crate::chain::Chain;
use crate::counters::Counter;
use crate::tiers::RAM;

/// The payloads that one reader of layers puts together.
///
/// A place is what one rank holds of one chunk, chunk by chunk. Its layers are copied as they arrive, and it is
/// published with the last of them, after all places before it: a chunk is resident only behind its parent.
#[derive(Debug)]
pub(crate) struct Promotions {
    chain: Chain,
    first_chunk: usize,
    generation: u64,
    /// The tier that each place comes from.
    tiers: Vec<TierKind>,
    /// Each with a lock of its own: several threads copy at a time.
    places: Vec<Mutex<Place>>,
    /// Places that are resident without a gap. Locked before a place.
    n_resident: Mutex<usize>,
    /// Held for reading by what copies layers.
    filling: RwLock<()>,
}

#[derive(Debug)]
enum Place {
    Resident,
    Filling {
        slot: Slot,
        n_missing_layers: usize,
    },
    Whole(Lease),
    /// It does not stay, and so nothing behind it does.
    GivenUp,
}

/// Whether the places of a reader are in memory; if not, whether they may push others out of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PromotionSource {
    Memory,
    Lower { may_displace: bool, tier: TierKind },
}

impl Promotions {
    /// Takes memory for the chunks from `first_chunk` on that are worth it, up to the first that is not.
    pub(crate) fn start(
        core: &Core,
        chain: &Chain,
        first_chunk: usize,
        generation: u64,
        sources: &[PromotionSource],
    ) -> Self {
        let n_ranks = usize::from(chain.n_ranks());
        let n_layers = chain.space().format().n_layers as usize;
        let mut goes_on = true;
        let mut places = Vec::with_capacity(sources.len());
        for (place, source) in sources.iter().enumerate() {
            let (chunk_idx, rank) = (first_chunk + place / n_ranks, (place % n_ranks) as u16);
            goes_on &= chunk_idx > first_chunk || core.has_parent_in(RAM, chain, chunk_idx, rank);
            let taken = match source {
                PromotionSource::Memory => Place::Resident,
                PromotionSource::Lower { may_displace, .. } if goes_on => {
                    let n_bytes = chain.payload_bytes(chunk_idx);
                    let is_worth_it = core.is_worth_keeping(chain, chunk_idx, n_bytes, *may_displace);
                    let slot = if is_worth_it { core.reserve(n_bytes) } else { None };
                    slot.map_or(Place::GivenUp, |slot| Place::Filling { slot, n_missing_layers: n_layers })
                }
                PromotionSource::Lower { .. } => Place::GivenUp,
            };
            goes_on &= !matches!(taken, Place::GivenUp);
            places.push(Mutex::new(taken));
        }
        let tier_of = |source: &PromotionSource| match source {
            PromotionSource::Memory => TierKind::Ram,
            PromotionSource::Lower { tier, .. } => *tier,
        };
        let tiers = sources.iter().map(tier_of).collect();
        Self {
            chain: chain.clone(),
            first_chunk,
            generation,
            tiers,
            places,
            n_resident: Mutex::new(0),
            filling: RwLock::new(()),
        }
    }

    /// Calls `tell`, then takes a layer of places. [`Self::wait`] waits for layers that were told of.
    pub(crate) fn fill_after<'a>(
        &self,
        core: &Core,
        layer_idx: usize,
        tell: impl FnOnce(),
        sections: impl Iterator<Item = (usize, &'a Lease)>,
    ) {
        let _filling = self.filling.read();
        tell();
        for (place, section) in sections {
            self.fill(core, place, layer_idx, section);
        }
    }

    /// Waits for the layers that others take at present.
    pub(crate) fn wait(&self) {
        drop(self.filling.write());
    }

    /// Takes one layer of a place; each is given once.
    fn fill(&self, core: &Core, place: usize, layer_idx: usize, section: &[u8]) {
        let Some(mut filled) = self.places.get(place).map(Mutex::lock) else { return };
        let Place::Filling { slot, n_missing_layers } = &mut *filled else { return };
        let start = layer_idx * section.len();
        if let Some(layer) = slot.get_mut(start..start + section.len()) {
            layer.copy_from_slice(section);
            *n_missing_layers -= 1;
        }
        if *n_missing_layers == 0
            && let Place::Filling { slot, .. } = std::mem::replace(&mut *filled, Place::GivenUp)
        {
            *filled = Place::Whole(slot.freeze());
            drop(filled);
            self.publish_whole(core);
        }
    }

    /// Gives back the memory of places that are not whole: the reader needs it more.
    pub(crate) fn give_up(&self) {
        for place in &self.places {
            let mut place = place.lock();
            if matches!(*place, Place::Filling { .. }) {
                *place = Place::GivenUp;
            }
        }
    }

    /// Publishes what is whole and has nothing before it that is not resident.
    fn publish_whole(&self, core: &Core) {
        let n_ranks = usize::from(self.chain.n_ranks());
        let mut n_resident = self.n_resident.lock();
        while let Some(place) = self.places.get(*n_resident) {
            let mut place = place.lock();
            if let Place::Whole(lease) = &*place {
                let lease = lease.clone();
                let chunk_idx = self.first_chunk + *n_resident / n_ranks;
                let rank = (*n_resident % n_ranks) as u16;
                let arrival = Arrival { lease, origin: Origin::Tier(self.tiers[*n_resident]) };
                *place = match core.publish(&self.chain, chunk_idx, rank, self.generation, arrival) {
                    Published::Stored(_) => {
                        core.counters.add(Counter::PromotedChunks, 1);
                        Place::Resident
                    }
                    Published::Present => Place::Resident,
                    Published::NoParent | Published::Stale | Published::Collision => Place::GivenUp,
                };
            }
            if !matches!(*place, Place::Resident) {
                return;
            }
            *n_resident += 1;
        }
    }
}
