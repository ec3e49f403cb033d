//! What every backend checks of a pass before it computes anything.

use kvik_types::TokenId;

use crate::config::ModelConfig;
use crate::error::{ModelError, Result};
use crate::kernels::{RowPlan, Span};

use super::{RowPositions, SegmentPart, SequenceRows};

/// Checks positions and tokens of `sequences`.
///
/// # Errors
/// If a token is not in the vocabulary, a position is past the context, or positions do not rise.
pub(super) fn check_sequences(config: &ModelConfig, sequences: &[SequenceRows<'_>]) -> Result<()> {
    for sequence in sequences {
        let n_rows = sequence.tokens.len();
        if let RowPositions::At(positions) = sequence.positions {
            let is_rising = positions.windows(2).all(|pair| pair[0] < pair[1]);
            if positions.len() != n_rows || !is_rising {
                let allowed = format!("{n_rows} rising positions");
                return Err(ModelError::request("positions", positions.len(), allowed));
            }
        }
        let end = n_rows.checked_sub(1).map_or(0, |last| sequence.positions.get(last) + 1);
        if config.max_positions < end {
            let allowed = format!("at most {} tokens", config.max_positions);
            return Err(ModelError::request("tokens", format!("{end} tokens long"), allowed));
        }
        let is_outside = |&&token: &&TokenId| config.vocab_size <= token as usize;
        if let Some(token) = sequence.tokens.iter().find(is_outside) {
            let allowed = format!("token ids below {}", config.vocab_size);
            return Err(ModelError::request("tokens", token, allowed));
        }
    }
    Ok(())
}

/// The runs of consecutive positions of a pass's rows.
pub(super) fn spans_of<'a>(sequences: &[SequenceRows<'a>]) -> Vec<Span<'a>> {
    sequences.iter().flat_map(spans_of_sequence).collect()
}

/// Plans the rows of `spans`.
///
/// # Errors
/// If a table does not cover its rows, names a block that does not exist, or two sequences write one block.
pub(super) fn plan_rows<'a>(spans: &[Span<'a>], n_blocks: usize) -> Result<RowPlan<'a>> {
    RowPlan::try_new(spans, n_blocks).ok_or_else(|| {
        let allowed = "tables that cover their rows and write no block twice";
        ModelError::request("block_table", "inconsistent", allowed)
    })
}

/// The number of tokens of a segment's part, with `token_bytes` for the keys of a token and as many for its values.
///
/// # Errors
/// If it is not a whole number, or keys and values differ in length.
pub(super) fn segment_tokens(part: SegmentPart<'_>, token_bytes: usize) -> Result<usize> {
    if part.keys.len() != part.values.len() || !part.keys.len().is_multiple_of(token_bytes) {
        let value = format!("{} and {} bytes", part.keys.len(), part.values.len());
        return Err(ModelError::request(
            "segment",
            value,
            format!("twice a multiple of {token_bytes} bytes"),
        ));
    }
    Ok(part.keys.len() / token_bytes)
}

fn spans_of_sequence<'a>(sequence: &SequenceRows<'a>) -> Vec<Span<'a>> {
    let block_table = sequence.block_table;
    let span =
        |n_rows, first_position, is_continued| Span { n_rows, first_position, block_table, is_continued };
    match sequence.positions {
        RowPositions::From(first) => vec![span(sequence.tokens.len(), first, false)],
        RowPositions::At(positions) => {
            let runs = positions.chunk_by(|before, after| before + 1 == *after);
            runs.enumerate().map(|(idx, run)| span(run.len(), run[0] as usize, 0 < idx)).collect()
        }
    }
}
