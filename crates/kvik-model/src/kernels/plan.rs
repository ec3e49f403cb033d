//! How the rows of one batch are cut into tasks.

use std::ops::Range;

use crate::paging::BlockId;

use super::simd::LANES;

/// Rows of one sequence that one attention task takes: enough to use a loaded key for many
/// queries, few enough that a prompt of a few hundred tokens feeds every thread.
const MAX_TILE_ROWS: usize = 16;

/// Consecutive rows of one sequence in a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span<'a> {
    pub(crate) n_rows: usize,
    /// Position of the first row in its sequence.
    pub(crate) first_position: usize,
    /// The blocks of the sequence through the last row.
    pub(crate) block_table: &'a [BlockId],
    /// Whether it goes on with the sequence of the span before, at a later position: both may then write one block.
    pub(crate) is_continued: bool,
}

/// Rows whose keys and values go into one block.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockRun {
    pub(super) first_row: usize,
    pub(super) n_rows: usize,
    /// Place of the first row inside the block.
    pub(super) first_lane: usize,
    pub(super) block: BlockId,
}

/// Rows whose attention one task computes for one KV head.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowTile<'a> {
    pub(super) first_row: usize,
    pub(super) n_rows: usize,
    pub(super) first_position: usize,
    pub(super) block_table: &'a [BlockId],
}

/// The tasks of one batch; the same for every layer.
#[derive(Debug)]
pub(crate) struct RowPlan<'a> {
    pub(super) runs: Vec<BlockRun>,
    /// The runs that one task writes, as ranges of `runs`: all of one block. No two groups have one block.
    pub(super) run_groups: Vec<Range<usize>>,
    pub(super) tiles: Vec<RowTile<'a>>,
    /// Sum over the rows of the tokens each one sees, without windows: the cost of attention.
    pub(super) n_visible: usize,
    pub(super) n_rows: usize,
}

impl<'a> RowPlan<'a> {
    /// Plans the rows of `spans`, which follow each other in the batch. `None` if a block table
    /// does not cover its rows, names a block outside of `0..n_blocks`, or two spans would write
    /// one block.
    pub(crate) fn try_new(spans: &[Span<'a>], n_blocks: usize) -> Option<Self> {
        let mut plan =
            Self { runs: Vec::new(), run_groups: Vec::new(), tiles: Vec::new(), n_visible: 0, n_rows: 0 };
        for span in spans {
            let end = span.first_position + span.n_rows;
            let block_table = span.block_table.get(..end.div_ceil(LANES))?;
            if block_table.iter().any(|block| n_blocks <= block.index()) {
                return None;
            }
            let mut position = span.first_position;
            while position < end {
                let n_rows = (LANES - position % LANES).min(end - position);
                let block = block_table[position / LANES];
                let run_idx = plan.runs.len();
                let goes_on = span.is_continued && plan.runs.last().is_some_and(|run| run.block == block);
                match plan.run_groups.last_mut() {
                    Some(group) if goes_on => group.end = run_idx + 1,
                    _ => plan.run_groups.push(run_idx..run_idx + 1),
                }
                plan.runs.push(BlockRun {
                    first_row: plan.n_rows + position - span.first_position,
                    n_rows,
                    first_lane: position % LANES,
                    block,
                });
                position += n_rows;
            }
            for tile_start in (0..span.n_rows).step_by(MAX_TILE_ROWS) {
                plan.tiles.push(RowTile {
                    first_row: plan.n_rows + tile_start,
                    n_rows: MAX_TILE_ROWS.min(span.n_rows - tile_start),
                    first_position: span.first_position + tile_start,
                    block_table,
                });
            }
            plan.n_visible += span.n_rows * span.first_position + span.n_rows * (span.n_rows + 1) / 2;
            plan.n_rows += span.n_rows;
        }
        let mut written: Vec<BlockId> =
            plan.run_groups.iter().map(|group| plan.runs[group.start].block).collect();
        written.sort_unstable();
        let is_disjoint = written.windows(2).all(|pair| pair[0] != pair[1]);
        is_disjoint.then_some(plan)
    }
}
