//! Bounded loads: which member takes a request.
//!
//! A member's bound is `ceil((1 + load_factor) * (L + r) * w / W)`: its share by weight of all load
//! `L` of the usable members and of the request `r`, and some room above it. The request goes to the
//! first usable member clockwise from its key that stays within its bound with it. An idle member
//! takes any request, since one that is larger than every bound must run somewhere. If none is idle
//! and none has room, the member with the least load for its weight takes it, the earlier on the
//! ring among equals. A key's second choice is thus as stable as its first.

use super::Ring;

/// What the members have to do, by their place in [`Ring::members`].
///
/// Values that are missing at the end count as 0.
#[derive(Debug, Clone, Copy)]
pub struct Loads<'a> {
    /// Outstanding tokens.
    pub tokens: &'a [u64],
    /// The weights that the ring was built with.
    pub weights: &'a [f64],
}

/// The member that takes a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Its place in [`Ring::members`].
    pub member: usize,
    /// Why this one.
    pub reason: Reason,
    /// Its outstanding tokens without the request.
    pub load: u64,
    /// Its bound, the request counted in.
    pub bound: u64,
}

/// Why a member was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The key is its own.
    Owner,
    /// Members before it had no room.
    Bound,
    /// Members before it were not usable.
    Unusable,
    /// No member had room; it has the least load for its weight.
    LeastLoaded,
    /// Of all usable members it has the most of the prompt; see [`crate::placement`].
    Holder,
    /// A member that has more of the prompt was full or too busy; see [`crate::placement`].
    Spread,
}

/// Why a member was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Skip {
    /// The request would pass its bound.
    Full,
    /// The caller said so.
    Unusable,
}

/// A member that was considered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Its place in [`Ring::members`].
    pub member: usize,
    /// Its outstanding tokens without the request.
    pub load: u64,
    /// Its bound; 0 for a member that is not usable.
    pub bound: u64,
    /// Why it was not taken; absent for the chosen one and for those that were not needed.
    pub skipped: Option<Skip>,
}

/// A choice with everything that led to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// Where the key lies.
    pub position: u64,
    /// The chosen member; `None` if none is usable.
    pub choice: Option<Choice>,
    /// All members on the ring, clockwise from the key.
    pub candidates: Vec<Candidate>,
}

/// The bounds of all members for one request.
pub(crate) struct Bounds<'a> {
    loads: Loads<'a>,
    /// All load with the request, and the room above it.
    limit: f64,
    /// Of the usable members.
    weight_sum: f64,
    request_tokens: u64,
}

/// Chooses the member that takes a request of `request_tokens` with `key`; `None` if no member on
/// the ring is usable.
///
/// Does not allocate for up to 64 members. A `load_factor` that is negative or no number counts
/// as 0.
pub fn choose(
    ring: &Ring,
    key: &[u8],
    loads: Loads<'_>,
    load_factor: f64,
    request_tokens: u64,
    usable: impl Fn(usize) -> bool,
) -> Option<Choice> {
    let bounds = Bounds::new(ring, loads, load_factor, request_tokens, &usable);
    decide(ring, key, &bounds, usable, |_| {})
}

/// Does what [`choose`] does and returns the reasons.
pub fn explain(
    ring: &Ring,
    key: &[u8],
    loads: Loads<'_>,
    load_factor: f64,
    request_tokens: u64,
    usable: impl Fn(usize) -> bool,
) -> Explanation {
    let bounds = Bounds::new(ring, loads, load_factor, request_tokens, &usable);
    let mut candidates = Vec::with_capacity(ring.members().len());
    let choice = decide(ring, key, &bounds, &usable, |candidate| candidates.push(candidate));
    // The least loaded member was passed before it was chosen.
    if let Some(choice) = choice
        && let Some(chosen) = candidates.iter_mut().find(|candidate| candidate.member == choice.member)
    {
        chosen.skipped = None;
    }
    for member in ring.walk(key).skip(candidates.len()) {
        let bound = if usable(member) { bounds.bound(member) } else { 0 };
        candidates.push(Candidate { member, load: bounds.load(member), bound, skipped: None });
    }
    Explanation { position: ring.position(key), choice, candidates }
}

fn decide(
    ring: &Ring,
    key: &[u8],
    bounds: &Bounds<'_>,
    usable: impl Fn(usize) -> bool,
    mut considered: impl FnMut(Candidate),
) -> Option<Choice> {
    let mut reason = Reason::Owner;
    let mut least: Option<Choice> = None;
    for member in ring.walk(key) {
        let load = bounds.load(member);
        if !usable(member) {
            considered(Candidate { member, load, bound: 0, skipped: Some(Skip::Unusable) });
            if reason == Reason::Owner {
                reason = Reason::Unusable;
            }
            continue;
        }
        let bound = bounds.bound(member);
        if load == 0 || load.saturating_add(bounds.request_tokens) <= bound {
            considered(Candidate { member, load, bound, skipped: None });
            return Some(Choice { member, reason, load, bound });
        }
        considered(Candidate { member, load, bound, skipped: Some(Skip::Full) });
        reason = Reason::Bound;
        if least.is_none_or(|least| bounds.is_less_loaded(member, least.member)) {
            least = Some(Choice { member, reason: Reason::LeastLoaded, load, bound });
        }
    }
    least
}

// === impl Bounds ===

impl<'a> Bounds<'a> {
    pub(crate) fn new(
        ring: &Ring,
        loads: Loads<'a>,
        load_factor: f64,
        request_tokens: u64,
        usable: impl Fn(usize) -> bool,
    ) -> Self {
        let mut bounds = Self { loads, limit: 0.0, weight_sum: 0.0, request_tokens };
        let mut total = request_tokens;
        // In the order of ids, so that all gateways round the sum alike.
        for member in 0..ring.members().len() {
            if ring.virtual_nodes(member) > 0 && usable(member) {
                total = total.saturating_add(bounds.load(member));
                bounds.weight_sum += bounds.weight(member);
            }
        }
        bounds.limit = (1.0 + load_factor.max(0.0)) * total as f64;
        bounds
    }

    pub(crate) fn load(&self, member: usize) -> u64 {
        self.loads.tokens.get(member).copied().unwrap_or(0)
    }

    pub(crate) fn weight(&self, member: usize) -> f64 {
        self.loads.weights.get(member).copied().unwrap_or(0.0)
    }

    /// The most that `member` may have; a weight that is no number gives 0.
    pub(crate) fn bound(&self, member: usize) -> u64 {
        (self.limit * self.weight(member) / self.weight_sum).ceil() as u64
    }

    fn is_less_loaded(&self, left: usize, right: usize) -> bool {
        // Multiplied out, so that a weight of 0 needs no case of its own.
        (self.load(left) as f64) * self.weight(right) < (self.load(right) as f64) * self.weight(left)
    }
}

// === impl Reason and Skip ===

impl Reason {
    /// Returns the word for it on the wire and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Bound => "bound",
            Self::Unusable => "unusable",
            Self::LeastLoaded => "least_loaded",
            Self::Holder => "holder",
            Self::Spread => "spread",
        }
    }
}

impl Skip {
    /// Returns the word for it on the wire and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Unusable => "unusable",
        }
    }
}
