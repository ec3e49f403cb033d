//! Copies to a GPU by way of memory of its own: chunks come over the bus as they lie in memory of the host, and a kernel
//! spreads them over the pieces.
//!
//! The bus is as fast as it can be only for long copies by the driver. A kernel that reads memory of the host asks for a
//! cache line at a time, and the driver takes a fraction of a microsecond for each piece.

use std::ptr;

use cudarc::driver::sys;
use tracing::warn;

use super::call::{check, words_of};
use super::context::PrimaryContext;
use super::copy_kernel::CopyKernel;
use super::copy_piece::CopyPiece;
use crate::Result;

/// Bytes of a slot: its copy over the bus takes long beside the calls that it needs.
const SLOT_BYTES: usize = 16 << 20;

/// Slots: while one is filled, those before it are emptied, also where other work delays that.
const N_SLOTS: usize = 3;

/// Pieces that lie behind each other in memory of the host have at least this many bytes, on the whole: the driver copies runs of
/// 256 KiB at 32 GB/s where a kernel reads 47 and long runs come at 52.
const MIN_RUN_BYTES: usize = 512 << 10;

/// Blocks of the kernel: enough bytes under way for the GPU's memory.
const N_BLOCKS: u32 = 64;

/// Memory of the GPU that bytes pass through, in slots.
#[derive(Debug)]
pub(super) struct Staging {
    memory: sys::CUdeviceptr,
    slots: [Slot; N_SLOTS],
    /// The kernel's stream; the copies over the bus are in that of the copier.
    spreading: sys::CUstream,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    address: u64,
    /// Its bytes have come.
    filled: sys::CUevent,
    /// Its bytes have gone to their pieces.
    emptied: sys::CUevent,
}

// SAFETY: streams, events and memory can be used by any thread of their process once the context is current there.
unsafe impl Send for Staging {}

impl Staging {
    /// Takes memory of the GPU; the context must be current.
    ///
    /// # Errors
    /// If the GPU has too little memory left.
    pub(super) fn new() -> Result<Self> {
        let nothing = Slot { address: 0, filled: ptr::null_mut(), emptied: ptr::null_mut() };
        // Dropped in whole, if something fails half way.
        let mut staging = Self { memory: 0, slots: [nothing; N_SLOTS], spreading: ptr::null_mut() };
        // SAFETY: the address goes to a local.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut staging.memory, N_SLOTS * SLOT_BYTES) })
            .and_then(|()| staging.create_stream())
            .and_then(|()| staging.create_slots())
            .inspect_err(|_| staging.free())?;
        Ok(staging)
    }

    /// The kernel goes before other work of the GPU: it is short, and a copy over the bus waits for it.
    fn create_stream(&mut self) -> Result<()> {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the answers go to locals.
        check("cuCtxGetStreamPriorityRange", unsafe {
            sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest)
        })?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the stream goes to a field.
        check("cuStreamCreateWithPriority", unsafe {
            sys::cuStreamCreateWithPriority(&raw mut self.spreading, flags, greatest)
        })
    }

    fn create_slots(&mut self) -> Result<()> {
        for (idx, slot) in self.slots.iter_mut().enumerate() {
            slot.address = self.memory + (idx * SLOT_BYTES) as u64;
            for event in [&mut slot.filled, &mut slot.emptied] {
                let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
                // SAFETY: the event goes to a field.
                check("cuEventCreate", unsafe { sys::cuEventCreate(event, flags) })?;
            }
        }
        Ok(())
    }

    /// Queues a copy of all pieces to the GPU: over the bus in `copying`, then to the targets behind the event `after`. The
    /// context must be current.
    ///
    /// # Safety
    /// As for [`CopyKernel::queue`], until both streams have ended ([`Self::wait`]). The sources are registered memory of the
    /// host, the targets are the GPU's, `after` is alive, and [`is_for_staging`] says yes.
    pub(super) unsafe fn queue(
        &mut self,
        kernel: &mut CopyKernel,
        pieces: &[CopyPiece],
        copying: sys::CUstream,
        after: Option<sys::CUevent>,
    ) -> Result<()> {
        kernel.reserve(pieces.len())?;
        if let Some(event) = after {
            wait_for(self.spreading, event)?;
        }
        let mut first_piece = 0;
        for (turn, group) in groups(pieces).enumerate() {
            let slot = self.slots[turn % N_SLOTS];
            if turn >= N_SLOTS {
                wait_for(copying, slot.emptied)?;
            }
            for run in runs(group, slot.address) {
                // SAFETY: the caller answers for the source, and the slot has room for the bytes of a group.
                check("cuMemcpyAsync", unsafe {
                    sys::cuMemcpyAsync(run.target, run.source, run.n_bytes, copying)
                })?;
            }
            record(slot.filled, copying)?;
            wait_for(self.spreading, slot.filled)?;
            let mut source = slot.address;
            let staged = group.iter().map(|piece| {
                let staged = CopyPiece { source, ..*piece };
                source += piece.n_bytes as u64;
                staged
            });
            // SAFETY: the caller answers for the targets; the slot is filled before and used again only after the kernel. The
            // list has room for all pieces.
            unsafe { kernel.launch(first_piece, staged, N_BLOCKS, self.spreading)? };
            record(slot.emptied, self.spreading)?;
            first_piece += group.len();
        }
        Ok(())
    }

    /// Waits for the end of what was queued; the context must be current.
    pub(super) fn wait(&self) -> Result<()> {
        // SAFETY: the stream is this value's.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.spreading) })
    }

    /// Gives all of it back.
    pub(super) fn close(&mut self, context: &PrimaryContext) {
        let Ok(_current) = context.enter() else { return };
        self.free();
    }

    /// Frees what was made; the context must be current, and nothing may be under way.
    fn free(&mut self) {
        let is_freed = |result: sys::CUresult| {
            if result != sys::CUresult::CUDA_SUCCESS {
                warn!(error = words_of(result), "could not free what copies to the GPU pass through");
            }
        };
        for event in self.slots.iter().flat_map(|slot| [slot.filled, slot.emptied]) {
            if !event.is_null() {
                // SAFETY: created once, destroyed once here.
                is_freed(unsafe { sys::cuEventDestroy_v2(event) });
            }
        }
        if !self.spreading.is_null() {
            // SAFETY: as above, with no work left in it.
            is_freed(unsafe { sys::cuStreamDestroy_v2(self.spreading) });
        }
        if self.memory != 0 {
            // SAFETY: allocated once, freed once here.
            is_freed(unsafe { sys::cuMemFree_v2(self.memory) });
        }
    }
}

