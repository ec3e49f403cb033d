//! Prompts that are put together from segments computed before.
//!
//! A segment is a run of tokens whose keys and values were computed alone, from position 0 on, and are placed anywhere in a
//! prompt: values as they are, keys turned to their new positions. What such a prompt lacks is the attention of a segment's
//! tokens to what stands before the segment. A [`Selector`] chooses tokens that are computed again, over the whole prompt; tokens
//! outside of segments always are.
//!
//! Invariants:
//! - With every token selected, the prompt is computed as any other, to the bit.
//! - Blended KV is approximate: its blocks are never registered, never offered to a store and never lent.

mod evidence;
mod segment;
mod selector;

pub use segment::{ComputedSegment, SegmentKv};
pub use selector::{Selector, Selectors};

pub(crate) use evidence::Assembled;
pub(crate) use selector::BlendedPrompt;

use std::ops::Range;
use std::sync::Arc;

use crate::error::{ModelError, Result};

/// How a prompt is put together.
#[derive(Debug, Clone)]
pub struct Blend {
    /// In the order of the prompt.
    pub segments: Vec<BlendSegment>,
    /// Which of their tokens are computed again.
    pub selectors: Selectors,
}

/// A segment in its place.
#[derive(Debug, Clone)]
pub struct BlendSegment {
    /// Position of its first token.
    pub first_token: usize,
    /// Its keys and values.
    pub kv: Arc<dyn SegmentKv>,
}

impl Blend {
    /// Checks that the segments lie in a prompt of `n_tokens` one behind the other.
    ///
    /// # Errors
    /// [`ModelError::InvalidRequest`] with the place of the first that does not.
    pub(crate) fn validate(&self, n_tokens: usize) -> Result<()> {
        let mut end = 0;
        for segment in &self.segments {
            let range = segment.token_range();
            if range.is_empty() || range.start < end || n_tokens < range.end {
                let allowed =
                    format!("segments of at least a token, one behind the other, in {n_tokens} tokens");
                return Err(ModelError::request("segments", format!("{range:?}"), allowed));
            }
            end = range.end;
        }
        Ok(())
    }
}

impl BlendSegment {
    /// The positions of its tokens.
    pub fn token_range(&self) -> Range<usize> {
        self.first_token..self.first_token.saturating_add(self.kv.n_tokens())
    }
}
