//! Which tokens of segments are computed again.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use kvik_types::TokenId;

use super::evidence::Evidence;
use crate::error::{ModelError, Result};
use crate::sampling::mix;

/// The forms that a selector is written in.
const FORMS: &str = "none, all, first:TOKENS, random:RATIO, position:RATIO, deviation:RATIO[@LAYER] or \
                     attention:RATIO, with ratios from 0 to 1, several joined by +";

/// The layer whose keys are compared where none is named: the first that depends on the tokens before.
const DEFAULT_CHECK_LAYER: usize = 1;

/// One way to choose tokens of segments.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Selector {
    /// All of them, which is plain prefill.
    All,
    /// The first tokens of every segment: they have seen least of what they need (EPIC).
    First {
        /// How many.
        n_tokens: usize,
    },
    /// Any; what the others must be better than.
    Random {
        /// The share of all tokens of segments.
        ratio: f32,
    },
    /// By the place in their segment: of every segment the same share, from its start.
    Position {
        /// The share of the tokens of each segment.
        ratio: f32,
    },
    /// Those whose keys differ most from what they would be (`CacheBlend`). Costs the layers up to the checked one for all tokens.
    Deviation {
        /// The share of all tokens of segments.
        ratio: f32,
        /// The layer whose keys are compared, from 0.
        layer_idx: usize,
    },
    /// Those that what stands behind the last segment looks at most, in the last layer. Costs a pass of the tokens outside of segments.
    Attention {
        /// The share of all tokens of segments.
        ratio: f32,
    },
}

/// Selectors together: a token that one of them chooses is computed again. None at all: nothing is.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Selectors(Vec<Selector>);

/// What selectors look at.
#[derive(Debug)]
pub(crate) struct BlendedPrompt<'a> {
    pub(crate) tokens: &'a [TokenId],
    /// The positions of the segments that were placed.
    pub(crate) segments: &'a [Range<usize>],
}

impl Selector {
    /// What it must know of the prompt.
    pub(crate) fn evidence(self) -> Option<Evidence> {
        match self {
            Self::Deviation { layer_idx, .. } => Some(Evidence::Deviation { layer_idx }),
            Self::Attention { .. } => Some(Evidence::Attention),
            Self::All | Self::First { .. } | Self::Random { .. } | Self::Position { .. } => None,
        }
    }

    /// Marks the tokens that it chooses. `scores` is what [`Selector::evidence`] asked for, by position.
    pub(crate) fn select(self, prompt: &BlendedPrompt<'_>, scores: &[f32], is_selected: &mut [bool]) {
        let segments = prompt.segments;
        let mut take_first = |n_of: &dyn Fn(usize) -> usize| {
            for segment in segments {
                let n_taken = n_of(segment.len()).min(segment.len());
                is_selected[segment.start..segment.start + n_taken].fill(true);
            }
        };
        match self {
            Self::All => take_first(&|n_tokens| n_tokens),
            Self::First { n_tokens } => take_first(&|_| n_tokens),
            Self::Position { ratio } => take_first(&|n_tokens| share_of(n_tokens, ratio)),
            Self::Random { ratio } => {
                // Of the prompt alone, so that a prompt that is computed again has the same choice.
                let seed = prompt.tokens.iter().fold(0, |seed, &token| mix(seed ^ u64::from(token)));
                let scores: Vec<f32> =
                    (0..prompt.tokens.len() as u64).map(|idx| (mix(seed ^ mix(idx)) >> 40) as f32).collect();
                take_largest(segments, ratio, &scores, is_selected);
            }
            Self::Deviation { ratio, .. } | Self::Attention { ratio } => {
                take_largest(segments, ratio, scores, is_selected);
            }
        }
    }
}

impl Selectors {
    /// The selectors.
    pub fn as_slice(&self) -> &[Selector] {
        &self.0
    }
}

impl From<Vec<Selector>> for Selectors {
    fn from(selectors: Vec<Selector>) -> Self {
        Self(selectors)
    }
}

impl FromStr for Selectors {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self> {
        if text == "none" {
            return Ok(Self::default());
        }
        let selectors = text.split('+').map(|part| parse(part).ok_or(part));
        let selectors = selectors.collect::<std::result::Result<_, _>>();
        selectors.map(Self).map_err(|part| ModelError::request("blend", part, FORMS))
    }
}

impl fmt::Display for Selectors {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return formatter.write_str("none");
        }
        for (idx, selector) in self.0.iter().enumerate() {
            if 0 < idx {
                formatter.write_str("+")?;
            }
            match selector {
                Selector::All => formatter.write_str("all"),
                Selector::First { n_tokens } => write!(formatter, "first:{n_tokens}"),
                Selector::Random { ratio } => write!(formatter, "random:{ratio}"),
                Selector::Position { ratio } => write!(formatter, "position:{ratio}"),
                Selector::Deviation { ratio, layer_idx } => {
                    write!(formatter, "deviation:{ratio}@{layer_idx}")
                }
                Selector::Attention { ratio } => write!(formatter, "attention:{ratio}"),
            }?;
        }
        Ok(())
    }
}

fn parse(part: &str) -> Option<Selector> {
    if part == "all" {
        return Some(Selector::All);
    }
    let (name, value) = part.split_once(':')?;
    let ratio_of = |text: &str| text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
    match name {
        "first" => value.parse().ok().map(|n_tokens| Selector::First { n_tokens }),
        "random" => ratio_of(value).map(|ratio| Selector::Random { ratio }),
        "position" => ratio_of(value).map(|ratio| Selector::Position { ratio }),
        "attention" => ratio_of(value).map(|ratio| Selector::Attention { ratio }),
        "deviation" => {
            let (ratio, layer) = value.split_once('@').unwrap_or((value, ""));
            let layer_idx = if layer.is_empty() { Some(DEFAULT_CHECK_LAYER) } else { layer.parse().ok() };
            Some(Selector::Deviation { ratio: ratio_of(ratio)?, layer_idx: layer_idx? })
        }
        _ => None,
    }
}

/// At least one token of a share that is not 0.
fn share_of(n_tokens: usize, ratio: f32) -> usize {
    (n_tokens as f64 * f64::from(ratio)).ceil() as usize
}

/// Marks the share of the segments' tokens with the largest scores; of equal ones the first.
fn take_largest(segments: &[Range<usize>], ratio: f32, scores: &[f32], is_selected: &mut [bool]) {
    let mut positions: Vec<usize> = segments.iter().flat_map(Clone::clone).collect();
    positions.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    let n_taken = share_of(positions.len(), ratio).min(positions.len());
    for &position in &positions[..n_taken] {
        is_selected[position] = true;
    }
}

#[cfg(test)]
mod tests;
