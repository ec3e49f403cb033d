//! The answer to a lookup: how much of the prompt each source has, tier by tier.

use super::sources::LiveHolder;
use super::tiers::TierOrder;
use super::types::{N_TIERS, SourceId, Tier};

const NO_ROW: u32 = u32::MAX;

/// How far a lookup looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Walk {
    /// Until no source has every block so far.
    #[default]
    Prefix,
    /// At every block, for scorers that count what lies behind a hole.
    All,
}

/// What a lookup is asked for beside the keys.
#[derive(Debug, Clone, Copy, Default)]
pub struct LookupOptions<'a> {
    /// How far to look; default [`Walk::Prefix`].
    pub walk: Walk,
    /// The only sources to look at; default all.
    pub only: Option<&'a SourceSet>,
    /// Which tier counts for a block that a source has in several; default the fastest.
    pub order: TierOrder,
}

/// A choice of sources.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SourceSet {
    words: Vec<u64>,
}

/// What one source has of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerMatch {
    source: SourceId,
    is_unsure: bool,
    /// Tiers of the segment at hand.
    segment_tiers: u8,
    /// Tiers that had every block so far.
    running_tiers: u8,
    prefix_in: [u32; N_TIERS],
    tier_runs: [u32; N_TIERS],
    covered_in: [u32; N_TIERS],
    highest_block: u32,
}

/// The answer to a lookup, whose memory serves for the next one too.
#[derive(Debug, Clone, Default)]
pub struct Matches {
    rows: Vec<WorkerMatch>,
    order: TierOrder,
    row_of: Vec<u32>,
    /// Rows that have every block so far.
    active: Vec<u32>,
    /// Rows of the segment at hand.
    entered: Vec<u32>,
    /// Whether the segment at hand is the first of the prompt.
    is_start: bool,
    was_abandoned: bool,
}

impl<'a> LookupOptions<'a> {
    /// The same for some sources only.
    #[must_use]
    pub fn only(self, sources: &'a SourceSet) -> Self {
        Self { only: Some(sources), ..self }
    }
}

impl SourceSet {
    /// Adds a source.
    pub fn insert(&mut self, source: SourceId) {
        let word = source.as_index() / 64;
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (source.0 % 64);
    }

    /// Whether a source is in it.
    pub fn contains(&self, source: SourceId) -> bool {
        self.contains_index(source.0)
    }

    #[inline]
    pub(super) fn contains_index(&self, source: u32) -> bool {
        self.words.get(source as usize / 64).is_some_and(|word| word >> (source % 64) & 1 == 1)
    }
}

impl FromIterator<SourceId> for SourceSet {
    fn from_iter<I: IntoIterator<Item = SourceId>>(sources: I) -> Self {
        let mut set = Self::default();
        sources.into_iter().for_each(|source| set.insert(source));
        set
    }
}

impl WorkerMatch {
    /// Whose it is.
    pub fn source(&self) -> SourceId {
        self.source
    }

    /// Whether events of the source are missing, so that it may have more or less than this.
    pub fn is_unsure(&self) -> bool {
        self.is_unsure
    }

    /// Blocks from the first on that it has in some tier.
    pub fn prefix_blocks(&self) -> u32 {
        self.prefix_in.iter().sum()
    }

    /// Those of [`Self::prefix_blocks`] for which this tier is the best.
    pub fn prefix_in(&self, tier: Tier) -> u32 {
        self.prefix_in[tier.as_index()]
    }

    /// Blocks from the first on that it has in this tier.
    pub fn tier_run(&self, tier: Tier) -> u32 {
        self.tier_runs[tier.as_index()]
    }

    /// Blocks anywhere for which this tier is the best; only of [`Walk::All`].
    pub fn covered_in(&self, tier: Tier) -> u32 {
        self.covered_in[tier.as_index()]
    }

    /// The 1-based place of the last block that it has; only of [`Walk::All`].
    pub fn highest_block(&self) -> u32 {
        self.highest_block
    }
}

impl Matches {
    /// One row for each source that has anything, in no particular order.
    pub fn rows(&self) -> &[WorkerMatch] {
        &self.rows
    }

    /// The row of a source.
    pub fn row(&self, source: SourceId) -> Option<&WorkerMatch> {
        self.rows.iter().find(|row| row.source == source)
    }

    pub(super) fn begin(&mut self, order: TierOrder) {
        self.rows.clear();
        self.active.clear();
        self.entered.clear();
        self.order = order;
        self.is_start = true;
        self.was_abandoned = false;
    }

    /// Enters a holder that has all blocks of the segment at hand.
    #[inline]
    pub(super) fn enter(&mut self, holder: LiveHolder, walk: Walk) {
        let source = holder.source as usize;
        if self.row_of.len() <= source {
            self.row_of.resize(source + 1, NO_ROW);
        }
        let mut row = self.row_of[source];
        if row == NO_ROW {
            if walk == Walk::Prefix && !self.is_start {
                return;
            }
            row = self.rows.len() as u32;
            self.row_of[source] = row;
            self.rows.push(WorkerMatch {
                source: SourceId(holder.source),
                is_unsure: holder.is_unsure,
                segment_tiers: 0,
                running_tiers: if self.is_start { u8::MAX } else { 0 },
                prefix_in: [0; N_TIERS],
                tier_runs: [0; N_TIERS],
                covered_in: [0; N_TIERS],
                highest_block: 0,
            });
            if self.is_start {
                self.active.push(row);
            }
        }
        let entry = &mut self.rows[row as usize];
        if entry.segment_tiers == 0 {
            self.entered.push(row);
        }
        entry.segment_tiers |= 1 << holder.tier;
    }

    /// Ends a segment of so many blocks, of which the last is the `end`-th of the prompt.
    #[inline]
    pub(super) fn end_segment(&mut self, n_blocks: u32, end: u32, walk: Walk) {
        let (rows, order) = (&mut self.rows, self.order);
        let mut n_active = 0;
        for at in 0..self.active.len() {
            let number = self.active[at];
            let row = &mut rows[number as usize];
            let tiers = row.segment_tiers;
            if tiers != 0 {
                row.prefix_in[order.best(tiers)] += n_blocks;
                row.running_tiers &= tiers;
                for (tier, run) in row.tier_runs.iter_mut().enumerate() {
                    *run += n_blocks * u32::from(row.running_tiers >> tier & 1);
                }
                self.active[n_active] = number;
                n_active += 1;
            }
        }
        self.active.truncate(n_active);
        for row in self.entered.drain(..) {
            let row = &mut rows[row as usize];
            if walk == Walk::All {
                row.covered_in[order.best(row.segment_tiers)] += n_blocks;
                row.highest_block = end;
            }
            row.segment_tiers = 0;
        }
        self.is_start = false;
    }

    /// Forgets what was entered: the segment is asked for again.
    pub(super) fn abandon_segment(&mut self) {
        for row in self.entered.drain(..) {
            self.rows[row as usize].segment_tiers = 0;
        }
        self.was_abandoned = true;
    }

    /// Notes that no source has the next block.
    pub(super) fn end_prefix(&mut self) {
        self.active.clear();
        self.is_start = false;
    }

    pub(super) fn n_active(&self) -> usize {
        self.active.len()
    }

    pub(super) fn finish(&mut self) {
        for row in &self.rows {
            self.row_of[row.source.as_index()] = NO_ROW;
        }
        if self.was_abandoned {
            // A source may have been entered and then, at the second look, not have had the block.
            self.rows.retain(|row| row.prefix_blocks() > 0 || row.highest_block > 0);
        }
    }
}
