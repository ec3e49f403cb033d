//! A store that both engines read and write, such as kvik's: the prompt is computed on one engine, which stores its KV, and
//! the other one finds it there.
//!
//! Neither gets a field about it. So what is not in the store yet, or no longer, is computed again by the decoding engine.

use crate::request::splice::Edit;

/// Fields of every body that asks an engine only to compute a prompt: one token, in one piece.
pub(super) const PREFILL_EDITS: [Edit<'static>; 5] = [
    Edit { name: "stream", value: Some("false") },
    Edit { name: "max_tokens", value: Some("1") },
    Edit { name: "stream_options", value: None },
    Edit { name: "max_completion_tokens", value: None },
    Edit { name: "min_tokens", value: None },
];
