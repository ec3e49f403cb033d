//! Requests that are done by two engines: one computes the prompt, the other one generates.
//!
//! The engine that generates is chosen first, as for every request. Then [`decision`] says whether it pays to have the prompt
//! computed elsewhere, and how depends on the protocol of the engines:
//!
//! | protocol | file | order |
//! |---|---|---|
//! | `nixl_pull` | `nixl_pull.rs` | prompt, then answer with what the first engine said of its KV |
//! | `p2p` | `remote_source.rs` | the answer alone, with an engine to pull from; or prompt, then answer |
//! | `shared` | `shared_store.rs` | prompt, then answer |
//! | `sglang` | `sglang.rs` | both at once; always, since its servers do one part only |
//! | `kvik` | `moving.rs` | the prompt's worker answers, and the request moves after its first token |
//!
//! Whatever fails before the first byte of an answer costs time and nothing else: another engine computes the prompt, or the engine
//! that generates does. KV is never offered to an engine if it may not be there any more. docs/disaggregation.md has the table of states.

mod decision;
mod legs;
mod moving;
mod nixl_pull;
mod remote_source;
mod sglang;
mod shape;
mod shared_store;

use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use tokio::time::Instant;

pub(crate) use self::decision::Figures;
use self::decision::Plain;
pub(crate) use self::legs::Prefill;
use self::legs::{MAX_PREFILLS, Prefilled, Scene};
use self::remote_source::KvRequestId;
use self::shape::Shape;
use crate::config::{GatewayConfig, PdProtocol, Role, millis};
use crate::error::Refusal;
use crate::metrics::Metrics;
use crate::placement::choose_among;
use crate::placement::input::Prompt;
use crate::placement::lookup::Lookup;
use crate::request::splice::{Edit, splice};
use crate::state::Shared;
use crate::upstream::backend::Backend;
use crate::upstream::exchange::{Call, Exchanged, Failure, exchange};
use crate::upstream::fleet::{ModelGroup, Transfer};

/// The parts of one request, over all its tries.
#[derive(Debug)]
pub(crate) struct Disaggregation<'a> {
    scene: Scene<'a>,
    /// KV that was computed for an engine which has not seen the request.
    handed_over: Option<HandedOver>,
    /// Whether the rest is left to one engine, because KV from elsewhere has failed.
    is_given_up: bool,
}

/// KV that an engine has computed for another one.
#[derive(Debug)]
struct HandedOver {
    protocol: PdProtocol,
    /// What the decoding engine is told, as JSON text; `None` if it needs to know nothing.
    params: Option<String>,
    since: Instant,
    /// Whether no engine has been offered it before.
    is_fresh: bool,
}

/// What a request would be done by, and why.
#[derive(Debug)]
pub(crate) struct Decision {
    pub(crate) protocol: PdProtocol,
    pub(crate) figures: Figures,
    pub(crate) outcome: Result<Partner, Plain>,
    /// What in the request does not allow it, if so.
    pub(crate) obstacle: Option<&'static str>,
}

/// The other backend, by its seat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Partner {
    /// Computes the prompt.
    Prefill(usize),
    /// Has a part of the prompt, which is pulled.
    Holder(usize),
}

/// What came of the first leg.
enum Step {
    HandedOver(HandedOver),
    /// The first engine's answer is the client's.
    Answered(Box<Exchanged>),
    /// One engine does it all.
    Alone,
}

impl<'a> Disaggregation<'a> {
    /// Begins with a request that has not been sent.
    pub(crate) fn new(
        shared: &'a Arc<Shared>,
        config: &'a GatewayConfig,
        group: &'a ModelGroup,
        prompt: Prompt<'a>,
    ) -> Self {
        let n_tokens = prompt.lookup.and_then(Lookup::prompt_tokens).unwrap_or(prompt.n_tokens);
        let scene = Scene { shared, config, group, prompt: Prompt { n_tokens, ..prompt } };
        Self { scene, handed_over: None, is_given_up: false }
    }

    /// Sends a request to `decode`, and before or beside that to another engine if that pays, and waits for the head of the
    /// answer; of an answer that uses KV from elsewhere, also for its first event. Dropping the future cancels all legs.
    ///
    /// # Errors
    /// As [`exchange`]; [`Failure::Refused`] if the client says itself where KV is and may not.
    pub(crate) async fn exchange(
        &mut self,
        decode: &Arc<Backend>,
        call: &Call<'_>,
    ) -> Result<Exchanged, Failure> {
        let Some((number, transfer, shape)) = self.parts(decode, call).map_err(Failure::Refused)? else {
            return self.exchange_plain(decode, call).await;
        };
        if transfer.protocol == PdProtocol::Sglang {
            return sglang::exchange_at_once(&self.scene, decode, &shape, call).await;
        }
        if transfer.protocol == PdProtocol::Kvik {
            return self.exchange_moving(number, decode, &shape, call).await;
        }
        let handed_over = match self.offer_again(transfer.protocol) {
            Some(handed_over) => handed_over,
            None if self.is_given_up => return self.exchange_alone(decode, &shape, call).await,
            None => match self.hand_over(number, decode, transfer.protocol, &shape, call).await? {
                Step::HandedOver(handed_over) => handed_over,
                Step::Answered(exchanged) => return Ok(*exchanged),
                Step::Alone => return self.exchange_alone(decode, &shape, call).await,
            },
        };
        self.decode(number, decode, &shape, handed_over, call).await
    }

