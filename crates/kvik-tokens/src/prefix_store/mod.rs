//! Known prefixes: the tokens of texts that came before, for texts that begin the same.
//!
//! A store keeps tokens only up to [cuts](crate::cut), so what it returns is a prefix of the tokens of the
//! whole text, whatever follows. [`encode`] finds what is known, tokenizes the rest from there and tells
//! the store, so its result is always complete and exact; the store only changes how long it takes.
//!
//! [`LruPrefixStore`] knows stretches of 256 bytes, [`TriePrefixStore`] finds the place to the character
//! where a text leaves the known ones and needs more memory for it. Both compare texts, not hashes alone,
//! so a collision is a miss; both count their bytes and make room by themselves.

use std::fmt;

use kvik_types::TokenId;

use crate::error::Result;
use crate::tokenizer::{AddSpecial, Tokenizer, TokenizerKey};

mod lru;
#[cfg(test)]
mod tests;
mod trie;

pub use lru::LruPrefixStore;
pub use trie::TriePrefixStore;

/// Tokens of texts that came before.
pub trait PrefixStore: fmt::Debug + Send + Sync {
    /// Returns the longest known prefix of `text`.
    ///
    /// The implementation must return tokens that were added for a text with the same tokenizer that agrees
    /// with this one in all bytes that show that there is a cut behind them.
    fn find(&self, tokenizer: TokenizerKey, text: &str) -> KnownPrefix;

    /// Adds the tokens of `text`.
    ///
    /// The caller hands in all tokens, without special ones around them, and cuts in rising order; not
    /// every cut needs to be there.
    fn add(&self, tokenizer: TokenizerKey, text: &str, tokens: &[TokenId], cuts: &[TokenCut]);

    /// Returns how far apart cuts should be, in bytes, for this store to make the best of them.
    fn cut_distance_bytes(&self) -> usize;

    /// Returns the memory that is taken, in bytes.
    fn used_bytes(&self) -> usize;
}

/// What is known of a text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KnownPrefix {
    /// The first tokens of the text.
    pub tokens: Vec<TokenId>,
    /// Bytes of text that they stand for; a cut.
    pub n_bytes: usize,
}

/// A cut between tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenCut {
    /// Bytes before it.
    pub n_bytes: usize,
    /// Bytes that show that it is a cut.
    pub seen_bytes: usize,
    /// Tokens before it.
    pub n_tokens: usize,
}

/// The tokens of a text, and how much of it was known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// All tokens, as [`Tokenizer::encode`] gives them.
    pub tokens: Vec<TokenId>,
    /// Bytes whose tokens came from the store.
    pub n_known_bytes: usize,
}

/// Returns the first tokens of a text as far as `store` knows them; nothing is tokenized.
pub fn known(
    tokenizer: &Tokenizer,
    store: &dyn PrefixStore,
    text: &str,
    add_special: AddSpecial,
) -> KnownPrefix {
    let Some(incremental) = tokenizer.incremental() else { return KnownPrefix::default() };
    let mut known = store.find(tokenizer.key(), text);
    if 0 < known.n_bytes && add_special == AddSpecial::Yes {
        known.tokens.splice(..0, incremental.leading.iter().copied());
    }
    known
}

/// Returns the tokens of a text, those of its beginning from `store` if they are known, and adds them to it.
///
/// # Errors
/// If the tokenizer fails.
pub fn encode(
    tokenizer: &Tokenizer,
    store: &dyn PrefixStore,
    text: &str,
    add_special: AddSpecial,
) -> Result<Encoded> {
    let distance_bytes = store.cut_distance_bytes();
    let whole = || Ok(Encoded { tokens: tokenizer.encode(text, add_special)?, n_known_bytes: 0 });
    // Of a shorter text nothing is kept.
    let Some(incremental) = tokenizer.incremental().filter(|_| distance_bytes <= text.len()) else {
        return whole();
    };
    let known = store.find(tokenizer.key(), text);
    let Some(cuts) = incremental.cut_rule.cuts(text, known.n_bytes, distance_bytes) else {
        return whole();
    };
    let mut tokens = known.tokens;
    let mut token_cuts = Vec::with_capacity(cuts.len());
    let mut part_start = known.n_bytes;
    for cut in cuts {
        tokens.extend(tokenizer.encode(&text[part_start..cut.n_bytes], AddSpecial::No)?);
        token_cuts.push(TokenCut {
            n_bytes: cut.n_bytes,
            seen_bytes: cut.seen_bytes,
            n_tokens: tokens.len(),
        });
        part_start = cut.n_bytes;
    }
    if part_start < text.len() {
        tokens.extend(tokenizer.encode(&text[part_start..], AddSpecial::No)?);
    }
    if !token_cuts.is_empty() {
        store.add(tokenizer.key(), text, &tokens, &token_cuts);
    }
    if add_special == AddSpecial::Yes {
        tokens.splice(..0, incremental.leading.iter().copied());
        tokens.extend_from_slice(&incremental.trailing);
    }
    Ok(Encoded { tokens, n_known_bytes: known.n_bytes })
}
