//! Transfers with `io_uring`.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, RawFd};

use io_uring::{IoUring, opcode, squeue, types};
use parking_lot::Mutex;

use super::{Io, ReadRun, WriteRun};
use crate::nvme::file::SegmentFile;

/// The most bytes of one request: large enough for a device's full speed, small enough that several requests
/// of one chunk are under way at a time.
const PIECE_BYTES: usize = 1 << 20;

/// A rest of a run that is shorter than this goes with the piece before it.
const MIN_PIECE_BYTES: usize = PIECE_BYTES / 8;

/// Moves bytes with `io_uring`: all pieces of a call are submitted together, up to the queue depth.
///
/// Each call takes a ring of its own from the pool, so calls neither share a queue nor wait for each other.
pub(crate) struct Uring {
    rings: Mutex<Vec<IoUring>>,
    queue_depth: u32,
}

/// A part of a run that is one request.
struct Piece {
    run_idx: usize,
    fd: RawFd,
    offset: u64,
    /// Its slices, as a range of [`Requests::vectors`].
    first_vector: usize,
    n_vectors: usize,
    n_bytes: usize,
}

/// The pieces of a call, and the vectors that the kernel reads.
#[derive(Default)]
struct Requests {
    pieces: Vec<Piece>,
    vectors: Vec<libc::iovec>,
}

/// A ring with requests that the kernel may still be working on.
///
/// Dropping it waits for all of them: that is what makes it sound to hand borrowed memory to the kernel.
struct BusyRing<'a> {
    ring: &'a mut IoUring,
    /// Pushed and not completed.
    n_in_flight: usize,
    requests: &'a mut Requests,
}

#[derive(Clone, Copy)]
enum Direction {
    Read,
    Write,
}

impl Uring {
    /// # Errors
    /// If the kernel has no `io_uring` or does not allow it.
    pub(crate) fn new(queue_depth: u32) -> io::Result<Self> {
        let ring = IoUring::new(queue_depth)?;
        Ok(Self { rings: Mutex::new(vec![ring]), queue_depth })
    }

    /// Moves all pieces; returns the first error of each run.
    fn transfer(&self, direction: Direction, mut requests: Requests, n_runs: usize) -> Vec<io::Result<()>> {
        let mut outcomes: Vec<io::Result<()>> = (0..n_runs).map(|_| Ok(())).collect();
        if requests.pieces.is_empty() {
            return outcomes;
        }
        let pooled = self.rings.lock().pop();
        let mut ring = match pooled.map_or_else(|| IoUring::new(self.queue_depth), Ok) {
            Ok(ring) => ring,
            Err(error) => {
                outcomes.fill_with(|| Err(copy_of(&error)));
                return outcomes;
            }
        };
        let mut waiting: VecDeque<usize> = (0..requests.pieces.len()).collect();
        let mut is_healthy = true;
        let mut busy = BusyRing { ring: &mut ring, n_in_flight: 0, requests: &mut requests };
        while !waiting.is_empty() || busy.n_in_flight > 0 {
            while busy.n_in_flight < self.queue_depth as usize
                && let Some(piece_idx) = waiting.front()
                && busy.push(direction, *piece_idx)
            {
                waiting.pop_front();
            }
            if let Err(error) = busy.wait_for_one() {
                // What the kernel did not take never begins; what it took ends before `busy` does.
                for piece in busy.requests.pieces.iter().filter(|piece| piece.n_bytes > 0) {
                    outcomes[piece.run_idx] = Err(copy_of(&error));
                }
                is_healthy = false;
                break;
            }
            busy.reap(|piece, outcome| match outcome {
                Ok(true) => {}
                Ok(false) => waiting.push_back(piece),
                Err((run_idx, error)) => outcomes[run_idx] = Err(error),
            });
        }
        drop(busy);
        if is_healthy {
            self.rings.lock().push(ring);
        }
        outcomes
    }
}

