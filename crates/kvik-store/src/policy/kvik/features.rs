//! What a request shows of the chance that it is continued.

/// How many features there are.
pub(super) const N_FEATURES: usize = 5;

/// Levels that any feature has at most.
pub(super) const MAX_LEVELS: usize = 9;

/// Levels of each feature.
pub(super) const N_LEVELS: [usize; N_FEATURES] = [7, 9, 9, 8, 2];

/// Features whose effect changes with the age: the pace of a conversation and what its answers are like.
pub(super) const VARIES_WITH_AGE: [bool; N_FEATURES] = [false, false, true, true, false];

/// Ends of the levels of the pace but the last.
const PACE_ENDS_S: [f64; 7] = [30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0];

/// One request in the terms of the model: a level for each feature.
pub(super) type Levels = [u8; N_FEATURES];

/// What is known when a request has been seen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Observation {
    /// 1 for the first request of a conversation.
    pub(super) turn: u16,
    pub(super) n_blocks: usize,
    /// Blocks that no earlier request had.
    pub(super) n_fresh_blocks: usize,
    /// Usual time between its turns.
    pub(super) pace_s: Option<f64>,
    pub(super) n_generated_tokens: Option<u32>,
    /// Whether it begins a conversation on a prefix that others have too.
    pub(super) has_shared_prefix: bool,
}

impl Observation {
    pub(super) fn levels(&self) -> Levels {
        let turn = match self.turn {
            0 | 1 => 0,
            2 => 1,
            3 => 2,
            4..=5 => 3,
            6..=8 => 4,
            9..=14 => 5,
            _ => 6,
        };
        // A first request shows its size; a later one shows how much was added.
        let size = match (self.turn, self.n_blocks, self.n_fresh_blocks) {
            (0 | 1, 0..=2, _) => 0,
            (0 | 1, 3..=8, _) => 1,
            (0 | 1, 9..=24, _) => 2,
            (0 | 1, 25..=64, _) => 3,
            (0 | 1, _, _) => 4,
            (_, _, 0..=2) => 5,
            (_, _, 3..=6) => 6,
            (_, _, 7..=24) => 7,
            (_, _, _) => 8,
        };
        let pace = match self.pace_s {
            None => 0,
            Some(pace_s) => 1 + PACE_ENDS_S.partition_point(|&end_s| end_s <= pace_s) as u8,
        };
        let generated = match self.n_generated_tokens {
            Some(0..=2) => 0,
            Some(3..=8) => 1,
            Some(9..=32) => 2,
            Some(33..=128) => 3,
            Some(129..=320) => 4,
            Some(321..=640) => 5,
            Some(_) => 6,
            None => 7,
        };
        [turn, size, pace, generated, u8::from(self.has_shared_prefix)]
    }
}

/// A number for each combination of levels, from 0 to [`n_combinations`].
pub(super) fn combination(levels: Levels) -> usize {
    levels.iter().zip(N_LEVELS).fold(0, |number, (&level, n_levels)| number * n_levels + usize::from(level))
}

/// How many combinations of levels there are.
pub(super) fn n_combinations() -> usize {
    N_LEVELS.iter().product()
}
