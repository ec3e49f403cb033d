//! `POST /v1/completions`.

use std::sync::Arc;

use bytes::Bytes;
use kvik_model::SamplingParams;
use kvik_proto::openai::{
    CompletionChoice, CompletionRequest, CompletionResponse, KvikFields, Prompt, SamplingFields, Usage,
};
use kvik_tokens::AddSpecial;
use serde_json::Value;

use super::answer::{Head, push_end};
use super::logprobs::completion_logprobs;
use super::outcome::Outcome;
use super::request::{cache_salt, refuse, sampling_params, unsupported};
use super::segments::{PromptParts, blend_part, selectors};
use super::stream::{Renderer, add_usage, no_usage, push_error, push_json, total_usage};
use super::{parse_with, part};
use crate::error::Refusal;
use crate::events::{self, Event};
use crate::plan::{BlendPart, Form, GenerationPath, Plan};
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

/// What a request asks for.
pub(super) async fn plan(loaded: &Arc<Loaded>, body: Bytes) -> Result<Plan, Refusal> {
    let request: CompletionRequest = parse_with(&body, &[part::<SamplingFields>])?;
    loaded.check_model(request.model.as_deref())?;
    let sampling = check(&request)?;
    let salt = cache_salt(request.cache_salt.as_deref())?;
    let form = Form::of(request.stream, request.stream_options)?;
    let (blend, (prompts, texts)) = match parts(loaded, &request).await? {
        Some((blend, prompt, text)) => (blend, (vec![prompt], vec![text])),
        None => (None, prompts(loaded, &request).await?),
    };
    let echoes = if request.echo.unwrap_or(false) { texts } else { vec![String::new(); prompts.len()] };
    Ok(Plan {
        path: GenerationPath::Completions,
        body,
        prompts,
        sampling,
        seq_id: request.seq_id,
        salt,
        blend,
        form,
        returns_tokens: request.return_token_ids.unwrap_or(false),
        echoes,
    })
}

/// Writes the chunks of a stream.
pub(super) fn renderer(plan: &Plan, head: Head, includes_usage: bool) -> impl Renderer + use<> {
    let offsets = vec![None; plan.n_outputs()];
    ChunkRenderer { outputs: Outputs::new(plan, head), includes_usage, usage: no_usage(plan), offsets }
}

/// The whole answer.
pub(super) fn whole(plan: &Plan, head: Head, outcomes: Vec<Vec<Outcome>>) -> CompletionResponse {
    let outputs = Outputs::new(plan, head);
    let mut response = outputs.response(Vec::new());
    response.usage = Some(total_usage(plan, &outcomes));
    for (part_idx, part) in outcomes.into_iter().enumerate() {
        for (choice, outcome) in part.into_iter().enumerate() {
            response.choices.push(outputs.whole_choice(part_idx, choice as u32, outcome));
        }
    }
    response
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

/// The tokens and the text of a prompt in parts; `None` if the request names none.
async fn parts(
    loaded: &Arc<Loaded>,
    request: &CompletionRequest,
) -> Result<Option<(Option<BlendPart>, Vec<u32>, String)>, Refusal> {
    let selectors = selectors(loaded, request.kvik.as_ref())?;
    let fields = match &request.kvik {
        Some(fields) => fields.clone(),
        None if selectors.is_none() => return Ok(None),
        None => KvikFields::default(),
    };
    let text = match &request.prompt {
        Prompt::Text(text) => text,
        _ if fields.segments.is_empty() && fields.separator.is_none() => return Ok(None),
        _ => return Err(Refusal::field("prompt", "a list or tokens, given with `kvik`", "one text")),
    };
    let Some(parts) = PromptParts::of(loaded, text, &fields)? else { return Ok(None) };
    let (tokens, segments) = parts.encode(loaded, add_special(request)).await?;
    loaded.check_prompt("kvik.segments", &tokens)?;
    let text = loaded.tokenizer.decode(&tokens, true)?;
    Ok(Some((blend_part(loaded, selectors, segments), tokens, text)))
}

fn add_special(request: &CompletionRequest) -> AddSpecial {
    if request.add_special_tokens.unwrap_or(true) { AddSpecial::Yes } else { AddSpecial::No }
}

/// The tokens of all prompts, and their texts if they are echoed.
async fn prompts(
    loaded: &Arc<Loaded>,
    request: &CompletionRequest,
) -> Result<(Vec<Vec<u32>>, Vec<String>), Refusal> {
    let add_special = add_special(request);
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
    fn new(plan: &Plan, head: Head) -> Self {
        Self { head, n_choices: plan.sampling.n, echoes: plan.echoes.clone() }
    }

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
            _ => return,
        };
        push_json(&self.outputs.response(vec![choice]), out);
    }

    fn skip(&mut self, part_idx: usize, choice: u32, tokens: &[u32]) {
        let head = &self.outputs.head;
        let Some(offset) = self.offsets.get_mut(self.outputs.index(part_idx, choice) as usize) else {
            return;
        };
        if tokens.is_empty() {
            return;
        }
        // Only log probabilities say where their token begins.
        let counted = if head.has_logprobs { tokens } else { &[] };
        let n_characters = counted.iter().map(|&token| head.loaded.token_text(token).chars().count());
        *offset.get_or_insert(0) += n_characters.sum::<usize>();
    }

    fn skip_end(&mut self, choice: u32, usage: events::Usage) {
        add_usage(&mut self.usage, choice, usage);
    }

    fn end(&mut self, out: &mut Vec<u8>) {
        let last = |usage| CompletionResponse { usage: Some(usage), ..self.outputs.response(Vec::new()) };
        push_end(self.includes_usage.then(|| std::mem::take(&mut self.usage)), last, out);
    }
}
