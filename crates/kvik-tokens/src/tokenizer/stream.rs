//! Text of a growing token sequence, cut at stop strings.

use std::sync::Arc;

use super::Tokenizer;
use super::detokenize::Detokenizer;
use super::stop::{StopFilter, StopMatch};
use crate::error::Result;

/// How a [`TextStream`] turns tokens into text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextStreamOptions {
    /// Whether special tokens give no text. Default: true.
    pub skip_special: bool,
    /// Strings that end the text; at most 64, each of 1 to 4096 bytes. Default: none.
    pub stop: Vec<String>,
    /// Whether the stop string that ended the text is part of it. Default: false.
    pub include_stop: bool,
}

/// What one token added to the text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StreamDelta {
    /// Text that no later token can change; often empty, because text is held back.
    pub text: String,
    /// The stop string that ended the text, with this token or before it.
    pub stopped: Option<StopMatch>,
}

/// Turns tokens into text as they come.
///
/// All deltas and the text of [`finish`](Self::finish), joined, are what decoding all tokens at
/// once gives, cut at the first stop string. Held back are: bytes of a character that is not
/// complete, byte-fallback tokens until another token follows, and text that could still become
/// a stop string.
#[derive(Debug)]
pub struct TextStream {
    detokenizer: Detokenizer,
    stop_filter: StopFilter,
}

impl Default for TextStreamOptions {
    fn default() -> Self {
        Self { skip_special: true, stop: Vec::new(), include_stop: false }
    }
}

impl TextStream {
    /// Starts an empty text; refuses stop strings that are empty, too long or too many.
    pub fn try_new(tokenizer: Arc<Tokenizer>, options: TextStreamOptions) -> Result<Self> {
        Ok(Self {
            detokenizer: Detokenizer::new(tokenizer, options.skip_special),
            stop_filter: StopFilter::try_new(options.stop, options.include_stop)?,
        })
    }

    /// Takes the next token; after a stop string matched, tokens give no text.
    pub fn push(&mut self, token: u32) -> StreamDelta {
        if self.stop_filter.matched().is_some() {
            return StreamDelta { text: String::new(), stopped: self.stop_filter.matched().cloned() };
        }
        let text = self.detokenizer.push(token);
        let text = self.stop_filter.push(&text);
        StreamDelta { text, stopped: self.stop_filter.matched().cloned() }
    }

    /// Returns the text that was held back, once no more tokens come.
    ///
    /// A stop string may match in it; [`stopped`](Self::stopped) then says so.
    pub fn finish(&mut self) -> String {
        let last_text = self.detokenizer.finish();
        let mut text = self.stop_filter.push(&last_text);
        text.push_str(&self.stop_filter.finish());
        text
    }

    /// Returns the stop string that ended the text, if one did.
    pub fn stopped(&self) -> Option<&StopMatch> {
        self.stop_filter.matched()
    }
}
