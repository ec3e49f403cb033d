use proptest::collection::vec;
use proptest::prelude::*;

use super::{Admission, Demand, GroupShare, MemberShare, Situation, Wait, admit, entitlements};
use crate::pages::Shortage;

fn demand(min_units: u64, max_units: u64, weight: u32, wanted_units: u64) -> Demand {
    Demand { min_units, max_units, weight, wanted_units }
}

fn group(weight: u32, priority: u32) -> GroupShare {
    GroupShare { min_units: 0, max_units: u64::MAX, weight, priority }
}

fn member(slot: usize, group: usize, held_units: u64) -> MemberShare {
    MemberShare { slot, group, held_units, parked_units: 0, waits: None }
}

fn waiting(slot: usize, group: usize, held_units: u64, ticket: u64, n_units: u64) -> MemberShare {
    MemberShare {
        waits: Some(Wait { ticket, n_units, is_starved: false }),
        ..member(slot, group, held_units)
    }
}

fn denied(admission: &Admission) -> Option<Shortage> {
    match admission {
        Admission::Granted => None,
        Admission::Denied { shortage, .. } => Some(*shortage),
    }
}

#[test]
fn scarce_memory_is_split_by_weight() {
    let demands = [demand(0, 1000, 1, 1000), demand(0, 1000, 3, 1000)];
    assert_eq!(entitlements(100, &demands), [25, 75]);
}

#[test]
fn what_one_does_not_want_goes_to_the_others() {
    let demands = [demand(0, 1000, 1, 10), demand(0, 1000, 1, 1000), demand(0, 30, 8, 1000)];
    assert_eq!(entitlements(100, &demands), [10, 60, 30]);
}

#[test]
fn a_minimum_comes_before_weights() {
    let demands = [demand(60, 1000, 1, 1000), demand(0, 1000, 9, 1000)];
    assert_eq!(entitlements(100, &demands), [60, 40]);
}

#[test]
fn a_minimum_that_is_not_wanted_is_lent() {
    let demands = [demand(60, 1000, 1, 0), demand(0, 1000, 1, 1000)];
    assert_eq!(entitlements(100, &demands), [0, 100]);
}

#[test]
fn a_claim_above_the_limit_of_the_group_is_denied_for_that_reason() {
    let mut situation =
        Situation { budget_units: 100, groups: vec![group(1, 0)], members: vec![member(0, 0, 10)] };
    situation.groups[0].max_units = 15;
    assert_eq!(denied(&admit(&situation, 0, 6)), Some(Shortage::GroupLimit));
    assert_eq!(admit(&situation, 0, 5), Admission::Granted);
}

#[test]
fn a_member_above_its_share_gets_nothing_new_while_one_below_waits() {
    let situation = Situation {
        budget_units: 100,
        groups: vec![group(1, 0), group(1, 0)],
        members: vec![member(0, 0, 80), waiting(1, 1, 0, 1, 30)],
    };
    assert_eq!(denied(&admit(&situation, 0, 10)), Some(Shortage::OverShare));
    let Admission::Denied { shortage, asks } = admit(&situation, 1, 30) else { panic!("granted 110 of 100") };
    assert_eq!(shortage, Shortage::DeviceFull);
    assert_eq!(asks, [super::Ask { slot: 0, n_units: 10 }]);
}

#[test]
fn without_a_waiter_one_member_may_have_everything() {
    let situation = Situation {
        budget_units: 100,
        groups: vec![group(1, 0), group(100, 0)],
        members: vec![member(0, 0, 80), member(1, 1, 0)],
    };
    assert_eq!(admit(&situation, 0, 20), Admission::Granted);
}

#[test]
fn parked_pages_are_asked_for_before_used_ones() {
    let mut situation = Situation {
        budget_units: 100,
        groups: vec![group(1, 0), group(1, 0)],
        members: vec![member(0, 0, 40), member(1, 0, 50), waiting(2, 1, 0, 1, 30)],
    };
    situation.members[0].parked_units = 15;
    let Admission::Denied { asks, .. } = admit(&situation, 2, 30) else { panic!("granted 120 of 100") };
    assert_eq!(asks, [super::Ask { slot: 0, n_units: 15 }, super::Ask { slot: 1, n_units: 5 }]);
}

