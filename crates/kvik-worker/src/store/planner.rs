//! Whether a prompt's KV is loaded or computed.
//!
//! [`Planner`] has what was measured: the store knows its tiers, the engine's thread tells what its passes took. It decides
//! what is asked of slow tiers, and how long the engine waits for a chunk when it has come to it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use kvik_store::plan::{
    Decision, Plan, PlanInput, PlannedChunk, PrefillMeter, PrefillSpeed, TierState, plan,
};
use kvik_store::{Chain, ChunkPlaces, Store};
use parking_lot::Mutex;

/// What the engine says of a request whose KV may be loaded.
#[derive(Debug, Clone)]
pub(crate) struct LoadRequest {
    pub(crate) chain: Chain,
    pub(crate) n_prompt_tokens: usize,
    /// Tokens, from the first on, whose KV the engine has.
    pub(crate) n_matched_tokens: usize,
    /// Tokens of other prompts that it computes before.
    pub(crate) n_queued_tokens: usize,
}

/// Decides what is loaded.
#[derive(Debug, Default)]
pub(crate) struct Planner {
    prefill: Mutex<PrefillMeter>,
    /// Tokens of the longest pass so far.
    longest_pass: AtomicUsize,
    counts: PlanCounts,
}

/// What was decided.
#[derive(Debug, Default)]
struct PlanCounts {
    loads: AtomicU64,
    layers: AtomicU64,
    meets: AtomicU64,
    computes: AtomicU64,
    loaded_tokens: AtomicU64,
    computed_tokens: AtomicU64,
}

/// What a plan was made of.
#[derive(Debug)]
pub(crate) struct Planned {
    pub(crate) plan: Plan,
    /// The chunks that some tier has, from the first that the engine does not have.
    pub(crate) chunks: Vec<PlannedChunk>,
    pub(crate) tiers: Vec<TierState>,
    pub(crate) prefill: Option<PrefillSpeed>,
}

impl LoadRequest {
    /// The first chunk of which the engine has not all.
    pub(crate) fn first_chunk(&self) -> usize {
        self.n_matched_tokens / self.chain.space().chunk_tokens()
    }
}

impl Planner {
    /// Takes a pass of the engine.
    pub(crate) fn note_pass(&self, n_tokens: usize, n_attended: u64, seconds: f64) {
        self.longest_pass.fetch_max(n_tokens, Ordering::Relaxed);
        self.prefill.lock().add(n_tokens, n_attended, seconds);
    }

    /// How fast the engine computes; `None` before its first prompt.
    pub(crate) fn prefill(&self) -> Option<PrefillSpeed> {
        self.prefill.lock().speed()
    }

    /// Makes the plan of a request whose chunks lie where `places` says.
    pub(crate) fn plan(&self, store: &Store, request: &LoadRequest, places: &ChunkPlaces) -> Planned {
        let first_chunk = request.first_chunk();
        let chunk = |place: usize| {
            let tokens = request.chain.tokens_of(first_chunk + place);
            PlannedChunk {
                tokens: tokens.start.max(request.n_matched_tokens)..tokens.end,
                n_bytes: request.chain.payload_bytes(first_chunk + place) as u64,
                tier: places.tier(place).checked_sub(1),
            }
        };
        let chunks: Vec<PlannedChunk> = (0..places.n_chunks()).map(chunk).collect();
        let (tiers, prefill) = (store.tier_states(), self.prefill());
        let plan = plan(&PlanInput {
            n_prompt_tokens: request.n_prompt_tokens,
            first_token: request.n_matched_tokens,
            n_queued_tokens: request.n_queued_tokens,
            chunks: &chunks,
            tiers: &tiers,
            prefill,
            n_layers: request.chain.space().format().n_layers as usize,
            max_pass_tokens: self.longest_pass.load(Ordering::Relaxed),
        });
        Planned { plan, chunks, tiers, prefill }
    }

    /// Counts a plan that is followed.
    pub(crate) fn count(&self, planned: &Planned) {
        let Planned { plan, chunks, .. } = planned;
        let counts = &self.counts;
        let decided = match plan.decision {
            Decision::Load => &counts.loads,
            Decision::Layers => &counts.layers,
            Decision::Meet => &counts.meets,
            Decision::Compute => &counts.computes,
        };
        decided.fetch_add(1, Ordering::Relaxed);
        for (place, chunk) in chunks.iter().enumerate() {
            let is_loaded = chunk.tier.is_none() || (plan.n_computed_chunks..plan.n_chunks).contains(&place);
            let count = if is_loaded { &counts.loaded_tokens } else { &counts.computed_tokens };
            count.fetch_add(chunk.tokens.len() as u64, Ordering::Relaxed);
        }
    }

    /// What was decided, by name.
    pub(crate) fn counts(&self) -> [(&'static str, u64); 6] {
        let counts = &self.counts;
        [
            ("planned_load_requests", &counts.loads),
            ("planned_layers_requests", &counts.layers),
            ("planned_meet_requests", &counts.meets),
            ("planned_compute_requests", &counts.computes),
            ("planned_loaded_tokens", &counts.loaded_tokens),
            ("planned_computed_tokens", &counts.computed_tokens),
        ]
        .map(|(name, count)| (name, count.load(Ordering::Relaxed)))
    }
}
