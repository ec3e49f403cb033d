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
mod tests;
