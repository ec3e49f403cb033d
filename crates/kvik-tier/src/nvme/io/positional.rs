//! Transfers with `preadv` and `pwritev`.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};

use super::{Io, ReadRun, WriteRun};
use crate::nvme::file::SegmentFile;

/// The most slices that one system call takes.
const MAX_SLICES: usize = 1024;

/// Moves bytes with `preadv` and `pwritev`, one run after the other.
///
/// The kernel cuts a large direct transfer into requests that the device has at the same time, so a run is
/// not cut here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Positional;

impl Io for Positional {
    fn read(&self, runs: &mut [ReadRun<'_>]) {
        for run in runs {
            run.outcome = read_all(run.file, run.file.position(run.offset), &mut run.slices);
        }
    }

    fn write(&self, runs: &mut [WriteRun<'_>]) {
        for run in runs {
            run.outcome = write_all(run.file, run.file.position(run.offset), &mut run.slices);
        }
    }

    fn sync(&self, file: &SegmentFile) -> io::Result<()> {
        file.handle().sync_data()
    }
}

fn read_all(file: &SegmentFile, mut offset: u64, mut slices: &mut [IoSliceMut<'_>]) -> io::Result<()> {
    // Empty slices at the front would read as the end of the file.
    IoSliceMut::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        let n_slices = slices.len().min(MAX_SLICES);
        match rustix::io::preadv(file.handle(), &mut slices[..n_slices], offset) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n_bytes) => {
                IoSliceMut::advance_slices(&mut slices, n_bytes);
                offset += n_bytes as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

fn write_all(file: &SegmentFile, mut offset: u64, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        let n_slices = slices.len().min(MAX_SLICES);
        match rustix::io::pwritev(file.handle(), &slices[..n_slices], offset) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n_bytes) => {
                IoSlice::advance_slices(&mut slices, n_bytes);
                offset += n_bytes as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}
