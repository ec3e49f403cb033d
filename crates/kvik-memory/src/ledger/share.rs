//! Entitlements and the order of waiting claims: arithmetic only.
//!
//! Entitlements are weighted max-min: as if water rose in vessels as wide as the groups' weights, each
//! of which starts at its guaranteed minimum and is closed at its demand or its limit. Memory that
//! no waiting claim is entitled to goes to the next claim.

use crate::pages::Shortage;

/// What a group may have and wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// Guaranteed when it is wanted.
    pub min_units: u64,
    /// Never exceeded.
    pub max_units: u64,
    /// Its width; zero counts as one.
    pub weight: u32,
    /// What it uses and wants to use.
    pub wanted_units: u64,
}

/// A group as the admission sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupShare {
    /// Guaranteed when it is wanted.
    pub min_units: u64,
    /// Never exceeded.
    pub max_units: u64,
    /// Its weight when memory is scarce.
    pub weight: u32,
    /// Higher goes first among waiting claims.
    pub priority: u32,
}

/// A member as the admission sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemberShare {
    /// Its slot.
    pub slot: usize,
    /// The index of its group in [`Situation::groups`].
    pub group: usize,
    /// What it holds.
    pub held_units: u64,
    /// How much of that is mapped and free.
    pub parked_units: u64,
    /// What it waits for.
    pub waits: Option<Wait>,
}

/// A claim that was denied and is still wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// Its place in the queue: lower came earlier.
    pub ticket: u64,
    /// How much is wanted, all or nothing.
    pub n_units: u64,
    /// Whether the member can do nothing until it gets it.
    pub is_starved: bool,
}

/// Everything a decision depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Situation {
    /// What all members together may hold.
    pub budget_units: u64,
    /// The groups.
    pub groups: Vec<GroupShare>,
    /// The members, each with a valid group.
    pub members: Vec<MemberShare>,
}

/// A request to give memory back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask {
    /// The member that is asked.
    pub slot: usize,
    /// For how much.
    pub n_units: u64,
}

/// The answer to a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// It may be taken.
    Granted,
    /// It may not be taken now.
    Denied {
        /// Why.
        shortage: Shortage,
        /// The members that hold, above their shares, what the claimant is entitled to.
        asks: Vec<Ask>,
    },
}

/// Fixed point of the water level: finer than the widest vessel.
const LEVEL_SHIFT: u32 = 32;

/// Splits `budget_units` among `demands`.
///
/// No group gets more than it wants or may have. Every group gets `min_units` of what it wants if all
/// minimums fit together; if not, the minimums are split by weight. Either all is given out or every
/// group has what it wants and may have.
pub fn entitlements(budget_units: u64, demands: &[Demand]) -> Vec<u64> {
    let caps: Vec<u64> = demands.iter().map(|demand| demand.wanted_units.min(demand.max_units)).collect();
    let floors: Vec<u64> =
        demands.iter().zip(&caps).map(|(demand, &cap)| demand.min_units.min(cap)).collect();
    let weights: Vec<u32> = demands.iter().map(|demand| demand.weight.max(1)).collect();
    let n_floor_units: u128 = floors.iter().copied().map(u128::from).sum();
    if n_floor_units > u128::from(budget_units) {
        fill(budget_units, &vec![0; floors.len()], &floors, &weights)
    } else {
        fill(budget_units, &floors, &caps, &weights)
    }
}

/// Raises the level until the budget is used or every vessel is closed.
fn fill(budget_units: u64, floors: &[u64], caps: &[u64], weights: &[u32]) -> Vec<u64> {
    let at_level = |level: u128| {
        let vessels = floors.iter().zip(caps).zip(weights);
        vessels.map(move |((&floor, &cap), &weight)| {
            let height = (level * u128::from(weight)) >> LEVEL_SHIFT;
            u64::try_from(height).unwrap_or(u64::MAX).clamp(floor, cap)
        })
    };
    let sum_at = |level: u128| at_level(level).map(u128::from).sum::<u128>();
    let budget = u128::from(budget_units);
    // At this level every vessel is closed or holds the whole budget: weights are at least one.
    let (mut low, mut high) = (0_u128, budget << LEVEL_SHIFT);
    if sum_at(high) <= budget {
        return at_level(high).collect();
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if sum_at(middle) <= budget {
            low = middle;
        } else {
            high = middle;
        }
    }
    // One more step of the level is at most one unit for each vessel, and too much in sum: the rest
    // goes to the first of those that would rise.
    let mut n_rest = budget - sum_at(low);
    let steps = at_level(low).zip(at_level(high));
    steps
        .map(|(units, next_units)| {
            let n_more = u64::from(n_rest > 0 && next_units > units);
            n_rest -= u128::from(n_more);
            units + n_more
        })
        .collect()
}