#[test]
fn tickets_order_waiters_of_one_priority_and_priority_comes_first() {
    let mut situation = Situation {
        budget_units: 90,
        groups: vec![group(1, 0), group(1, 0), group(1, 0)],
        members: vec![member(0, 0, 60), waiting(1, 1, 0, 5, 20), waiting(2, 2, 0, 4, 20)],
    };
    assert_eq!(denied(&admit(&situation, 1, 20)), Some(Shortage::DeviceFull), "ticket 4 comes first");
    assert_eq!(admit(&situation, 2, 20), Admission::Granted);
    situation.groups[1].priority = 1;
    assert_eq!(admit(&situation, 1, 20), Admission::Granted);
    assert_eq!(denied(&admit(&situation, 2, 20)), Some(Shortage::DeviceFull));
}

#[test]
fn a_full_group_asks_its_own_members_only() {
    let mut situation = Situation {
        budget_units: 1000,
        groups: vec![group(1, 0), group(1, 0)],
        members: vec![member(0, 0, 90), member(1, 0, 10), member(2, 1, 500)],
    };
    situation.groups[0].max_units = 100;
    let Admission::Denied { shortage, asks } = admit(&situation, 1, 20) else { panic!("above the limit") };
    assert_eq!(shortage, Shortage::GroupLimit);
    assert_eq!(asks, [super::Ask { slot: 0, n_units: 20 }]);
}

#[test]
fn members_of_a_group_that_has_the_whole_device_are_asked_for_more_than_their_half() {
    let situation = Situation {
        budget_units: 32,
        groups: vec![group(1, 0)],
        members: vec![member(0, 0, 32), member(1, 0, 0)],
    };
    let Admission::Denied { asks, .. } = admit(&situation, 1, 8) else { panic!("there is nothing left") };
    assert_eq!(asks, [super::Ask { slot: 0, n_units: 8 }]);
    let Admission::Denied { asks, .. } = admit(&situation, 1, 17) else { panic!("there is nothing left") };
    assert_eq!(asks, [], "it is entitled to a half");
}

fn starved(slot: usize, group: usize, held_units: u64, ticket: u64, n_units: u64) -> MemberShare {
    MemberShare { waits: Some(Wait { ticket, n_units, is_starved: true }), ..member(slot, group, held_units) }
}

#[test]
fn of_two_starved_members_beyond_their_shares_one_asks_the_other_and_keeps_its_turn() {
    let mut situation = Situation {
        budget_units: 100,
        groups: vec![group(1, 0), group(1, 0)],
        members: vec![starved(0, 0, 50, 7, 1), starved(1, 1, 50, 6, 20)],
    };
    let Admission::Denied { asks, .. } = admit(&situation, 1, 20) else { panic!("granted 120 of 100") };
    assert_eq!(asks, [super::Ask { slot: 0, n_units: 20 }], "its ticket is the earlier one");
    let Admission::Denied { asks, .. } = admit(&situation, 0, 1) else { panic!("granted 101 of 100") };
    assert_eq!(asks, []);
    // It got some of it, and waits with a later ticket: the other must not take what comes back next.
    situation.members = vec![starved(0, 0, 44, 7, 7), starved(1, 1, 49, 9, 3)];
    assert_eq!(denied(&admit(&situation, 0, 7)), Some(Shortage::OverShare));
    assert_eq!(admit(&situation, 1, 3), Admission::Granted);
}

#[test]
fn a_member_that_goes_on_is_not_asked_by_a_starved_one_beyond_its_share() {
    let situation = Situation {
        budget_units: 100,
        groups: vec![group(1, 0), group(1, 0)],
        members: vec![starved(0, 0, 50, 7, 10), waiting(1, 1, 50, 6, 20)],
    };
    let Admission::Denied { asks, .. } = admit(&situation, 0, 10) else { panic!("granted 110 of 100") };
    assert_eq!(asks, []);
}

