//! Blocks that the device writes to a file.

use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::super::device::{CuFile, Device};
use super::super::pages::PageAddresses;
use super::lane::{Lane, MAX_SECTIONS};
use super::{CALL_BYTES, CopyInside, FILE_BLOCK_BYTES, FileMover, failed};
use crate::error::{ModelError, Result};
use crate::paging::BlockId;

/// Writes under way at a time: one is summed up while the other is written.
const N_LANES: usize = 2;

pub(super) type Lanes = [Lane; N_LANES];

impl FileMover {
    /// Writes `layers` of `blocks` to a file, from `offset` on: layer by layer, and in each block by block. Returns the checksum of each
    /// layer. `copy` copies inside of the device's memory, and waits for that.
    ///
    /// The caller guarantees that the blocks stay as they are until this returns, and that the file's bytes are its own.
    ///
    /// # Errors
    /// If a layer is not whole blocks of the file or too long, or the device or the file fails; the file may have any bytes then.
    pub(in super::super) fn write(
        &self,
        layers: Range<usize>,
        blocks: &[BlockId],
        pages: &PageAddresses,
        copy: CopyInside<'_>,
        (file, offset): (BorrowedFd<'_>, u64),
    ) -> Result<Vec<u64>> {
        let section_bytes = blocks.len() * pages.block_bytes();
        let is_whole = section_bytes.is_multiple_of(FILE_BLOCK_BYTES as usize);
        if section_bytes == 0 || CALL_BYTES < section_bytes || !is_whole || offset % FILE_BLOCK_BYTES > 0 {
            let allowed = format!("layers of whole {FILE_BLOCK_BYTES} bytes, of at most {CALL_BYTES}");
            return Err(failed(allowed));
        }
        // A descriptor of its own: readers may have a handle of the other one now.
        let file = file.try_clone_to_owned().map_err(|error| ModelError::Device {
            call: "duplicate a file's descriptor",
            reason: error.to_string(),
        })?;
        self.device.enter()?;
        let handle = self.library.handle(file.as_fd())?;
        let mut lanes = self.write_lanes.lock();
        let layers_at_a_time = (CALL_BYTES / section_bytes).min(MAX_SECTIONS);
        let checksums = Mutex::new(vec![0; layers.len()]);
        let (next, has_failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let write_next = |lane: &mut Lane| -> Result<()> {
            self.device.enter()?;
            while !has_failed.load(Ordering::Relaxed) {
                let first = next.fetch_add(layers_at_a_time, Ordering::Relaxed);
                let end = layers.len().min(first + layers_at_a_time);
                if end <= first {
                    break;
                }
                let address = lane.address();
                copy(&pages.pieces_to(address, layers.start + first..layers.start + end, blocks))?;
                let found = lane.checksums_of(&self.checksum, address, section_bytes, end - first)?;
                lane.write(&handle, (end - first) * section_bytes, offset + (first * section_bytes) as u64)?;
                checksums.lock()[first..end].copy_from_slice(&found);
            }
            Ok(())
        };
        let write_lane = |lane| write_next(lane).inspect_err(|_| has_failed.store(true, Ordering::Relaxed));
        std::thread::scope(|scope| {
            let write_lane = &write_lane;
            let [first, second] = &mut *lanes;
            let other = scope.spawn(move || write_lane(second));
            let written = write_lane(first);
            let other = other.join().unwrap_or_else(|_| Err(failed("a thread that writes has panicked")));
            written.and(other)
        })?;
        Ok(checksums.into_inner())
    }
}

/// The lanes of what is written; their memory is there when the device has done what is queued.
pub(super) fn new_lanes(device: &Arc<Device>, library: &'static CuFile) -> Result<Lanes> {
    Ok([Lane::new(device, library)?, Lane::new(device, library)?])
}
