//! `POST /v1/chat/completions`.

use std::sync::Arc;

use bytes::Bytes;
use kvik_model::SamplingParams;
use kvik_proto::openai::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, ChatMessage, ChatRequest, ChatResponse,
    MessageContent, SamplingFields, Usage,
};
use kvik_tokens::AddSpecial;
use serde_json::Value;

use super::answer::{Head, push_end};
use super::logprobs::chat_logprobs;
use super::outcome::Outcome;
use super::request::{cache_salt, chat_messages, refuse, sampling_params, unsupported};
use super::segments::{PromptParts, blend_part, selectors};
use super::stream::{Renderer, add_usage, no_usage, push_error, push_json, total_usage};
use super::{parse_with, part};
use crate::error::Refusal;
use crate::events::{self, Event};
use crate::plan::{Form, GenerationPath, Plan};
use crate::state::Loaded;

/// Writes chunks.
#[derive(Debug)]
struct ChunkRenderer {
    head: Head,
    includes_usage: bool,
    usage: Usage,
    /// For each choice: whether its role was sent.
    has_role: Vec<bool>,
}

/// What a request asks for.
pub(super) async fn plan(loaded: &Arc<Loaded>, body: Bytes) -> Result<Plan, Refusal> {
    let request: ChatRequest = parse_with(&body, &[part::<SamplingFields>])?;
    loaded.check_model(request.model.as_deref())?;
    let sampling = check(&request, loaded)?;
    let salt = cache_salt(request.cache_salt.as_deref())?;
    let form = Form::of(request.stream, request.stream_options)?;
    let mut selectors = selectors(loaded, request.kvik.as_ref())?;
    let reusable = if selectors.is_some() { reusable_parts(&request.messages) } else { Vec::new() };
    let messages = chat_messages(request.messages)?;
    let add_generation_prompt = request.add_generation_prompt.unwrap_or(true);
    let fields = request.kvik.unwrap_or_default();
    let mut parts = None;
    if selectors.is_some() {
        let text = loaded.render_chat(&messages, add_generation_prompt)?;
        parts = PromptParts::of(loaded, &text, &fields)?;
        if parts.is_none() && !reusable.is_empty() {
            parts = Some(PromptParts::of_messages(&text, reusable));
        }
    }
    let (prompt, segments) = match parts {
        Some(parts) => parts.encode(loaded, AddSpecial::No).await?,
        None => (loaded.encode_chat(&messages, add_generation_prompt).await?, Vec::new()),
    };
    loaded.check_prompt("messages", &prompt)?;
    let blend = blend_part(loaded, selectors.take(), segments);
    Ok(Plan {
        path: GenerationPath::Chat,
        body,
        prompts: vec![prompt],
        sampling,
        seq_id: request.seq_id,
        salt,
        blend,
        form,
        returns_tokens: request.return_token_ids.unwrap_or(false),
        echoes: Vec::new(),
    })
}

/// The texts of the parts that are marked as reusable, in order.
fn reusable_parts(messages: &[ChatMessage]) -> Vec<String> {
    let parts = messages.iter().filter_map(|message| match &message.content {
        Some(MessageContent::Parts(parts)) => Some(parts),
        _ => None,
    });
    parts.flatten().filter(|part| part.reusable).filter_map(|part| part.text.clone()).collect()
}

/// Writes the chunks of a stream.
pub(super) fn renderer(plan: &Plan, head: Head, includes_usage: bool) -> impl Renderer + use<> {
    let has_role = vec![false; plan.sampling.n as usize];
    ChunkRenderer { head, includes_usage, usage: no_usage(plan), has_role }
}

/// The whole answer.
pub(super) fn whole(plan: &Plan, head: Head, outcomes: Vec<Vec<Outcome>>) -> ChatResponse {
    let usage = total_usage(plan, &outcomes);
    let choices = outcomes.into_iter().flatten().enumerate();
    ChatResponse {
        object: "chat.completion".to_owned(),
        created: head.created,
        model: head.loaded.model_name.clone(),
        system_fingerprint: Some(head.loaded.fingerprint.clone()),
        choices: choices.map(|(choice, outcome)| whole_choice(&head, choice as u32, outcome)).collect(),
        usage,
        id: head.id,
    }
}