#[test]
fn a_claim_that_can_never_be_served_does_not_stop_others() {
    let mut situation = Situation {
        budget_units: 100,
        groups: vec![group(1, 0), group(1, 0), group(1, 0)],
        members: vec![starved(0, 0, 34, 1, 40), starved(1, 1, 33, 2, 10), starved(2, 2, 33, 3, 10)],
    };
    situation.groups[0].max_units = 60;
    let Admission::Denied { asks, .. } = admit(&situation, 1, 10) else { panic!("granted 110 of 100") };
    assert_eq!(asks, [super::Ask { slot: 2, n_units: 10 }]);
}

fn any_demand() -> impl Strategy<Value = Demand> {
    (0..200_u64, 0..400_u64, 0..50_u32, 0..400_u64)
        .prop_map(|(min, max, weight, wanted)| demand(min, max, weight, wanted))
}

proptest! {
    #[test]
    fn entitlements_keep_limits_minimums_and_waste_nothing(
        budget in 0..2000_u64,
        demands in vec(any_demand(), 0..12),
    ) {
        let units = entitlements(budget, &demands);
        let caps: Vec<u64> = demands.iter().map(|demand| demand.wanted_units.min(demand.max_units)).collect();
        let floors: Vec<u64> = demands.iter().zip(&caps).map(|(demand, cap)| demand.min_units.min(*cap)).collect();
        for (mine, cap) in units.iter().zip(&caps) {
            prop_assert!(mine <= cap);
        }
        if floors.iter().sum::<u64>() <= budget {
            for (mine, floor) in units.iter().zip(&floors) {
                prop_assert!(mine >= floor);
            }
        }
        prop_assert_eq!(units.iter().sum::<u64>(), budget.min(caps.iter().sum()));
    }

    #[test]
    fn entitlements_take_any_numbers(
        budget in any::<u64>(),
        demands in vec((any::<u64>(), any::<u64>(), any::<u32>(), any::<u64>()), 0..5),
    ) {
        let demands: Vec<Demand> = demands.into_iter().map(|(a, b, c, d)| demand(a, b, c, d)).collect();
        let units = entitlements(budget, &demands);
        prop_assert!(units.iter().copied().map(u128::from).sum::<u128>() <= u128::from(budget));
    }

    #[test]
    fn more_weight_is_never_less_memory(
        budget in 0..2000_u64,
        demands in vec(any_demand(), 1..8),
        more in 1..100_u32,
        which in 0..8_usize,
    ) {
        let which = which % demands.len();
        let before = entitlements(budget, &demands)[which];
        let mut heavier = demands;
        heavier[which].weight = heavier[which].weight.max(1) + more;
        let after = entitlements(budget, &heavier)[which];
        // Rounding may move one unit to a neighbor.
        prop_assert!(after + 1 >= before, "{before} fell to {after}");
    }

    #[test]
    fn a_claim_within_the_entitlement_is_served_after_bounded_releases(
        weight in 1..20_u32,
        others in vec((1..20_u32, 0..200_u64, 1..40_u64), 1..8),
        budget in 50..500_u64,
    ) {
        // Every member but member 0 takes all it can get; member 0 asks for what it is entitled to
        // whatever the others want, less one unit that rounding may move.
        let weights: Vec<u32> = std::iter::once(weight).chain(others.iter().map(|other| other.0)).collect();
        let everything: Vec<Demand> = weights.iter().map(|&weight| demand(0, budget, weight, budget)).collect();
        let n_units = entitlements(budget, &everything)[0].saturating_sub(1);
        prop_assume!(n_units > 0);
        let groups = weights.iter().map(|&weight| group(weight, 0)).collect();
        let mut situation =
            Situation { budget_units: budget, groups, members: vec![waiting(0, 0, 0, 100, n_units)] };
        let mut n_free = budget;
        for (index, &(_, held, greed)) in others.iter().enumerate() {
            let (slot, held) = (index + 1, held.min(n_free));
            n_free -= held;
            situation.members.push(waiting(slot, slot, held, slot as u64, greed));
        }
        let mut next_ticket = 101;
        let mut n_releases = 0;
        loop {
            let asks = match admit(&situation, 0, n_units) {
                Admission::Granted => break,
                Admission::Denied { asks, .. } => asks,
            };
            n_releases += 1;
            prop_assert!(n_releases <= 3 * weights.len(), "starved: {situation:?}");
            // Those asked give back; then all others try to be faster.
            for ask in asks {
                situation.members[ask.slot].held_units -= ask.n_units;
            }
            for (index, &(_, _, greed)) in others.iter().enumerate() {
                if admit(&situation, index + 1, greed) == Admission::Granted {
                    let member = &mut situation.members[index + 1];
                    member.held_units += greed;
                    member.waits = Some(Wait { ticket: next_ticket, n_units: greed, is_starved: false });
                    next_ticket += 1;
                }
                let n_held: u64 = situation.members.iter().map(|member| member.held_units).sum();
                prop_assert!(n_held <= budget);
            }
        }
    }

    /// Requests grow to a size of their own and end; a member gives back what it is asked for only while it is starved, as
    /// an engine whose sequences run cannot.
    #[test]
    fn starved_members_never_wait_for_each_other_for_ever(
        budget in 10..200_u64,
        sizes in vec((0..4_usize, 1..200_u64, 1..20_u64), 2..8),
        priorities in vec(0..3_u32, 4),
        limits in vec(1..400_u64, 4),
    ) {
        let groups: Vec<GroupShare> = priorities.iter().zip(&limits)
            .map(|(&priority, &max_units)| GroupShare { max_units, ..group(1, priority) })
            .collect();
        let members = sizes.iter().enumerate().map(|(slot, &(group, ..))| member(slot, group, 0)).collect();
        let mut situation = Situation { budget_units: budget, groups, members };
        // What a request needs in all, and whether it was reached.
        let needs: Vec<u64> = sizes.iter().map(|&(group, size, _)| size.min(limits[group]).min(budget)).collect();
        let mut is_done = vec![false; sizes.len()];
        let mut next_ticket = 1;
        for _ in 0..20_000 {
            for (slot, &(_, _, step)) in sizes.iter().enumerate() {
                if is_done[slot] {
                    continue;
                }
                let before = situation.members[slot];
                // A starved member lost its place: it begins again only with all that it had.
                let n_lacking = needs[slot] - before.held_units;
                let n_units = if before.waits.is_some() { before.waits.map_or(step, |wait| wait.n_units) } else { step };
                let n_units = n_units.min(n_lacking);
                match admit(&situation, slot, n_units) {
                    Admission::Granted => {
                        let member = &mut situation.members[slot];
                        member.held_units += n_units;
                        member.waits = None;
                        if member.held_units == needs[slot] {
                            is_done[slot] = true;
                            member.held_units = 0;
                        }
                    }
                    Admission::Denied { asks, .. } => {
                        let ticket = before.waits.map_or(next_ticket, |wait| wait.ticket);
                        next_ticket += 1;
                        situation.members[slot].waits = Some(Wait { ticket, n_units, is_starved: true });
                        for ask in asks {
                            let asked = &mut situation.members[ask.slot];
                            let Some(wait) = &mut asked.waits else { continue };
                            prop_assert!(ask.n_units <= asked.held_units);
                            asked.held_units -= ask.n_units;
                            wait.n_units += ask.n_units;
                        }
                    }
                }
                let n_held: u64 = situation.members.iter().map(|member| member.held_units).sum();
                prop_assert!(n_held <= budget);
            }
            if is_done.iter().all(|&is_done| is_done) {
                return Ok(());
            }
        }
        prop_assert!(false, "they wait for ever: {situation:?}, {needs:?}");
    }
}
