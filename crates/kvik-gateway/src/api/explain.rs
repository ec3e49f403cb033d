//! Where a request would go now, and why.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use kvik_index::placement::{QUEUE_SHARE, Request as Placement};
use kvik_proto::route::{DisaggregationExplanation, RouteCandidate, RouteExplanation};
use tokio::time::Instant;

use super::index::answer;
use crate::answer::forward::{expected_output_tokens, find_group};
use crate::answer::refuse;
use crate::config::millis;
use crate::disaggregation::{Decision, Disaggregation};
use crate::error::Refusal;
use crate::placement::input::RouteInput;
use crate::placement::lookup::Lookup;
use crate::placement::{answering, choose_among};
use crate::request::body::read_body;
use crate::request::peek::Peek;
use crate::route::Route;
use crate::state::Shared;
use crate::upstream::exchange::Call;
use crate::upstream::fleet::ModelGroup;

/// Explains a request for a completion or a chat completion; nothing is sent and no load changes.
pub(super) async fn explain(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    find(&shared, request).await.unwrap_or_else(refuse)
}

async fn find(shared: &Arc<Shared>, request: Request) -> Result<Response, Refusal> {
    let view = shared.view();
    let config = &*view.config;
    let (parts, body) = request.into_parts();
    let deadline = Instant::now() + millis(config.timeouts.request_ms);
    let reading = read_body(body, &parts.headers, config.max_body_bytes, deadline);
    let body = reading.await.map_err(Refusal::before_body)?;
    let peek = Peek::read(&body).map_err(|error| Refusal::invalid(error.message, error.param))?;
    let route = if peek.messages.is_some() { Route::Chat } else { Route::Completions };
    let group = find_group(&view.fleet, &peek)?;
    let output_tokens = expected_output_tokens(route, &peek, config);
    let asked = (route, &peek);
    let input = RouteInput::read(shared, group, asked, &parts.headers, &config.routing, output_tokens).await;
    let exact_tokens = input.lookup.as_ref().and_then(Lookup::prompt_tokens);
    let wanted = input.wanted();
    let request = wanted.request;
    let may_answer = answering(group, &[]);
    let choice = choose_among(group, wanted, &config.routing, &may_answer);
    let mut explanation = RouteExplanation {
        model: group.model.clone(),
        prompt_tokens: exact_tokens.unwrap_or(input.prompt_tokens),
        is_exact: exact_tokens.is_some(),
        output_tokens,
        candidates: (0..group.seats.len()).map(|member| candidate(group, member, request)).collect(),
        ..RouteExplanation::default()
    };
    for (candidate, seat) in explanation.candidates.iter_mut().zip(&group.seats) {
        candidate.may_answer = may_answer(seat);
    }
    if let Some(choice) = choice {
        let backend = &group.seats[choice.member].backend;
        explanation.worker = Some(backend.id.clone());
        explanation.reason = Some(choice.reason.as_str().to_owned());
        let call = Call {
            path: None,
            route,
            headers: &parts.headers,
            query: None,
            body: body.clone(),
            decode_at: None,
            until: deadline,
            deadline,
        };
        let decision = Disaggregation::new(shared, config, group, input.prompt()).explain(backend, &call)?;
        explanation.disaggregation = decision.map(|decision| explain_decision(group, &decision));
    }
    Ok(answer(&explanation))
}

fn candidate(group: &ModelGroup, member: usize, request: Placement<'_>) -> RouteCandidate {
    let (seat, weight) = (&group.seats[member], group.weights[member]);
    let (left_tokens, outstanding_tokens) = (request.left(member), seat.backend.outstanding_tokens());
    RouteCandidate {
        worker: seat.backend.id.clone(),
        role: seat.part.role.as_str().to_owned(),
        pd: seat.part.protocol().map(|protocol| protocol.as_str().to_owned()),
        may_answer: false,
        is_usable: seat.is_usable(),
        cached_tokens: request.tokens - left_tokens,
        outstanding_tokens,
        weight,
        cost: (left_tokens as f64 + QUEUE_SHARE * outstanding_tokens as f64) / weight.max(f64::MIN_POSITIVE),
    }
}

fn explain_decision(group: &ModelGroup, decision: &Decision) -> DisaggregationExplanation {
    let figures = &decision.figures;
    DisaggregationExplanation {
        protocol: decision.protocol.as_str().to_owned(),
        decision: decision.word().to_owned(),
        partner: decision.partner().map(|member| group.seats[member].backend.id.clone()),
        obstacle: decision.obstacle.map(str::to_owned),
        uncached_tokens: figures.uncached_tokens,
        threshold_tokens: figures.threshold_tokens,
        decode_tokens_per_s: figures.decode_tokens_per_s,
        transfer_tokens_per_s: figures.transfer_tokens_per_s,
        prefill_tokens_per_s: figures.prefill_tokens_per_s,
        prefill_queue_tokens: figures.prefill_queue_tokens,
    }
}
