//! Rotary position encoding, half-rotation form.

use std::marker::PhantomData;

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
    pub(crate) fn rotate(&self, row_idx: usize, heads: &mut [f32]) {
        let (cosines, sines) = self.row(row_idx);
        for head in heads.chunks_exact_mut(2 * cosines.len()) {
            let (first, second) = head.split_at_mut(cosines.len());
            rotate_each(first, second, cosines, sines);
        }
    }

    /// Writes stored tokens to rows of `2 * width`: their keys, rotated as by row 0, and then their values. The bits are those of
    /// [`Self::rotate`] on every instruction set.
    ///
    /// # Panics
    /// If no row was prepared, `width` is not that of whole heads, or the lengths differ.
    pub(crate) fn turn_rows<E: KvElement>(
        &self,
        isa: Isa,
        width: usize,
        keys: &[u8],
        values: &[u8],
        rows: &mut [f32],
    ) {
        let (cosines, sines) = self.row(0);
        assert!(width.is_multiple_of(2 * cosines.len().max(1)) && !cosines.is_empty(), "not whole heads");
        let n_bytes = rows.len() / 2 * E::N_BYTES;
        assert!(keys.len() == n_bytes && values.len() == n_bytes, "rows of another length");
        isa.run(TurnRows::<E> { cosines, sines, width, keys, values, rows, element: PhantomData });
    }

    fn row(&self, row_idx: usize) -> (&[f32], &[f32]) {
        let half = self.inverse_frequencies.len();
        let row = row_idx * half..(row_idx + 1) * half;
        (&self.cosines[row.clone()], &self.sines[row])
    }
}

/// The definition of the rotation: two roundings for each product and sum, never fused.
#[inline(always)]
fn rotate_each(first: &mut [f32], second: &mut [f32], cosines: &[f32], sines: &[f32]) {
    for ((a, b), (cosine, sine)) in first.iter_mut().zip(second).zip(cosines.iter().zip(sines)) {
        let (x, y) = (*a, *b);
        *a = x * cosine - y * sine;
        *b = y * cosine + x * sine;
    }
}

struct TurnRows<'a, E> {
    cosines: &'a [f32],
    sines: &'a [f32],
    width: usize,
    keys: &'a [u8],
    values: &'a [u8],
    rows: &'a mut [f32],
    element: PhantomData<E>,
}

impl<E: KvElement> Kernel for TurnRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { cosines, sines, width, keys, values, rows, .. } = self;
        let token_bytes = width * E::N_BYTES;
        let tokens = keys.chunks_exact(token_bytes).zip(values.chunks_exact(token_bytes));
        for (row, (keys, values)) in rows.chunks_exact_mut(2 * width).zip(tokens) {
            let (to_keys, to_values) = row.split_at_mut(width);
            let heads = to_keys.chunks_exact_mut(2 * cosines.len());
            for (head, bytes) in heads.zip(keys.chunks_exact(2 * cosines.len() * E::N_BYTES)) {
                turn_head::<E, S>(simd, cosines, sines, bytes, head);
            }
            widen::<E, S>(simd, values, to_values);
        }
    }
}

/// Writes one head of keys, rotated.
#[inline(always)]
fn turn_head<E: KvElement, S: Simd>(simd: S, cosines: &[f32], sines: &[f32], bytes: &[u8], head: &mut [f32]) {
    let half = cosines.len();
    let (first, second) = head.split_at_mut(half);
    let (first_bytes, second_bytes) = bytes.split_at(half * E::N_BYTES);
    let n_whole = half / LANES * LANES;
    let vectors = first.as_chunks_mut::<LANES>().0.iter_mut().zip(second.as_chunks_mut::<LANES>().0);
    let rotations = cosines.as_chunks::<LANES>().0.iter().zip(sines.as_chunks::<LANES>().0);
    let vector_bytes = LANES * E::N_BYTES;
    let stored = first_bytes.chunks_exact(vector_bytes).zip(second_bytes.chunks_exact(vector_bytes));
    for (((a, b), (cosine, sine)), (x, y)) in vectors.zip(rotations).zip(stored) {
        let (x, y) = (load::<E, S>(simd, x), load::<E, S>(simd, y));
        let (cosine, sine) = (simd.load(cosine), simd.load(sine));
        simd.store(simd.sub(simd.mul(x, cosine), simd.mul(y, sine)), a);
        simd.store(simd.add(simd.mul(y, cosine), simd.mul(x, sine)), b);
    }
    let (first, second) = (&mut first[n_whole..], &mut second[n_whole..]);
    widen_each::<E>(&first_bytes[n_whole * E::N_BYTES..], first);
    widen_each::<E>(&second_bytes[n_whole * E::N_BYTES..], second);
    rotate_each(first, second, &cosines[n_whole..], &sines[n_whole..]);
}

#[inline(always)]
fn widen<E: KvElement, S: Simd>(simd: S, bytes: &[u8], out: &mut [f32]) {
    let (vectors, rest) = out.as_chunks_mut::<LANES>();
    let n_bytes = vectors.len() * LANES * E::N_BYTES;
    for (vector, bytes) in vectors.iter_mut().zip(bytes.chunks_exact(LANES * E::N_BYTES)) {
        simd.store(load::<E, S>(simd, bytes), vector);
    }
    widen_each::<E>(&bytes[n_bytes..], rest);
}

#[inline(always)]
fn load<E: KvElement, S: Simd>(simd: S, bytes: &[u8]) -> S::Lanes {
    let mut elements = [E::default(); LANES];
    E::read_le(bytes, &mut elements);
    E::widen(simd, &elements)
}

#[inline(always)]
fn widen_each<E: KvElement>(bytes: &[u8], out: &mut [f32]) {
    for (slot, element) in out.iter_mut().zip(bytes.chunks_exact(E::N_BYTES)) {
        *slot = E::from_le(element).to_f32();
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
        let mut heads = widened.clone();
        table.rotate(0, &mut heads);
        assert_eq!(bits(&heads), expected, "in place");
        // Rows of one head each, and one row of all heads; the values are the same bytes as the keys.
        for width in [2 * half, n_elements].into_iter().filter(|width| 0 < *width) {
            let n_rows = n_elements / width;
            for isa in Isa::available() {
                let mut rows = vec![0.0; 2 * n_elements];
                table.turn_rows::<E>(isa, width, &bytes, &bytes, &mut rows);
                for row in 0..n_rows {
                    let (keys, values) = rows[2 * row * width..2 * (row + 1) * width].split_at(width);
                    let range = row * width..(row + 1) * width;
                    assert_eq!(
                        bits(keys),
                        expected[range.clone()],
                        "{isa}, half a head of {half}, by {distance}"
                    );
                    assert_eq!(bits(values), bits(&widened[range]), "{isa} values");
                }
            }
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
        table.rotate(0, &mut turned);
        assert_ne!(bits(&turned), bits(&keys));
        table.prepare_turn(-123);
        table.rotate(0, &mut turned);
        for (turned, key) in turned.iter().zip(keys) {
            assert!((turned - key).abs() < 1e-5, "{turned} for {key}");
        }
        let mut still = keys;
        table.prepare_turn(0);
        table.rotate(0, &mut still);
        assert_eq!(bits(&still), bits(&keys));
    }
}