/// Decides whether `slot` may take `n_units` now, and which members it may ask for them otherwise.
///
/// Claims that their group is entitled to are served by priority, then by ticket: what the ones before
/// wait for is kept for them, so small claims cannot starve a large one. A claim beyond the
/// entitlement takes what no entitled claim waits for. Where starved members wait for each other with claims beyond it, one of them
/// has its turn: it asks the others, and what it waits for is kept for it.
pub fn admit(situation: &Situation, slot: usize, n_units: u64) -> Admission {
    let Some(claimant) = situation.members.iter().find(|member| member.slot == slot) else {
        return Admission::Denied { shortage: Shortage::DeviceFull, asks: Vec::new() };
    };
    let Some(group) = situation.groups.get(claimant.group) else {
        return Admission::Denied { shortage: Shortage::DeviceFull, asks: Vec::new() };
    };
    let held = situation.held_by_group();
    let group_held_units = held.get(claimant.group).copied().unwrap_or(0);
    if group_held_units.saturating_add(n_units) > group.max_units {
        let n_missing = group_held_units.saturating_add(n_units) - group.max_units;
        let mut asks = situation.asks_within_group(claimant, group.max_units, n_units, n_missing);
        if asks.is_empty() {
            let entitled = situation.group_entitlements(slot, n_units);
            let mut turns = situation.turns(&held, &entitled);
            turns.retain(|member| member.group == claimant.group);
            asks = Situation::asks_for_a_turn(claimant, &turns, n_missing);
        }
        return Admission::Denied { shortage: Shortage::GroupLimit, asks };
    }

    let entitled = situation.group_entitlements(slot, n_units);
    let n_free_units =
        situation.budget_units.saturating_sub(held.iter().fold(0, |sum, &n| sum.saturating_add(n)));
    let queue = situation.queue(slot, n_units);
    let mut promised = held.clone();
    let mut n_before_units = 0_u64;
    let mut n_owed_others_units = 0_u64;
    let mut is_owed = false;
    for waiter in &queue {
        let (Some(promised), Some(&entitled)) = (promised.get_mut(waiter.group), entitled.get(waiter.group))
        else {
            continue;
        };
        if promised.saturating_add(waiter.n_units) > entitled {
            continue;
        }
        *promised += waiter.n_units;
        if waiter.slot == slot {
            is_owed = true;
        } else {
            n_owed_others_units = n_owed_others_units.saturating_add(waiter.n_units);
            if !is_owed {
                n_before_units = n_before_units.saturating_add(waiter.n_units);
            }
        }
    }
    let turns = if is_owed { Vec::new() } else { situation.turns(&held, &entitled) };
    let n_turn_units = match turns.first() {
        Some(first) if first.slot != slot => first.waits.map_or(0, |wait| wait.n_units),
        _ => 0,
    };
    let n_kept_units =
        if is_owed { n_before_units } else { n_owed_others_units.saturating_add(n_turn_units) };
    let n_needed_units = n_units.saturating_add(n_kept_units);
    if n_needed_units <= n_free_units {
        return Admission::Granted;
    }
    if is_owed {
        let asks = situation.asks_above_share(slot, &held, &entitled, n_needed_units - n_free_units);
        Admission::Denied { shortage: Shortage::DeviceFull, asks }
    } else if n_units <= n_free_units {
        Admission::Denied { shortage: Shortage::OverShare, asks: Vec::new() }
    } else {
        // The group has its share; what its members hold of it is theirs to split.
        let share_units = entitled.get(claimant.group).copied().unwrap_or(0).max(group_held_units);
        let n_missing = n_units - n_free_units;
        let mut asks = situation.asks_within_group(claimant, share_units, n_units, n_missing);
        if asks.is_empty() {
            asks = Situation::asks_for_a_turn(claimant, &turns, n_missing);
        }
        Admission::Denied { shortage: Shortage::DeviceFull, asks }
    }
}

struct Waiter {
    slot: usize,
    group: usize,
    priority: u32,
    ticket: u64,
    n_units: u64,
}

// === impl Situation ===

