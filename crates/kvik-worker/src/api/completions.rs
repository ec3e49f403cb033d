//! `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use http::StatusCode;
use kvik_model::SamplingParams;
use kvik_proto::openai::{
    CompletionChoice, CompletionRequest, CompletionResponse, Prompt, SamplingFields, Usage,
};
use kvik_tokens::AddSpecial;
use serde_json::Value;

use super::answer::{Form, Head, push_end};
use super::logprobs::completion_logprobs;
use super::request::{cache_salt, refuse, sampling_params, start, unsupported};
use super::stream::{Outcome, Renderer, add_usage, collect, push_error, push_json, respond, total_usage};
use super::{Answer, Shared, json, part, read_json_with};
use crate::error::Refusal;
use crate::events::Event;
use crate::state::Loaded;

/// Most tokens of an output where the request says nothing.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Most prompts of a request.
const MAX_PROMPTS: usize = 1024;

/// What the outputs of an answer share.
#[derive(Debug)]
struct Outputs {
    head: Head,
    /// Of each prompt.
    n_choices: u32,
    /// For each prompt: what stands before its outputs.
    echoes: Vec<String>,
}

/// Writes chunks.
#[derive(Debug)]
struct ChunkRenderer {
    outputs: Outputs,
    includes_usage: bool,
    usage: Usage,
    /// For each choice of each prompt: characters of tokens so far, none before the first chunk.
    offsets: Vec<Option<usize>>,
}

/// Serves the request.
pub(super) async fn handle(State(state): Shared, request: Request) -> Answer {
    let request: CompletionRequest = read_json_with(&state, request, &[part::<SamplingFields>]).await?;
    let loaded = state.ready()?;
    loaded.check_model(request.model.as_deref())?;
    let sampling = check(&request)?;
    let salt = cache_salt(request.cache_salt.as_deref())?;
    let form = Form::of(request.stream, request.stream_options)?;
    let (prompts, texts) = prompts(loaded, &request).await?;
    let echoes = if request.echo.unwrap_or(false) { texts } else { vec![String::new(); prompts.len()] };
    let n_prompts = prompts.len();
    let generation = start(&state, loaded, prompts, &sampling, request.seq_id.as_deref(), salt).await?;
    let head = Head::new(&state, loaded, "cmpl-", request.return_token_ids, &sampling);
    let outputs = Outputs { head, n_choices: sampling.n, echoes };
    if let Form::Stream { includes_usage } = form {
        let offsets = vec![None; n_prompts * sampling.n as usize];
        let renderer = ChunkRenderer { outputs, includes_usage, usage: Usage::default(), offsets };
        return Ok(respond(generation, renderer));
    }
    let outcomes = collect(generation, n_prompts, sampling.n as usize).await?;
    let mut response = outputs.response(Vec::new());
    response.usage = Some(total_usage(&outcomes));
    for (part_idx, part) in outcomes.into_iter().enumerate() {
        for (choice, outcome) in part.into_iter().enumerate() {
            response.choices.push(outputs.whole_choice(part_idx, choice as u32, outcome));
        }
    }
    Ok(json(StatusCode::OK, &response))
}

/// Refuses what is not honored and returns the rest.
fn check(request: &CompletionRequest) -> Result<SamplingParams, Refusal> {
    let suffix = request.suffix.clone().map(Value::from);
    refuse(&[("suffix", suffix.as_ref()), ("logit_bias", request.logit_bias.as_ref())])?;
    if let Some(best_of) =
        request.best_of.filter(|&best_of| best_of != request.sampling_fields.n.unwrap_or(1))
    {
        return Err(Refusal::field("best_of", best_of, "the value of `n`"));
    }
    if request.echo.unwrap_or(false) && request.logprobs.is_some() {
        return Err(unsupported("echo"));
    }
    sampling_params(&request.sampling(), DEFAULT_MAX_TOKENS, "logprobs")
}

