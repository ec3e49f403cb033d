//! Which tokens of a prompt each worker has, and in which tier: the picture behind a score.
//!
//! A book says how many blocks of a list a worker has in each tier, not which. A list that a worker has not at all, or wholly in
//! one tier, is known; another one is halved and asked again. What a worker has are a few runs, so this takes a few
//! questions for each end of a run, also where the book is on a server.

use std::collections::BTreeMap;
use std::ops::Range;

use kvik_index::holders::{BlockKey, Tier, Walk};
use kvik_proto::index::{HeldRun, PromptHoldersRequest, PromptHoldersResponse};

use crate::backend::Row;
use crate::book::Book;
use crate::error::{IndexerError, Result};
use crate::indexer::{Indexer, prompt_in, tier_name};

/// Questions about one book, where it is in memory and where it is on a server.
const MAX_QUESTIONS: usize = 8192;
const MAX_REMOTE_QUESTIONS: usize = 256;
/// Most pairs of worker and piece of the prompt in one answer.
const MAX_CELLS: usize = 1 << 26;
/// A piece of a prompt that a worker does not have.
const NOTHING: u8 = u8::MAX;

/// The tiers of each worker's pieces of a prompt, as their number in [`Tier::ALL`].
struct Picture {
    /// Tokens of a piece: every block is a whole number of them.
    piece_tokens: usize,
    n_pieces: usize,
    workers: BTreeMap<String, Vec<u8>>,
    is_complete: bool,
}

impl Indexer {
    /// Finds which tokens of a prompt each worker has, by the fastest tier that has them.
    ///
    /// # Errors
    /// If a field of the request cannot be used, or the index is away.
    pub async fn prompt_holders(&self, request: PromptHoldersRequest) -> Result<PromptHoldersResponse> {
        let PromptHoldersRequest { model, prompt, messages, token_ids, cache_salt } = request;
        let prompt = prompt_in(prompt, messages.as_deref(), token_ids)?;
        let tokens = self.tokenize(&model, prompt).await?;
        let books = self.catalog().discover(&model).await?;
        let books = books.map(|books| books.all()).unwrap_or_default();
        let sizes = books.iter().map(|book| book.keys.block_tokens.get());
        let piece_tokens = sizes.reduce(greatest_common_divisor).unwrap_or(tokens.len()).max(1);
        let mut picture = Picture {
            piece_tokens,
            n_pieces: tokens.len().div_ceil(piece_tokens),
            workers: BTreeMap::new(),
            is_complete: true,
        };
        let mut keys: Vec<BlockKey> = Vec::new();
        for book in &books {
            keys.clear();
            book.keys.extend_salted(&tokens, cache_salt.as_deref(), &mut keys);
            picture.add(book, &keys).await?;
        }
        Ok(PromptHoldersResponse {
            model,
            block_tokens: piece_tokens,
            is_complete: picture.is_complete,
            workers: picture.runs(tokens.len()),
            token_ids: tokens,
        })
    }
}

impl Picture {
    /// Adds what a book knows of blocks.
    async fn add(&mut self, book: &Book, keys: &[BlockKey]) -> Result<()> {
        let is_near = book.backend.kind() == "memory";
        let max_questions = if is_near { MAX_QUESTIONS } else { MAX_REMOTE_QUESTIONS };
        let pieces = book.keys.block_tokens.get() / self.piece_tokens;
        let mut open: Vec<Range<usize>> = Vec::new();
        if !keys.is_empty() {
            open.push(0..keys.len());
        }
        let mut n_questions = 0;
        while let Some(range) = open.pop() {
            if n_questions == max_questions {
                self.is_complete = false;
                break;
            }
            n_questions += 1;
            let rows = book.backend.lookup(&keys[range.clone()], Walk::All).await?;
            let tiers: Option<Vec<Tier>> = rows.iter().map(|row| only_tier(row, range.len())).collect();
            let Some(tiers) = tiers else {
                let middle = usize::midpoint(range.start, range.end);
                open.extend([middle..range.end, range.start..middle]);
                continue;
            };
            for (row, tier) in rows.iter().zip(tiers) {
                self.paint(&row.source.worker, range.start * pieces..range.end * pieces, tier)?;
            }
        }
        Ok(())
    }

    /// Notes that a worker has pieces in a tier, where it has them in no faster one.
    fn paint(&mut self, worker: &str, pieces: Range<usize>, tier: Tier) -> Result<()> {
        if !self.workers.contains_key(worker) {
            if MAX_CELLS < (self.workers.len() + 1).saturating_mul(self.n_pieces) {
                let allowed = "a shorter one: too many workers have parts of it";
                return Err(IndexerError::invalid("prompt", format!("{} pieces", self.n_pieces), allowed));
            }
            self.workers.insert(worker.to_owned(), vec![NOTHING; self.n_pieces]);
        }
        let cells = self.workers.get_mut(worker).and_then(|cells| cells.get_mut(pieces));
        for cell in cells.into_iter().flatten() {
            *cell = (*cell).min(tier.as_index() as u8);
        }
        Ok(())
    }

    fn runs(self, n_tokens: usize) -> BTreeMap<String, Vec<HeldRun>> {
        let runs = |cells: Vec<u8>| {
            let mut start = 0;
            let mut runs = Vec::new();
            for same in cells.chunk_by(|one, other| one == other) {
                let (first_token, end) =
                    (start * self.piece_tokens, (start + same.len()) * self.piece_tokens);
                start += same.len();
                if let Some(tier) = Tier::ALL.get(usize::from(same[0])) {
                    let tier = tier_name(*tier).to_owned();
                    runs.push(HeldRun { first_token, tokens: end.min(n_tokens) - first_token, tier });
                }
            }
            runs
        };
        self.workers.into_iter().map(|(worker, cells)| (worker, runs(cells))).collect()
    }
}

/// The tier that has all of `n_blocks` blocks; none if they are in several, or some are missing.
fn only_tier(row: &Row, n_blocks: usize) -> Option<Tier> {
    let has_all = |tier: &&Tier| row.covered_in[tier.as_index()] as usize == n_blocks;
    Tier::ALL.iter().find(has_all).copied()
}

fn greatest_common_divisor(one: usize, other: usize) -> usize {
    if other == 0 { one } else { greatest_common_divisor(other, one % other) }
}
