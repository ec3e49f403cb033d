//! Whether the KV of a prompt is loaded or computed, and what of it.
//!
//! KV is computed from the front of a prompt to its back. So there are four things to do with chunks that lie in slow
//! tiers: to load them all and wait; to load them layer by layer and to compute each layer of the tokens behind them as it
//! comes; to compute the front while the back loads, until the two meet; and to compute what
//! would come later than that takes. [`plan`] predicts the time of each and takes the shortest. It reads no clock and asks
//! no tier: what it knows is an argument.

mod prefill;

use std::ops::Range;

use crate::lower::TierSpeed;

pub use prefill::PrefillMeter;

/// Places at which a long chain is cut, at most: the search takes time in proportion to its square.
const MAX_CUTS: usize = 256;

/// A plan that loads fewer chunks must be better than the plans before it by this part of their time: predictions differ by that
/// much from one prompt to the next.
const MIN_GAIN: f64 = 0.02;

/// A plan that computes while it loads, chunks or layers, must be better than the best of the others by this part of its time. It cuts the prompt
/// once more, and the copies of a load slow the engine down: for short prompts that costs 5 to 9 %.
const MIN_MEET_GAIN: f64 = 0.1;

/// And by this many seconds: threads that wake each other, one more copy and one more pass cost a short prompt on a GPU more than
/// they save.
const MIN_MEET_GAIN_S: f64 = 0.01;

/// What passes may cost beside their tokens, as a part of the time of these, where a prompt is cut to look for KV.
const MAX_PASS_SHARE: f64 = 0.1;

/// How fast an engine computes KV.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillSpeed {
    /// Seconds that a pass takes beside those of its tokens. A GPU is slow with few tokens at a time, a CPU is not.
    pub pass_s: f64,
    /// Seconds for a token, whatever stands before it.
    pub token_s: f64,
    /// Seconds more for each token that it looks at.
    pub attended_s: f64,
}

/// A chunk that may be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedChunk {
    /// Its tokens that the engine does not have.
    pub tokens: Range<usize>,
    /// Its bytes in memory.
    pub n_bytes: u64,
    /// The tier that it would come from, as a place in [`PlanInput::tiers`]; `None` where it is in memory.
    pub tier: Option<usize>,
}

/// A tier as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TierState {
    /// What was measured; `None` before its first read.
    pub speed: Option<TierSpeed>,
    /// Bytes that are to be read for others before.
    pub queued_bytes: u64,
}

/// What a plan is made of.
#[derive(Debug, Clone, Copy)]
pub struct PlanInput<'a> {
    /// Tokens of the prompt.
    pub n_prompt_tokens: usize,
    /// The first token that the engine does not have.
    pub first_token: usize,
    /// Tokens of other prompts that the engine computes before.
    pub n_queued_tokens: usize,
    /// The chunks that some tier has, in the order of the prompt and without a gap.
    pub chunks: &'a [PlannedChunk],
    /// The tiers below memory.
    pub tiers: &'a [TierState],
    /// What was measured; `None` before the first prompt.
    pub prefill: Option<PrefillSpeed>,
    /// Layers of the model; 1 where the chunks cannot be read layer by layer.
    pub n_layers: usize,
    /// Tokens of the longest pass: what is computed behind it finds all layers loaded.
    pub max_pass_tokens: usize,
}

/// What is done with the chunks of slow tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// They are loaded, and nothing is computed meanwhile.
    Load,
    /// They are loaded layer by layer, and what lies behind them is computed layer by layer meanwhile.
    Layers,
    /// The front is computed while the back loads.
    Meet,
    /// They are computed.
    Compute,
}

/// What is done with a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// What is done with the chunks of slow tiers.
    pub decision: Decision,
    /// Chunks, from the first on, that are asked of slow tiers.
    pub n_chunks: usize,
    /// Chunks, from the first on, that should be computed when the others have come.
    pub n_computed_chunks: usize,
    /// The times that were compared; `None` where too little was measured to compare any.
    pub times: Option<PlanTimes>,
}

