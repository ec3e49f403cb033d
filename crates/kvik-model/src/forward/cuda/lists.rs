//! What the kernels of one pass read about its rows, in one run of words.

use crate::paging::BlockId;
use crate::sampling::TokenDraw;

use super::super::{SequenceRows, WantedRow};
use super::kernels::{CHUNK_QUERIES, CHUNK_TOKENS};

/// Rows of an item of the kernel without matrix instructions: one for each of its warps.
const PLAIN_ROWS: usize = 4;

/// How rows are handed to the kernels of attention.
#[derive(Debug, Clone, Copy)]
pub(super) struct ListShape {
    /// Query heads of one KV head.
    pub(super) group: usize,
    /// Queries that a block takes of many rows, where attention runs on matrix instructions.
    pub(super) many_queries: Option<usize>,
}

/// Blocks in tables, and chunks of attention, of rows that decode are filled up to multiples of these, so that most passes have
/// lists of the same shape as the pass before.
const TABLE_STEP: usize = 512;
const CHUNK_STEP: usize = 32;

/// The lists, one behind the other.
#[derive(Debug, Default)]
pub(super) struct RowLists {
    pub(super) words: Vec<u32>,
    pub(super) sizes: ListSizes,
}

/// Where the lists begin, in words, and how much they have: all that the arguments of kernels say of them.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct ListSizes {
    pub(super) n_words: usize,
    pub(super) n_rows: usize,
    pub(super) tokens: usize,
    pub(super) positions: usize,
    pub(super) table_starts: usize,
    pub(super) tables: usize,
    /// Rows whose logits are wanted.
    pub(super) chosen: usize,
    pub(super) n_logits: usize,
    /// How the token behind each of these rows is chosen; none where none is.
    pub(super) draws: usize,
    /// Items of attention: of many rows, chunks of few rows, and rows whose chunks are merged.
    pub(super) items: usize,
    pub(super) n_many: usize,
    pub(super) n_chunks: usize,
    pub(super) n_merged: usize,
}