impl Io for Uring {
    fn read(&self, runs: &mut [ReadRun<'_>]) {
        let mut requests = Requests::default();
        for (run_idx, run) in runs.iter_mut().enumerate() {
            let n_bytes = run.slices.iter().map(|slice| slice.len()).sum();
            let slices = run.slices.iter_mut().map(|slice| (slice.as_mut_ptr(), slice.len()));
            requests.add_run(run_idx, (run.file, run.file.position(run.offset)), n_bytes, slices);
        }
        let outcomes = self.transfer(Direction::Read, requests, runs.len());
        runs.iter_mut().zip(outcomes).for_each(|(run, outcome)| run.outcome = outcome);
    }

    fn write(&self, runs: &mut [WriteRun<'_>]) {
        let mut requests = Requests::default();
        for (run_idx, run) in runs.iter().enumerate() {
            let n_bytes = run.slices.iter().map(|slice| slice.len()).sum();
            let slices = run.slices.iter().map(|slice| (slice.as_ptr().cast_mut(), slice.len()));
            requests.add_run(run_idx, (run.file, run.file.position(run.offset)), n_bytes, slices);
        }
        let outcomes = self.transfer(Direction::Write, requests, runs.len());
        runs.iter_mut().zip(outcomes).for_each(|(run, outcome)| run.outcome = outcome);
    }

    fn sync(&self, file: &SegmentFile) -> io::Result<()> {
        file.handle().sync_data()
    }
}

impl Requests {
    /// Cuts a run of so many bytes into pieces.
    fn add_run(
        &mut self,
        run_idx: usize,
        (file, mut offset): (&SegmentFile, u64),
        n_bytes: usize,
        slices: impl Iterator<Item = (*mut u8, usize)>,
    ) {
        let mut n_left = n_bytes;
        let mut piece_left = 0;
        for (start, n_bytes) in slices {
            let mut done = 0;
            while done < n_bytes {
                if piece_left == 0 {
                    piece_left = if n_left < PIECE_BYTES + MIN_PIECE_BYTES { n_left } else { PIECE_BYTES };
                    let first_vector = self.vectors.len();
                    let fd = file.handle().as_raw_fd();
                    self.pieces.push(Piece { run_idx, fd, offset, first_vector, n_vectors: 0, n_bytes: 0 });
                }
                let n_here = piece_left.min(n_bytes - done);
                self.vectors.push(libc::iovec { iov_base: start.wrapping_add(done).cast(), iov_len: n_here });
                if let Some(piece) = self.pieces.last_mut() {
                    piece.n_vectors += 1;
                    piece.n_bytes += n_here;
                }
                done += n_here;
                offset += n_here as u64;
                piece_left -= n_here;
                n_left -= n_here;
            }
        }
    }

    /// Takes off a piece what was moved; returns whether all of it was.
    fn advance(&mut self, piece_idx: usize, n_bytes: usize) -> bool {
        let piece = &mut self.pieces[piece_idx];
        let mut n_left = n_bytes.min(piece.n_bytes);
        piece.offset += n_left as u64;
        piece.n_bytes -= n_left;
        while n_left > 0 {
            let vector = &mut self.vectors[piece.first_vector];
            let n_here = n_left.min(vector.iov_len);
            vector.iov_base = vector.iov_base.wrapping_byte_add(n_here);
            vector.iov_len -= n_here;
            n_left -= n_here;
            if vector.iov_len == 0 {
                piece.first_vector += 1;
                piece.n_vectors -= 1;
            }
        }
        piece.n_bytes == 0
    }
}

impl BusyRing<'_> {
    /// Puts a piece into the submission queue; false if that is full.
    fn push(&mut self, direction: Direction, piece_idx: usize) -> bool {
        let piece = &self.requests.pieces[piece_idx];
        let vectors = self.requests.vectors[piece.first_vector..][..piece.n_vectors].as_ptr();
        let (fd, n_vectors) = (types::Fd(piece.fd), piece.n_vectors as u32);
        let entry: squeue::Entry = match direction {
            Direction::Read => opcode::Readv::new(fd, vectors, n_vectors).offset(piece.offset).build(),
            Direction::Write => opcode::Writev::new(fd, vectors, n_vectors).offset(piece.offset).build(),
        };
        // SAFETY: the vectors, the file and the memory the vectors point to are borrowed by the call that made
        // `self`, and `self` ends, by return or by unwinding, only when the kernel has completed every entry it
        // took (`Drop`). The vectors of a piece are not changed while it is in flight. Memory that is
        // read into is borrowed exclusively, by one piece each.
        let is_pushed = unsafe { self.ring.submission().push(&entry.user_data(piece_idx as u64)) }.is_ok();
        self.n_in_flight += usize::from(is_pushed);
        is_pushed
    }

    /// Hands what was pushed to the kernel and waits until something is completed.
    fn wait_for_one(&mut self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => Ok(()),
            // Nothing is lost: what was not taken stays in the queue and goes with the next call.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {
                std::thread::yield_now();
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Takes all completions that are there. `finish` receives the piece, and whether it is done, must be
    /// submitted again for its rest, or failed with its run.
    fn reap(&mut self, mut finish: impl FnMut(usize, Result<bool, (usize, io::Error)>)) {
        // The iterator borrows the ring; entries are small and few.
        while let Some(entry) = self.ring.completion().next() {
            self.n_in_flight -= 1;
            let piece_idx = entry.user_data() as usize;
            let run_idx = self.requests.pieces[piece_idx].run_idx;
            let outcome = match entry.result() {
                0 => Err((run_idx, ErrorKind::UnexpectedEof.into())),
                result if result > 0 => Ok(self.requests.advance(piece_idx, result as usize)),
                result if matches!(-result, libc::EINTR | libc::EAGAIN) => Ok(false),
                result => Err((run_idx, io::Error::from_raw_os_error(-result))),
            };
            finish(piece_idx, outcome);
        }
    }
}

impl Drop for BusyRing<'_> {
    fn drop(&mut self) {
        // What still lies in the submission queue was never taken, and is not once the ring is gone.
        while self.n_in_flight > self.ring.submission().len() {
            // A ring that refuses to wait still completes what it took, in memory that is shared with it.
            let _ = self.ring.submit_and_wait(1);
            let n_completed = self.ring.completion().count();
            self.n_in_flight -= n_completed;
            if n_completed == 0 {
                std::thread::yield_now();
            }
        }
    }
}

impl fmt::Debug for Uring {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Uring").field("queue_depth", &self.queue_depth).finish_non_exhaustive()
    }
}

/// Errors of the system cannot be cloned; the code is what matters.
fn copy_of(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}
