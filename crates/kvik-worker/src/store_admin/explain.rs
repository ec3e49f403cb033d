//! Why the KV of a prompt would be loaded or computed.

use std::sync::mpsc;

use kvik_node::PlannerMode;
use kvik_proto::cache::{ExplainResponse, ExplainedChunk, PredictedTimes, PrefillEstimate, TierEstimate};
use kvik_store::TierSpeed;
use kvik_store::plan::{Decision, PlanTimes, PlannedChunk, PrefillSpeed, TierState};

use crate::prompt::Prompt;
use crate::store::{LoadRequest, LocalStore, Planned};

/// Plans a prompt of which the engine has nothing, and says why. Remote tiers are asked for as long as a lookup may take.
pub(super) fn explain(local: &LocalStore, prompt: &Prompt) -> ExplainResponse {
    let store = local.store();
    // The last token is computed in any case.
    let loadable = &prompt.tokens[..prompt.tokens.len().saturating_sub(1)];
    let request = LoadRequest {
        chain: local.chain(loadable, prompt.salt.as_ref()),
        n_prompt_tokens: prompt.tokens.len(),
        n_matched_tokens: 0,
        n_queued_tokens: 0,
    };
    let inquiry = store.inquire(&request.chain, 0);
    let (done, is_done) = mpsc::channel();
    inquiry.on_done(move || {
        // The receiver may have waited long enough.
        let _ = done.send(());
    });
    let _ = is_done.recv_timeout(store.options().lookup_timeout);
    let places = inquiry.places();
    let Planned { plan, chunks, tiers, prefill } = local.planner().plan(store, &request, &places);
    let labels = store.tiers();
    let name_of = |tier: usize| labels.get(tier).map_or_else(String::new, |label| label.name.to_string());
    let explained = |(place, chunk): (usize, &PlannedChunk)| {
        let is_loaded = chunk.tier.is_none() || (plan.n_computed_chunks..plan.n_chunks).contains(&place);
        ExplainedChunk {
            first_token: chunk.tokens.start,
            tokens: chunk.tokens.len(),
            bytes: chunk.n_bytes,
            tier: name_of(chunk.tier.map_or(0, |tier| tier + 1)),
            action: if is_loaded { "load" } else { "compute" }.to_owned(),
        }
    };
    let is_by_layers = local.is_layerwise() || plan.decision == Decision::Layers;
    ExplainResponse {
        prompt_tokens: prompt.tokens.len(),
        chunk_tokens: request.chain.space().chunk_tokens(),
        planner: mode_name(local.planner_mode()).to_owned(),
        decision: plan.decision.name().to_owned(),
        reads: if is_by_layers { "layers" } else { "whole" }.to_owned(),
        predicted: plan.times.map(predicted),
        prefill: prefill.map(estimate),
        tiers: tiers.iter().enumerate().map(|(idx, state)| tier_estimate(name_of(idx + 1), state)).collect(),
        chunks: chunks.iter().enumerate().map(explained).collect(),
    }
}

fn mode_name(mode: PlannerMode) -> &'static str {
    match mode {
        PlannerMode::Auto => "auto",
        PlannerMode::LoadAll => "load_all",
        PlannerMode::ComputeAll => "compute_all",
    }
}

fn predicted(times: PlanTimes) -> PredictedTimes {
    let PlanTimes { plan_s, load_all_s, compute_all_s, load_layers_s } = times;
    let [plan_ms, load_all_ms, compute_all_ms, load_layers_ms] =
        [plan_s, load_all_s, compute_all_s, load_layers_s].map(|seconds| rounded(seconds * 1e3));
    PredictedTimes { plan_ms, load_all_ms, compute_all_ms, load_layers_ms }
}

fn estimate(prefill: PrefillSpeed) -> PrefillEstimate {
    PrefillEstimate {
        pass_us: rounded(prefill.pass_s * 1e6),
        token_us: rounded(prefill.token_s * 1e6),
        thousand_before_us: rounded(prefill.attended_s * 1e9),
    }
}

fn tier_estimate(tier: String, state: &TierState) -> TierEstimate {
    TierEstimate {
        tier,
        bytes_per_s: state.speed.map(|TierSpeed { bytes_per_s, .. }| bytes_per_s.round()),
        latency_ms: state.speed.map(|TierSpeed { latency_s, .. }| rounded(latency_s * 1e3)),
        queued_bytes: state.queued_bytes,
    }
}

/// To a thousandth: more digits of an estimate say nothing.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}
