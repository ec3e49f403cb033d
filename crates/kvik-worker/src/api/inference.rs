//! `/inference/*`: sequences stepped by their clients, and streams.

use std::sync::Arc;

use axum::extract::{Request, State};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use kvik_model::{GenerateRequest, SamplingParams};
use kvik_proto::moves::{HELD, HeldPartial, SEED};
use kvik_proto::openai::SamplingFields;
use kvik_proto::sse;
use kvik_proto::worker::{
    FinishRequest, FinishResponse, GenerateEvent, GenerateRequest as WireGenerateRequest, InitRequest,
    PromptInput, SamplingInput, StepRequest,
};
use serde::Deserialize as _;

use super::request::{admit, check_seq_id, read_input, sampling_params, unsupported};
use super::resume::Resumed;
use super::segments::{blend_part, selectors};
use super::stream::{Renderer, push_json};
use super::{Answer, Part, Shared, json, parse_with, part, read_body, read_json};
use crate::error::Refusal;
use crate::events::{Event, Usage};
use crate::generation::StageGuard;
use crate::plan::{Form, GenerationPath, Plan};
use crate::prompt::Prompt;
use crate::sequences::{HeldBegun, HeldStart, MAX_STEP};
use crate::state::{Loaded, WorkerState};

/// The flattened parts of a request that starts a sequence.
const PARTS: &[Part] = &[part::<PromptInput>, part::<SamplingInput>, part::<SamplingFields>];

/// Longest name of a life of a sequence, in bytes.
const MAX_IDENTITY_BYTES: usize = 128;

/// Writes events.
#[derive(Debug)]
struct EventRenderer;

/// `POST /inference/init`.
pub(super) async fn init(State(state): Shared, request: Request) -> Answer {
    let identity = identity(request.headers())?;
    let body = read_body(&state, request).await?;
    let loaded = state.ready()?;
    let plan = plan_init(loaded, body).await?;
    let start = held_start(&state, loaded, &plan, identity.clone(), None)?;
    let (response, seed) = loaded.sequences.init(&loaded.engine, start).await?;
    let mut answer = json(StatusCode::OK, &response);
    if identity.is_some() {
        answer.headers_mut().insert(SEED, HeaderValue::from(seed));
    }
    Ok(answer)
}

/// Goes on with a sequence that another worker has begun; it waits for its next step.
pub(super) async fn resume(
    state: &WorkerState,
    loaded: &Loaded,
    plan: &Plan,
    resumed: &Resumed,
    stages: Vec<StageGuard>,
) -> Answer {
    let part = resumed.begun(plan).pop().unwrap_or_default();
    let output = part.outputs.outputs.first().cloned().unwrap_or_default();
    if output.is_ended {
        return Err(Refusal::field("progress", "of an output that has ended", "outputs that go on"));
    }
    let partial = match resumed.partial() {
        None => HeldPartial::default(),
        Some(partial) => HeldPartial::deserialize(partial)
            .map_err(|error| Refusal::invalid(format!("`partial`: {error}"), Some("partial")))?,
    };
    let n_tokens = output.tokens.len();
    let HeldPartial { mut texts, answered } = partial;
    if texts.is_empty() {
        texts.resize(n_tokens, String::new());
    }
    if texts.len() != n_tokens {
        let allowed = format!("{n_tokens}, one for each token, or none");
        return Err(Refusal::field("partial", format!("{} texts", texts.len()), &allowed));
    }
    let identity = Some(resumed.head.id.clone()).filter(|identity| !identity.is_empty());
    let mut start = held_start(state, loaded, plan, identity, resumed.head.seeds.first().copied())?;
    start.begun = Some(HeldBegun {
        part,
        tokens: output.tokens.into_iter().zip(texts).collect(),
        n_answered: answered.unwrap_or(u64::MAX).min(n_tokens as u64),
        stages,
    });
    let seq_id = start.seq_id.clone();
    loaded.sequences.resume(&loaded.engine, start).await?;
    Ok(json(StatusCode::OK, &serde_json::json!({"seq_id": seq_id})))
}

/// What a sequence is started from, with its place; `seed` if it has begun elsewhere.
fn held_start(
    state: &WorkerState,
    loaded: &Loaded,
    plan: &Plan,
    identity: Option<String>,
    seed: Option<u64>,
) -> Result<HeldStart, Refusal> {
    let mut sampling = plan.sampling.clone();
    sampling.seed = seed.or(sampling.seed);
    let prompt = plan.prompts.first().cloned().unwrap_or_default();
    Ok(HeldStart {
        seq_id: plan.seq_id.clone().unwrap_or_default(),
        identity,
        body: plan.body.clone(),
        request: GenerateRequest { prompt, sampling },
        salt: plan.salt.clone(),
        permit: admit(state, loaded, 1)?,
        draining: state.draining.clone(),
        begun: None,
    })
}

