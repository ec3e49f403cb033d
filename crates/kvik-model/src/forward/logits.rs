//! What a pass gives of its logits: rows of them, or tokens.

use kvik_types::TokenId;

use crate::kernels::padded;
use crate::sampling::TokenDraw;

/// What a pass gives of its logits.
#[derive(Debug, Clone, Copy)]
pub enum WantedLogits<'a> {
    /// All of a row.
    Rows,
    /// For each row its token, where there is a draw and the backend can choose it, and else all of it.
    Tokens(&'a [Option<TokenDraw>]),
}

/// The logits of one forward pass, one row for each that was asked for, in order.
#[derive(Debug, Default)]
pub struct Logits {
    /// Rows as the CPU kernels write them, `stride` apart.
    pub(super) values: Vec<f32>,
    stride: usize,
    vocab_size: usize,
    /// For each row its token instead of its logits, or which of the rows in `values` it is; empty where those are all rows.
    places: Vec<RowPlace>,
}

/// What a pass gave of a row.
#[derive(Debug, Clone, Copy)]
enum RowPlace {
    Chosen(ChosenToken),
    Values(usize),
}

/// The token of a row that the backend has chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChosenToken {
    /// The token; without meaning if the logits are not numbers.
    pub token: TokenId,
    /// Whether all logits of the row are numbers.
    pub is_finite: bool,
}

impl Logits {
    /// Makes room for `n_rows` rows of `vocab_size` logits, all zero; for implementations of [`Backend`].
    pub fn reset(&mut self, n_rows: usize, vocab_size: usize) {
        self.vocab_size = vocab_size;
        self.stride = padded(vocab_size);
        self.places.clear();
        self.values.clear();
        self.values.resize(n_rows * self.stride, 0.0);
    }

    /// Takes the tokens of rows that were chosen, and makes room for the logits of the others; for implementations of [`Backend`].
    pub fn reset_chosen(&mut self, rows: impl Iterator<Item = Option<ChosenToken>>, vocab_size: usize) {
        let mut n_values = 0;
        let places = rows.map(|row| {
            row.map_or_else(
                || {
                    n_values += 1;
                    RowPlace::Values(n_values - 1)
                },
                RowPlace::Chosen,
            )
        });
        let places: Vec<RowPlace> = places.collect();
        self.reset(n_values, vocab_size);
        self.places = places;
    }

    /// The token of row `row_idx`, where the pass gave it instead of the logits.
    pub fn chosen(&self, row_idx: usize) -> Option<ChosenToken> {
        match self.places.get(row_idx) {
            Some(RowPlace::Chosen(chosen)) => Some(*chosen),
            Some(RowPlace::Values(_)) | None => None,
        }
    }

    /// Where the logits of a row begin.
    fn start(&self, row_idx: usize) -> usize {
        match self.places.get(row_idx) {
            Some(RowPlace::Values(place)) => place * self.stride,
            Some(RowPlace::Chosen(_)) => self.values.len(),
            None => row_idx * self.stride,
        }
    }

    /// The logits of row `row_idx`, to be written.
    ///
    /// # Panics
    /// If there is no such row, or its token was chosen.
    pub fn row_mut(&mut self, row_idx: usize) -> &mut [f32] {
        let start = self.start(row_idx);
        &mut self.values[start..][..self.vocab_size]
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        if self.places.is_empty() {
            self.values.len().checked_div(self.stride).unwrap_or(0)
        } else {
            self.places.len()
        }
    }

    /// The logits of row `row_idx`, one for each token of the vocabulary.
    ///
    /// # Panics
    /// If there is no such row, or its token was chosen.
    pub fn row(&self, row_idx: usize) -> &[f32] {
        &self.values[self.start(row_idx)..][..self.vocab_size]
    }
}
