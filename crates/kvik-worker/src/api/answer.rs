//! What the answers of the OpenAI API share.

use std::sync::Arc;

use kvik_proto::openai::Usage;
use kvik_proto::sse;
use serde::Serialize;

use super::stream::push_json;
use crate::clock::unix_seconds;
use crate::plan::{GenerationPath, Plan};
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

impl Head {
    /// The head of a new answer.
    pub(super) fn new(state: &WorkerState, loaded: &Arc<Loaded>, plan: &Plan) -> Self {
        let id_prefix = match plan.path {
            GenerationPath::Completions => "cmpl-",
            GenerationPath::Chat => "chatcmpl-",
            GenerationPath::Generate | GenerationPath::Init => "gen-",
        };
        Self::of(loaded, plan, state.new_id(id_prefix), unix_seconds())
    }

    /// The head of an answer that has begun elsewhere.
    pub(super) fn of(loaded: &Arc<Loaded>, plan: &Plan, id: String, created: u64) -> Self {
        Self {
            loaded: Arc::clone(loaded),
            id,
            created,
            returns_tokens: plan.returns_tokens,
            has_logprobs: plan.sampling.logprobs.is_some(),
        }
    }
}

/// Appends the end of a stream: the chunk that `last` makes of the usage, if it is reported, and the mark.
pub(super) fn push_end<C: Serialize>(usage: Option<Usage>, last: impl FnOnce(Usage) -> C, out: &mut Vec<u8>) {
    if let Some(usage) = usage {
        push_json(&last(usage), out);
    }
    sse::encode("[DONE]", out);
}
