//! KV that one engine computes and another one reads: the prompt's leg, then the answer's.
//!
//! KV is offered to one engine at a time, and again only if the one before has not seen the request and the lease is not
//! over: an engine that may have read it may have let its memory be used again. Whatever fails leaves the request to the
//! engine that generates.

use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use tokio::time::Instant;

use super::legs::{MAX_PREFILLS, Prefilled};
use super::remote_source::KvRequestId;
use super::shape::Shape;
use super::{Disaggregation, Partner, nixl_pull, shared_store};
use crate::config::{PdProtocol, millis};
use crate::metrics::Metrics;
use crate::request::splice::{Edit, splice};
use crate::upstream::backend::Backend;
use crate::upstream::exchange::{Call, Exchanged, Failure, exchange};

/// KV that an engine has computed for another one.
#[derive(Debug)]
pub(super) struct HandedOver {
    protocol: PdProtocol,
    /// Parameters for the decoding engine, as JSON text; `None` if it needs to know nothing.
    params: Option<String>,
    since: Instant,
    /// Whether no engine has been offered it before.
    is_fresh: bool,
}

/// What came of the first leg.
pub(super) enum Step {
    HandedOver(HandedOver),
    /// The first engine's answer is the client's.
    Answered(Box<Exchanged>),
    /// One engine does it all.
    Alone,
}

impl Disaggregation<'_> {
    /// KV that was computed for an engine which did not see the request, unless it may be gone.
    pub(super) fn offer_again(&mut self, protocol: PdProtocol) -> Option<HandedOver> {
        let handed_over = self.handed_over.take()?;
        let lease = millis(self.scene.config.disaggregation.lease_ms);
        if handed_over.protocol == protocol && handed_over.since.elapsed() < lease {
            return Some(handed_over);
        }
        Metrics::disaggregation_fallback(protocol.as_str(), "lease_over");
        self.is_given_up = true;
        None
    }

    /// Finds or computes the KV of the prompt elsewhere.
    pub(super) async fn hand_over(
        &mut self,
        number: usize,
        decode: &Arc<Backend>,
        protocol: PdProtocol,
        shape: &Shape,
        call: &Call<'_>,
    ) -> Result<Step, Failure> {
        let scene = self.scene;
        match self.decide(number, decode, protocol, shape).outcome {
            Err(plain) => {
                Metrics::disaggregation(protocol.as_str(), plain.as_str());
                return Ok(Step::Alone);
            }
            Ok(Partner::Holder(member)) => {
                let holder = scene.group.seats[member].part.transfer.as_deref();
                let params = holder.map(|holder| KvRequestId::new().source_params(holder));
                return Ok(Step::HandedOver(HandedOver::new(protocol, params)));
            }
            Ok(Partner::Prefill(_)) => {}
        }
        let mut tried: Vec<Arc<Backend>> = Vec::new();
        while tried.len() < MAX_PREFILLS {
            if !tried.is_empty() && !scene.shared.retry_budget.withdraw() {
                break;
            }
            let Some(prefill) = scene.place_prefill(decode, protocol, &tried) else { break };
            let backend = Arc::clone(&prefill.load.backend);
            let id = KvRequestId::new();
            let params = match protocol {
                PdProtocol::NixlPull => Some(nixl_pull::PREFILL_PARAMS.to_owned()),
                PdProtocol::P2p => Some(id.prefill_params()),
                PdProtocol::Shared | PdProtocol::Sglang | PdProtocol::Kvik => None,
            };
            let Some(body) = prefill_body(&call.body, params.as_deref()) else { break };
            let leg = Call { body, until: scene.prefill_until(call), ..call.clone() };
            match scene.compute(protocol, prefill, &leg).await? {
                Prefilled::Refused(exchanged) => {
                    Metrics::disaggregation(protocol.as_str(), "prefill_refused");
                    return Ok(Step::Answered(exchanged));
                }
                Prefilled::Failed(reason) => Metrics::disaggregation_fallback(protocol.as_str(), reason),
                Prefilled::Done(answer) => {
                    let seat = scene.group.seat_of(&backend);
                    let peer = seat.and_then(|(_, seat)| seat.part.transfer.as_deref());
                    let params = match protocol {
                        PdProtocol::NixlPull => nixl_pull::handed_over(&answer),
                        PdProtocol::P2p => peer.map(|peer| id.decode_params(peer)),
                        PdProtocol::Shared | PdProtocol::Sglang | PdProtocol::Kvik => {
                            return Ok(Step::HandedOver(HandedOver::new(protocol, None)));
                        }
                    };
                    if params.is_some() {
                        return Ok(Step::HandedOver(HandedOver::new(protocol, params)));
                    }
                    Metrics::disaggregation_fallback(protocol.as_str(), "nothing_handed_over");
                    break;
                }
            }
            tried.push(backend);
        }
        self.is_given_up = true;
        Ok(Step::Alone)
    }

    /// Has `decode` answer with KV that was computed elsewhere; without it if it cannot use it.
    pub(super) async fn decode(
        &mut self,
        number: usize,
        decode: &Arc<Backend>,
        shape: &Shape,
        handed_over: HandedOver,
        call: &Call<'_>,
    ) -> Result<Exchanged, Failure> {
        let scene = self.scene;
        let protocol = handed_over.protocol;
        let until = scene.decode_until(call, shape.is_stream);
        let Some(body) = decode_body(&call.body, handed_over.params.as_deref()) else {
            return self.exchange_alone(decode, shape, call).await;
        };
        let mut response = match exchange(scene.shared, decode, &Call { body, until, ..call.clone() }).await {
            Ok(response) => response,
            Err(failure) => {
                // One that may have seen the request may have read the KV, whose memory is then used again.
                let is_unseen = match &failure {
                    Failure::Unreachable => true,
                    Failure::Unavailable(response) => response.status() == StatusCode::SERVICE_UNAVAILABLE,
                    _ => false,
                };
                Metrics::disaggregation_fallback(protocol.as_str(), "decode_failed");
                self.handed_over = is_unseen.then_some(HandedOver { is_fresh: false, ..handed_over });
                return Err(failure);
            }
        };
        let begins_well = if response.status().is_server_error() {
            Ok(false)
        } else {
            scene.begins_well(decode, &mut response, call).await
        };
        if !matches!(begins_well, Ok(true)) {
            Metrics::disaggregation_fallback(protocol.as_str(), "decode_failed");
        }
        // What failed may be the transfer: the engine itself answers, as far as there is a budget for trying again.
        if !begins_well? && scene.shared.retry_budget.withdraw() {
            tracing::debug!(worker = %decode.id, "an answer with KV from elsewhere failed; trying without it");
            scene.shared.metrics.retries.increment(1);
            self.is_given_up = true;
            drop(response);
            return self.exchange_alone(decode, shape, call).await;
        }
        if shape.is_stream {
            let time = handed_over.since.elapsed();
            Metrics::handed_over(protocol.as_str(), time);
            if handed_over.is_fresh {
                let assumed = scene.config.disaggregation.transfer_tokens_per_s;
                decode.transfer_speed.measure_at_best(scene.uncached_tokens(number), time, assumed);
            }
        }
        Metrics::disaggregation(protocol.as_str(), "disaggregated");
        Ok(Exchanged { has_foreign_kv: true, ..Exchanged::plain(response) })
    }
}

