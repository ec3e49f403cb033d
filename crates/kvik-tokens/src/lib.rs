//! Text to tokens and back: tokenizers as Hugging Face has them, chat templates, and what makes both cheap
//! for a service that sees many prompts.
//!
//! [`Tokenizer`] encodes, decodes and renders conversations; [`TextStream`] turns tokens into text as they
//! come. [`TokenizersPool`] does the first for many models on threads of its own. [`prefix_store`] knows
//! the tokens of prompts that came before, up to [cuts](cut), where a text can be tokenized in parts.
//!
//! Invariants:
//! - The tokens of a text are those of the tokenizer for the whole text, however much of it was known: a
//!   cut is used only where it is proven that both sides join to the whole, and a tokenizer without a proof
//!   gets none.
//! - A hash collision, a changed tokenizer or an evicted prefix is a miss, never other tokens.
//! - Nothing panics on a model folder, a text or a conversation; a template that never ends is stopped.
//! - A full queue is reported at once; no caller waits for a thread that is not there.
//!
//! ```
//! use kvik_tokens::{AddSpecial, Outcome, PoolConfig, TokenizeInput, TokenizeRequest, TokenizersPool};
//!
//! let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models").into();
//! let pool = TokenizersPool::try_new(PoolConfig { root: Some(root), ..PoolConfig::default() })?;
//! let input = TokenizeInput::Text { text: "Once upon a time".to_owned(), add_special: AddSpecial::Yes };
//! let request = TokenizeRequest { model: "kvik-tiny".to_owned(), input };
//! match pool.tokenize_blocking(request)? {
//!     Outcome::Tokenized(tokenized) => assert_eq!(tokenized.tokens[0], 1),
//!     Outcome::Busy => {}
//! }
//! # Ok::<(), kvik_tokens::TokensError>(())
//! ```

#![forbid(unsafe_code)]

pub mod cut;
mod error;
mod pool;
pub mod prefix_store;
#[cfg(test)]
#[path = "../tests/support/kinds.rs"]
#[expect(clippy::missing_panics_doc, reason = "a test panics where it fails")]
pub mod testing;
mod tokenizer;

/// The name by which the tokenizers of the tests, which both kinds of tests share, know this crate.
#[cfg(test)]
extern crate self as kvik_tokens;

pub use error::{Result, TokensError};
pub use pool::{
    Outcome, PoolConfig, PrefixStoreKind, TokenizeInput, TokenizeRequest, Tokenized, TokenizersPool,
};
pub use prefix_store::{KnownPrefix, LruPrefixStore, PrefixStore, TokenCut, TriePrefixStore};
pub use tokenizer::{
    AddSpecial, CalendarDate, ChatMessage, ChatOptions, Incremental, Json, StopMatch, StreamDelta,
    TextStream, TextStreamOptions, Tokenizer, TokenizerKey,
};
