//! `/v1/models`, `/tokenize`, `/detokenize`.

use axum::extract::{Path, Request, State};
use http::StatusCode;
use kvik_proto::openai::{
    DetokenizeRequest, DetokenizeResponse, ModelCard, ModelList, TokenizeRequest, TokenizeResponse,
};
use kvik_tokens::AddSpecial;

use super::request::chat_messages;
use super::{Answer, Shared, json, read_json};
use crate::error::Refusal;
use crate::state::{Loaded, WorkerState};

/// `GET /v1/models`.
pub(super) async fn models(State(state): Shared) -> Answer {
    let loaded = state.loaded()?;
    Ok(json(StatusCode::OK, &ModelList::new(vec![card(&state, loaded)])))
}

/// `GET /v1/models/{id}`.
pub(super) async fn model(State(state): Shared, Path(id): Path<String>) -> Answer {
    let loaded = state.loaded()?;
    loaded.check_model(Some(&id))?;
    Ok(json(StatusCode::OK, &card(&state, loaded)))
}

/// `POST /tokenize`.
pub(super) async fn tokenize(State(state): Shared, request: Request) -> Answer {
    let request: TokenizeRequest = read_json(&state, request).await?;
    let loaded = state.loaded()?;
    loaded.check_model(request.model.as_deref())?;
    let special = |adds: bool| if adds { AddSpecial::Yes } else { AddSpecial::No };
    let tokens = match (request.prompt, request.messages) {
        (Some(text), None) => {
            loaded.encode(text, special(request.add_special_tokens.unwrap_or(true))).await?
        }
        (None, Some(messages)) => {
            if request.add_special_tokens.unwrap_or(false) {
                let allowed = "false for messages, whose template writes them";
                return Err(Refusal::field("add_special_tokens", true, allowed));
            }
            let messages = chat_messages(messages)?;
            loaded.encode_chat(&messages, request.add_generation_prompt.unwrap_or(true)).await?
        }
        _ => {
            let message = "exactly one of `prompt` and `messages` must be given";
            return Err(Refusal::invalid(message, Some("prompt")));
        }
    };
    let response = TokenizeResponse { count: tokens.len(), max_model_len: loaded.max_tokens, tokens };
    Ok(json(StatusCode::OK, &response))
}

/// `POST /detokenize`.
pub(super) async fn detokenize(State(state): Shared, request: Request) -> Answer {
    let request: DetokenizeRequest = read_json(&state, request).await?;
    let loaded = state.loaded()?;
    loaded.check_model(request.model.as_deref())?;
    loaded.check_vocabulary("tokens", &request.tokens)?;
    let prompt = loaded.tokenizer.decode(&request.tokens, false)?;
    Ok(json(StatusCode::OK, &DetokenizeResponse { prompt }))
}

fn card(state: &WorkerState, loaded: &Loaded) -> ModelCard {
    ModelCard {
        id: loaded.model_name.clone(),
        object: "model".to_owned(),
        created: state.started,
        owned_by: "kvik".to_owned(),
        max_model_len: Some(loaded.max_tokens),
    }
}