impl HandedOver {
    fn new(protocol: PdProtocol, params: Option<String>) -> Self {
        Self { protocol, params, since: Instant::now(), is_fresh: true }
    }
}

/// A body that asks for nothing but the KV of its prompt; `None` if it cannot be made.
fn prefill_body(body: &[u8], params: Option<&str>) -> Option<Bytes> {
    let text = simdutf8::basic::from_utf8(body).ok()?;
    let [stream, max_tokens, stream_options, max_completion_tokens, min_tokens] = shared_store::PREFILL_EDITS;
    let params = Edit { name: "kv_transfer_params", value: params };
    splice(text, &[stream, max_tokens, stream_options, max_completion_tokens, min_tokens, params]).ok()
}

/// The client's body with the parameters of the prompt's KV; `None` if it cannot be made.
fn decode_body(body: &Bytes, params: Option<&str>) -> Option<Bytes> {
    let Some(params) = params else { return Some(body.clone()) };
    let text = simdutf8::basic::from_utf8(body).ok()?;
    splice(text, &[Edit::set("kv_transfer_params", params)]).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_prompt_is_computed_by_a_body_for_one_token_in_one_piece() {
        let body = br#"{"model":"m","prompt":"a","stream":true,"stream_options":{"include_usage":true},
            "max_completion_tokens":9,"max_tokens":7,"min_tokens":5,"temperature":0.5,"kv_transfer_params":null}"#;
        let spliced = prefill_body(body, Some("{\"x\":1}")).unwrap();
        let expected = json!({
            "model": "m", "prompt": "a", "stream": false, "max_tokens": 1, "temperature": 0.5,
            "kv_transfer_params": {"x": 1},
        });
        assert_eq!(serde_json::from_slice::<Value>(&spliced).unwrap(), expected);
        let plain = prefill_body(body, None).unwrap();
        assert!(serde_json::from_slice::<Value>(&plain).unwrap().get("kv_transfer_params").is_none());
    }

    #[test]
    fn an_answer_is_asked_for_by_the_clients_body_and_one_key() {
        let body = Bytes::from_static(br#"{ "prompt":"a", "max_tokens":7 }"#);
        let spliced = decode_body(&body, Some("{\"x\":1}")).unwrap();
        assert_eq!(spliced, r#"{"kv_transfer_params":{"x":1},"prompt":"a", "max_tokens":7}"#);
        let untouched = decode_body(&body, None).unwrap();
        assert_eq!(untouched.as_ptr(), body.as_ptr());
    }
}
