//! From a request's fields to the engine.

use kvik_model::{GenerateRequest, SamplingParams};
use kvik_proto::openai;
use kvik_proto::worker::{PromptInput, Sampling};
use kvik_tokens::{AddSpecial, ChatMessage};
use kvik_types::CacheSalt;
use serde_json::Value;

use std::sync::Arc;

use super::segments::PromptParts;
use crate::admission::Permit;
use crate::engine_thread::BegunPart;
use crate::error::Refusal;
use crate::generation::{Generation, StageGuard, Start};
use crate::plan::Plan;
use crate::prompt::Prompt;
use crate::state::{Loaded, WorkerState};

/// Most alternatives reported with a token: as many as the most generous of the public APIs.
const MAX_LOGPROBS: u32 = 20;
/// Longest name of a sequence, in bytes.
const MAX_SEQ_ID_BYTES: usize = 512;

/// The engine's parameters; `max_tokens` where the request has none.
pub(super) fn sampling_params(
    given: &Sampling,
    max_tokens: u32,
    logprobs_field: &'static str,
) -> Result<SamplingParams, Refusal> {
    if let Some(n) = given.logprobs.filter(|&n| MAX_LOGPROBS < n) {
        return Err(Refusal::field(logprobs_field, n, &format!("0 to {MAX_LOGPROBS}")));
    }
    let default = SamplingParams::default();
    let params = SamplingParams {
        temperature: given.temperature.unwrap_or(default.temperature),
        top_k: given.top_k.unwrap_or(default.top_k),
        top_p: given.top_p.unwrap_or(default.top_p),
        min_p: given.min_p.unwrap_or(default.min_p),
        repetition_penalty: given.repetition_penalty.unwrap_or(default.repetition_penalty),
        presence_penalty: given.presence_penalty.unwrap_or(default.presence_penalty),
        frequency_penalty: given.frequency_penalty.unwrap_or(default.frequency_penalty),
        seed: given.seed,
        stop: given.stop.clone().unwrap_or_default(),
        stop_token_ids: given.stop_token_ids.clone().unwrap_or_default(),
        ignore_eos: given.ignore_eos.unwrap_or(default.ignore_eos),
        logprobs: given.logprobs,
        n: given.n.unwrap_or(default.n),
        max_tokens: given.max_tokens.unwrap_or(max_tokens),
    };
    params.validate()?;
    Ok(params)
}

/// What a sequence of the worker's own API starts from.
pub(super) async fn read_input(loaded: &Arc<Loaded>, input: PromptInput) -> Result<Prompt, Refusal> {
    let salt = cache_salt(input.cache_salt.as_deref())?;
    let fields = input.kvik.unwrap_or_default();
    let text = input.prompt.clone().unwrap_or_default();
    if input.token_ids.is_none()
        && input.messages.is_none()
        && let Some(parts) = PromptParts::of(loaded, &text, &fields)?
    {
        let (tokens, segments) = parts.encode(loaded, AddSpecial::Yes).await?;
        loaded.check_prompt("kvik.segments", &tokens)?;
        return Ok(Prompt { tokens, salt, segments });
    }
    let (field, tokens) = match (input.prompt, input.token_ids, input.messages) {
        (Some(text), None, None) => ("prompt", loaded.encode(text, AddSpecial::Yes).await?),
        (None, Some(tokens), None) => ("token_ids", tokens),
        (None, None, Some(messages)) => {
            let messages: Vec<ChatMessage> =
                messages.into_iter().map(|message| ChatMessage::new(message.role, message.content)).collect();
            ("messages", loaded.encode_chat(&messages, true).await?)
        }
        _ => {
            let message = "exactly one of `prompt`, `token_ids` and `messages` must be given";
            return Err(Refusal::invalid(message, Some("prompt")));
        }
    };
    loaded.check_prompt(field, &tokens)?;
    Ok(Prompt { tokens, salt, segments: Vec::new() })
}

/// The salt of a request.
pub(super) fn cache_salt(given: Option<&str>) -> Result<Option<CacheSalt>, Refusal> {
    given
        .map(CacheSalt::try_new)
        .transpose()
        .map_err(|error| Refusal::invalid(error.to_string(), Some("cache_salt")))
}