/// Predicted times until the last token of a prompt is computed, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlanTimes {
    /// By this plan.
    pub plan_s: f64,
    /// If all chunks were loaded.
    pub load_all_s: f64,
    /// If none was, also none from memory.
    pub compute_all_s: f64,
    /// If all chunks were loaded layer by layer, and the rest computed layer by layer behind them.
    pub load_layers_s: f64,
}

impl PrefillSpeed {
    /// Seconds to compute a range of a prompt.
    pub fn seconds(&self, tokens: Range<usize>) -> f64 {
        let (first, n_tokens) = (tokens.start as f64, tokens.len() as f64);
        // Each token looks at itself and at all before it.
        let n_attended = n_tokens * first + n_tokens * (n_tokens + 1.0) / 2.0;
        self.token_s * n_tokens + self.attended_s * n_attended
    }

    /// Tokens that a pass should have at least, so that cutting a prompt into such passes costs little.
    pub fn piece_tokens(&self) -> usize {
        (self.pass_s / (MAX_PASS_SHARE * self.token_s)).ceil() as usize
    }

    /// Seconds that it costs to compute `n_tokens` in pieces, beside those of the tokens.
    fn pieces_s(&self, n_tokens: usize) -> f64 {
        self.pass_s * n_tokens.div_ceil(self.piece_tokens().max(1)) as f64
    }
}

impl Decision {
    /// Its name in counts and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Layers => "layers",
            Self::Meet => "meet",
            Self::Compute => "compute",
        }
    }
}

/// Decides what is done with a prompt.
///
/// Where too little was measured, the front is computed while the back loads: that is never much slower than computing
/// everything, and measures both.
pub fn plan(input: &PlanInput<'_>) -> Plan {
    let n_chunks = input.chunks.len();
    if input.chunks.iter().all(|chunk| chunk.tier.is_none()) {
        // All there is lies in memory.
        let times = input.prefill.map(|prefill| {
            let loaded_s = prefill.seconds(input.first_unchunked()..input.n_prompt_tokens);
            let compute_all_s = input.compute_all_s(&prefill);
            PlanTimes { plan_s: loaded_s, load_all_s: loaded_s, compute_all_s, load_layers_s: loaded_s }
        });
        let decision = if n_chunks == 0 { Decision::Compute } else { Decision::Load };
        return Plan { decision, n_chunks, n_computed_chunks: 0, times };
    }
    let speeds: Option<Vec<TierSpeed>> = input.needed_speeds();
    let (Some(prefill), Some(speeds)) = (input.prefill, speeds) else {
        return Plan { decision: Decision::Meet, n_chunks, n_computed_chunks: 0, times: None };
    };
    Search::new(input, prefill, speeds).best()
}

impl PlanInput<'_> {
    /// Where the chunks end.
    fn first_unchunked(&self) -> usize {
        self.chunks.last().map_or(self.first_token, |chunk| chunk.tokens.end).max(self.first_token)
    }

    fn compute_all_s(&self, prefill: &PrefillSpeed) -> f64 {
        self.queue_s(prefill) + prefill.seconds(self.first_token..self.n_prompt_tokens)
    }

    fn queue_s(&self, prefill: &PrefillSpeed) -> f64 {
        prefill.token_s * self.n_queued_tokens as f64
    }

    /// The speeds of all tiers; of those that no chunk needs, any. `None` where one that is needed is not known.
    fn needed_speeds(&self) -> Option<Vec<TierSpeed>> {
        let is_needed = |idx| self.chunks.iter().any(|chunk| chunk.tier == Some(idx));
        let unneeded = TierSpeed { bytes_per_s: 1.0, latency_s: 0.0 };
        let speeds = self
            .tiers
            .iter()
            .enumerate()
            .map(|(idx, state)| if is_needed(idx) { state.speed } else { Some(unneeded) });
        let is_outside = |chunk: &PlannedChunk| chunk.tier.is_some_and(|tier| self.tiers.len() <= tier);
        if self.chunks.iter().any(is_outside) { None } else { speeds.collect() }
    }
}

