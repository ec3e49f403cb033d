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
mod hand_over;
mod legs;
mod moving;
mod nixl_pull;
mod remote_source;
mod sglang;
mod shape;
mod shared_store;

use std::sync::Arc;

pub(crate) use self::decision::Figures;
use self::decision::Plain;
use self::hand_over::{HandedOver, Step};
pub(crate) use self::legs::Prefill;
use self::legs::Scene;
use self::shape::Shape;
use crate::config::{GatewayConfig, PdProtocol, Role};
use crate::error::Refusal;
use crate::metrics::Metrics;
use crate::placement::choose_among;
use crate::placement::input::Prompt;
use crate::placement::lookup::Lookup;
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
