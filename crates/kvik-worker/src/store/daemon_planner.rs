//! Whether chunks of a daemon are loaded or computed.
//!
//! The daemon reads the chunks of a chain together, so nothing is computed meanwhile: either all that it has is loaded, or
//! nothing. What loads took is measured here, from the request to the last copied byte.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvik_node::PlannerMode;
use kvik_store::plan::{PlanInput, PlannedChunk, PrefillSpeed, TierState, plan};
use kvik_store::{Chain, SpeedMeter, TierSpeed};
use kvik_tier::TierKind;
use parking_lot::Mutex;

use super::planner::Planner;

/// Age of a measurement of a tier that is not repeated.
const MAX_AGE: Duration = Duration::from_secs(30);

/// Decides by what was measured.
#[derive(Debug)]
pub(super) struct DaemonPlanner {
    mode: PlannerMode,
    engine: Planner,
    speeds: Mutex<BTreeMap<TierKind, Arc<SpeedMeter>>>,
}

impl DaemonPlanner {
    pub(super) fn new(mode: PlannerMode) -> Self {
        Self { mode, engine: Planner::default(), speeds: Mutex::default() }
    }

    /// What knows the speed of the engine; `None` where that decides nothing.
    pub(super) fn engine(&self) -> Option<&Planner> {
        (self.mode == PlannerMode::Auto).then_some(&self.engine)
    }

    /// What measures the loads of chains whose slowest chunk is in `tier`.
    pub(super) fn speed_of(&self, tier: TierKind) -> Arc<SpeedMeter> {
        Arc::clone(self.speeds.lock().entry(tier).or_default())
    }

    /// Whether the chunks `first_chunk..n_found` of a chain should be loaded; the slowest of them is in `tier`. What lies in memory
    /// is always loaded, and so is what was never measured.
    pub(super) fn should_load(
        &self,
        chain: &Chain,
        first_chunk: usize,
        n_found: usize,
        tier: TierKind,
    ) -> bool {
        match self.mode {
            PlannerMode::LoadAll => return true,
            PlannerMode::ComputeAll => return false,
            PlannerMode::Auto if tier == TierKind::Ram => return true,
            PlannerMode::Auto => {}
        }
        let speed = self.speed_of(tier).speed();
        is_load_faster(chain, first_chunk..n_found, speed, self.engine.prefill())
    }

    /// Whether a tier whose chunks are computed should be measured again, which costs no request anything: it would stay as slow
    /// as it was.
    pub(super) fn claim_measurement(&self, tier: TierKind) -> bool {
        self.mode == PlannerMode::Auto && self.speed_of(tier).claim_measurement(MAX_AGE)
    }
}

/// Whether chunks that come with `speed` are there before an engine with `prefill` has computed them; yes where one of the two is
/// not known.
fn is_load_faster(
    chain: &Chain,
    chunks: Range<usize>,
    speed: Option<TierSpeed>,
    prefill: Option<PrefillSpeed>,
) -> bool {
    let chunk = |chunk_idx: usize| PlannedChunk {
        tokens: chain.tokens_of(chunk_idx),
        n_bytes: chain.payload_bytes(chunk_idx) as u64,
        tier: Some(0),
    };
    let chunks: Vec<PlannedChunk> = chunks.map(chunk).collect();
    let Some(first) = chunks.first() else { return false };
    let times = plan(&PlanInput {
        // The last token of a prompt is not in its chain.
        n_prompt_tokens: chain.n_tokens() + 1,
        first_token: first.tokens.start,
        n_queued_tokens: 0,
        chunks: &chunks,
        tiers: &[TierState { speed, queued_bytes: 0 }],
        prefill,
        n_layers: 1,
        max_pass_tokens: 0,
    })
    .times;
    times.is_none_or(|times| times.load_all_s <= times.compute_all_s)
}

#[cfg(test)]
mod tests {
    use kvik_store::{ChunkFormat, Space, StoreOptions};
    use kvik_types::{BlockSize, Dtype, Namespace};

    use super::*;

    fn chain(n_tokens: u32) -> Chain {
        let format = ChunkFormat {
            n_layers: 2,
            token_layer_bytes: 64,
            n_ranks: 1,
            block_tokens: BlockSize::try_new(16).unwrap(),
        };
        let namespace = Namespace {
            model: "m".to_owned(),
            dtype: Dtype::F32,
            layout: "l".to_owned(),
            tenant: String::new(),
        };
        let space = Space::detached(&namespace, format, &StoreOptions::default()).unwrap();
        space.chain(&(0..n_tokens).collect::<Vec<_>>())
    }

    #[test]
    fn what_is_computed_sooner_than_it_comes_is_not_loaded() {
        let chain = chain(2048);
        // 262 144 bytes in 52 ms.
        let disk = Some(TierSpeed { bytes_per_s: 5e6, latency_s: 0.0 });
        let engine = |token_s| Some(PrefillSpeed { pass_s: 0.0, token_s, attended_s: 0.0 });
        let is_faster = |speed, prefill| is_load_faster(&chain, 0..chain.n_chunks(), speed, prefill);
        assert!(!is_faster(disk, engine(1e-6)) && is_faster(disk, engine(1e-3)));
        // What was never measured is tried, and nothing cannot be loaded.
        assert!(is_faster(None, engine(1e-6)) && is_faster(disk, None));
        assert!(!is_load_faster(&chain, 3..3, None, None));
    }

    #[test]
    fn what_is_in_memory_is_loaded_and_modes_decide_without_times() {
        let chain = chain(2048);
        let should_load = |mode, tier| {
            let planner = DaemonPlanner::new(mode);
            planner.engine.note_pass(1000, 0, 1e-6);
            planner.should_load(&chain, 0, chain.n_chunks(), tier)
        };
        assert!(
            should_load(PlannerMode::Auto, TierKind::Ram) && should_load(PlannerMode::Auto, TierKind::Peer)
        );
        assert!(should_load(PlannerMode::LoadAll, TierKind::Nvme));
        assert!(!should_load(PlannerMode::ComputeAll, TierKind::Ram));
    }

    #[test]
    fn a_tier_that_is_not_asked_is_measured_once_in_a_while() {
        let planner = DaemonPlanner::new(PlannerMode::Auto);
        assert!(planner.claim_measurement(TierKind::Nvme) && !planner.claim_measurement(TierKind::Nvme));
        assert!(planner.claim_measurement(TierKind::Peer));
        assert!(!DaemonPlanner::new(PlannerMode::ComputeAll).claim_measurement(TierKind::Peer));
    }
}
