//! The distributions that symbols are coded with: part of the format, the same on every machine.
//!
//! A class is a bell curve with long ends over the integers, cut off where it is of no use. Its weights come from additions,
//! multiplications and divisions of f64 alone, whose results IEEE 754 fixes.

use std::sync::OnceLock;

use crate::rans::{Frequencies, N_SYMBOLS};
use crate::simd::SlotTable;

/// Set in a class where differences against anchors were coded.
pub(super) const IS_DIFFERENCE: u8 = 0x80;

/// Number of classes.
pub(crate) const N_CLASSES: usize = 16;

/// The largest magnitude of a symbol.
pub(crate) const MAX_SYMBOL: u8 = 127;

/// Width of the narrowest class; each next one is [`GROWTH`] times as wide.
const NARROWEST: f64 = 0.25;

const GROWTH: f64 = 1.4;

/// Share of the long ends.
const ENDS: f64 = 0.08;

/// How much wider the long ends are.
const ENDS_WIDTH: f64 = 1.5;

/// All classes.
#[derive(Debug)]
pub(crate) struct Classes {
    pub(crate) slots: Vec<SlotTable>,
    pub(crate) ranges: Vec<[(u16, u16); N_SYMBOLS]>,
    /// Of each class, the largest magnitude that it has a share for.
    pub(crate) reaches: [u8; N_CLASSES],
    /// Of each class and magnitude, what a symbol costs in 1/64 bits.
    pub(crate) costs: Vec<[u16; MAX_SYMBOL as usize + 1]>,
}

impl Classes {
    /// The classes; made once.
    pub(crate) fn get() -> &'static Self {
        static CLASSES: OnceLock<Classes> = OnceLock::new();
        CLASSES.get_or_init(Self::new)
    }

    fn new() -> Self {
        let mut width = NARROWEST;
        let (mut slots, mut ranges, mut costs) = (Vec::new(), Vec::new(), Vec::new());
        let mut reaches = [MAX_SYMBOL; N_CLASSES];
        for (class, reach) in reaches.iter_mut().enumerate() {
            if class + 1 < N_CLASSES {
                *reach = ((6.0 * width) as u8 + 3).min(MAX_SYMBOL);
            }
            let frequencies = Frequencies::of_weights(&weights(width, *reach));
            let class_ranges = frequencies.ranges();
            slots.push(frequencies.slots());
            costs.push(std::array::from_fn(|magnitude| cost(class_ranges[magnitude].1)));
            ranges.push(class_ranges);
            width *= GROWTH;
        }
        Self { slots, ranges, reaches, costs }
    }

    /// The cheapest class for symbols of these magnitudes.
    #[inline(always)]
    pub(crate) fn cheapest(&self, symbols: &[i8]) -> u8 {
        let (mut sum, mut largest) = (0_u32, 0_u8);
        for symbol in symbols {
            sum += u32::from(symbol.unsigned_abs());
            largest = largest.max(symbol.unsigned_abs());
        }
        // The mean magnitude is about four fifths of the width.
        let mean = f64::from(sum) / symbols.len().max(1) as f64;
        let (mut class, mut width) = (0, NARROWEST);
        while class + 1 < N_CLASSES && (width * 0.8 < mean || self.reaches[class] < largest) {
            class += 1;
            width *= GROWTH;
        }
        let cost_of = |class: usize| {
            let costs = &self.costs[class];
            symbols
                .iter()
                .map(|symbol| u32::from(costs[usize::from(symbol.unsigned_abs()) & 0x7f]))
                .sum::<u32>()
        };
        let first = (class.saturating_sub(1)..class).find(|class| self.reaches[*class] >= largest);
        let candidates = first.unwrap_or(class)..(class + 2).min(N_CLASSES);
        candidates.min_by_key(|class| cost_of(*class)).unwrap_or(class) as u8
    }
}

