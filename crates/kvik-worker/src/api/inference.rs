//! `/inference/*`: sequences stepped by their clients, and streams.

use std::sync::Arc;

use axum::extract::{Request, State};
use bytes::Bytes;
use http::StatusCode;
use kvik_model::{GenerateRequest, SamplingParams};
use kvik_proto::openai::SamplingFields;
use kvik_proto::sse;
use kvik_proto::worker::{
    FinishRequest, FinishResponse, GenerateEvent, GenerateRequest as WireGenerateRequest, InitRequest,
    PromptInput, SamplingInput, StepRequest,
};

use super::request::{admit, check_seq_id, read_input, sampling_params, unsupported};
use super::stream::{Renderer, push_json};
use super::{Answer, Part, Shared, json, parse_with, part, read_json, read_json_with};
use crate::error::Refusal;
use crate::events::{Event, Usage};
use crate::plan::{Form, GenerationPath, Plan};
use crate::prompt::Prompt;
use crate::sequences::MAX_STEP;
use crate::state::Loaded;

/// The flattened parts of a request that starts a sequence.
const PARTS: &[Part] = &[part::<PromptInput>, part::<SamplingInput>, part::<SamplingFields>];

/// Writes events.
#[derive(Debug)]
struct EventRenderer;

/// `POST /inference/init`.
pub(super) async fn init(State(state): Shared, request: Request) -> Answer {
    let request: InitRequest = read_json_with(&state, request, PARTS).await?;
    let loaded = state.ready()?;
    check_seq_id(&request.seq_id)?;
    let sampling = check(request.sampling)?;
    if sampling.n != 1 {
        return Err(Refusal::field("n", sampling.n, "1; only /inference/generate takes more"));
    }
    let Prompt { tokens, salt } = read_input(loaded, request.input).await?;
    let permit = admit(&state, loaded, 1)?;
    let generate = GenerateRequest { prompt: tokens, sampling };
    let response = loaded.sequences.init(&loaded.engine, &request.seq_id, generate, salt, permit).await?;
    Ok(json(StatusCode::OK, &response))
}

/// `POST /inference/step`; also while the worker drains, because it is how a sequence ends.
pub(super) async fn step(State(state): Shared, request: Request) -> Answer {
    let request: StepRequest = read_json(&state, request).await?;
    let loaded = state.loaded()?;
    if request.n == 0 || MAX_STEP < request.n {
        return Err(Refusal::field("n", request.n, &format!("1 to {MAX_STEP}")));
    }
    let response = loaded.sequences.step(&request.seq_id, request.step_index, request.n).await?;
    Ok(json(StatusCode::OK, &response))
}

/// `POST /inference/finish`.
pub(super) async fn finish(State(state): Shared, request: Request) -> Answer {
    let request: FinishRequest = read_json(&state, request).await?;
    let loaded = state.loaded()?;
    let resident_tokens = loaded.sequences.finish(&loaded.engine, &request.seq_id, request.forget).await?;
    Ok(json(StatusCode::OK, &FinishResponse { seq_id: request.seq_id, resident_tokens }))
}

/// What a request of `/inference/generate` asks for.
pub(super) async fn plan(loaded: &Arc<Loaded>, body: Bytes) -> Result<Plan, Refusal> {
    let request: WireGenerateRequest = parse_with(&body, PARTS)?;
    let sampling = check(request.sampling)?;
    let Prompt { tokens, salt } = read_input(loaded, request.input).await?;
    Ok(Plan {
        path: GenerationPath::Generate,
        body,
        prompts: vec![tokens],
        sampling,
        seq_id: request.seq_id,
        salt,
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
