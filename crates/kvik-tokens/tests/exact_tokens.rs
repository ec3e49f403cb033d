//! Tokens are those of the whole text, whatever is known of it.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

#[expect(clippy::missing_panics_doc, reason = "a test panics where it fails")]
pub mod support;

exact_tokens! { n_texts: 8, n_conversations: 8 }