/// Weights of the symbols of a class; a symbol is a byte in two's complement.
fn weights(width: f64, reach: u8) -> [u64; N_SYMBOLS] {
    let bell_rate = exp_of_minus(1.0 / (2.0 * width * width));
    let ends_rate = exp_of_minus(1.0 / (ENDS_WIDTH * width));
    // A bell curve of width w has a sum of about 2.5 w, long ends of width e of 2 e.
    let (mut bell, mut bell_step) = ((1.0 - ENDS) / (2.5 * width), bell_rate);
    let mut ends = ENDS / (2.0 * ENDS_WIDTH * width);
    let mut weights = [0; N_SYMBOLS];
    for magnitude in 0..=reach {
        let weight = ((bell + ends) * 1e12) as u64 + 1;
        weights[usize::from(magnitude)] = weight;
        weights[usize::from(magnitude.wrapping_neg())] = weight;
        // From m squared to the next square are 2 m + 1 steps.
        bell *= bell_step;
        bell_step *= bell_rate * bell_rate;
        ends *= ends_rate;
    }
    weights
}

/// `e^-x` for `x` from 0 to 8, by its series.
fn exp_of_minus(x: f64) -> f64 {
    let (mut term, mut sum) = (1.0, 1.0);
    for n in 1..80 {
        term *= x / f64::from(n);
        sum += term;
    }
    1.0 / sum
}

/// Cost of a symbol with a share of 4096, in 1/64 bits; a symbol without one must not be used.
fn cost(share: u16) -> u16 {
    if share == 0 {
        return 16 * 64;
    }
    let whole_bits = share.ilog2();
    // The logarithm of the mantissa, by squaring.
    let (mut mantissa, mut fraction) = (u64::from(share) << (32 - whole_bits), 0);
    for _ in 0..6 {
        mantissa = (mantissa >> 16) * (mantissa >> 16);
        fraction *= 2;
        if mantissa >= 1 << 33 {
            mantissa >>= 1;
            fraction += 1;
        }
    }
    (12 * 64) - (whole_bits as u16 * 64 + fraction)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_classes_are_those_of_the_format() {
        let classes = Classes::get();
        assert_eq!(classes.reaches, [4, 5, 5, 7, 8, 11, 14, 18, 25, 33, 46, 63, 88, 122, 127, 127]);
        // Shares of 0, 1 and the largest magnitude of some classes: a change makes chunks unreadable.
        let shares = |class: usize| {
            [0, 1, usize::from(classes.reaches[class])].map(|magnitude| classes.ranges[class][magnitude].1)
        };
        assert_eq!([0, 5, 10, 15].map(shares), [[4050, 20, 1], [1204, 896, 1], [230, 219, 1], [41, 41, 1]]);
    }

    #[test]
    fn no_share_of_the_format_changes() {
        let shares = Classes::get().ranges.iter().flatten().map(|(_, share)| u64::from(*share));
        let sum = shares.fold(0, |sum: u64, share| sum.wrapping_mul(0x0100_0000_01b3).wrapping_add(share));
        assert_eq!(sum, 16_539_289_953_989_893_850);
    }

    #[test]
    fn costs_are_logarithms() {
        for (share, bits) in [(4095, 0.0), (2048, 1.0), (1, 12.0), (3, 10.415), (100, 5.356)] {
            assert!((f64::from(cost(share)) / 64.0 - bits).abs() < 0.02, "{share}: {}", cost(share));
        }
    }

    #[test]
    fn the_cheapest_class_is_as_wide_as_the_symbols_and_reaches_the_largest() {
        let classes = Classes::get();
        assert_eq!(classes.cheapest(&[0; 32]), 0);
        let narrow = classes.cheapest(&[1, -1, 0, 2, 0, -1, 1, 0]);
        let wide = classes.cheapest(&[40, -90, 7, -22, 66, 1, -8, 30]);
        assert!((3..=5).contains(&narrow) && wide >= 13, "{narrow} {wide}");
        assert!(classes.reaches[usize::from(classes.cheapest(&[0, 0, 0, 0, 0, 0, 0, 60]))] >= 60);
        assert_eq!(classes.reaches[usize::from(classes.cheapest(&[127, 0]))], 127);
    }
}
