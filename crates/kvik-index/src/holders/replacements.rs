//! Replacements of all blocks of a source that are in progress.

use super::types::{N_TIERS, SourceId};

/// A replacement that has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplacementId(pub(super) u64);

/// What a source will hold.
#[derive(Debug)]
pub(super) struct Replacement {
    pub(super) id: ReplacementId,
    pub(super) source: SourceId,
    pub(super) epoch: Option<u64>,
    pub(super) next: u64,
    pub(super) holders: [Option<u16>; N_TIERS],
}

/// The replacements in progress: few, mostly none.
#[derive(Debug, Default)]
pub(super) struct Replacements {
    pub(super) list: Vec<Replacement>,
    pub(super) n_begun: u64,
}
