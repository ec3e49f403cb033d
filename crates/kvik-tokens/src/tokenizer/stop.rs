//! Stop strings: text is cut where the first of them is complete.
//!
//! The match that ends first wins, and of those that end together the longest. Both depend on
//! the text alone, so the cut does not depend on how the text was divided into tokens.

use crate::error::{Result, TokensError};

/// Most stop strings that one request may have.
const MAX_STOP_STRINGS: usize = 64;

/// Longest stop string, in bytes; as much text may have to be held back.
const MAX_STOP_BYTES: usize = 4096;

/// The stop string that ended a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopMatch {
    /// Place of the stop string in the list that was given.
    pub stop_idx: usize,
    /// The stop string.
    pub text: String,
}

/// Passes text on, less what could still become a stop string.
#[derive(Debug)]
pub(super) struct StopFilter {
    stops: Vec<String>,
    include_stop: bool,
    /// End of the text that is not passed on yet: a proper prefix of a stop string, or empty.
    held: String,
    matched: Option<StopMatch>,
}

impl StopFilter {
    pub(super) fn try_new(stops: Vec<String>, include_stop: bool) -> Result<Self> {
        if stops.len() > MAX_STOP_STRINGS {
            let allowed = format!("at most {MAX_STOP_STRINGS} strings");
            return Err(TokensError::request("stop", format!("a list of {}", stops.len()), allowed));
        }
        if let Some(stop) = stops.iter().find(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
            let allowed = format!("strings of 1 to {MAX_STOP_BYTES} bytes");
            return Err(TokensError::request("stop", format!("a string of {} bytes", stop.len()), allowed));
        }
        Ok(Self { stops, include_stop, held: String::new(), matched: None })
    }

    pub(super) fn matched(&self) -> Option<&StopMatch> {
        self.matched.as_ref()
    }

    /// Takes more text and returns what is certain to come before any stop string.
    pub(super) fn push(&mut self, text: &str) -> String {
        if self.matched.is_some() || text.is_empty() {
            return String::new();
        }
        self.held.push_str(text);
        let first = self
            .stops
            .iter()
            .enumerate()
            .filter_map(|(stop_idx, stop)| {
                self.held.find(stop).map(|start| (start + stop.len(), start, stop_idx))
            })
            .min();
        if let Some((end, start, stop_idx)) = first {
            self.matched = Some(StopMatch { stop_idx, text: self.stops[stop_idx].clone() });
            let mut passed = std::mem::take(&mut self.held);
            passed.truncate(if self.include_stop { end } else { start });
            return passed;
        }
        let rest = self.held.split_off(self.held.len() - self.n_undecided_bytes());
        std::mem::replace(&mut self.held, rest)
    }

    /// Returns what was held back, once it is known that no more text comes.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Length of the longest end of `held` that is a proper prefix of a stop string.
    ///
    /// Always a boundary between characters: a prefix of a stop string starts with a whole one.
    fn n_undecided_bytes(&self) -> usize {
        let held = self.held.as_bytes();
        self.stops
            .iter()
            .map(|stop| {
                let stop = stop.as_bytes();
                let longest = held.len().min(stop.len() - 1);
                (1..=longest).rev().find(|n_bytes| held.ends_with(&stop[..*n_bytes])).unwrap_or(0)
            })
            .max()
            .unwrap_or(0)
    }
}