/// Refuses what is not honored and returns the rest.
fn check(request: &ChatRequest, loaded: &Loaded) -> Result<SamplingParams, Refusal> {
    refuse(&[
        ("tools", request.tools.as_ref()),
        ("functions", request.functions.as_ref()),
        ("audio", request.audio.as_ref()),
        ("logit_bias", request.logit_bias.as_ref()),
    ])?;
    let is_text = |format: &Value| format.is_null() || format.get("type").is_some_and(|kind| kind == "text");
    if request.response_format.as_ref().is_some_and(|format| !is_text(format)) {
        return Err(unsupported("response_format"));
    }
    let is_free = |choice: &Value| choice.is_null() || choice == "none" || choice == "auto";
    if request.tool_choice.as_ref().is_some_and(|choice| !is_free(choice)) {
        return Err(unsupported("tool_choice"));
    }
    let is_only_text = |kinds: &Value| {
        kinds.is_null() || kinds.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind == "text"))
    };
    if request.modalities.as_ref().is_some_and(|kinds| !is_only_text(kinds)) {
        return Err(unsupported("modalities"));
    }
    if request.top_logprobs.is_some_and(|n| 0 < n) && !request.logprobs.unwrap_or(false) {
        return Err(Refusal::field("top_logprobs", "given without `logprobs`", "with `logprobs`: true"));
    }
    let limits = [
        ("max_tokens", request.sampling_fields.max_tokens),
        ("max_completion_tokens", request.max_completion_tokens),
    ];
    if let Some((field, _)) = limits.into_iter().find(|(_, limit)| *limit == Some(0)) {
        return Err(Refusal::field(field, 0, "at least 1"));
    }
    let longest = u32::try_from(loaded.max_tokens).unwrap_or(u32::MAX);
    sampling_params(&request.sampling(), longest, "top_logprobs")
}

fn chunk(head: &Head, choices: Vec<ChatChunkChoice>) -> ChatChunk {
    ChatChunk {
        id: head.id.clone(),
        object: "chat.completion.chunk".to_owned(),
        created: head.created,
        model: head.loaded.model_name.clone(),
        system_fingerprint: Some(head.loaded.fingerprint.clone()),
        choices,
        usage: None,
    }
}

fn whole_choice(head: &Head, choice: u32, outcome: Outcome) -> ChatChoice {
    let tokens = outcome.tokens.iter().copied().zip(&outcome.logprobs);
    ChatChoice {
        index: choice,
        logprobs: head.has_logprobs.then(|| chat_logprobs(&head.loaded, tokens)),
        message: ChatMessage::text("assistant", outcome.text),
        finish_reason: Some(outcome.finish_reason.to_owned()),
        token_ids: head.returns_tokens.then_some(outcome.tokens),
    }
}

impl Renderer for ChunkRenderer {
    fn render(&mut self, _part_idx: usize, event: Event, out: &mut Vec<u8>) {
        let choice = match event {
            Event::Token(token) => {
                let Some(has_role) = self.has_role.get_mut(token.choice as usize) else { return };
                if !std::mem::replace(has_role, true) {
                    let delta =
                        ChatDelta { role: Some("assistant".to_owned()), content: Some(String::new()) };
                    let first = ChatChunkChoice { index: token.choice, delta, ..ChatChunkChoice::default() };
                    push_json(&chunk(&self.head, vec![first]), out);
                }
                let logprobs = token.logprobs.map(|at| chat_logprobs(&self.head.loaded, [(token.id, &at)]));
                let token_ids = self.head.returns_tokens.then(|| vec![token.id]);
                // Text that is held back comes with a later token; there is nothing to tell yet.
                if token.text.is_empty() && logprobs.is_none() && token_ids.is_none() {
                    return;
                }
                let delta = ChatDelta { role: None, content: Some(token.text) };
                ChatChunkChoice { index: token.choice, delta, logprobs, finish_reason: None, token_ids }
            }
            Event::Finished { choice, text, reason, usage } => {
                add_usage(&mut self.usage, choice, usage);
                let content = (!text.is_empty()).then_some(text);
                ChatChunkChoice {
                    index: choice,
                    delta: ChatDelta { role: None, content },
                    finish_reason: Some(reason.as_str().to_owned()),
                    ..ChatChunkChoice::default()
                }
            }
            Event::Failed(message) => return push_error(&message, out),
            Event::Rejected(error) => return push_error(&error.to_string(), out),
            _ => return,
        };
        push_json(&chunk(&self.head, vec![choice]), out);
    }

    fn skip(&mut self, _part_idx: usize, choice: u32, tokens: &[u32]) {
        if let Some(has_role) = self.has_role.get_mut(choice as usize) {
            *has_role |= !tokens.is_empty();
        }
    }

    fn skip_end(&mut self, choice: u32, usage: events::Usage) {
        add_usage(&mut self.usage, choice, usage);
    }

    fn end(&mut self, out: &mut Vec<u8>) {
        let last = |usage| ChatChunk { usage: Some(usage), ..chunk(&self.head, Vec::new()) };
        push_end(self.includes_usage.then(|| std::mem::take(&mut self.usage)), last, out);
    }
}
