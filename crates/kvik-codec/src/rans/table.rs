//! Frequencies of symbols, and what decoders make of them.

use crate::error::{CodecError, Result};
use crate::simd::{N_SLOTS, SlotTable};

/// Symbols of an alphabet.
pub(crate) const N_SYMBOLS: usize = 256;

/// The most that one symbol may have: 12 bits.
const MAX_FREQUENCY: u16 = N_SLOTS as u16 - 1;

/// How often each symbol is expected, of [`N_SLOTS`]. At least two symbols have a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frequencies([u16; N_SYMBOLS]);

impl Frequencies {
    /// The frequencies for symbols of these weights. Every symbol with a weight has a share.
    pub(crate) fn of_weights(weights: &[u64; N_SYMBOLS]) -> Self {
        let total = weights.iter().sum::<u64>().max(1);
        let mut shares = [0; N_SYMBOLS];
        for (share, weight) in shares.iter_mut().zip(weights) {
            let scaled = u128::from(*weight) * N_SLOTS as u128 / u128::from(total);
            *share = if *weight == 0 { 0 } else { (scaled as u16).clamp(1, MAX_FREQUENCY) };
        }
        // An only symbol leaves a slot to another one, because a share of all does not fit its 12 bits.
        while shares.iter().filter(|share| **share > 0).count() < 2 {
            let unused = shares.iter().position(|share| *share == 0).unwrap_or_default();
            shares[unused] = 1;
        }
        // What rounding left over or took too much is the largest shares'.
        let mut sum: usize = shares.iter().map(|share| usize::from(*share)).sum();
        while sum != N_SLOTS {
            let largest = (0..N_SYMBOLS).max_by_key(|symbol| shares[*symbol]).unwrap_or_default();
            let share = usize::from(shares[largest]);
            let changed = if sum < N_SLOTS {
                share + (N_SLOTS - sum).min(usize::from(MAX_FREQUENCY) - share)
            } else {
                share - (sum - N_SLOTS).min((share / 8).max(1))
            };
            sum = sum - share + changed;
            shares[largest] = changed as u16;
        }
        Self(shares)
    }

    /// First slot and frequency of every symbol; the frequency of one that is never expected is 0.
    pub(crate) fn ranges(&self) -> [(u16, u16); N_SYMBOLS] {
        let mut start = 0;
        self.0.map(|share| {
            let range = (start, share);
            start += share;
            range
        })
    }

    /// What a decoder does in each slot.
    pub(crate) fn slots(&self) -> SlotTable {
        let mut slots = [0; N_SLOTS];
        for (symbol, (start, share)) in self.ranges().into_iter().enumerate() {
            for rest in 0..share {
                let entry = u32::from(share) << 20 | u32::from(rest) << 8 | symbol as u32;
                slots[usize::from(start + rest)] = entry;
            }
        }
        slots
    }

    /// Appends the symbols that have a share, one u16 for their number and then three bytes each.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let n_used = self.0.iter().filter(|share| **share > 0).count();
        out.extend((n_used as u16).to_le_bytes());
        for (symbol, share) in self.0.iter().enumerate().filter(|(_, share)| **share > 0) {
            out.push(symbol as u8);
            out.extend(share.to_le_bytes());
        }
    }

    /// Reads what [`Self::write`] gives, from the front of `bytes`.
    ///
    /// # Errors
    /// If the bytes end, or are no frequencies in the order of their symbols that sum up to [`N_SLOTS`].
    pub(crate) fn read(bytes: &mut &[u8]) -> Result<Self> {
        let wrong = || CodecError::corrupt("frequencies of symbols");
        let (n_used, rest) = bytes.split_first_chunk().ok_or_else(wrong)?;
        let n_used = usize::from(u16::from_le_bytes(*n_used));
        let (entries, rest) = rest.split_at_checked(3 * n_used).ok_or_else(wrong)?;
        let (mut shares, mut sum, mut last) = ([0; N_SYMBOLS], 0, None);
        for [symbol, low, high] in entries.as_chunks().0 {
            let share = u16::from_le_bytes([*low, *high]);
            if last >= Some(*symbol) || !(1..=MAX_FREQUENCY).contains(&share) {
                return Err(wrong());
            }
            shares[usize::from(*symbol)] = share;
            sum += usize::from(share);
            last = Some(*symbol);
        }
        *bytes = rest;
        if sum == N_SLOTS { Ok(Self(shares)) } else { Err(wrong()) }
    }
}
