//! Rotary position encoding, half-rotation form.

/// The rotations of the rows of one batch.
///
/// Angles are computed for the positions at hand instead of being tabulated for the whole
/// context: a batch needs few, and a long-context model would need a table of many megabytes.
#[derive(Debug)]
pub(crate) struct RotaryTable {
    inverse_frequencies: Vec<f32>,
    /// For each row, for each frequency: (cosine, sine).
    rotations: Vec<(f32, f32)>,
}

impl RotaryTable {
    pub(crate) fn new(inverse_frequencies: Vec<f32>) -> Self {
        Self { inverse_frequencies, rotations: Vec::new() }
    }

    /// Computes the rotations of `positions`, one row each. The angle is rounded to f32 before
    /// the cosine is taken, as the models were trained.
    pub(crate) fn prepare(&mut self, positions: impl Iterator<Item = u32>) {
        self.rotations.clear();
        for position in positions {
            for &frequency in &self.inverse_frequencies {
                let (sine, cosine) = f64::from(position as f32 * frequency).sin_cos();
                self.rotations.push((cosine as f32, sine as f32));
            }
        }
    }

    /// Cosine and sine of each frequency in the first row.
    pub(crate) fn first_row(&self) -> &[(f32, f32)] {
        self.rotations.get(..self.inverse_frequencies.len()).unwrap_or_default()
    }

    /// Rotates the heads of row `row_idx` in place; `heads` holds whole heads side by side.
    ///
    /// # Panics
    /// If the row was not prepared.
    pub(crate) fn rotate(&self, row_idx: usize, heads: &mut [f32]) {
        let half = self.inverse_frequencies.len();
        let rotations = &self.rotations[row_idx * half..(row_idx + 1) * half];
        for head in heads.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            for ((a, b), &(cosine, sine)) in first.iter_mut().zip(second).zip(rotations) {
                let (x, y) = (*a, *b);
                *a = x * cosine - y * sine;
                *b = y * cosine + x * sine;
            }
        }
    }
}