/// Whether pieces are such as are copied this way: each fits into a slot, and many lie behind each other on the host.
pub(super) fn is_for_staging(pieces: &[CopyPiece]) -> bool {
    let n_bytes: usize = pieces.iter().map(|piece| piece.n_bytes).sum();
    let is_behind =
        |pair: &&[CopyPiece]| pair[0].source.wrapping_add(pair[0].n_bytes as u64) == pair[1].source;
    let n_runs = pieces.len() - pieces.windows(2).filter(is_behind).count();
    n_bytes / n_runs.max(1) >= MIN_RUN_BYTES && pieces.iter().all(|piece| piece.n_bytes <= SLOT_BYTES)
}

/// The pieces in groups that fit into a slot. A piece that does not is a group of its own.
fn groups(mut pieces: &[CopyPiece]) -> impl Iterator<Item = &[CopyPiece]> {
    std::iter::from_fn(move || {
        let mut n_bytes = 0;
        let fits = |piece: &&CopyPiece| {
            n_bytes += piece.n_bytes;
            n_bytes <= SLOT_BYTES
        };
        let n_fitting = pieces.iter().take_while(fits).count().max(1).min(pieces.len());
        let (group, rest) = pieces.split_at(n_fitting);
        pieces = rest;
        Some(group).filter(|group| !group.is_empty())
    })
}

/// The sources of pieces, those that lie behind each other as one, copied one behind the other from `target` on.
fn runs(group: &[CopyPiece], target: u64) -> impl Iterator<Item = CopyPiece> {
    let mut target = target;
    let is_run = |first: &CopyPiece, second: &CopyPiece| {
        first.source.wrapping_add(first.n_bytes as u64) == second.source
    };
    group.chunk_by(is_run).map(move |run| {
        let n_bytes = run.iter().map(|piece| piece.n_bytes).sum();
        let copied = CopyPiece { target, source: run[0].source, n_bytes };
        target += n_bytes as u64;
        copied
    })
}

/// Lets a stream wait for an event.
fn wait_for(stream: sys::CUstream, event: sys::CUevent) -> Result<()> {
    // SAFETY: the callers have both, alive.
    check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream, event, 0) })
}

/// Notes the work of a stream up to now in an event.
fn record(event: sys::CUevent, stream: sys::CUstream) -> Result<()> {
    // SAFETY: the callers have both, alive.
    check("cuEventRecord", unsafe { sys::cuEventRecord(event, stream) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces of these lengths, whose sources lie behind each other but for those with a gap before them.
    fn pieces(lengths: &[usize], gaps: &[usize]) -> Vec<CopyPiece> {
        let mut source = 1 << 30;
        let piece = |(idx, n_bytes): (usize, &usize)| {
            source += if gaps.contains(&idx) { 4096 } else { 0 };
            let piece = CopyPiece { target: (idx as u64) << 40, source, n_bytes: *n_bytes };
            source += *n_bytes as u64;
            piece
        };
        lengths.iter().enumerate().map(piece).collect()
    }

    #[test]
    fn groups_fit_into_a_slot_and_have_every_piece_once_and_in_order() {
        let third = SLOT_BYTES / 3;
        for lengths in [
            &[][..],
            &[16],
            &[SLOT_BYTES],
            &[SLOT_BYTES, 16, SLOT_BYTES],
            &[third, third, third, third, 16],
            &[third; 50],
        ] {
            let pieces = pieces(lengths, &[]);
            let groups: Vec<&[CopyPiece]> = groups(&pieces).collect();
            assert_eq!(groups.concat(), pieces);
            for group in groups {
                assert!(group.iter().map(|piece| piece.n_bytes).sum::<usize>() <= SLOT_BYTES);
            }
        }
    }

    #[test]
    fn runs_end_at_gaps_and_lie_one_behind_the_other_in_the_slot() {
        let pieces = pieces(&[64, 32, 16, 128, 16], &[2, 4]);
        let found: Vec<(u64, u64, usize)> =
            runs(&pieces, 1000).map(|run| (run.target, run.source, run.n_bytes)).collect();
        let start = pieces[0].source;
        let expected =
            [(1000, start, 96), (1096, start + 96 + 4096, 144), (1240, start + 240 + 2 * 4096, 16)];
        assert_eq!(found, expected);
    }

    #[test]
    fn short_runs_and_pieces_longer_than_a_slot_are_not_for_staging() {
        assert!(is_for_staging(&pieces(&[64 << 10; 64], &[])));
        assert!(is_for_staging(&pieces(&[64 << 10; 64], &[16, 32, 48])));
        assert!(!is_for_staging(&pieces(&[64 << 10; 64], &(0..64).collect::<Vec<_>>())));
        assert!(!is_for_staging(&pieces(&[SLOT_BYTES + 16], &[])));
        assert!(!is_for_staging(&[]));
    }
}
