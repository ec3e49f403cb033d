//! Whether chunks of a daemon are loaded or computed.
//!
//! The daemon reads the chunks of a chain together, so nothing is computed meanwhile: either all that it has is loaded, or
//! nothing. What loads took is measured here, from the request to the last copied byte.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvik_node::PlannerMode;
use kvik_store::plan::{PlanInput, PlannedChunk, TierState, plan};
use kvik_store::{Chain, SpeedMeter};
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
        let chunk = |chunk_idx: usize| PlannedChunk {
            tokens: chain.tokens_of(chunk_idx),
            n_bytes: chain.payload_bytes(chunk_idx) as u64,
            tier: Some(0),
        };
        let chunks: Vec<PlannedChunk> = (first_chunk..n_found).map(chunk).collect();
        let Some(first) = chunks.first() else { return false };
        let times = plan(&PlanInput {
            // The last token of a prompt is not in its chain.
            n_prompt_tokens: chain.n_tokens() + 1,
            first_token: first.tokens.start,
            n_queued_tokens: 0,
            chunks: &chunks,
            tiers: &[TierState { speed: self.speed_of(tier).speed(), queued_bytes: 0 }],
            prefill: self.engine.prefill(),
            n_layers: chain.space().format().n_layers as usize,
        })
        .times;
        times.is_none_or(|times| times.load_all_s <= times.compute_all_s)
    }

    /// Whether a tier whose chunks are computed should be measured again, which costs no request anything: it would stay as slow
    /// as it was.
    pub(super) fn claim_measurement(&self, tier: TierKind) -> bool {
        self.mode == PlannerMode::Auto && self.speed_of(tier).claim_measurement(MAX_AGE)
    }
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

    /// A planner whose engine computes a token in `token_s`, and whose disk took `read_s` for a megabyte.
    fn planner(mode: PlannerMode, token_s: f64, read_s: f64) -> DaemonPlanner {
        let planner = DaemonPlanner::new(mode);
        planner.engine.note_pass(1000, 0, 1000.0 * token_s);
        let read = || std::thread::sleep(Duration::from_secs_f64(read_s));
        planner.speed_of(TierKind::Nvme).measure(read, |()| 1_000_000);
        planner
    }

    #[test]
    fn what_is_computed_sooner_than_it_was_loaded_is_not_loaded() {
        let chain = chain(2048);
        let should_load =
            |planner: &DaemonPlanner, tier| planner.should_load(&chain, 0, chain.n_chunks(), tier);
        // 262 144 bytes take at least 5 ms from the disk, and 2 048 tokens 2 ms or 2 s.
        let fast = planner(PlannerMode::Auto, 1e-6, 0.02);
        assert!(!should_load(&fast, TierKind::Nvme));
        assert!(should_load(&planner(PlannerMode::Auto, 1e-3, 0.02), TierKind::Nvme));
        // What is in memory, and what was never measured.
        assert!(should_load(&fast, TierKind::Ram) && should_load(&fast, TierKind::Peer));
        assert!(!fast.should_load(&chain, 3, 3, TierKind::Nvme));
        // The other modes ask nothing.
        assert!(should_load(&planner(PlannerMode::LoadAll, 1e-6, 0.02), TierKind::Nvme));
        assert!(!should_load(&planner(PlannerMode::ComputeAll, 1e-3, 0.02), TierKind::Ram));
    }

    #[test]
    fn a_tier_that_is_not_asked_is_measured_once_in_a_while() {
        let planner = DaemonPlanner::new(PlannerMode::Auto);
        assert!(planner.claim_measurement(TierKind::Nvme) && !planner.claim_measurement(TierKind::Nvme));
        assert!(planner.claim_measurement(TierKind::Peer));
        assert!(!DaemonPlanner::new(PlannerMode::ComputeAll).claim_measurement(TierKind::Peer));
    }
}
