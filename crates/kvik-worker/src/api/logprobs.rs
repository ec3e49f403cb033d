//! Log probabilities in the two forms of the OpenAI API.

use std::collections::BTreeMap;

use kvik_model::TokenLogprobs;
use kvik_proto::openai::{ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob};

use crate::state::Loaded;

/// What stands for the log probability of the impossible, which JSON cannot write.
const LOWEST: f32 = -9999.0;

/// Log probabilities of completions; `text_offset`, in characters, moves on with each token.
pub(super) fn completion_logprobs<'a>(
    loaded: &Loaded,
    tokens: impl IntoIterator<Item = (u32, &'a TokenLogprobs)>,
    text_offset: &mut usize,
) -> CompletionLogprobs {
    let mut logprobs = CompletionLogprobs::default();
    for (token, at) in tokens {
        let text = loaded.token_text(token);
        let mut top: BTreeMap<String, f32> =
            at.top.iter().map(|&(token, logprob)| (loaded.token_text(token), finite(logprob))).collect();
        top.entry(text.clone()).or_insert(finite(at.chosen));
        logprobs.text_offset.push(*text_offset);
        *text_offset += text.chars().count();
        logprobs.tokens.push(text);
        logprobs.token_logprobs.push(Some(finite(at.chosen)));
        logprobs.top_logprobs.push((!at.top.is_empty()).then_some(top));
    }
    logprobs
}

/// Log probabilities of chat completions.
pub(super) fn chat_logprobs<'a>(
    loaded: &Loaded,
    tokens: impl IntoIterator<Item = (u32, &'a TokenLogprobs)>,
) -> ChatLogprobs {
    let entry = |token: u32, logprob: f32| {
        let token = loaded.token_text(token);
        TopLogprob { bytes: token.clone().into_bytes(), token, logprob: finite(logprob) }
    };
    let content = tokens
        .into_iter()
        .map(|(token, at)| {
            let TopLogprob { token, logprob, bytes } = entry(token, at.chosen);
            let top_logprobs = at.top.iter().map(|&(token, logprob)| entry(token, logprob)).collect();
            ChatTokenLogprob { token, logprob, bytes, top_logprobs }
        })
        .collect();
    ChatLogprobs { content }
}

fn finite(logprob: f32) -> f32 {
    logprob.max(LOWEST)
}