/// The life of a sequence that a gateway names.
fn identity(headers: &HeaderMap) -> Result<Option<String>, Refusal> {
    let Some(given) = headers.get(HELD) else { return Ok(None) };
    let is_sane = |bytes: &[u8]| {
        (1..=MAX_IDENTITY_BYTES).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic)
    };
    match given.to_str() {
        Ok(text) if is_sane(text.as_bytes()) => Ok(Some(text.to_owned())),
        _ => {
            let allowed = format!("1 to {MAX_IDENTITY_BYTES} visible characters");
            Err(Refusal::field(HELD, format!("{} bytes", given.len()), &allowed))
        }
    }
}

/// `POST /inference/step`; also while the worker drains, because it is how a sequence ends.
pub(super) async fn step(State(state): Shared, request: Request) -> Answer {
    let identity = identity(request.headers())?;
    let request: StepRequest = read_json(&state, request).await?;
    let loaded = state.loaded()?;
    if request.n == 0 || MAX_STEP < request.n {
        return Err(Refusal::field("n", request.n, &format!("1 to {MAX_STEP}")));
    }
    let (seq_id, identity) = (&request.seq_id, identity.as_deref());
    let response = loaded.sequences.step(seq_id, identity, request.step_index, request.n).await?;
    Ok(json(StatusCode::OK, &response))
}

/// `POST /inference/finish`.
pub(super) async fn finish(State(state): Shared, request: Request) -> Answer {
    let identity = identity(request.headers())?;
    let request: FinishRequest = read_json(&state, request).await?;
    let loaded = state.loaded()?;
    let (seq_id, identity) = (&request.seq_id, identity.as_deref());
    let resident_tokens = loaded.sequences.finish(&loaded.engine, seq_id, identity, request.forget).await?;
    Ok(json(StatusCode::OK, &FinishResponse { seq_id: request.seq_id, resident_tokens }))
}

/// What a request of `/inference/init` asks for.
pub(super) async fn plan_init(loaded: &Arc<Loaded>, body: Bytes) -> Result<Plan, Refusal> {
    let request: InitRequest = parse_with(&body, PARTS)?;
    check_seq_id(&request.seq_id)?;
    let sampling = check(request.sampling)?;
    if sampling.n != 1 {
        return Err(Refusal::field("n", sampling.n, "1; only /inference/generate takes more"));
    }
    let Prompt { tokens, salt, .. } = read_input(loaded, request.input).await?;
    Ok(Plan {
        path: GenerationPath::Init,
        body,
        prompts: vec![tokens],
        sampling,
        seq_id: Some(request.seq_id),
        salt,
        blend: None,
        form: Form::Whole,
        returns_tokens: false,
        echoes: Vec::new(),
    })
}

/// What a request of `/inference/generate` asks for.
pub(super) async fn plan(loaded: &Arc<Loaded>, body: Bytes) -> Result<Plan, Refusal> {
    let request: WireGenerateRequest = parse_with(&body, PARTS)?;
    let sampling = check(request.sampling)?;
    let selectors = selectors(loaded, request.input.kvik.as_ref())?;
    let Prompt { tokens, salt, segments } = read_input(loaded, request.input).await?;
    Ok(Plan {
        path: GenerationPath::Generate,
        body,
        prompts: vec![tokens],
        sampling,
        seq_id: request.seq_id,
        salt,
        blend: blend_part(loaded, selectors, segments),
        form: Form::Stream { includes_usage: false },
        returns_tokens: false,
        echoes: Vec::new(),
    })
}

/// Writes the events of a stream.
pub(super) fn renderer() -> impl Renderer {
    EventRenderer
}

/// Refuses what is not honored and returns the rest.
fn check(given: SamplingInput) -> Result<SamplingParams, Refusal> {
    let max_tokens = SamplingParams::default().max_tokens;
    let sampling = sampling_params(&given.merge()?, max_tokens, "logprobs")?;
    if sampling.logprobs.is_some() {
        return Err(unsupported("logprobs"));
    }
    Ok(sampling)
}

impl Renderer for EventRenderer {
    fn render(&mut self, _part_idx: usize, event: Event, out: &mut Vec<u8>) {
        let event = match event {
            Event::Token(token) => {
                GenerateEvent::Token { choice: token.choice, token: token.id, text: token.text }
            }
            Event::Finished { choice, text, reason, usage } => GenerateEvent::Finished {
                choice,
                text,
                finish_reason: reason.as_str().to_owned(),
                prompt_tokens: usage.prompt_tokens,
                cached_tokens: usage.cached_tokens,
                completion_tokens: usage.completion_tokens,
            },
            Event::Failed(message) => GenerateEvent::Error { message },
            Event::Rejected(error) => GenerateEvent::Error { message: error.to_string() },
            _ => return,
        };
        push_json(&event, out);
    }

    fn skip(&mut self, _part_idx: usize, _choice: u32, _tokens: &[u32]) {}

    fn skip_end(&mut self, _choice: u32, _usage: Usage) {}

    fn end(&mut self, out: &mut Vec<u8>) {
        sse::encode("[DONE]", out);
    }
}
