//! What the answers of the OpenAI API share.

use std::sync::Arc;

use kvik_model::SamplingParams;
use kvik_proto::openai::{StreamOptions, Usage};
use kvik_proto::sse;
use serde::Serialize;

use super::stream::push_json;
use crate::clock::unix_seconds;
use crate::error::Refusal;
use crate::state::{Loaded, WorkerState};

/// What all chunks of an answer have.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) loaded: Arc<Loaded>,
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) returns_tokens: bool,
    pub(super) has_logprobs: bool,
}

/// The form of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Whole,
    Stream { includes_usage: bool },
}

impl Head {
    /// The head of a new answer whose id starts with `id_prefix`.
    pub(super) fn new(
        state: &WorkerState,
        loaded: &Arc<Loaded>,
        id_prefix: &str,
        return_token_ids: Option<bool>,
        sampling: &SamplingParams,
    ) -> Self {
        Self {
            loaded: Arc::clone(loaded),
            id: state.new_id(id_prefix),
            created: unix_seconds(),
            returns_tokens: return_token_ids.unwrap_or(false),
            has_logprobs: sampling.logprobs.is_some(),
        }
    }
}

impl Form {
    /// The form that the fields of a request ask for.
    pub(super) fn of(stream: Option<bool>, options: Option<StreamOptions>) -> Result<Self, Refusal> {
        match (stream.unwrap_or(false), options) {
            (true, options) => {
                let includes_usage = options.is_some_and(|options| options.include_usage == Some(true));
                Ok(Self::Stream { includes_usage })
            }
            (false, None) => Ok(Self::Whole),
            (false, Some(_)) => {
                Err(Refusal::field("stream_options", "given without `stream`", "with `stream`: true"))
            }
        }
    }
}

/// Appends the end of a stream: the chunk that `last` makes of the usage, if it is told, and the mark.
pub(super) fn push_end<C: Serialize>(usage: Option<Usage>, last: impl FnOnce(Usage) -> C, out: &mut Vec<u8>) {
    if let Some(usage) = usage {
        push_json(&last(usage), out);
    }
    sse::encode("[DONE]", out);
}