impl Situation {
    /// What each group holds.
    pub fn held_by_group(&self) -> Vec<u64> {
        let mut held = vec![0_u64; self.groups.len()];
        for member in &self.members {
            if let Some(held) = held.get_mut(member.group) {
                *held = held.saturating_add(member.held_units);
            }
        }
        held
    }

    /// What each group is entitled to, if `slot` wants `n_units` more.
    ///
    /// A group wants what it uses and what its members wait for; parked pages are for any group that needs
    /// them.
    pub fn group_entitlements(&self, slot: usize, n_units: u64) -> Vec<u64> {
        let mut demands: Vec<Demand> = self
            .groups
            .iter()
            .map(|group| Demand {
                min_units: group.min_units,
                max_units: group.max_units,
                weight: group.weight,
                wanted_units: 0,
            })
            .collect();
        for member in &self.members {
            let n_waits =
                if member.slot == slot { n_units } else { member.waits.map_or(0, |wait| wait.n_units) };
            let n_used = member.held_units.saturating_sub(member.parked_units);
            if let Some(demand) = demands.get_mut(member.group) {
                demand.wanted_units = demand.wanted_units.saturating_add(n_used).saturating_add(n_waits);
            }
        }
        entitlements(self.budget_units, &demands)
    }

    /// Asks for what groups hold above their limits, and what all hold above the budget.
    pub fn asks_above_limits(&self) -> Vec<Ask> {
        let held = self.held_by_group();
        let entitled = self.group_entitlements(usize::MAX, 0);
        let n_held_units = held.iter().fold(0_u64, |sum, &held| sum.saturating_add(held));
        let mut n_above_budget = n_held_units.saturating_sub(self.budget_units);
        let mut asks = Vec::new();
        for (group, (&held, share)) in held.iter().zip(&self.groups).enumerate() {
            let n_above_limit = held.saturating_sub(share.max_units);
            let n_above_share = held.saturating_sub(entitled[group]).min(n_above_budget);
            n_above_budget -= n_above_share;
            self.ask_members(group, usize::MAX, n_above_limit.max(n_above_share), &mut asks);
        }
        asks
    }

    /// All waiting claims and the claimant, first served first. A claimant without a ticket is last of its
    /// priority.
    fn queue(&self, slot: usize, n_units: u64) -> Vec<Waiter> {
        let mut queue: Vec<Waiter> = self
            .members
            .iter()
            .filter_map(|member| {
                let priority = self.groups.get(member.group)?.priority;
                let (ticket, n_units) = if member.slot == slot {
                    (member.waits.map_or(u64::MAX, |wait| wait.ticket), n_units)
                } else {
                    member.waits.map(|wait| (wait.ticket, wait.n_units))?
                };
                Some(Waiter { slot: member.slot, group: member.group, priority, ticket, n_units })
            })
            .collect();
        queue.sort_by_key(|waiter| (std::cmp::Reverse(waiter.priority), waiter.ticket, waiter.slot));
        queue
    }

    /// Asks the members of groups above their share: lowest priority first, then the most above.
    fn asks_above_share(
        &self,
        slot: usize,
        held: &[u64],
        entitled: &[u64],
        n_missing_units: u64,
    ) -> Vec<Ask> {
        let mut debtors: Vec<(usize, u64)> = held
            .iter()
            .zip(entitled)
            .enumerate()
            .map(|(group, (&held, &entitled))| (group, held.saturating_sub(entitled)))
            .filter(|&(_, above)| above > 0)
            .collect();
        debtors.sort_by_key(|&(group, above)| (self.groups[group].priority, std::cmp::Reverse(above), group));
        let mut asks = Vec::new();
        let mut n_missing = n_missing_units;
        for (group, above) in debtors {
            let n_asked = above.min(n_missing);
            n_missing -= n_asked - self.ask_members(group, slot, n_asked, &mut asks);
        }
        asks
    }

    /// Splits a request to a group over its members: parked pages first, then the member that holds most.
    ///
    /// Returns the part that no member could be asked for.
    fn ask_members(&self, group: usize, except: usize, n_units: u64, asks: &mut Vec<Ask>) -> u64 {
        let mut members: Vec<&MemberShare> = self
            .members
            .iter()
            .filter(|member| member.group == group && member.slot != except && member.held_units > 0)
            .collect();
        members.sort_by_key(|member| {
            (std::cmp::Reverse(member.parked_units), std::cmp::Reverse(member.held_units), member.slot)
        });
        let mut n_left = n_units;
        let mut n_asked = vec![0_u64; members.len()];
        for (member, n_asked) in members.iter().zip(&mut n_asked) {
            *n_asked = member.parked_units.min(member.held_units).min(n_left);
            n_left -= *n_asked;
        }
        let mut by_rest: Vec<usize> = (0..members.len()).collect();
        by_rest.sort_by_key(|&index| std::cmp::Reverse(members[index].held_units - n_asked[index]));
        for index in by_rest {
            let n_more = (members[index].held_units - n_asked[index]).min(n_left);
            n_asked[index] += n_more;
            n_left -= n_more;
        }
        let requests = members.iter().zip(n_asked).filter(|&(_, n_units)| n_units > 0);
        asks.extend(requests.map(|(member, n_units)| Ask { slot: member.slot, n_units }));
        n_left
    }

