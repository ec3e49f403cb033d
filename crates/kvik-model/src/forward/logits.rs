//! What a pass gives of its logits: rows of them, or tokens.

use kvik_types::TokenId;

use crate::kernels::padded;
use crate::sampling::TokenDraw;

/// What a pass gives of its logits.
#[derive(Debug, Clone, Copy)]
pub enum WantedLogits<'a> {
    /// All of a row.
    Rows,
    /// Of each row what it says, where the backend can choose tokens, and else all of it.
    Tokens(&'a [WantedRow]),
}

/// What is wanted of one row of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WantedRow {
    /// Its logits.
    Logits,
    /// The token that is drawn from it.
    Token(TokenDraw),
    /// Both.
    TokenAndLogits(TokenDraw),
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

/// What a pass gave of a row: its token, and which of the rows in `values` it is.
#[derive(Debug, Clone, Copy)]
struct RowPlace {
    chosen: Option<ChosenToken>,
    place: Option<usize>,
}

/// The token of a row that the backend has chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChosenToken {
    /// The token; without meaning if the logits are not numbers.
    pub token: TokenId,
    /// Whether all logits of the row are numbers.
    pub is_finite: bool,
}

impl WantedRow {
    /// How its token is drawn.
    pub fn draw(self) -> Option<TokenDraw> {
        match self {
            Self::Logits => None,
            Self::Token(draw) | Self::TokenAndLogits(draw) => Some(draw),
        }
    }

    /// Whether its logits are wanted.
    pub fn has_logits(self) -> bool {
        !matches!(self, Self::Token(_))
    }
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

    /// Takes the tokens that were chosen of the rows that want one, and makes room for the logits of those that want these; for
    /// implementations of [`Backend`].
    pub fn reset_chosen(&mut self, rows: impl Iterator<Item = (WantedRow, ChosenToken)>, vocab_size: usize) {
        let mut n_values = 0;
        let places = rows.map(|(wanted, chosen)| {
            let place = wanted.has_logits().then(|| {
                n_values += 1;
                n_values - 1
            });
            RowPlace { chosen: wanted.draw().map(|_| chosen), place }
        });
        let places: Vec<RowPlace> = places.collect();
        self.reset(n_values, vocab_size);
        self.places = places;
    }

    /// The token of row `row_idx`, where the pass chose it.
    pub fn chosen(&self, row_idx: usize) -> Option<ChosenToken> {
        self.places.get(row_idx)?.chosen
    }

    /// Whether the pass gave the logits of row `row_idx`.
    pub fn has_row(&self, row_idx: usize) -> bool {
        self.places.get(row_idx).map_or(row_idx < self.n_rows(), |row| row.place.is_some())
    }

    /// Where the logits of a row begin.
    fn start(&self, row_idx: usize) -> usize {
        match self.places.get(row_idx) {
            Some(RowPlace { place, .. }) => place.map_or(self.values.len(), |place| place * self.stride),
            None => row_idx * self.stride,
        }
    }

    /// The logits of row `row_idx`, to be written.
    ///
    /// # Panics
    /// If there is no such row, or its logits were not wanted.
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
    /// If there is no such row, or its logits were not wanted.
    pub fn row(&self, row_idx: usize) -> &[f32] {
        &self.values[self.start(row_idx)..][..self.vocab_size]
    }
}
