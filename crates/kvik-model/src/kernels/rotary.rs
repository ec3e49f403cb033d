//! Rotary position encoding, half-rotation form.

use super::pages::KvElement;
use super::simd::{Isa, Kernel, LANES, Simd};

/// The rotations of the rows of one batch.
///
/// Angles are computed for the positions at hand instead of being tabulated for the whole
/// context: a batch needs few, and a long-context model would need a table of many megabytes.
#[derive(Debug)]
pub(crate) struct RotaryTable {
    inverse_frequencies: Vec<f32>,
    /// For each row, for each frequency.
    cosines: Vec<f32>,
    /// As `cosines`.
    sines: Vec<f32>,
}

impl RotaryTable {
    pub(crate) fn new(inverse_frequencies: Vec<f32>) -> Self {
        Self { inverse_frequencies, cosines: Vec::new(), sines: Vec::new() }
    }

    /// Computes the rotations of `positions`, one row each. The angle is rounded to f32 before
    /// the cosine is taken, as the models were trained.
    pub(crate) fn prepare(&mut self, positions: impl Iterator<Item = u32>) {
        self.clear();
        positions.for_each(|position| self.push_row(position as f32));
    }

    /// Computes one row, which turns keys from one position to another `distance` behind it.
    pub(crate) fn prepare_turn(&mut self, distance: i64) {
        self.clear();
        self.push_row(distance as f32);
    }

    fn clear(&mut self) {
        self.cosines.clear();
        self.sines.clear();
    }

    fn push_row(&mut self, position: f32) {
        for &frequency in &self.inverse_frequencies {
            let (sine, cosine) = f64::from(position * frequency).sin_cos();
            self.cosines.push(cosine as f32);
            self.sines.push(sine as f32);
        }
    }

    /// Cosine and sine of each frequency in the first row.
    pub(crate) fn first_row(&self) -> impl Iterator<Item = (f32, f32)> {
        let pairs = self.cosines.iter().copied().zip(self.sines.iter().copied());
        pairs.take(self.inverse_frequencies.len())
    }

    /// Rotates the heads of row `row_idx` in place; `heads` holds whole heads side by side.
    ///
    /// # Panics
    /// If the row was not prepared.
    pub(crate) fn rotate(&self, isa: Isa, row_idx: usize, heads: &mut [f32]) {
        let (cosines, sines) = self.row(row_idx);
        isa.run(Rotate { cosines, sines, heads });
    }

    /// Writes the stored keys `bytes` to `heads`, rotated as by row 0.
    ///
    /// # Panics
    /// If no row was prepared, or the lengths differ.
    pub(crate) fn turn<E: KvElement>(&self, isa: Isa, bytes: &[u8], heads: &mut [f32]) {
        let (cosines, sines) = self.row(0);
        widen_row::<E>(isa, bytes, heads);
        isa.run(Rotate { cosines, sines, heads });
    }

    fn row(&self, row_idx: usize) -> (&[f32], &[f32]) {
        let half = self.inverse_frequencies.len();
        let row = row_idx * half..(row_idx + 1) * half;
        (&self.cosines[row.clone()], &self.sines[row])
    }
}

/// Writes stored elements to `out`; exact.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn widen_row<E: KvElement>(isa: Isa, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * E::N_BYTES, "a row of another length");
    isa.run(Widen { bytes, out, element: std::marker::PhantomData::<E> });
}

/// Rotates heads by one row.
struct Rotate<'a> {
    cosines: &'a [f32],
    sines: &'a [f32],
    heads: &'a mut [f32],
}

struct Widen<'a, E> {
    bytes: &'a [u8],
    out: &'a mut [f32],
    element: std::marker::PhantomData<E>,
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let half = self.cosines.len();
        let (cosines, more_cosines) = self.cosines.as_chunks::<LANES>();
        let (sines, more_sines) = self.sines.as_chunks::<LANES>();
        for head in self.heads.chunks_exact_mut((2 * half).max(1)) {
            let (first, second) = head.split_at_mut(half);
            let (first, more_first) = first.as_chunks_mut::<LANES>();
            let (second, more_second) = second.as_chunks_mut::<LANES>();
            for ((a, b), (cosine, sine)) in first.iter_mut().zip(second).zip(cosines.iter().zip(sines)) {
                let (x, y) = (simd.load(a), simd.load(b));
                let (cosine, sine) = (simd.load(cosine), simd.load(sine));
                // Two roundings each, never fused: the bits of the definition below.
                simd.store(simd.sub(simd.mul(x, cosine), simd.mul(y, sine)), a);
                simd.store(simd.add(simd.mul(y, cosine), simd.mul(x, sine)), b);
            }
            let rotations = more_cosines.iter().zip(more_sines);
            for ((a, b), (cosine, sine)) in more_first.iter_mut().zip(more_second).zip(rotations) {
                let (x, y) = (*a, *b);
                *a = x * cosine - y * sine;
                *b = y * cosine + x * sine;
            }
        }
    }
}

