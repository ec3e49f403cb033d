//! Which member takes a request when it is known how much of its prompt each member has.
//!
//! [`choose`] minimizes what the request costs on a member:
//!
//! ```text
//! cost = (left + QUEUE_SHARE * outstanding) / weight      left = tokens of the request - matched tokens
//! ```
//!
//! * `left` is what the member must compute. It delays the request itself and everyone behind it.
//! * `outstanding` is what the member has to do already. It delays the request only, since it is done on one
//!   member or another; [`QUEUE_SHARE`] says how much less that counts.
//! * `weight` is the member's speed: it computes and works its queue off by as much faster.
//!
//! Only members that stay within their bound with the request are asked, the bound being that of
//! [`ring::choose`] and the request weighing what is left of it on that member. So a prefix
//! that many requests share spreads: when its holder is full, the next best holder takes the request, and a member
//! that has nothing of it if that is cheaper. If no member has room, the cheapest of all usable ones takes it.
//! Of equally cheap members the first clockwise from the key is taken. If no usable member has
//! anything of the prompt, the choice is exactly that of the ring.
//!
//! A named sequence stays with the owner of its name ([`choose_named`]): its KV is there, and with a mean load of a few
//! requests a bound relative to the mean would move it whenever one or two other requests are on its owner. So the
//! owner's bound is never below a number of tokens that says how much work may wait before a sequence moves.

use crate::ring::{self, Bounds, Choice, Loads, Reason, Ring};

/// How much a token in a member's queue counts, beside a token that is computed anew.
///
/// A token of the queue delays this request only: it is computed in any case. A token that is computed anew
/// delays this request and all that wait behind it. A member that is busy a part `u` of the time has
/// `u / (1 - u)` requests waiting in the mean (as a queue with one server and random arrivals has), so a token of the
/// queue counts `1 / (1 + u / (1 - u)) = 1 - u` of the other. The value is that of a fleet that is busy three quarters
/// of the time, for which fleets are planned. With 1 each request would go where its own first token
/// comes soonest, and the fleet would compute more than it has to just when it has the least to spare.
pub const QUEUE_SHARE: f64 = 0.25;

/// Outstanding tokens up to which a member of weight 1 keeps its named sequences, where nothing else is configured.
///
/// A move costs the KV of the whole conversation, a stay the wait for what is queued. An engine that computes 10 000 tokens
/// a second works this off in ten seconds; of a fleet that is busy 70 % of the time fewer than one turn in a hundred meets
/// a queue as long as that (`kvik bench routing`).
pub const NAMED_FLOOR_TOKENS: u64 = 98_304;

/// A request to be placed.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Where it lies on the ring, which decides between members that are equally good.
    ///
    /// The best key is the first block that no member has: prompts that share a beginning that all members have
    /// then spread over all members, and gateways that see the same prompt at a time agree.
    pub key: &'a [u8],
    /// Tokens that it keeps a member busy with that has nothing of its prompt.
    pub tokens: u64,
    /// Tokens of the prompt that each member has, by its place in [`Ring::members`], less where they must
    /// be fetched from a slower tier.
    ///
    /// Values that are missing at the end count as 0, and so does what is negative or no number. More than
    /// `tokens` counts as `tokens`.
    pub matched_tokens: &'a [f64],
}

/// Chooses the member that takes a request; `None` if no member on the ring is usable.
///
/// Looks at every member a fixed number of times and does not allocate for up to 64 of them. A `load_factor` that is
/// negative or no number counts as 0.
pub fn choose(
    ring: &Ring,
    request: Request<'_>,
    loads: Loads<'_>,
    load_factor: f64,
    usable: impl Fn(usize) -> bool,
) -> Option<Choice> {
    let Request { key, tokens, .. } = request;
    let bounds = Bounds::new(ring, loads, load_factor, tokens, &usable);
    let mut most_matched = 0;
    let mut best: Option<Candidate> = None;
    for member in ring.walk(key).filter(|member| usable(*member)) {
        let matched_tokens = request.matched(member);
        most_matched = most_matched.max(matched_tokens);
        let (load, bound) = (bounds.load(member), bounds.bound(member));
        let left_tokens = tokens - matched_tokens;
        let has_room = load == 0 || load.saturating_add(left_tokens) <= bound;
        let cost = (left_tokens as f64 + QUEUE_SHARE * load as f64) / bounds.weight(member);
        let candidate = Candidate { member, load, bound, has_room, matched_tokens, cost };
        if best.is_none_or(|best| candidate.is_better_than(&best)) {
            best = Some(candidate);
        }
    }
    if most_matched == 0 {
        return ring::choose(ring, key, loads, load_factor, tokens, usable);
    }
    best.map(|best| {
        let reason = if best.matched_tokens < most_matched { Reason::Spread } else { Reason::Holder };
        Choice { member: best.member, reason, load: best.load, bound: best.bound }
    })
}

/// Chooses the member that takes a request of a named sequence; `None` if no member on the ring is usable.
///
/// The owner of the key takes it while it is usable and has room: up to its bound, or up to `floor_tokens` times its
/// weight if that is more. Otherwise the sequence moves, and the choice is that of [`choose`]: to a member that has its
/// KV, if one does.
pub fn choose_named(
    ring: &Ring,
    request: Request<'_>,
    loads: Loads<'_>,
    load_factor: f64,
    floor_tokens: u64,
    usable: impl Fn(usize) -> bool,
) -> Option<Choice> {
    if let Some(owner) = ring.walk(request.key).next().filter(|owner| usable(*owner)) {
        let bounds = Bounds::new(ring, loads, load_factor, request.tokens, &usable);
        let floor = (floor_tokens as f64 * bounds.weight(owner)) as u64;
        let (load, bound) = (bounds.load(owner), bounds.bound(owner).max(floor));
        if load == 0 || load.saturating_add(request.left(owner)) <= bound {
            return Some(Choice { member: owner, reason: Reason::Owner, load, bound });
        }
    }
    choose(ring, request, loads, load_factor, usable)
}

/// A usable member.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    member: usize,
    load: u64,
    bound: u64,
    has_room: bool,
    matched_tokens: u64,
    cost: f64,
}

// === impl Request ===

impl Request<'_> {
    /// Tokens that the request keeps `member` busy with: its load once it is placed there.
    pub fn left(&self, member: usize) -> u64 {
        self.tokens - self.matched(member)
    }

    /// Whole tokens of the prompt that `member` has.
    fn matched(&self, member: usize) -> u64 {
        // What is negative or no number becomes 0.
        self.matched_tokens.get(member).map_or(0, |&tokens| tokens as u64).min(self.tokens)
    }
}

// === impl Candidate ===

impl Candidate {
    fn is_better_than(&self, other: &Self) -> bool {
        if self.has_room == other.has_room { self.cost < other.cost } else { self.has_room }
    }
}
