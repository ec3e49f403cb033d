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
    let mut words: [Vec<u16>; N_CHAINS] = [const { Vec::new() }; N_CHAINS];
    // Decoders are last in, first out: what they read first is written last.
    for (unit_idx, (unit, class)) in units.iter().zip(classes).enumerate().rev() {
        let chain = unit_idx % N_CHAINS;
        let ranges = &ranges[usize::from(*class)];
        for (state, symbol) in states[chain].iter_mut().zip(unit).rev() {
            let (start, share) = ranges[usize::from(*symbol)];
            let (start, share) = (u32::from(start), u32::from(share).max(1));
            if *state >= share << (32 - PROBABILITY_BITS) {
                words[chain].push(*state as u16);
                *state >>= 16;
            }
            *state = ((*state / share) << PROBABILITY_BITS) + *state % share + start;
        }
    }
    for chain_words in &words {
        out.extend((chain_words.len() as u32).to_le_bytes());
    }
    out.extend(states.as_flattened().iter().flat_map(|state| state.to_le_bytes()));
    for chain_words in &words {
        out.extend(chain_words.iter().rev().flat_map(|word| word.to_le_bytes()));
    }
}
