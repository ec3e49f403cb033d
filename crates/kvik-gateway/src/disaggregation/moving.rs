//! Workers of kvik: the worker for prompts gets the whole request and answers it. It sends the KV of the prompt to the worker that
//! generates as it computes it, and after the first token the request moves there, by the protocol of docs/moving.md. So there is no second
//! leg: the answer goes on at the other worker, and whatever fails is done as for every answer that moves.

use std::sync::Arc;

use super::legs::{MAX_PREFILLS, Scene, is_wrong_request, reason_of, refused};
use super::shape::Shape;
use crate::config::PdProtocol;
use crate::metrics::Metrics;
use crate::upstream::backend::Backend;
use crate::upstream::exchange::{Call, Exchanged, Failure, exchange, outcome_of};

const PROTOCOL: &str = PdProtocol::Kvik.as_str();

/// Sends the request to a worker for prompts that gives it to `decode`, to another one if that fails; `None` if none took it.
///
/// # Errors
/// [`Failure::Moved`] of a request without a stream whose prompt is computed, and if the request's time is over.
pub(super) async fn exchange_moving(
    scene: &Scene<'_>,
    decode: &Arc<Backend>,
    shape: &Shape,
    call: &Call<'_>,
) -> Result<Option<Exchanged>, Failure> {
    let mut tried: Vec<Arc<Backend>> = Vec::new();
    while tried.len() < MAX_PREFILLS {
        let may_try = tried.is_empty() || scene.shared.retry_budget.withdraw();
        let prefill = if may_try { scene.place_prefill(decode, PdProtocol::Kvik, &tried) } else { None };
        let Some(prefill) = prefill else { break };
        let backend = Arc::clone(&prefill.load.backend);
        let until = scene.decode_until(call, shape.is_stream);
        let leg = Call { decode_at: Some(&decode.base), until, ..call.clone() };
        let reason = match exchange(scene.shared, &backend, &leg).await {
            Ok(response) if is_wrong_request(response.status()) => {
                Metrics::disaggregation(PROTOCOL, "prefill_refused");
                return Ok(Some(refused(prefill, response)));
            }
            Ok(response) if response.status().is_success() => {
                Metrics::disaggregation(PROTOCOL, "disaggregated");
                let answered_by = Some(prefill.load);
                let plain = Exchanged::plain(response);
                return Ok(Some(Exchanged { answered_by, is_on_its_way: true, ..plain }));
            }
            Ok(response) => {
                backend.record(outcome_of(response.status(), response.headers()), &scene.config.breaker);
                "prefill_failed"
            }
            Err(Failure::Moved(moved)) => {
                Metrics::disaggregation(PROTOCOL, "disaggregated");
                return Err(Failure::Moved(moved));
            }
            Err(Failure::DeadlinePassed) => return Err(Failure::DeadlinePassed),
            Err(failure) => {
                backend.record(failure.outcome(), &scene.config.breaker);
                reason_of(&failure)
            }
        };
        Metrics::disaggregation_fallback(PROTOCOL, reason);
        tried.push(backend);
    }
    Ok(None)
}