impl RowLists {
    /// The lists of one pass; the caller has checked that tables cover their rows, and that there is a draw for each row of
    /// logits, or none.
    pub(super) fn new(sequences: &[SequenceRows<'_>], draws: &[WantedRow], shape: ListShape) -> Self {
        let mut words = Vec::new();
        let n_rows = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        words.reserve(4 * n_rows);
        for sequence in sequences {
            words.extend_from_slice(sequence.tokens);
        }
        let positions = words.len();
        for sequence in sequences {
            words.extend((0..sequence.tokens.len()).map(|row| sequence.positions.get(row) as u32));
        }
        let table_starts = words.len();
        let mut start = 0;
        for sequence in sequences {
            words.extend(std::iter::repeat_n(start as u32, sequence.tokens.len()));
            start += sequence.block_table.len();
        }
        let tables = words.len();
        for sequence in sequences {
            words.extend(sequence.block_table.iter().map(|block: &BlockId| block.index() as u32));
        }
        let is_decoding = sequences.iter().all(|sequence| sequence.tokens.len() <= shape.few_rows());
        if is_decoding {
            words.resize(tables + (words.len() - tables).next_multiple_of(TABLE_STEP), 0);
        }
        let chosen = words.len();
        let mut row = 0;
        for sequence in sequences {
            row += sequence.tokens.len();
            let n_wanted = sequence.n_logits.min(sequence.tokens.len());
            words.extend((row - n_wanted..row).map(|row| row as u32));
        }
        let n_logits = words.len() - chosen;
        let first_draw = words.len();
        words.extend(draws.iter().flat_map(|draw| words_of(&draw.draw().unwrap_or(TokenDraw::BEST))));
        let items = words.len();
        let sizes = ListSizes {
            n_rows,
            tokens: 0,
            positions,
            table_starts,
            tables,
            chosen,
            n_logits,
            draws: first_draw,
            items,
            ..ListSizes::default()
        };
        let mut lists = Self { words, sizes };
        lists.add_items(sequences, shape);
        lists.sizes.n_words = lists.words.len();
        lists
    }

    fn add_items(&mut self, sequences: &[SequenceRows<'_>], shape: ListShape) {
        let (many_rows, few_rows) = (shape.many_rows(), shape.few_rows());
        let (mut chunks, mut merged) = (Vec::new(), Vec::new());
        let (mut first_row, mut table) = (0, 0);
        for sequence in sequences {
            let n_rows = sequence.tokens.len();
            if n_rows <= few_rows {
                if let Some(last) = n_rows.checked_sub(1).map(|last| sequence.positions.get(last)) {
                    let n_chunks = last / CHUNK_TOKENS + 1;
                    let first_slot = self.sizes.n_chunks;
                    for chunk in 0..n_chunks {
                        chunks.extend([first_row, n_rows, table, chunk].map(|word| word as u32));
                    }
                    for row in 0..n_rows {
                        merged.extend([first_row + row, row, first_slot, n_chunks].map(|word| word as u32));
                    }
                    self.sizes.n_chunks += n_chunks;
                    self.sizes.n_merged += n_rows;
                }
            } else {
                for first in (0..n_rows).step_by(many_rows) {
                    let n_here = many_rows.min(n_rows - first);
                    self.words.extend([first_row + first, n_here, table, 0].map(|word| word as u32));
                    self.sizes.n_many += 1;
                }
            }
            first_row += n_rows;
            table += sequence.block_table.len();
        }
        if self.sizes.is_decoding() {
            // Items of no rows.
            self.sizes.n_chunks = self.sizes.n_chunks.next_multiple_of(CHUNK_STEP);
            chunks.resize(4 * self.sizes.n_chunks, 0);
        }
        self.words.append(&mut chunks);
        self.words.append(&mut merged);
    }
}

/// A draw as `choice.cu` reads it.
pub(super) fn words_of(draw: &TokenDraw) -> [u32; 8] {
    let halves = |value: f64| [value.to_bits() as u32, (value.to_bits() >> 32) as u32];
    let [scale, least, uniform] = [draw.scale, draw.least_exponent, draw.uniform].map(halves);
    [scale[0], scale[1], least[0], least[1], uniform[0], uniform[1], draw.top_k, draw.top_p.to_bits()]
}

impl ListShape {
    /// Rows of an item of many rows.
    fn many_rows(self) -> usize {
        self.many_queries.map_or(PLAIN_ROWS, |many_queries| many_queries / self.group)
    }

    /// Sequences of so few rows, as those that decode: their chunks are taken by warps of their own.
    fn few_rows(self) -> usize {
        if self.many_queries.is_some() { CHUNK_QUERIES / self.group } else { 0 }
    }
}

impl ListSizes {
    /// Whether all rows are of sequences of few rows: passes of such sizes come again and again.
    pub(super) fn is_decoding(&self) -> bool {
        0 < self.n_merged && self.n_many == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward::RowPositions;

    fn sequence<'a>(tokens: &'a [u32], first: usize, table: &'a [BlockId]) -> SequenceRows<'a> {
        SequenceRows { tokens, positions: RowPositions::From(first), block_table: table, n_logits: 1 }
    }

    #[test]
    fn rows_that_decode_are_cut_into_chunks_and_prompts_into_items_of_many_rows() {
        let blocks: Vec<BlockId> = (0..64).map(BlockId::new).collect();
        let prompt: Vec<u32> = (0..40).collect();
        let sequences = [
            sequence(&prompt, 0, &blocks[..3]),
            sequence(&[7], 600, &blocks[3..41]),
            sequence(&[8], 3, &blocks[41..42]),
        ];
        let lists = RowLists::new(&sequences, &[], ListShape { group: 4, many_queries: Some(64) });
        let sizes = lists.sizes;
        assert_eq!((sizes.n_rows, sizes.n_logits), (42, 3));
        assert_eq!((sizes.n_many, sizes.n_chunks, sizes.n_merged), (3, 4, 2));
        assert_eq!(lists.words[sizes.chosen..sizes.draws], [39, 40, 41]);
        assert_eq!(
            lists.words[sizes.items..],
            [
                [0, 16, 0, 0],
                [16, 16, 0, 0],
                [32, 8, 0, 0],
                [40, 1, 3, 0],
                [40, 1, 3, 1],
                [40, 1, 3, 2],
                [41, 1, 41, 0],
                [40, 0, 0, 3],
                [41, 0, 3, 1],
            ]
            .concat()
        );
        assert_eq!(lists.words[sizes.table_starts..][..42].iter().sum::<u32>(), 3 + 41);
    }

    #[test]
    fn without_matrix_instructions_every_row_is_in_an_item_of_many() {
        let blocks: Vec<BlockId> = (0..8).map(BlockId::new).collect();
        let sequences = [sequence(&[1, 2, 3, 4, 5], 0, &blocks[..1]), sequence(&[7], 30, &blocks[1..3])];
        let lists = RowLists::new(&sequences, &[], ListShape { group: 2, many_queries: None });
        let sizes = lists.sizes;
        assert_eq!((sizes.n_many, sizes.n_chunks, sizes.n_merged), (3, 0, 0));
        assert_eq!(lists.words[sizes.items..], [[0, 4, 0, 0], [4, 1, 0, 0], [5, 1, 1, 0]].concat());
    }

    #[test]
    fn lists_of_rows_that_decode_have_the_same_shape_while_their_sequences_grow() {
        let blocks: Vec<BlockId> = (0..200).map(BlockId::new).collect();
        let sizes_at = |first: usize, second: usize| {
            let tables = [&blocks[..=first / 16], &blocks[100..=100 + second / 16]];
            let sequences = [sequence(&[7], first, tables[0]), sequence(&[8], second, tables[1])];
            let lists = RowLists::new(&sequences, &[], ListShape { group: 4, many_queries: Some(64) });
            let items = &lists.words[lists.sizes.items..];
            let n_there = items.chunks(4).take(lists.sizes.n_chunks).filter(|item| item[1] == 1).count();
            assert_eq!(n_there, first / 256 + second / 256 + 2);
            assert_eq!(items.len(), 4 * (lists.sizes.n_chunks + 2));
            lists.sizes
        };
        assert!(sizes_at(500, 30).is_decoding());
        assert_eq!(sizes_at(500, 30), sizes_at(1500, 300));
    }
}
