//! Memory for envelopes, aligned for direct I/O and used again.

use parking_lot::Mutex;

use crate::envelope::ENVELOPE_BYTES;

/// Buffers that are kept for the next call. More threads than this at a time allocate.
const MAX_KEPT_BUFFERS: usize = 8;

/// The most envelopes of a buffer that is kept: 1 MiB.
const MAX_KEPT_ENVELOPES: usize = 256;

/// Lends buffers of whole envelopes.
#[derive(Debug, Default)]
pub(super) struct ScratchPool {
    free: Mutex<Vec<Scratch>>,
}

/// Room for envelopes, aligned to their size.
#[derive(Debug)]
pub(super) struct Scratch {
    bytes: Vec<u8>,
    /// Where the aligned part begins; the vector never grows, so it stays.
    start: usize,
}

impl ScratchPool {
    /// Room for `n_envelopes` or more, of any content.
    pub(super) fn take(&self, n_envelopes: usize) -> Scratch {
        let mut free = self.free.lock();
        let large_enough = free.iter().position(|scratch| scratch.n_envelopes() >= n_envelopes);
        if let Some(scratch_idx) = large_enough {
            return free.swap_remove(scratch_idx);
        }
        drop(free);
        Scratch::new(n_envelopes)
    }

    /// Takes a buffer back.
    pub(super) fn give_back(&self, scratch: Scratch) {
        if scratch.n_envelopes() > MAX_KEPT_ENVELOPES {
            return;
        }
        let mut free = self.free.lock();
        if free.len() < MAX_KEPT_BUFFERS {
            free.push(scratch);
        } else if let Some(smaller) = free.iter_mut().find(|kept| kept.n_envelopes() < scratch.n_envelopes())
        {
            *smaller = scratch;
        }
    }
}

impl Scratch {
    fn new(n_envelopes: usize) -> Self {
        let bytes = vec![0; (n_envelopes + 1) * ENVELOPE_BYTES];
        let start = bytes.as_ptr().addr().next_multiple_of(ENVELOPE_BYTES) - bytes.as_ptr().addr();
        Self { bytes, start }
    }

    /// The envelopes.
    pub(super) fn envelopes(&self) -> &[[u8; ENVELOPE_BYTES]] {
        self.bytes[self.start..].as_chunks().0
    }

    /// The envelopes, to be written.
    pub(super) fn envelopes_mut(&mut self) -> &mut [[u8; ENVELOPE_BYTES]] {
        self.bytes[self.start..].as_chunks_mut().0
    }

    fn n_envelopes(&self) -> usize {
        self.envelopes().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envelopes_are_aligned_and_as_many_as_asked_for() {
        for n_envelopes in [0, 1, 3, 300] {
            let scratch = Scratch::new(n_envelopes);
            assert!(scratch.n_envelopes() >= n_envelopes);
            assert_eq!(scratch.envelopes().as_ptr().addr() % ENVELOPE_BYTES, 0);
        }
    }

    #[test]
    fn a_buffer_is_lent_again_and_a_huge_one_is_not_kept() {
        let pool = ScratchPool::default();
        let scratch = pool.take(4);
        let address = scratch.bytes.as_ptr();
        pool.give_back(scratch);
        assert_eq!(pool.take(2).bytes.as_ptr(), address);
        pool.give_back(pool.take(MAX_KEPT_ENVELOPES + 2));
        assert!(pool.free.lock().is_empty());
    }

    #[test]
    fn small_buffers_make_way_for_larger_ones() {
        let pool = ScratchPool::default();
        let lent: Vec<Scratch> = (0..=MAX_KEPT_BUFFERS).map(|_| pool.take(1)).collect();
        for scratch in lent {
            pool.give_back(scratch);
        }
        pool.give_back(Scratch::new(100));
        let free = pool.free.lock();
        assert_eq!(free.len(), MAX_KEPT_BUFFERS);
        assert!(free.iter().any(|scratch| scratch.n_envelopes() >= 100));
    }
}