impl<E: KvElement> Kernel for Widen<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (vectors, rest) = self.out.as_chunks_mut::<LANES>();
        let mut bytes = self.bytes.chunks_exact(LANES * E::N_BYTES);
        for (vector, bytes) in vectors.iter_mut().zip(bytes.by_ref()) {
            let mut elements = [E::default(); LANES];
            E::read_le(bytes, &mut elements);
            simd.store(E::widen(simd, &elements), vector);
        }
        for (slot, element) in rest.iter_mut().zip(bytes.remainder().chunks_exact(E::N_BYTES)) {
            *slot = E::from_le(element).to_f32();
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;

    /// The definition.
    fn rotated(table: &RotaryTable, heads: &[f32]) -> Vec<f32> {
        let half = table.inverse_frequencies.len();
        let mut out = heads.to_vec();
        for head in out.chunks_exact_mut(2 * half) {
            for (idx, (cosine, sine)) in table.first_row().enumerate() {
                let (x, y) = (head[idx], head[half + idx]);
                head[idx] = x * cosine - y * sine;
                head[half + idx] = y * cosine + x * sine;
            }
        }
        out
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        let canonical = |value: &f32| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() };
        values.iter().map(canonical).collect()
    }

    fn check<E: KvElement>(half: usize, distance: i64, values: &[f32]) {
        let frequencies = (0..half).map(|idx| 10_000_f32.powf(-(idx as f32) / half as f32)).collect();
        let mut table = RotaryTable::new(frequencies);
        table.prepare_turn(distance);
        let n_elements = values.len() / (2 * half) * 2 * half;
        let stored: Vec<E> = values[..n_elements].iter().map(|value| E::from_f32(*value)).collect();
        let mut bytes = vec![0; n_elements * E::N_BYTES];
        E::write_le(&stored, &mut bytes);
        let widened: Vec<f32> = stored.iter().map(|element| element.to_f32()).collect();
        let expected = bits(&rotated(&table, &widened));
        for isa in Isa::available() {
            let mut turned = vec![0.0; n_elements];
            table.turn::<E>(isa, &bytes, &mut turned);
            assert_eq!(bits(&turned), expected, "{isa}, half a head of {half}, turned by {distance}");
            let mut heads = widened.clone();
            table.rotate(isa, 0, &mut heads);
            assert_eq!(bits(&heads), expected, "{isa} in place");
            let mut plain = vec![0.0; n_elements];
            widen_row::<E>(isa, &bytes, &mut plain);
            assert_eq!(bits(&plain), bits(&widened), "{isa} widened");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn keys_are_turned_to_the_same_bits_on_every_instruction_set(
            half in 1..70_usize,
            distance in -40_000..40_000_i64,
            values in prop::collection::vec(any::<u32>().prop_map(f32::from_bits), 1..600),
        ) {
            check::<f32>(half, distance, &values);
            check::<f16>(half, distance, &values);
            check::<bf16>(half, distance, &values);
        }
    }

    #[test]
    fn a_turn_back_undoes_a_turn_and_no_distance_leaves_the_bits() {
        let mut table = RotaryTable::new(vec![1.0, 0.1, 0.01]);
        let keys = [0.5_f32, -2.0, 3.0, 0.25, 7.0, -1.5];
        let mut turned = keys;
        table.prepare_turn(123);
        table.rotate(Isa::detect(), 0, &mut turned);
        assert_ne!(bits(&turned), bits(&keys));
        table.prepare_turn(-123);
        table.rotate(Isa::detect(), 0, &mut turned);
        for (turned, key) in turned.iter().zip(keys) {
            assert!((turned - key).abs() < 1e-5, "{turned} for {key}");
        }
        let mut still = keys;
        table.prepare_turn(0);
        table.rotate(Isa::detect(), 0, &mut still);
        assert_eq!(bits(&still), bits(&keys));
    }
}
