//! The same as `exact_tokens`, with many texts.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

#[expect(clippy::missing_panics_doc, reason = "a test panics where it fails")]
pub mod support;

exact_tokens! { n_texts: 1000, n_conversations: 150 }
