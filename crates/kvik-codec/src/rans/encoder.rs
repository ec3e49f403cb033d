//! Symbols to streams.

use super::N_CHAINS;
use super::table::N_SYMBOLS;
use crate::element::LANES;
use crate::simd::{LOWER_BOUND, PROBABILITY_BITS};

/// Appends the stream of `symbols`, whole units of sixteen, to `out`. Unit `i` is coded with the ranges at
/// `classes[i]`, which give every symbol of the unit a share.
pub(crate) fn encode(symbols: &[u8], classes: &[u8], ranges: &[[(u16, u16); N_SYMBOLS]], out: &mut Vec<u8>) {
    let (units, _) = symbols.as_chunks::<LANES>();
    let mut states = [[LOWER_BOUND; LANES]; N_CHAINS];
    // Decoders are last in, first out: the buffers are filled from their ends.
    let mut words = [0, 1].map(|chain| vec![0_u16; (units.len() + 1 - chain) / N_CHAINS * LANES]);
    let mut starts = [words[0].len(), words[1].len()];
    for (unit_idx, (unit, class)) in units.iter().zip(classes).enumerate().rev() {
        let chain = unit_idx % N_CHAINS;
        let ranges = &ranges[usize::from(*class)];
        let (words, start) = (&mut words[chain], &mut starts[chain]);
        for (state, symbol) in states[chain].iter_mut().zip(unit).rev() {
            let (first_slot, share) = ranges[usize::from(*symbol)];
            let (first_slot, share) = (u32::from(first_slot), u32::from(share).max(1));
            // Written in any case and kept if it is needed: which is as good as random, and a branch would be mispredicted.
            if let Some(word) = words.get_mut(start.wrapping_sub(1)) {
                *word = *state as u16;
            }
            let gives = *state >= share << (32 - PROBABILITY_BITS);
            *start -= usize::from(gives);
            let reduced = if gives { *state >> 16 } else { *state };
            *state = ((reduced / share) << PROBABILITY_BITS) + reduced % share + first_slot;
        }
    }
    let words = [&words[0][starts[0]..], &words[1][starts[1]..]];
    for chain_words in words {
        out.extend((chain_words.len() as u32).to_le_bytes());
    }
    out.extend(states.as_flattened().iter().flat_map(|state| state.to_le_bytes()));
    for chain_words in words {
        out.reserve(2 * chain_words.len());
        out.extend(chain_words.iter().flat_map(|word| word.to_le_bytes()));
    }
}