/// The tokens of all prompts, and their texts if they are echoed.
async fn prompts(
    loaded: &Arc<Loaded>,
    request: &CompletionRequest,
) -> Result<(Vec<Vec<u32>>, Vec<String>), Refusal> {
    let add_special =
        if request.add_special_tokens.unwrap_or(true) { AddSpecial::Yes } else { AddSpecial::No };
    let (token_lists, mut texts) = match request.prompt.clone() {
        Prompt::Text(text) => (Vec::new(), vec![text]),
        Prompt::Texts(texts) => (Vec::new(), texts),
        Prompt::Tokens(tokens) => (vec![tokens], Vec::new()),
        Prompt::TokenLists(lists) => (lists, Vec::new()),
    };
    let n_prompts = token_lists.len() + texts.len();
    if n_prompts == 0 || MAX_PROMPTS < n_prompts {
        let value = format!("a list of {n_prompts}");
        return Err(Refusal::field("prompt", value, &format!("1 to {MAX_PROMPTS} prompts")));
    }
    let mut prompts = token_lists;
    if prompts.is_empty() {
        for text in &texts {
            prompts.push(loaded.encode(text.clone(), add_special).await?);
        }
    }
    for prompt in &prompts {
        loaded.check_prompt("prompt", prompt)?;
        if texts.len() < prompts.len() && request.echo.unwrap_or(false) {
            texts.push(loaded.tokenizer.decode(prompt, true)?);
        }
    }
    texts.resize(prompts.len(), String::new());
    Ok((prompts, texts))
}

impl Outputs {
    fn response(&self, choices: Vec<CompletionChoice>) -> CompletionResponse {
        let head = &self.head;
        CompletionResponse {
            id: head.id.clone(),
            object: "text_completion".to_owned(),
            created: head.created,
            model: head.loaded.model_name.clone(),
            system_fingerprint: Some(head.loaded.fingerprint.clone()),
            choices,
            usage: None,
        }
    }

    fn index(&self, part_idx: usize, choice: u32) -> u32 {
        part_idx as u32 * self.n_choices + choice
    }

    fn whole_choice(&self, part_idx: usize, choice: u32, outcome: Outcome) -> CompletionChoice {
        let tokens = outcome.tokens.iter().copied().zip(&outcome.logprobs);
        CompletionChoice {
            index: self.index(part_idx, choice),
            logprobs: self.head.has_logprobs.then(|| completion_logprobs(&self.head.loaded, tokens, &mut 0)),
            text: format!("{}{}", self.echoes[part_idx], outcome.text),
            finish_reason: Some(outcome.finish_reason.to_owned()),
            token_ids: self.head.returns_tokens.then_some(outcome.tokens),
        }
    }
}

impl Renderer for ChunkRenderer {
    fn render(&mut self, part_idx: usize, event: Event, out: &mut Vec<u8>) {
        let head = &self.outputs.head;
        let choice = match event {
            Event::Token(token) => {
                let index = self.outputs.index(part_idx, token.choice);
                let mut text = token.text;
                let Some(offset) = self.offsets.get_mut(index as usize) else { return };
                if offset.is_none() {
                    text.insert_str(0, &self.outputs.echoes[part_idx]);
                }
                let offset = offset.get_or_insert(0);
                let logprobs =
                    token.logprobs.map(|at| completion_logprobs(&head.loaded, [(token.id, &at)], offset));
                let token_ids = head.returns_tokens.then(|| vec![token.id]);
                // Text that is held back comes with a later token; there is nothing to tell yet.
                if text.is_empty() && logprobs.is_none() && token_ids.is_none() {
                    return;
                }
                CompletionChoice { index, text, logprobs, finish_reason: None, token_ids }
            }
            Event::Finished { choice, text, reason, usage } => {
                add_usage(&mut self.usage, choice, usage);
                CompletionChoice {
                    index: self.outputs.index(part_idx, choice),
                    text,
                    finish_reason: Some(reason.as_str().to_owned()),
                    ..CompletionChoice::default()
                }
            }
            Event::Failed(message) => return push_error(&message, out),
            Event::Rejected(error) => return push_error(&error.to_string(), out),
            Event::Accepted | Event::Admitted { .. } => return,
        };
        push_json(&self.outputs.response(vec![choice]), out);
    }

    fn end(&mut self, out: &mut Vec<u8>) {
        let last = |usage| CompletionResponse { usage: Some(usage), ..self.outputs.response(Vec::new()) };
        push_end(self.includes_usage.then_some(self.usage), last, out);
    }
}