/// Sums over the first chunks, for the times of all cuts.
struct Search<'a> {
    input: &'a PlanInput<'a>,
    prefill: PrefillSpeed,
    speeds: Vec<TierSpeed>,
    /// Seconds to compute those of the first chunks that are not in memory, and their tokens.
    computed_s: Vec<f64>,
    computed_tokens: Vec<usize>,
    /// For each tier, bytes of the first chunks that come from it.
    tier_bytes: Vec<Vec<u64>>,
}

impl<'a> Search<'a> {
    fn new(input: &'a PlanInput<'a>, prefill: PrefillSpeed, speeds: Vec<TierSpeed>) -> Self {
        let (mut computed_s, mut computed_tokens) = (vec![0.0], vec![0]);
        let mut tier_bytes = vec![vec![0_u64]; speeds.len()];
        for chunk in input.chunks {
            let computed = if chunk.tier.is_none() { 0..0 } else { chunk.tokens.clone() };
            computed_tokens.push(computed_tokens.last().copied().unwrap_or(0) + computed.len());
            computed_s.push(computed_s.last().copied().unwrap_or(0.0) + prefill.seconds(computed));
            for (tier, sums) in tier_bytes.iter_mut().enumerate() {
                let n_bytes = if chunk.tier == Some(tier) { chunk.n_bytes } else { 0 };
                sums.push(sums.last().copied().unwrap_or(0).saturating_add(n_bytes));
            }
        }
        Self { input, prefill, speeds, computed_s, computed_tokens, tier_bytes }
    }

    /// Seconds until the chunks `loaded` are there; tiers work beside each other.
    fn load_s(&self, loaded: &Range<usize>) -> f64 {
        let of_tier = |(tier, speed): (usize, &TierSpeed)| {
            let n_bytes = self.tier_bytes[tier][loaded.end] - self.tier_bytes[tier][loaded.start];
            let queued_bytes = self.input.tiers[tier].queued_bytes;
            if n_bytes == 0 { 0.0 } else { speed.seconds(n_bytes.saturating_add(queued_bytes)) }
        };
        self.speeds.iter().enumerate().map(of_tier).fold(0.0, f64::max)
    }

    /// Seconds if the chunks before `loaded` are computed while these load, and then those behind.
    fn plan_s(&self, loaded: &Range<usize>) -> f64 {
        let n_chunks = self.input.chunks.len();
        let load_s = self.load_s(loaded);
        // What loads is looked for between the pieces of the front; otherwise it is computed in one go.
        let pieces_s =
            if load_s > 0.0 { self.prefill.pieces_s(self.computed_tokens[loaded.start]) } else { 0.0 };
        let front_s = self.input.queue_s(&self.prefill) + self.computed_s[loaded.start] + pieces_s;
        let behind_s = self.computed_s[n_chunks] - self.computed_s[loaded.end];
        let tail_s = self.prefill.seconds(self.input.first_unchunked()..self.input.n_prompt_tokens);
        front_s.max(load_s) + behind_s + tail_s
    }

    /// Seconds if loading and the first pass behind it go through the layers one behind the other. The slower of the two is waited
    /// for; the other one is ahead of it, but for one layer.
    fn load_layers_s(&self) -> f64 {
        let load_s = self.load_s(&(0..self.input.chunks.len()));
        let queue_s = self.input.queue_s(&self.prefill);
        let (first, end) = (self.input.first_unchunked(), self.input.n_prompt_tokens);
        let pass_end = end.min(first.saturating_add(self.input.max_pass_tokens)).max(first);
        let pass_s = self.prefill.seconds(first..pass_end);
        let n_layers = self.input.n_layers.max(1) as f64;
        let load_is_slower_s = queue_s.max(load_s) + pass_s / n_layers;
        let compute_is_slower_s = queue_s.max(load_s / n_layers) + pass_s;
        load_is_slower_s.max(compute_is_slower_s) + self.prefill.seconds(pass_end..end.max(pass_end))
    }

    /// Whether something is computed while the chunks `loaded` come from slow tiers.
    fn is_meeting(&self, loaded: &Range<usize>) -> bool {
        self.load_s(loaded) > 0.0 && self.computed_s[loaded.start] > 0.0
    }