    /// Sends a request to a worker for prompts that moves it to `decode`, or to `decode` alone.
    async fn exchange_moving(
        &mut self,
        number: usize,
        decode: &Arc<Backend>,
        shape: &Shape,
        call: &Call<'_>,
    ) -> Result<Exchanged, Failure> {
        let outcome = if self.is_given_up {
            None
        } else {
            Some(self.decide(number, decode, PdProtocol::Kvik, shape).outcome)
        };
        match outcome {
            Some(Ok(_)) => {
                if let Some(exchanged) = moving::exchange_moving(&self.scene, decode, shape, call).await? {
                    return Ok(exchanged);
                }
                self.is_given_up = true;
            }
            Some(Err(plain)) => Metrics::disaggregation(PdProtocol::Kvik.as_str(), plain.as_str()),
            None => {}
        }
        self.exchange_alone(decode, shape, call).await
    }

    /// What [`exchange`](Self::exchange) would do with the first leg of a request now; `None` if the backend takes whole requests only.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn explain(
        &self,
        decode: &Arc<Backend>,
        call: &Call<'_>,
    ) -> Result<Option<Decision>, Refusal> {
        let parts = self.parts(decode, call)?;
        Ok(parts.map(|(number, transfer, shape)| self.decide(number, decode, transfer.protocol, &shape)))
    }

    /// Places the prompt of a request on the engine that is to compute it for `decode`; `None` if one engine does it all. For a
    /// data plane whose engines transfer KV themselves, given each other's address.
    ///
    /// # Errors
    /// As [`explain`](Self::explain), and if `decode` requires a prefill engine and none is usable.
    pub(crate) fn place_partner(
        &self,
        decode: &Arc<Backend>,
        call: &Call<'_>,
    ) -> Result<Option<Prefill>, Refusal> {
        let Some((number, transfer, shape)) = self.parts(decode, call)? else { return Ok(None) };
        let protocol = transfer.protocol;
        let outcome = match protocol {
            // A worker of kvik moves the request itself, to where the gateway that reads its journal says.
            PdProtocol::Kvik => Err(Plain::Off),
            _ => self.decide(number, decode, protocol, &shape).outcome,
        };
        let prefill = match outcome {
            Ok(Partner::Prefill(_)) => self.scene.place_prefill(decode, protocol, &[]),
            // Pulling takes a field in the body, which stays as it came.
            Ok(Partner::Holder(_)) => None,
            Err(plain) => {
                Metrics::disaggregation(protocol.as_str(), plain.as_str());
                None
            }
        };
        if prefill.is_some() {
            Metrics::disaggregation(protocol.as_str(), "disaggregated");
        } else if protocol == PdProtocol::Sglang {
            return Err(Refusal::no_backend(1));
        }
        Ok(prefill)
    }

    /// Number, transfer and shape of a request that may have parts on `decode`.
    fn parts(
        &self,
        decode: &Arc<Backend>,
        call: &Call<'_>,
    ) -> Result<Option<(usize, &'a Transfer, Shape)>, Refusal> {
        if !self.scene.group.has_parts() {
            return Ok(None);
        }
        let Some(shape) = Shape::read(call.route, &call.body) else { return Ok(None) };
        if let Some(field) = shape.engine_field {
            if self.scene.config.disaggregation.allow_client_params {
                return Ok(None);
            }
            let message = format!(
                "`{field}` is set; allowed: none here, where the gateway says which engine has the prompt's KV"
            );
            return Err(Refusal::invalid(message, Some(field)));
        }
        let seat = self.scene.group.seat_of(decode);
        Ok(seat.and_then(|(number, seat)| Some((number, seat.part.transfer.as_deref()?, shape))))
    }

    /// Sends a request that has no parts.
    ///
    /// # Errors
    /// As [`Failure`] says.
    pub(crate) async fn exchange_plain(
        &self,
        decode: &Backend,
        call: &Call<'_>,
    ) -> Result<Exchanged, Failure> {
        exchange(self.scene.shared, decode, call).await.map(Exchanged::plain)
    }

    /// As [`exchange_plain`](Self::exchange_plain), after some time: that of the head begins now.
    async fn exchange_alone(
        &self,
        decode: &Backend,
        shape: &Shape,
        call: &Call<'_>,
    ) -> Result<Exchanged, Failure> {
        let until = self.scene.decode_until(call, shape.is_stream);
        self.exchange_plain(decode, &Call { until, ..call.clone() }).await
    }

    /// KV that was computed for an engine which did not see the request, unless it may be gone.
    fn offer_again(&mut self, protocol: PdProtocol) -> Option<HandedOver> {
        let handed_over = self.handed_over.take()?;
        let lease = millis(self.scene.config.disaggregation.lease_ms);
        if handed_over.protocol == protocol && handed_over.since.elapsed() < lease {
            return Some(handed_over);
        }
        Metrics::disaggregation_fallback(protocol.as_str(), "lease_over");
        self.is_given_up = true;
        None
    }

    /// Decides how a request is done that `decode` will answer.
    fn decide(&self, number: usize, decode: &Arc<Backend>, protocol: PdProtocol, shape: &Shape) -> Decision {
        let Scene { config, group, prompt, .. } = self.scene;
        let settings = &config.disaggregation;
        let uncached_tokens = self.scene.uncached_tokens(number);
        let mut figures = Figures::new(settings, decode, uncached_tokens);
        let allowed = self.scene.prefilling(decode, protocol, &[]);
        let chosen = choose_among(group, self.scene.wanted(), &config.routing, allowed);
        let prefill = chosen.map(|choice| (choice.member, choice.load));
        if let Some((member, queue_tokens)) = prefill {
            figures = figures.with_prefill(settings, &group.seats[member].backend, queue_tokens);
        }
        let decide = || {
            if protocol == PdProtocol::Sglang {
                return prefill.map(|(member, _)| Partner::Prefill(member)).ok_or(Plain::NoPrefill);
            }
            if !settings.enabled {
                return Err(Plain::Off);
            }
            if shape.obstacle.is_some() {
                return Err(Plain::Unsuited);
            }
            if protocol == PdProtocol::P2p
                && let Some((member, n_gained)) = self.holder(number, decode)
                && figures.pays(n_gained).is_ok()
            {
                return Ok(Partner::Holder(member));
            }
            figures.pays(uncached_tokens)?;
            let (member, _) = prefill.ok_or(Plain::NoPrefill)?;
            figures.has_turn()?;
            // Its own load is there already.
            let own_tokens = uncached_tokens.saturating_add(prompt.n_output_tokens).max(1);
            let is_idle = decode.outstanding_tokens() <= own_tokens;
            if is_idle && group.seats[member].part.role == Role::Both {
                return Err(Plain::Idle);
            }
            Ok(Partner::Prefill(member))
        };
        let obstacle = shape.obstacle.filter(|_| protocol != PdProtocol::Sglang);
        Decision { protocol, outcome: decide(), figures, obstacle }
    }

    /// The backend that has most of the prompt, and how many tokens more than `decode`, as far as the index knows.
    fn holder(&self, number: usize, decode: &Arc<Backend>) -> Option<(usize, u64)> {
        let Scene { group, prompt, .. } = self.scene;
        let lookup = prompt.lookup?;
        let cached_tokens = prompt.n_tokens.saturating_sub(self.scene.uncached_tokens(number));
        let matched = |backend: &Backend| lookup.matched_tokens(backend).min(prompt.n_tokens);
        remote_source::holder(group, decode, cached_tokens, matched)
    }

    /// Finds or computes the KV of the prompt elsewhere.
    async fn hand_over(
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
    async fn decode(
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

impl Decision {
    /// What is done, or why nothing is, in one word.
    pub(crate) fn word(&self) -> &'static str {
        match self.outcome {
            Ok(Partner::Prefill(_)) => "disaggregate",
            Ok(Partner::Holder(_)) => "pull",
            Err(plain) => plain.as_str(),
        }
    }

    /// The other backend's seat.
    pub(crate) fn partner(&self) -> Option<usize> {
        match self.outcome {
            Ok(Partner::Prefill(member) | Partner::Holder(member)) => Some(member),
            Err(_) => None,
        }
    }
}

/// A body that asks for nothing but the KV of its prompt; `None` if it cannot be made.
fn prefill_body(body: &[u8], params: Option<&str>) -> Option<Bytes> {
    let text = simdutf8::basic::from_utf8(body).ok()?;
    let [stream, max_tokens, stream_options, max_completion_tokens, min_tokens] = shared_store::PREFILL_EDITS;
    let params = Edit { name: "kv_transfer_params", value: params };
    splice(text, &[stream, max_tokens, stream_options, max_completion_tokens, min_tokens, params]).ok()
}

/// The client's body with what its engine is told about the prompt's KV; `None` if it cannot be made.
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
