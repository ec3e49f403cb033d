//! `SGLang`: both engines get the same request at once, with where the engine that computes the prompt listens and a number
//! under which both find each other.
//!
//! The client gets the answer of the decoding engine, whose bytes wait until the other one has accepted the request. The end of
//! the decoding engine's answer does not cancel the other leg, the end of the client does.

use std::fmt::Write as _;
use std::sync::Arc;

use bytes::Bytes;
use http::Response;
use tokio::time::Instant;

use super::legs::{MAX_PREFILLS, Prefill, Scene, is_wrong_request, reason_of, refused};
use super::shape::Shape;
use crate::config::PdProtocol;
use crate::metrics::Metrics;
use crate::request::headers::unique_id;
use crate::request::splice::{Edit, splice};
use crate::upstream::backend::Backend;
use crate::upstream::exchange::{Call, Exchanged, Failure, WorkerBody, exchange, outcome_of};
use crate::upstream::fleet::Transfer;

const PROTOCOL: PdProtocol = PdProtocol::Sglang;
/// Rooms leave the upper half of their range free: an engine counts on from one for several outputs.
const ROOM_BITS: u32 = 62;

/// What became of one pair of legs.
enum Pair {
    /// The answer to pass on.
    Answered(Box<Exchanged>),
    /// The engine for prompts failed, for this reason.
    NoPrefill(&'static str),
}

/// Sends the request to `decode` and to an engine for prompts, to another one if that fails.
///
/// # Errors
/// What the decoding engine fails with, or [`Failure::NoPartner`].
pub(super) async fn exchange_at_once(
    scene: &Scene<'_>,
    decode: &Arc<Backend>,
    shape: &Shape,
    call: &Call<'_>,
) -> Result<Exchanged, Failure> {
    let mut tried: Vec<Arc<Backend>> = Vec::new();
    while tried.len() < MAX_PREFILLS {
        let may_try = tried.is_empty() || scene.shared.retry_budget.withdraw();
        let prefill = if may_try { scene.place_prefill(decode, PROTOCOL, &tried) } else { None };
        let Some(prefill) = prefill else { break };
        let backend = Arc::clone(&prefill.load.backend);
        let seat = scene.group.seat_of(&backend).map(|(_, seat)| &seat.part);
        let Some(transfer) = seat.and_then(|part| part.transfer.as_deref()) else { break };
        let body = pair_body(&call.body, shape, transfer).ok_or(Failure::NoPartner)?;
        match exchange_pair(scene, prefill, decode, shape, &Call { body, ..call.clone() }).await? {
            Pair::Answered(exchanged) => return Ok(*exchanged),
            Pair::NoPrefill(reason) => Metrics::disaggregation_fallback(PROTOCOL.as_str(), reason),
        }
        tried.push(backend);
    }
    if tried.is_empty() {
        Metrics::disaggregation(PROTOCOL.as_str(), "no_prefill");
    }
    Err(Failure::NoPartner)
}

/// Runs both legs.
async fn exchange_pair(
    scene: &Scene<'_>,
    prefill: Prefill,
    decode: &Arc<Backend>,
    shape: &Shape,
    call: &Call<'_>,
) -> Result<Pair, Failure> {
    let backend = Arc::clone(&prefill.load.backend);
    let (started, n_tokens) = (Instant::now(), backend.outstanding_tokens());
    let prefill_call = Call { until: scene.prefill_until(call), ..call.clone() };
    let decode_call = Call { until: scene.decode_until(call, shape.is_stream), ..call.clone() };
    let mut prefilling = std::pin::pin!(exchange(scene.shared, &backend, &prefill_call));
    let mut decoding = std::pin::pin!(async {
        let mut response = exchange(scene.shared, decode, &decode_call).await?;
        let is_well =
            response.status().is_success() && scene.begins_well(decode, &mut response, call).await?;
        Ok::<_, Failure>((response, is_well))
    });
    let mut decoded: Option<Response<WorkerBody>> = None;
    let prefilled = loop {
        tokio::select! {
            biased;
            prefilled = &mut prefilling => break prefilled,
            answer = &mut decoding, if decoded.is_none() => match answer? {
                (response, true) => decoded = Some(response),
                // The other engine would wait for one that has given up.
                (response, false) => return decoded_badly(response),
            },
        }
    };
    let breaker = &scene.config.breaker;
    let response = match prefilled {
        Err(Failure::DeadlinePassed) => return Err(Failure::DeadlinePassed),
        Err(failure) => {
            backend.record(failure.outcome(), breaker);
            return Ok(Pair::NoPrefill(reason_of(&failure)));
        }
        Ok(response) if is_wrong_request(response.status()) => {
            Metrics::disaggregation(PROTOCOL.as_str(), "prefill_refused");
            return Ok(Pair::Answered(Box::new(refused(prefill, response))));
        }
        Ok(response) => response,
    };
    backend.record(outcome_of(response.status(), response.headers()), breaker);
    if !response.status().is_success() {
        return Ok(Pair::NoPrefill("prefill_failed"));
    }
    let accepted = Instant::now();
    if !shape.is_stream {
        // An answer in one piece is there when the prompt is computed.
        backend.prefill_speed.measure(n_tokens, accepted - started);
    }
    Metrics::prefill_ended(PROTOCOL.as_str(), accepted - started);
    let other_leg = scene.drain(prefill, response, call.deadline);
    let response = match decoded {
        Some(response) => response,
        None => match decoding.await? {
            (response, true) => response,
            (response, false) => return decoded_badly(response),
        },
    };
    if shape.is_stream {
        Metrics::handed_over(PROTOCOL.as_str(), accepted.elapsed());
    }
    Metrics::disaggregation(PROTOCOL.as_str(), "disaggregated");
    let has_foreign_kv = true;
    Ok(Pair::Answered(Box::new(Exchanged {
        response,
        answered_by: None,
        is_on_its_way: false,
        other_leg: Some(other_leg),
        has_foreign_kv,
    })))
}

/// What becomes of an answer of the decoding engine that is an error: if the request is wrong the client gets it, otherwise another
/// engine is tried.
fn decoded_badly(response: Response<WorkerBody>) -> Result<Pair, Failure> {
    if response.status().is_client_error() {
        return Ok(Pair::Answered(Box::new(Exchanged::plain(response))));
    }
    Metrics::disaggregation_fallback(PROTOCOL.as_str(), "decode_failed");
    Err(Failure::Unavailable(Box::new(response)))
}

/// The body of both legs; `None` if it cannot be made.
fn pair_body(body: &[u8], shape: &Shape, prefill: &Transfer) -> Option<Bytes> {
    let text = simdutf8::basic::from_utf8(body).ok()?;
    let host = serde_json::Value::from(prefill.host.as_str()).to_string();
    let port = prefill.port.to_string();
    // One value for each prompt of a list, and for each output of a conversation; otherwise one value.
    let n_values = match shape.n_prompts {
        1 if shape.is_chat && 1 < shape.n_outputs => usize::try_from(shape.n_outputs).ok()?,
        n_prompts => n_prompts,
    };
    let hosts = values(n_values, || host.clone())?;
    let ports = values(n_values, || port.clone())?;
    let rooms = values(n_values, || (unique_id() as u64 >> (64 - ROOM_BITS)).to_string())?;
    let edits = [
        Edit::set("bootstrap_host", &hosts),
        Edit::set("bootstrap_port", &ports),
        Edit::set("bootstrap_room", &rooms),
    ];
    splice(text, &edits).ok()
}

/// Most prompts and outputs for which a list is written; a request for more is left to the engine's own limits.
const MAX_VALUES: usize = 1024;

/// One value, or a list of several.
fn values(n_values: usize, mut value: impl FnMut() -> String) -> Option<String> {
    match n_values {
        0 | 1 => Some(value()),
        2..=MAX_VALUES => {
            let mut list = String::from("[");
            for number in 0..n_values {
                let comma = if number == 0 { "" } else { "," };
                let _ = write!(list, "{comma}{}", value());
            }
            list.push(']');
            Some(list)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::route::Route;

    fn fields(route: Route, body: &str) -> Value {
        let prefill = Transfer { protocol: PROTOCOL, host: "10.0.0.7".to_owned(), port: 8998 };
        let shape = Shape::read(route, body.as_bytes()).unwrap();
        serde_json::from_slice(&pair_body(body.as_bytes(), &shape, &prefill).unwrap()).unwrap()
    }

    #[test]
    fn one_output_has_one_room_and_several_have_a_list() {
        let one = fields(Route::Completions, r#"{"prompt":"a","x":1}"#);
        assert_eq!(
            (one["bootstrap_host"].as_str(), one["bootstrap_port"].as_u64()),
            (Some("10.0.0.7"), Some(8998))
        );
        assert!(one["bootstrap_room"].as_u64().unwrap() < 1 << ROOM_BITS);
        assert_eq!(one["x"], 1);
        for (route, body, n_values) in [
            (Route::Completions, r#"{"prompt":["a","b","c"]}"#, 3),
            (Route::Chat, r#"{"messages":[{"role":"user"}],"n":2}"#, 2),
        ] {
            let several = fields(route, body);
            for field in ["bootstrap_host", "bootstrap_port", "bootstrap_room"] {
                assert_eq!(several[field].as_array().unwrap().len(), n_values, "{field} of {body}");
            }
            assert_ne!(several["bootstrap_room"][0], several["bootstrap_room"][1]);
        }
        let of_text = fields(Route::Completions, r#"{"prompt":"a","n":2}"#);
        assert!(of_text["bootstrap_room"].is_u64());
    }

    #[test]
    fn no_list_is_longer_than_engines_would_take() {
        assert!(values(MAX_VALUES, String::new).is_some());
        assert!(values(MAX_VALUES + 1, String::new).is_none());
    }
}
