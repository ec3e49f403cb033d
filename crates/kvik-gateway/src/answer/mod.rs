//! What a client gets: a worker's answer passed on, or one of the gateway's own.

use axum::response::{IntoResponse, Response};
use http::header::CONTENT_TYPE;
use http::{HeaderName, StatusCode};

use crate::error::Refusal;
use crate::metrics::Metrics;

pub(crate) mod body;
pub(crate) mod continuation;
pub(crate) mod events;
pub(crate) mod forward;
pub(crate) mod generate;
pub(crate) mod journal;
pub(crate) mod record;
pub(crate) mod send;

/// What a client without an accepted key is told.
pub(crate) const WRONG_KEY: &str =
    "the API key is missing or wrong; send it as `Authorization: Bearer <key>`";

/// Counts and answers a refusal.
pub(crate) fn refuse(refusal: Refusal) -> Response {
    Metrics::rejected(refusal.reason);
    refusal.into_response()
}

pub(crate) fn json_answer(status: StatusCode, value: &serde_json::Value) -> Response {
    (status, [content_type("application/json")], value.to_string()).into_response()
}

pub(crate) fn text_answer(kind: &'static str, text: String) -> Response {
    ([content_type(kind)], text).into_response()
}

fn content_type(kind: &'static str) -> (HeaderName, &'static str) {
    (CONTENT_TYPE, kind)
}
