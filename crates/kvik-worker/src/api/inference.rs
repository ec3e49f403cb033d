//! `/inference/*`: sequences stepped by their clients, and streams.

use axum::extract::{Request, State};
use http::StatusCode;
use kvik_model::{GenerateRequest, SamplingParams};
use kvik_proto::sse;
use kvik_proto::worker::{
    FinishRequest, FinishResponse, GenerateEvent, GenerateRequest as WireGenerateRequest, InitRequest,
    StepRequest,
};

use super::request::{admit, check_seq_id, input_tokens, sampling_params, start, unsupported};
use super::stream::{Renderer, push_json, respond};
use super::{Answer, Shared, json, read_json};
use crate::error::Refusal;
use crate::generation::Event;
use crate::sequences::MAX_STEP;

/// Writes events.
#[derive(Debug)]
struct EventRenderer;

/// `POST /inference/init`.
pub(super) async fn init(State(state): Shared, request: Request) -> Answer {
    let request: InitRequest = read_json(&state, request).await?;
    let loaded = state.ready()?;
    check_seq_id(&request.seq_id)?;
    let max_tokens = SamplingParams::default().max_tokens;
    let sampling = sampling_params(&request.sampling, max_tokens, "logprobs")?;
    if sampling.n != 1 {
        return Err(Refusal::field("n", sampling.n, "1; only /inference/generate takes more"));
    }
    if sampling.logprobs.is_some() {
        return Err(unsupported("logprobs"));
    }
    let prompt = input_tokens(loaded, request.input).await?;
    let permit = admit(&state, loaded, 1)?;
    let generate = GenerateRequest { prompt, sampling };
    let response = loaded.sequences.init(&loaded.engine, &request.seq_id, generate, permit).await?;
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

/// `POST /inference/generate`.
pub(super) async fn generate(State(state): Shared, request: Request) -> Answer {
    let request: WireGenerateRequest = read_json(&state, request).await?;
    let loaded = state.ready()?;
    let max_tokens = SamplingParams::default().max_tokens;
    let sampling = sampling_params(&request.sampling, max_tokens, "logprobs")?;
    if sampling.logprobs.is_some() {
        return Err(unsupported("logprobs"));
    }
    let prompt = input_tokens(loaded, request.input).await?;
    let generation = start(&state, loaded, vec![prompt], &sampling, request.seq_id.as_deref()).await?;
    Ok(respond(generation, EventRenderer))
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
            Event::Accepted | Event::Admitted { .. } => return,
        };
        push_json(&event, out);
    }

    fn end(&mut self, out: &mut Vec<u8>) {
        sse::encode("[DONE]", out);
    }
}