/// The messages of an OpenAI request.
pub(super) fn chat_messages(messages: Vec<openai::ChatMessage>) -> Result<Vec<ChatMessage>, Refusal> {
    let message = |(idx, message): (usize, openai::ChatMessage)| {
        let field = format!("messages[{idx}].content");
        if message.tool_calls.is_some_and(|calls| asks(&calls)) {
            return Err(unsupported(&format!("messages[{idx}].tool_calls")));
        }
        match message.content {
            Some(openai::MessageContent::Text(text)) => Ok(ChatMessage::new(message.role, text)),
            Some(openai::MessageContent::Parts(parts)) => {
                if let Some(part) = parts.iter().find(|part| part.kind != "text") {
                    return Err(Refusal::field(
                        &field,
                        format!("a part of type `{}`", part.kind),
                        "type `text`",
                    ));
                }
                let texts = parts.into_iter().filter_map(|part| part.text).collect();
                Ok(ChatMessage::from_parts(message.role, texts))
            }
            None => Err(Refusal::field(&field, "missing", "a string or a list of text parts")),
        }
    };
    messages.into_iter().enumerate().map(message).collect()
}

/// Takes places and starts the outputs of a plan, or goes on with them.
pub(super) async fn start(
    state: &WorkerState,
    loaded: &Loaded,
    plan: &Plan,
    begun: Vec<BegunPart>,
    seeds: &[u64],
    stages: Vec<StageGuard>,
) -> Result<Generation, Refusal> {
    if let Some(seq_id) = &plan.seq_id {
        check_seq_id(seq_id)?;
        if 1 < plan.prompts.len() {
            return Err(Refusal::field("seq_id", "given with several prompts", "one prompt"));
        }
        if loaded.sequences.is_active(seq_id) {
            let message = format!("`seq_id` is `{seq_id}`, which is being stepped; finish it first");
            return Err(Refusal::conflict(message, Some("seq_id")));
        }
    }
    let permit = admit(state, loaded, plan.n_outputs())?;
    let request = |(part_idx, prompt): (usize, &Vec<u32>)| {
        let mut sampling = plan.sampling.clone();
        if let Some(seed) = seeds.get(part_idx) {
            sampling.seed = Some(*seed);
        }
        GenerateRequest { prompt: prompt.clone(), sampling }
    };
    let requests = plan.prompts.iter().enumerate().map(request).collect();
    let (name, salt, blend) = (plan.seq_id.as_deref(), plan.salt.clone(), plan.blend.clone());
    Generation::start(&loaded.engine, Start { requests, name, salt, permit, begun, stages, blend }).await
}

/// Takes places for `n` outputs.
pub(super) fn admit(state: &WorkerState, loaded: &Loaded, n: usize) -> Result<Permit, Refusal> {
    let n_places = state.admission.n_places();
    if n_places < n {
        return Err(Refusal::field("n", format!("{n} outputs in all"), &format!("at most {n_places}")));
    }
    state.admission.try_take(n).ok_or_else(|| {
        let message = format!("all {n_places} places are taken; try again later");
        Refusal::too_many(message, loaded.engine.last_snapshot().retry_after())
    })
}

pub(super) fn check_seq_id(seq_id: &str) -> Result<(), Refusal> {
    if (1..=MAX_SEQ_ID_BYTES).contains(&seq_id.len()) {
        return Ok(());
    }
    let allowed = format!("1 to {MAX_SEQ_ID_BYTES} bytes");
    Err(Refusal::field("seq_id", format!("{} bytes long", seq_id.len()), &allowed))
}

/// Refuses fields that ask for what the worker does not do.
pub(super) fn refuse(fields: &[(&str, Option<&Value>)]) -> Result<(), Refusal> {
    for (field, value) in fields {
        if value.is_some_and(asks) {
            return Err(unsupported(field));
        }
    }
    Ok(())
}

pub(super) fn unsupported(field: &str) -> Refusal {
    Refusal::invalid(
        format!("`{field}` is given, which this worker does not support; allowed: none"),
        Some(field),
    )
}

/// Whether a value asks for something: empty ones are what some clients send by default.
fn asks(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(values) => !values.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        Value::String(text) => !text.is_empty(),
        _ => true,
    }
}
