//! The decoders in plain Rust: the definition that the other instruction sets must match.

use super::{Kernel, LOWER_BOUND, Lanes, N_SLOTS, PROBABILITY_BITS, SlotTable};
use crate::element::LANES;

/// Needs nothing of the CPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalar;

impl Lanes for Scalar {
    type States = [u32; LANES];

    #[inline(always)]
    fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn load(self, states: &[u32; LANES]) -> Self::States {
        *states
    }

    #[inline(always)]
    fn store(self, states: Self::States, to: &mut [u32; LANES]) {
        *to = states;
    }

    #[inline(always)]
    fn step(
        self,
        mut states: Self::States,
        table: &SlotTable,
        words: &[u8; 2 * LANES],
        symbols: &mut [u8; LANES],
    ) -> (Self::States, usize) {
        let words = words.as_chunks::<2>().0;
        let mut n_taken = 0;
        for (state, symbol) in states.iter_mut().zip(symbols) {
            let entry = table[*state as usize % N_SLOTS];
            *symbol = entry as u8;
            let next = (entry >> 20) * (*state >> PROBABILITY_BITS) + (entry >> 8 & (N_SLOTS as u32 - 1));
            // At most one word a lane was taken before: the remainder never wraps, it drops the check of the index.
            let word = u32::from(u16::from_le_bytes(words[n_taken % LANES]));
            let takes = next < LOWER_BOUND;
            *state = if takes { next << 16 | word } else { next };
            n_taken += usize::from(takes);
        }
        (states, n_taken)
    }
}
