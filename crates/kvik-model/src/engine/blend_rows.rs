//! What is left to compute of a prompt whose segments lie in their places.

use std::sync::Arc;

use kvik_types::TokenId;

use crate::blend::Blend;
use crate::forward::RowPositions;

/// How far a blended prompt is.
#[derive(Debug, Clone)]
pub(super) struct Blended {
    pub(super) blend: Arc<Blend>,
    /// What is computed, by position; empty before the prompt is put together and after it is computed.
    rows: Vec<u32>,
    row_tokens: Vec<TokenId>,
    n_done: usize,
    pub(super) usage: BlendUsage,
}

/// Tokens of a blended prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlendUsage {
    /// Tokens of the prompt that stand in segments that were placed.
    pub blended_tokens: usize,
    /// Of these, tokens that were computed again.
    pub recomputed_tokens: usize,
}

impl Blended {
    pub(super) fn new(blend: Arc<Blend>) -> Self {
        Self { blend, rows: Vec::new(), row_tokens: Vec::new(), n_done: 0, usage: BlendUsage::default() }
    }

    pub(super) fn set_rows(&mut self, rows: Vec<u32>, row_tokens: Vec<TokenId>, usage: BlendUsage) {
        (self.rows, self.row_tokens, self.n_done, self.usage) = (rows, row_tokens, 0, usage);
    }

    /// Rows that are left of the prompt and of what was generated before it was put together.
    pub(super) fn n_pending(&self) -> usize {
        self.rows.len() - self.n_done
    }

    pub(super) fn pending(&self, n_rows: usize) -> (&[TokenId], RowPositions<'_>) {
        let range = self.n_done..self.n_done + n_rows;
        (&self.row_tokens[range.clone()], RowPositions::At(&self.rows[range]))
    }

    /// Position of the next row; `None` if all are computed.
    pub(super) fn advance(&mut self, n_rows: usize) -> Option<usize> {
        self.n_done += n_rows;
        let next = self.rows.get(self.n_done).map(|&position| position as usize);
        if next.is_none() {
            self.reset();
        }
        next
    }

    pub(super) fn reset(&mut self) {
        (self.rows, self.row_tokens, self.n_done) = (Vec::new(), Vec::new(), 0);
    }
}