    /// Whose turn it is among starved members that wait for more than their group is entitled to: none of them can use what
    /// it holds while each waits for the others.
    ///
    /// The highest priority comes first, then the member that uses most, then the earliest ticket. The one that has the turn
    /// uses more with every claim, so it keeps the turn until it needs no more, and no memory goes back and forth. Claims that
    /// a group is entitled to need no turn, and a claim that can never be served has none.
    fn turns<'a>(&'a self, held: &'a [u64], entitled: &'a [u64]) -> Vec<&'a MemberShare> {
        let is_candidate = |member: &&MemberShare| {
            let (Some(wait), Some(group)) = (member.waits, self.groups.get(member.group)) else {
                return false;
            };
            let (Some(&held), Some(&entitled)) = (held.get(member.group), entitled.get(member.group)) else {
                return false;
            };
            let n_most = group.max_units.min(self.budget_units);
            wait.is_starved
                && held.saturating_add(wait.n_units) > entitled
                && member.held_units.saturating_add(wait.n_units) <= n_most
        };
        let mut turns: Vec<&MemberShare> = self.members.iter().filter(is_candidate).collect();
        turns.sort_by_key(|member| {
            let priority = self.groups.get(member.group).map_or(0, |group| group.priority);
            let ticket = member.waits.map_or(u64::MAX, |wait| wait.ticket);
            let n_used = member.held_units.saturating_sub(member.parked_units);
            (std::cmp::Reverse(priority), std::cmp::Reverse(n_used), ticket, member.slot)
        });
        turns
    }

    /// Asks the members of `turns` behind the claimant for what they hold, last turn first, if the claimant has the first.
    fn asks_for_a_turn(claimant: &MemberShare, turns: &[&MemberShare], n_missing_units: u64) -> Vec<Ask> {
        let Some((first, others)) = turns.split_first() else { return Vec::new() };
        if first.slot != claimant.slot {
            return Vec::new();
        }
        let mut n_missing = n_missing_units;
        let mut asks = Vec::new();
        for member in others.iter().rev() {
            let n_asked = member.held_units.min(n_missing);
            if n_asked > 0 {
                n_missing -= n_asked;
                asks.push(Ask { slot: member.slot, n_units: n_asked });
            }
        }
        asks
    }

    /// Asks the other members of a group that may hold `max_units` for what they hold above an equal share.
    fn asks_within_group(
        &self,
        claimant: &MemberShare,
        max_units: u64,
        n_units: u64,
        n_missing_units: u64,
    ) -> Vec<Ask> {
        let members: Vec<&MemberShare> =
            self.members.iter().filter(|member| member.group == claimant.group).collect();
        let demands: Vec<Demand> = members
            .iter()
            .map(|member| {
                let n_waits = if member.slot == claimant.slot {
                    n_units
                } else {
                    member.waits.map_or(0, |wait| wait.n_units)
                };
                let wanted_units =
                    member.held_units.saturating_sub(member.parked_units).saturating_add(n_waits);
                Demand { min_units: 0, max_units, weight: 1, wanted_units }
            })
            .collect();
        let shares = entitlements(max_units, &demands);
        let is_owed = members.iter().zip(&shares).any(|(member, &share)| {
            member.slot == claimant.slot && member.held_units.saturating_add(n_units) <= share
        });
        if !is_owed {
            return Vec::new();
        }
        let mut n_missing = n_missing_units;
        let mut asks = Vec::new();
        for (member, share) in members.iter().zip(shares) {
            let n_asked = member.held_units.saturating_sub(share).min(n_missing);
            if member.slot != claimant.slot && n_asked > 0 {
                n_missing -= n_asked;
                asks.push(Ask { slot: member.slot, n_units: n_asked });
            }
        }
        asks
    }
}

#[cfg(test)]
mod tests;