    fn best(&self) -> Plan {
        let n_chunks = self.input.chunks.len();
        let step = n_chunks.div_ceil(MAX_CUTS).max(1);
        let cuts: Vec<usize> = (0..n_chunks).step_by(step).chain([n_chunks]).collect();
        let mut simple = (self.plan_s(&(0..n_chunks)), 0..n_chunks);
        let mut meeting = (f64::INFINITY, 0..n_chunks);
        let mut consider = |loaded: Range<usize>| {
            let plan_s = self.plan_s(&loaded);
            if self.is_meeting(&loaded) {
                if plan_s < meeting.0 {
                    meeting = (plan_s, loaded);
                }
            } else if plan_s < simple.0 * (1.0 - MIN_GAIN) {
                simple = (plan_s, loaded);
            }
        };
        consider(n_chunks..n_chunks);
        for (place, &start) in cuts.iter().enumerate() {
            for &end in &cuts[place..] {
                consider(start..end);
            }
        }
        let load_layers_s = self.load_layers_s();
        let gains = |plan_s: f64| plan_s + MIN_MEET_GAIN_S < simple.0 * (1.0 - MIN_MEET_GAIN);
        let (plan_s, loaded, decision) = if gains(load_layers_s) && load_layers_s < meeting.0 {
            (load_layers_s, 0..n_chunks, Decision::Layers)
        } else if gains(meeting.0) {
            (meeting.0, meeting.1, Decision::Meet)
        } else if self.load_s(&simple.1) <= 0.0 {
            (simple.0, simple.1, Decision::Compute)
        } else {
            (simple.0, simple.1, Decision::Load)
        };
        let times = PlanTimes {
            plan_s,
            load_all_s: self.plan_s(&(0..n_chunks)),
            compute_all_s: self.input.compute_all_s(&self.prefill),
            load_layers_s,
        };
        let n_asked = if decision == Decision::Compute { 0 } else { loaded.end };
        Plan { decision, n_chunks: n_asked, n_computed_chunks: loaded.start, times: Some(times) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CHUNK: usize = 256;

    fn chunks(tiers: &[Option<usize>], n_bytes: u64) -> Vec<PlannedChunk> {
        let chunk = |(idx, tier): (usize, &Option<usize>)| PlannedChunk {
            tokens: idx * CHUNK..(idx + 1) * CHUNK,
            n_bytes,
            tier: *tier,
        };
        tiers.iter().enumerate().map(chunk).collect()
    }

    fn state(bytes_per_s: f64, latency_s: f64) -> TierState {
        TierState { speed: Some(TierSpeed { bytes_per_s, latency_s }), queued_bytes: 0 }
    }

    fn decide(tiers: &[Option<usize>], states: &[TierState], prefill: Option<PrefillSpeed>) -> Plan {
        let chunks = chunks(tiers, 1 << 20);
        let n_prompt_tokens = chunks.len() * CHUNK + 1;
        let (first_token, n_queued_tokens) = (0, 0);
        plan(&PlanInput {
            n_prompt_tokens,
            first_token,
            n_queued_tokens,
            chunks: &chunks,
            tiers: states,
            prefill,
            n_layers: 4,
            max_pass_tokens: usize::MAX,
        })
    }

    /// A chunk a tenth of a second.
    const PREFILL: PrefillSpeed = PrefillSpeed { pass_s: 0.0, token_s: 0.1 / CHUNK as f64, attended_s: 0.0 };

    #[test]
    fn a_fast_tier_is_loaded_a_slow_one_is_not_and_between_them_both_meet() {
        let of = |bytes_per_s| decide(&[Some(0); 10], &[state(bytes_per_s, 0.0)], Some(PREFILL));
        let fast = of(1e10);
        assert_eq!((fast.decision, fast.n_chunks, fast.n_computed_chunks), (Decision::Load, 10, 0));
        let slow = of(1e5);
        assert_eq!((slow.decision, slow.n_chunks), (Decision::Compute, 0));
        // As fast as the engine: half of it each, in half of the time.
        let even = of(1e7 * 1.048_576);
        assert_eq!((even.decision, even.n_chunks, even.n_computed_chunks), (Decision::Meet, 10, 5));
        let times = even.times.unwrap();
        assert!((times.plan_s - 0.5).abs() < 0.01 && (times.load_all_s - 1.0).abs() < 0.01, "{times:?}");
    }

    #[test]
    fn a_small_gain_is_no_reason_to_compute_while_chunks_load() {
        let times_as_fast = |factor: f64| {
            // Ten chunks of 1 MiB are computed in a second.
            decide(&[Some(0); 10], &[state(factor * 10.0 * f64::from(1 << 20), 0.0)], Some(PREFILL))
        };
        // Computing the first chunk meanwhile would save a tenth of the loads, and computing two of them a fifth.
        assert_eq!(times_as_fast(9.0).decision, Decision::Load);
        assert_eq!((times_as_fast(3.0).decision, times_as_fast(3.0).n_computed_chunks), (Decision::Meet, 2));
    }

    #[test]
    fn layers_are_loaded_where_a_pass_behind_them_takes_as_long() {
        let chunks = chunks(&[Some(0); 4], 1 << 20);
        let decide = |n_behind: usize, n_layers, max_pass_tokens| {
            plan(&PlanInput {
                n_prompt_tokens: (4 + n_behind) * CHUNK,
                first_token: 0,
                n_queued_tokens: 0,
                chunks: &chunks,
                // A third of the time that computing them takes.
                tiers: &[state(30.0 * f64::from(1 << 20), 0.0)],
                prefill: Some(PREFILL),
                n_layers,
                max_pass_tokens,
            })
        };
        let plan = decide(2, 8, 4 * CHUNK);
        assert_eq!((plan.decision, plan.n_chunks, plan.n_computed_chunks), (Decision::Layers, 4, 0));
        let times = plan.times.unwrap();
        assert!(
            (times.load_all_s - 0.333).abs() < 0.001 && (times.plan_s - 0.217).abs() < 0.001,
            "{times:?}"
        );
        // Nothing to compute behind them, nothing to gain by passes that are short, and no layers.
        assert_ne!(decide(0, 8, 4 * CHUNK).decision, Decision::Layers);
        assert_ne!(decide(2, 8, 16).decision, Decision::Layers);
        assert_ne!(decide(2, 1, 4 * CHUNK).decision, Decision::Layers);
    }

    #[test]
    fn a_gain_of_a_few_milliseconds_is_none() {
        // Half of the time of the better one would be saved.
        let of = |chunk_s: f64| {
            let speed = state(f64::from(1 << 20) / chunk_s, 0.0);
            decide(&[Some(0); 4], &[speed], Some(PrefillSpeed { token_s: chunk_s / CHUNK as f64, ..PREFILL }))
                .decision
        };
        assert_eq!(of(0.1), Decision::Meet);
        assert_ne!(of(0.004), Decision::Meet);
    }

    #[test]
    fn a_prompt_is_cut_only_as_often_as_its_passes_are_cheap() {
        // Ten chunks a second either way: half of them each, in half of the time.
        let of = |pass_s| {
            let speed = state(10.0 * f64::from(1 << 20), 0.0);
            decide(&[Some(0); 10], &[speed], Some(PrefillSpeed { pass_s, ..PREFILL }))
        };
        let cheap = of(0.01);
        assert_eq!(
            (cheap.decision, PrefillSpeed { pass_s: 0.01, ..PREFILL }.piece_tokens()),
            (Decision::Meet, CHUNK)
        );
        // A pass costs as much as two chunks: pieces of twenty chunks are more than there are.
        let dear = PrefillSpeed { pass_s: 0.2, ..PREFILL };
        assert_eq!(dear.piece_tokens(), 20 * CHUNK);
        let plan = of(0.2);
        assert!(plan.n_computed_chunks < cheap.n_computed_chunks, "{plan:?}");
        // And one that costs more than it saves is not made.
        assert_eq!(of(1.0).decision, Decision::Load);
    }

    #[test]
    fn what_lies_in_memory_is_not_computed_and_a_slow_back_is() {
        let tiers = [None, None, Some(0), Some(0), Some(1), Some(1)];
        let plan = decide(&tiers, &[state(1e10, 0.0), state(1e4, 0.0)], Some(PREFILL));
        assert_eq!((plan.decision, plan.n_chunks, plan.n_computed_chunks), (Decision::Load, 4, 0));
        assert!((plan.times.unwrap().plan_s - 0.2).abs() < 0.01, "{plan:?}");
        let in_memory = decide(&[None; 3], &[], Some(PREFILL));
        assert_eq!((in_memory.decision, in_memory.n_chunks), (Decision::Load, 3));
    }

    #[test]
    fn what_was_never_measured_is_tried_while_the_engine_computes() {
        for (states, prefill) in [
            (vec![TierState::default()], Some(PREFILL)),
            (vec![state(1e6, 0.0)], None),
            (Vec::new(), Some(PREFILL)),
        ] {
            let plan = decide(&[Some(0); 4], &states, prefill);
            assert_eq!((plan.decision, plan.n_chunks, plan.times), (Decision::Meet, 4, None));
        }
        assert_eq!(decide(&[], &[], None).decision, Decision::Compute);
    }

    #[test]
    fn prompts_that_are_computed_before_leave_time_to_load() {
        let chunks = chunks(&[Some(0); 4], 1 << 20);
        let (tiers, prefill) = ([state(3e6, 0.0)], Some(PREFILL));
        let of = |n_queued_tokens| {
            plan(&PlanInput {
                n_prompt_tokens: 4 * CHUNK + 1,
                first_token: 0,
                n_queued_tokens,
                chunks: &chunks,
                tiers: &tiers,
                prefill,
                n_layers: 4,
                max_pass_tokens: usize::MAX,
            })
        };
        assert_eq!(of(0).decision, Decision::Meet);
        assert_eq!(of(100 * CHUNK).decision, Decision::Load);
    }

    proptest! {
        #[test]
        fn a_plan_is_predicted_to_be_no_slower_than_loading_or_computing_everything(
            tiers in proptest::collection::vec(prop_oneof![Just(None), Just(Some(0)), Just(Some(1))], 1..40),
            speeds in [(4.0_f64..10.0, 0.0_f64..0.3), (4.0_f64..10.0, 0.0_f64..0.3)],
            queued in [0_u64..1 << 30, 0_u64..1 << 30],
            (pass_s, token_s) in (0.0_f64..1.0, 1e-6_f64..1e-2),
            attended_s in 0.0_f64..1e-6,
            n_queued_tokens in 0_usize..10_000,
            n_more in 1_usize..500,
            n_layers in 1_usize..100,
            max_pass_tokens in 1_usize..1000,
        ) {
            let chunks = chunks(&tiers, 2 << 20);
            let states: Vec<TierState> = speeds.iter().zip(queued).map(|((power, latency_s), queued_bytes)| {
                TierState { queued_bytes, ..state(10_f64.powf(*power), *latency_s) }
            }).collect();
            let input = PlanInput {
                n_prompt_tokens: chunks.len() * CHUNK + n_more,
                first_token: 0,
                n_queued_tokens,
                chunks: &chunks,
                tiers: &states,
                prefill: Some(PrefillSpeed { pass_s, token_s, attended_s }),
                n_layers,
                max_pass_tokens,
            };
            let plan = plan(&input);
            let PlanTimes { plan_s, load_all_s, compute_all_s, load_layers_s } = plan.times.unwrap();
            // Layers overlap loads with the computation of what is not stored, and nothing more.
            let tail_s = input.prefill.unwrap().seconds(input.first_unchunked()..input.n_prompt_tokens);
            prop_assert!(load_layers_s <= load_all_s + 1e-9, "{:?}", plan);
            prop_assert!(load_all_s - load_layers_s <= tail_s + 1e-9, "{:?}", plan);
            prop_assert!(n_layers > 1 || (load_all_s - load_layers_s).abs() < 1e-9, "{:?}", plan);
            prop_assert!(plan_s <= 1.05 * load_all_s.min(compute_all_s), "{:?}", plan);
            prop_assert!(plan.n_chunks <= chunks.len() && plan.n_computed_chunks <= chunks.len());
            prop_assert!(plan.decision == Decision::Compute || plan.n_computed_chunks <= plan.n_chunks);
        }
    }
}
