//! The slabs of all chunk sizes that are asked for often.

use std::sync::OnceLock;

use parking_lot::Mutex;

use super::run::Run;
use super::slab::Slab;

/// Places for slabs. Sizes that come when all are taken get runs of their own, as rare sizes do.
const N_PLACES: usize = 256;

/// How often a size is asked for before it gets a slab.
const N_ASKS: u32 = 4;

/// Sizes without a slab whose requests are counted.
const N_COUNTED: usize = 64;

/// The largest part of an arena that one extent takes: there is room for many sizes side by side.
const ARENA_PER_EXTENT: u32 = 64;

/// The most that is cleared for an extent when no free run is long enough. It is worth it for small chunks,
/// where looking for what to move costs more than moving it.
const MAX_CLEARED_UNITS: u32 = (16 << 20) / super::run::UNIT_BYTES as u32;

/// A table of slabs by their slot size that is read without a lock. Slabs are added and never removed.
#[derive(Debug)]
pub(super) struct Slabs {
    places: Box<[OnceLock<Slab>]>,
    max_extent_units: u32,
    counted: Mutex<Vec<Asked>>,
}

/// Where a slab is in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlabId(u16);

#[derive(Debug)]
struct Asked {
    n_units: u32,
    n_asks: u32,
}

impl Slabs {
    /// No slabs yet, for an arena of `n_units`.
    pub(super) fn new(n_units: u32) -> Self {
        Self {
            places: (0..N_PLACES).map(|_| OnceLock::new()).collect(),
            // A power of two, which the buddy allocator has at hand for longest.
            max_extent_units: (n_units / ARENA_PER_EXTENT).checked_ilog2().map_or(0, |order| 1 << order),
            counted: Mutex::default(),
        }
    }

    /// The slab with slots of `n_units`, if that size has one or is asked for often enough to get it now.
    pub(super) fn for_size(&self, n_units: u32) -> Option<(SlabId, &Slab)> {
        self.find(n_units).or_else(|| self.count(n_units))
    }

    pub(super) fn get(&self, slab: SlabId) -> Option<&Slab> {
        self.places.get(usize::from(slab.0))?.get()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Slab> {
        self.places.iter().filter_map(OnceLock::get)
    }

    /// Length of the extent that is worth moving chunks for, in a slab with slots of `n_slot_units`.
    pub(super) fn cleared_units(n_slot_units: u32) -> u32 {
        (MAX_CLEARED_UNITS / n_slot_units).clamp(1, u64::BITS) * n_slot_units
    }

    /// Adds the runs of all free slots to `runs`.
    pub(super) fn free_runs(&self, runs: &mut Vec<Run>) {
        self.iter().for_each(|slab| slab.free_runs(runs));
    }

    fn find(&self, n_units: u32) -> Option<(SlabId, &Slab)> {
        for place in probe(n_units) {
            let slab = self.places[place].get()?;
            if slab.n_slot_units() == n_units {
                return Some((SlabId(place as u16), slab));
            }
        }
        None
    }

    fn count(&self, n_units: u32) -> Option<(SlabId, &Slab)> {
        if n_units > self.max_extent_units / 2 {
            return None;
        }
        let mut counted = self.counted.lock();
        let asked_idx = counted.iter().position(|asked| asked.n_units == n_units).unwrap_or_else(|| {
            if counted.len() == N_COUNTED {
                let rarest = counted.iter().enumerate().min_by_key(|(_, asked)| asked.n_asks);
                let rarest_idx = rarest.map_or(0, |(asked_idx, _)| asked_idx);
                counted.swap_remove(rarest_idx);
            }
            counted.push(Asked { n_units, n_asks: 0 });
            counted.len() - 1
        });
        counted[asked_idx].n_asks += 1;
        if counted[asked_idx].n_asks < N_ASKS {
            return None;
        }
        counted.swap_remove(asked_idx);
        // Under the lock of the counts, so that a size gets one slab.
        if self.find(n_units).is_none() {
            let place = probe(n_units).find(|place| self.places[*place].get().is_none())?;
            let slab = Slab::new(n_units, self.max_extent_units)?;
            self.places[place].set(slab).ok()?;
        }
        self.find(n_units)
    }
}

/// All places, in the order in which a size looks for its own.
fn probe(n_units: u32) -> impl Iterator<Item = usize> {
    let first = (n_units.wrapping_mul(0x9e37_79b1) >> 24) as usize;
    (0..N_PLACES).map(move |step| (first + step) % N_PLACES)
}
