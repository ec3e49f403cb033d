//! Cuts: places where a text can be tokenized in two parts that join to the tokens of the whole.
//!
//! A tokenizer looks at what follows: `hel` and `hello` have no token in common although one begins the
//! other, so the tokens of a prefix are in general not a prefix of the tokens. What they share ends at a
//! cut: for every text `x y` with a cut between `x` and `y`, `tokens(x y) = tokens(x) tokens(y)`. Whether a
//! place is a cut is decided by the characters on its two sides and by nothing behind them. So two texts that
//! agree up to and including the character after a cut have the same tokens up to it, whatever follows.
//!
//! [`CutRule::of`] decides once for each tokenizer which pairs of characters are cuts. It goes through what
//! the tokenizer does and needs a reason for each step (`stages.rs`, `pattern.rs`); without one there is no
//! rule, and texts are tokenized whole.

use tokenizers::Tokenizer;

mod pattern;
mod stages;
#[cfg(test)]
mod tests;

/// Longest stretch of text without a cut that is cut around, in bytes.
///
/// The regular expressions of tokenizers run with a limit on steps, and a text that exceeds it is split no
/// further. Matching never goes past a cut, so between near cuts the limit (a million steps) is out of reach.
const MAX_UNCUT_BYTES: usize = 16 << 10;

/// A place in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Bytes before it.
    pub n_bytes: usize,
    /// Bytes that show that it is a cut: one character more.
    pub seen_bytes: usize,
}

/// Pairs of characters between which a text can be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pair {
    /// Anything but white space, then a space.
    Space,
    /// A letter of a script without spaces, then its punctuation.
    Ideograph,
}

/// How the texts of a tokenizer can be cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CutRule {
    pairs: Vec<Pair>,
    /// What may not stand before a cut although it is no white space.
    excluded_before: Option<char>,
    /// Texts of added tokens that swallow the white space after them: behind them is no cut.
    swallowing: Vec<String>,
}

// === impl Pair ===

impl Pair {
    const ALL: [Self; 2] = [Self::Space, Self::Ideograph];

    /// Ranges of the characters before the cut.
    pub(crate) fn before(self) -> &'static [(char, char)] {
        match self {
            // All but White_Space.
            Self::Space => &[
                ('\0', '\u{8}'),
                ('\u{e}', '\u{1f}'),
                ('!', '\u{84}'),
                ('\u{86}', '\u{9f}'),
                ('\u{a1}', '\u{167f}'),
                ('\u{1681}', '\u{1fff}'),
                ('\u{200b}', '\u{2027}'),
                ('\u{202a}', '\u{202e}'),
                ('\u{2030}', '\u{205e}'),
                ('\u{2060}', '\u{2fff}'),
                ('\u{3001}', '\u{10ffff}'),
            ],
            // Hiragana, Katakana, ideographs, Hangul syllables.
            Self::Ideograph => &[
                ('\u{3041}', '\u{3096}'),
                ('\u{30a1}', '\u{30fa}'),
                ('\u{4e00}', '\u{9fff}'),
                ('\u{ac00}', '\u{d7a3}'),
            ],
        }
    }

    /// The characters after the cut.
    pub(crate) fn after(self) -> &'static [char] {
        match self {
            Self::Space => &[' '],
            // Comma, full stop, brackets; full-width exclamation mark, comma, colon, semicolon, question
            // mark.
            Self::Ideograph => &[
                '\u{3001}', '\u{3002}', '\u{300c}', '\u{300d}', '\u{ff01}', '\u{ff0c}', '\u{ff1a}',
                '\u{ff1b}', '\u{ff1f}',
            ],
        }
    }

    pub(crate) fn is(self, before: char, after: char) -> bool {
        self.after().contains(&after)
            && self.before().iter().any(|(first, last)| (*first..=*last).contains(&before))
    }
}

// === impl CutRule ===

impl CutRule {
    /// Returns where texts of `tokenizer` can be cut, or `None` where no place is known to be a cut.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        stages::rule_of(tokenizer)
    }

    /// Returns the cut at `n_bytes` of `text`, if there is one.
    pub fn at(&self, text: &str, n_bytes: usize) -> Option<Cut> {
        let after = text.get(n_bytes..)?.chars().next()?;
        let before = text[..n_bytes].chars().next_back()?;
        let is_cut = self.pairs.iter().any(|pair| pair.is(before, after))
            && self.excluded_before != Some(before)
            && !self.swallowing.iter().any(|token| text[..n_bytes].ends_with(token.as_str()));
        is_cut.then_some(Cut { n_bytes, seen_bytes: n_bytes + after.len_utf8() })
    }

    /// Returns the cuts of `text` behind `start_bytes`: in each stretch of `distance_bytes`, counted from the
    /// beginning of the text, the last that is seen in it.
    ///
    /// Depends on the text only up to the end of each stretch. `None` if a part between two of them is so
    /// long that it is not certain how it is tokenized; such a text is not cut at all.
    pub fn cuts(&self, text: &str, start_bytes: usize, distance_bytes: usize) -> Option<Vec<Cut>> {
        let distance_bytes = distance_bytes.max(1);
        let mut cuts = Vec::new();
        let mut part_start = start_bytes;
        let mut stretch_start = start_bytes / distance_bytes * distance_bytes;
        while stretch_start + distance_bytes <= text.len() {
            let stretch_end = stretch_start + distance_bytes;
            if let Some(cut) = self.last_cut(text, part_start, stretch_start, stretch_end) {
                if MAX_UNCUT_BYTES < cut.n_bytes - part_start {
                    return None;
                }
                part_start = cut.n_bytes;
                cuts.push(cut);
            }
            stretch_start = stretch_end;
        }
        Some(cuts)
    }

    /// The last cut behind `part_start` whose last seen byte lies in the stretch.
    fn last_cut(
        &self,
        text: &str,
        part_start: usize,
        stretch_start: usize,
        stretch_end: usize,
    ) -> Option<Cut> {
        let seen = &text[..text.floor_char_boundary(stretch_end)];
        seen.char_indices()
            .rev()
            .take_while(|(start, character)| {
                part_start < *start && stretch_start < start + character.len_utf8()
            })
            .find_map(|(start, _)| self.at(text, start))
    }
}
