//! An arena on the memory file of another one.
//!
//! One process leaves its arena to the next: the file, and a list of the places that are in use. The next process takes
//! the rest for free memory, so the list must be complete, and a place that overlaps another or lies outside is
//! refused: chunks that share bytes would be wrong.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;

use super::buddy::Buddy;
use super::mapping::Mapping;
use super::run::{Run, UNIT_BYTES, units_for};
use super::slot::{Held, Home};
use super::{Arena, Lease, NumaPlacement, Shared};
use crate::error::{Result, TierError};

/// Bytes of an arena that hold a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkPlace {
    /// Where it starts in the memory file, a multiple of 4096.
    pub offset: u64,
    /// The bytes of the chunk.
    pub n_bytes: u64,
}

impl Arena {
    /// Makes an arena of the memory file of another one; returns it with a lease on each place, in their order.
    ///
    /// The caller has the right to the file: its previous owner neither hands out nor writes any of its memory from now
    /// on. All that lies outside of `places` is free.
    ///
    /// # Errors
    /// [`TierError::Invalid`] if a place is not aligned, lies outside or overlaps another; [`TierError::Io`] if
    /// the file cannot be mapped or could still change its size.
    pub fn adopt(file: OwnedFd, places: &[ChunkPlace]) -> Result<(Self, Vec<Lease>)> {
        let mapping = Mapping::adopt(file)?;
        let n_bytes = mapping.n_bytes();
        if !n_bytes.is_multiple_of(UNIT_BYTES)
            || !(UNIT_BYTES as u64..=Self::MAX_BYTES).contains(&(n_bytes as u64))
        {
            let allowed = format!("multiples of {UNIT_BYTES} up to {}", Self::MAX_BYTES);
            return Err(TierError::invalid("length of an arena", &n_bytes, allowed));
        }
        let n_units = (n_bytes / UNIT_BYTES) as u32;
        let mut buddy = Buddy::new(n_units);
        let mut runs = Vec::with_capacity(places.len());
        for place in places {
            let run = run_of(place, n_units)?;
            if buddy.claim(run) != [run] {
                return Err(refused(place, "bytes that no other place has"));
            }
            runs.push(run);
        }
        let mut shared = Shared::new(mapping, NumaPlacement::Auto);
        shared.buddy = Mutex::new(buddy);
        let shared = Arc::new(shared);
        let lease = |(run, place): (Run, &ChunkPlace)| {
            let n_bytes = place.n_bytes as usize;
            Lease::new(Held { shared: Arc::clone(&shared), run, home: Home::Own, n_bytes })
        };
        let leases = runs.into_iter().zip(places).map(lease).collect();
        Ok((Self { shared }, leases))
    }
}

/// The units of a place, all of them inside of the arena.
fn run_of(place: &ChunkPlace, n_units: u32) -> Result<Run> {
    let ChunkPlace { offset, n_bytes } = *place;
    if !offset.is_multiple_of(UNIT_BYTES as u64) {
        return Err(refused(place, "a start at a multiple of 4096"));
    }
    let start = u32::try_from(offset / UNIT_BYTES as u64).ok();
    let n_run_units = usize::try_from(n_bytes).ok().and_then(units_for);
    match (start, n_run_units) {
        (Some(start), Some(n_run_units))
            if start.checked_add(n_run_units).is_some_and(|end| end <= n_units) =>
        {
            Ok(Run::new(start, n_run_units))
        }
        _ => Err(refused(place, "bytes inside of the arena")),
    }
}

fn refused(place: &ChunkPlace, allowed: &str) -> TierError {
    let ChunkPlace { offset, n_bytes } = place;
    TierError::invalid("place of a chunk", &format!("{n_bytes} bytes at {offset}"), allowed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::ArenaOptions;

    const CAPACITY_BYTES: u64 = 4 << 20;

    fn file(arena: &Arena) -> OwnedFd {
        arena.as_fd().try_clone_to_owned().unwrap()
    }

    #[test]
    fn an_adopted_arena_has_the_bytes_of_its_places_and_gives_out_only_the_rest() {
        let arena = Arena::new(ArenaOptions::new(CAPACITY_BYTES)).unwrap();
        let mut kept = Vec::new();
        for number in 0..40_u8 {
            let mut slot = arena.allocate(5000 + 1000 * usize::from(number)).unwrap();
            slot.fill(number);
            // Every third one leaves a hole.
            if number % 3 != 0 {
                kept.push((number, slot.freeze()));
            }
        }
        let places: Vec<ChunkPlace> = kept
            .iter()
            .map(|(_, lease)| ChunkPlace { offset: lease.offset(), n_bytes: lease.len() as u64 })
            .collect();
        let used_bytes = kept.iter().map(|(_, lease)| lease.padded().len() as u64).sum::<u64>();
        let (adopted, leases) = Arena::adopt(file(&arena), &places).unwrap();
        assert_eq!(adopted.stat().used_bytes, used_bytes);
        assert_eq!(adopted.stat().capacity_bytes, CAPACITY_BYTES);
        // All that is free is taken and written, in small pieces and in large ones.
        let mut slots = Vec::new();
        for n_bytes in [300_000, 9000, 1] {
            while let Some(mut slot) = adopted.allocate(n_bytes) {
                slot.fill(0xEE);
                slots.push(slot);
            }
        }
        assert_eq!(adopted.stat().used_bytes, CAPACITY_BYTES);
        for ((number, before), lease) in kept.iter().zip(&leases) {
            assert_eq!((lease.offset(), lease.len()), (before.offset(), before.len()));
            assert!(lease.iter().all(|byte| byte == number), "{number}");
        }
        drop((leases, slots));
        assert_eq!(adopted.stat().used_bytes, 0);
        assert!(adopted.allocate(CAPACITY_BYTES as usize).is_some(), "all free blocks are joined");
    }

    #[test]
    fn places_that_overlap_or_lie_outside_are_refused() {
        let arena = Arena::new(ArenaOptions::new(CAPACITY_BYTES)).unwrap();
        let place = |offset, n_bytes| ChunkPlace { offset, n_bytes };
        for (places, reason) in [
            (vec![place(0, 4097), place(4096, 1)], "no other place"),
            (vec![place(8192, 1), place(0, 40_000)], "no other place"),
            (vec![place(4096, 1), place(4096, 1)], "no other place"),
            (vec![place(100, 1)], "multiple of 4096"),
            (vec![place(CAPACITY_BYTES, 0)], "inside of the arena"),
            (vec![place(0, CAPACITY_BYTES + 1)], "inside of the arena"),
            (vec![place(u64::MAX - 4095, 4096)], "inside of the arena"),
            (vec![place(4096, u64::MAX)], "inside of the arena"),
        ] {
            let error = Arena::adopt(file(&arena), &places).unwrap_err().to_string();
            assert!(error.contains(reason), "{places:?}: {error}");
        }
        assert!(Arena::adopt(file(&arena), &[place(0, CAPACITY_BYTES)]).is_ok());
    }

    #[test]
    fn a_file_whose_size_can_change_is_refused() {
        use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
        let file = memfd_create("unsealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, 8192).unwrap();
        let error = Arena::adopt(file, &[]).unwrap_err().to_string();
        assert!(error.contains("sealed"), "{error}");
    }
}
