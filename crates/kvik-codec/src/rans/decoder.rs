//! Streams to symbols.

use super::{N_CHAINS, STREAM_HEAD_BYTES};
use crate::element::LANES;
use crate::error::{CodecError, Result};
use crate::simd::{Isa, Kernel, LOWER_BOUND, Lanes, SlotTable};

/// Words that a unit may take.
const UNIT_WORD_BYTES: usize = 2 * LANES;

/// Decodes a stream part by part.
#[derive(Debug)]
pub(crate) struct Decoder<'a> {
    isa: Isa,
    states: [[u32; LANES]; N_CHAINS],
    words: [&'a [u8]; N_CHAINS],
}

/// Decodes units as far as both chains have words for two of them.
struct DecodePairs<'a, 'b, 'c> {
    decoder: &'a mut Decoder<'b>,
    tables: &'c [SlotTable],
    classes: &'c [u8],
    symbols: &'c mut [[u8; LANES]],
}

impl<'a> Decoder<'a> {
    /// Begins to decode the stream that `bytes` are.
    ///
    /// # Errors
    /// If it is not as long as its head says.
    pub(crate) fn new(isa: Isa, bytes: &'a [u8]) -> Result<Self> {
        let wrong = || CodecError::corrupt("length of a stream");
        let (head, words) = bytes.split_at_checked(STREAM_HEAD_BYTES).ok_or_else(wrong)?;
        let (numbers, _) = head.as_chunks::<4>();
        let number = |number_idx: usize| u32::from_le_bytes(numbers[number_idx]);
        let n_even_bytes = 2 * number(0) as usize;
        let (even, odd) = words.split_at_checked(n_even_bytes).ok_or_else(wrong)?;
        if odd.len() != 2 * number(1) as usize {
            return Err(wrong());
        }
        let states =
            std::array::from_fn(|chain| std::array::from_fn(|lane| number(N_CHAINS + chain * LANES + lane)));
        Ok(Self { isa, states, words: [even, odd] })
    }

    /// Decodes the next units into `symbols`, unit `i` with the table at `classes[i]`. Only the last part of a
    /// stream may have an odd number of units.
    ///
    /// # Errors
    /// If the stream ends before, or a class has no table.
    pub(crate) fn decode(
        &mut self,
        tables: &[SlotTable],
        classes: &[u8],
        symbols: &mut [[u8; LANES]],
    ) -> Result<()> {
        if classes.iter().any(|class| usize::from(*class) >= tables.len()) {
            return Err(CodecError::corrupt("class of symbols"));
        }
        let isa = self.isa;
        let pairs = DecodePairs { decoder: self, tables, classes, symbols: &mut *symbols };
        let n_done = isa.run(pairs);
        for (unit_idx, (symbols, class)) in symbols.iter_mut().zip(classes).enumerate().skip(n_done) {
            self.decode_last(unit_idx % N_CHAINS, &tables[usize::from(*class)], symbols)?;
        }
        Ok(())
    }

    /// Checks that the stream ends here.
    ///
    /// # Errors
    /// If it does not, or not as an encoder ends it.
    pub(crate) fn finish(self) -> Result<()> {
        let is_end = self.states.as_flattened().iter().all(|state| *state == LOWER_BOUND);
        let is_empty = self.words.iter().all(|words| words.is_empty());
        if is_end && is_empty { Ok(()) } else { Err(CodecError::corrupt("end of a stream")) }
    }

    /// Decodes a unit near the end of a chain.
    fn decode_last(&mut self, chain: usize, table: &SlotTable, symbols: &mut [u8; LANES]) -> Result<()> {
        let mut words = [0; UNIT_WORD_BYTES];
        let n_bytes = self.words[chain].len().min(UNIT_WORD_BYTES);
        words[..n_bytes].copy_from_slice(&self.words[chain][..n_bytes]);
        let step = DecodeOne { states: &mut self.states[chain], table, words: &words, symbols };
        let n_taken = self.isa.run(step);
        let rest = self.words[chain].get(2 * n_taken..);
        self.words[chain] = rest.ok_or_else(|| CodecError::corrupt("end of a stream"))?;
        Ok(())
    }
}

impl Kernel for DecodePairs<'_, '_, '_> {
    /// Units that were decoded.
    type Output = usize;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> usize {
        let Self { decoder, tables, classes, symbols } = self;
        let [mut even_words, mut odd_words] = decoder.words;
        let (mut even, mut odd) = (lanes.load(&decoder.states[0]), lanes.load(&decoder.states[1]));
        let mut n_done = 0;
        let (pairs, _) = symbols.as_chunks_mut::<N_CHAINS>();
        let (class_pairs, _) = classes.as_chunks::<N_CHAINS>();
        for ([even_symbols, odd_symbols], [even_class, odd_class]) in pairs.iter_mut().zip(class_pairs) {
            let (Some(even_next), Some(odd_next)) = (even_words.first_chunk(), odd_words.first_chunk())
            else {
                break;
            };
            let (even_table, odd_table) =
                (&tables[usize::from(*even_class)], &tables[usize::from(*odd_class)]);
            let (even_states, n_even) = lanes.step(even, even_table, even_next, even_symbols);
            let (odd_states, n_odd) = lanes.step(odd, odd_table, odd_next, odd_symbols);
            (even, odd) = (even_states, odd_states);
            even_words = &even_words[2 * n_even..];
            odd_words = &odd_words[2 * n_odd..];
            n_done += N_CHAINS;
        }
        lanes.store(even, &mut decoder.states[0]);
        lanes.store(odd, &mut decoder.states[1]);
        decoder.words = [even_words, odd_words];
        n_done
    }
}

/// One unit.
struct DecodeOne<'a> {
    states: &'a mut [u32; LANES],
    table: &'a SlotTable,
    words: &'a [u8; UNIT_WORD_BYTES],
    symbols: &'a mut [u8; LANES],
}

impl Kernel for DecodeOne<'_> {
    /// Words that were taken.
    type Output = usize;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> usize {
        let (states, n_taken) = lanes.step(lanes.load(self.states), self.table, self.words, self.symbols);
        lanes.store(states, self.states);
        n_taken
    }
}
