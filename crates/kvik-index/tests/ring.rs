//! Properties of the ring and of the choice on it.

#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

use std::collections::BTreeSet;

use kvik_index::ring::{Loads, MAX_VIRTUAL_NODES, Reason, Ring, RingError, RingHash, Skip, choose, explain};
use proptest::prelude::*;

const VIRTUAL_NODES: u32 = 160;
const N_KEYS: usize = 10_000;

fn ring_of(hash: RingHash, ids: &[String]) -> Ring {
    let members: Vec<_> = ids.iter().map(|id| (id, 1.0)).collect();
    Ring::build(hash, VIRTUAL_NODES, &members).unwrap()
}

fn workers(n: usize) -> Vec<String> {
    (0..n).map(|worker| format!("worker-{worker:02}")).collect()
}

/// The owner of each of the test's keys.
fn owners(ring: &Ring) -> Vec<String> {
    (0..N_KEYS)
        .map(|key| ring.members()[ring.walk(format!("seq-{key}").as_bytes()).next().unwrap()].clone())
        .collect()
}

fn hashes() -> impl Strategy<Value = RingHash> {
    prop_oneof![Just(RingHash::Xxh3), Just(RingHash::Md5)]
}

/// Distinct ids, as random as an operator's.
fn ids(n: impl Into<proptest::collection::SizeRange>) -> impl Strategy<Value = Vec<String>> {
    proptest::collection::btree_set("[a-z0-9.:-]{1,12}", n)
        .prop_map(|ids: BTreeSet<String>| ids.into_iter().collect::<Vec<_>>())
        .prop_shuffle()
}

/// Members in any order, their weights and loads in the order of ids, and which are usable.
fn loaded() -> impl Strategy<Value = (Vec<(String, f64)>, Vec<u64>, Vec<bool>)> {
    (ids(1..=80)).prop_flat_map(|ids| {
        let n = ids.len();
        let weights = proptest::collection::vec(prop_oneof![Just(0.0), Just(1.0), 0.05..8.0], n);
        let tokens = proptest::collection::vec(prop_oneof![Just(0), 1_u64..100, 1_u64..100_000], n);
        let usable = proptest::collection::vec(proptest::bool::weighted(0.8), n);
        (weights, tokens, usable).prop_map(move |(weights, tokens, usable)| {
            (ids.iter().cloned().zip(weights).collect(), tokens, usable)
        })
    })
}

fn weights_by_id(members: &[(String, f64)]) -> Vec<f64> {
    let mut sorted = members.to_vec();
    sorted.sort_by(|left, right| left.0.cmp(&right.0));
    sorted.into_iter().map(|(_, weight)| weight).collect()
}

#[test]
fn the_same_key_goes_to_the_same_worker_over_10_000_ids_and_16_workers() {
    for hash in [RingHash::Xxh3, RingHash::Md5] {
        let (first, second) = (ring_of(hash, &workers(16)), ring_of(hash, &workers(16)));
        assert_eq!(owners(&first), owners(&second));
        let used: BTreeSet<_> = owners(&first).into_iter().collect();
        assert_eq!(used.len(), 16, "every worker owns some of the keys");
    }
}

#[test]
fn one_worker_more_or_less_moves_at_most_its_share_and_five_percent() {
    for hash in [RingHash::Xxh3, RingHash::Md5] {
        for n in 2..=16 {
            let (small, large) =
                (owners(&ring_of(hash, &workers(n - 1))), owners(&ring_of(hash, &workers(n))));
            let moved = small.iter().zip(&large).filter(|(before, after)| before != after).count();
            let share = moved as f64 / N_KEYS as f64;
            assert!(share <= 1.0 / n as f64 + 0.05, "{hash:?}: {n} workers: {share} moved");
        }
    }
}

#[test]
fn the_md5_ring_is_the_one_computed_with_pythons_hashlib() {
    // position = int.from_bytes(hashlib.md5(key).digest()[:4], "big"); nodes f"{worker}#{n}", n < 4;
    // bisect_left over the sorted nodes, then the distinct workers from there on.
    let members = [("worker-2", 1.0), ("worker-0", 1.0), ("worker-1", 1.0)];
    let ring = Ring::build(RingHash::Md5, 4, &members).unwrap();
    let expected = ["102", "201", "120", "102", "120", "012", "012", "201", "102", "102", "201", "012"];
    for (key, expected) in expected.iter().enumerate() {
        let walked: String =
            ring.walk(format!("seq-{key}").as_bytes()).map(|member| member.to_string()).collect();
        assert_eq!(walked, *expected, "seq-{key}");
    }
    let shares = ring.shares();
    for (share, expected) in shares.iter().zip([0.313_605_547_88, 0.475_015_208_12, 0.211_379_243_99]) {
        assert!((share - expected).abs() < 1e-9, "{shares:?}");
    }
}

#[test]
fn weights_give_virtual_nodes() {
    let members = [("none", 0.0), ("tiny", 0.001), ("half", 0.5), ("more", 2.0)];
    let ring = Ring::build(RingHash::Xxh3, 160, &members).unwrap();
    let nodes: Vec<_> = members.iter().map(|(id, _)| ring.virtual_nodes(ring.member(id).unwrap())).collect();
    assert_eq!(nodes, [0, 1, 80, 320]);
    assert_eq!(ring.walk(b"key").count(), 3, "a member of no weight is not on the ring");
    assert_eq!(ring.virtual_nodes(99), 0);
}

#[test]
fn a_weight_that_is_no_share_is_refused() {
    for weight in [f64::NAN, -1.0, f64::INFINITY, f64::NEG_INFINITY, f64::from(MAX_VIRTUAL_NODES), 1e300] {
        let error = Ring::build(RingHash::Xxh3, 160, &[("a", 1.0), ("b", weight)]).unwrap_err();
        assert!(matches!(&error, RingError::InvalidWeight { id, .. } if id == "b"), "{error}");
    }
    let error = Ring::build(RingHash::Xxh3, 160, &[("a", -2.0)]).unwrap_err();
    assert_eq!(error.to_string(), "weight of `a` is -2; allowed: 0 to 409.6");
}

#[test]
fn an_id_that_is_listed_twice_is_refused() {
    let error = Ring::build(RingHash::Xxh3, 160, &[("a", 1.0), ("b", 1.0), ("a", 2.0)]).unwrap_err();
    assert_eq!(error, RingError::DuplicateMember { id: "a".to_owned() });
}

#[test]
fn an_empty_ring_chooses_no_member() {
    let ring = Ring::build::<&str>(RingHash::Xxh3, 160, &[]).unwrap();
    let loads = Loads { tokens: &[], weights: &[] };
    assert_eq!(ring.walk(b"key").next(), None);
    assert_eq!(choose(&ring, b"key", loads, 0.25, 1, |_| true), None);
    assert!(explain(&ring, b"key", loads, 0.25, 1, |_| true).candidates.is_empty());
    assert!(ring.shares().is_empty());
}

#[test]
fn a_lone_virtual_node_owns_the_circle() {
    let ring = Ring::build(RingHash::Md5, 1, &[("a", 1.0)]).unwrap();
    assert_eq!(ring.shares(), [1.0]);
}

#[test]
fn the_explanation_names_the_skipped_members_and_why() {
    let ring = ring_of(RingHash::Xxh3, &workers(4));
    let order: Vec<usize> = ring.walk(b"key").collect();
    let mut tokens = [10, 10, 10, 10];
    tokens[order[1]] = 1_000;
    let loads = Loads { tokens: &tokens, weights: &[1.0; 4] };
    let explanation = explain(&ring, b"key", loads, 0.25, 10, |member| member != order[0]);

    let choice = explanation.choice.unwrap();
    assert_eq!((choice.member, choice.reason), (order[2], Reason::Bound));
    assert_eq!(explanation.position, ring.position(b"key"));
    assert_eq!(explanation.candidates.iter().map(|candidate| candidate.member).collect::<Vec<_>>(), order);
    let skipped: Vec<_> = explanation.candidates.iter().map(|candidate| candidate.skipped).collect();
    assert_eq!(skipped, [Some(Skip::Unusable), Some(Skip::Full), None, None]);
    // 1.25 * (1000 + 10 + 10 + 10) / 3, rounded up.
    assert_eq!(explanation.candidates[1].bound, 430);
}

#[test]
fn a_request_that_fits_nowhere_goes_to_the_least_loaded() {
    let ring = ring_of(RingHash::Xxh3, &workers(4));
    let loads = Loads { tokens: &[9, 8, 7, 6], weights: &[1.0, 1.0, 1.0, 1.0] };
    let choice = choose(&ring, b"key", loads, 0.25, 100_000, |_| true).unwrap();
    assert_eq!((choice.member, choice.reason), (3, Reason::LeastLoaded));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_worker_that_leaves_gives_its_own_keys_and_no_others(
        hash in hashes(), ids in ids(2..=24), leaver in any::<prop::sample::Index>(),
    ) {
        let leaver = leaver.get(&ids).clone();
        let rest: Vec<_> = ids.iter().filter(|id| **id != leaver).cloned().collect();
        let (before, after) = (ring_of(hash, &ids), ring_of(hash, &rest));
        for key in 0..1_000_u32 {
            let key = key.to_le_bytes();
            // Not only the owner: the whole order of the others stays.
            let remaining: Vec<_> = before
                .walk(&key)
                .map(|member| &before.members()[member])
                .filter(|id| **id != leaver)
                .collect();
            prop_assert_eq!(remaining, after.walk(&key).map(|member| &after.members()[member]).collect::<Vec<_>>());
        }
    }

    #[test]
    fn one_of_many_moves_at_most_its_share_and_five_percent(hash in hashes(), ids in ids(8..=24)) {
        let (large, small) = (owners(&ring_of(hash, &ids)), owners(&ring_of(hash, &ids[1..])));
        let moved = small.iter().zip(&large).filter(|(before, after)| before != after).count();
        prop_assert!(moved as f64 / N_KEYS as f64 <= 1.0 / ids.len() as f64 + 0.05);
    }

    #[test]
    fn more_weight_only_takes_keys(weight in 0.1..4.0, more in 0.0..4.0, key in any::<u64>()) {
        let ring = |weight: f64| Ring::build(RingHash::Xxh3, 160, &[("a", weight), ("b", 1.0), ("c", 1.0)]).unwrap();
        let key = key.to_le_bytes();
        let before = ring(weight).walk(&key).next();
        let after = ring(weight + more).walk(&key).next();
        prop_assert!(after == before || after == Some(0));
    }

    #[test]
    fn a_walk_visits_every_placed_member_once((members, _, _) in loaded(), key in any::<u64>()) {
        let ring = Ring::build(RingHash::Xxh3, 16, &members).unwrap();
        let walked: Vec<usize> = ring.walk(&key.to_le_bytes()).collect();
        let distinct: BTreeSet<_> = walked.iter().copied().collect();
        let placed: BTreeSet<_> = (0..members.len()).filter(|&member| ring.virtual_nodes(member) > 0).collect();
        prop_assert_eq!(walked.len(), distinct.len());
        prop_assert_eq!(distinct, placed);
        let total: f64 = ring.shares().iter().sum();
        prop_assert!(ring.walk(b"").count() == 0 || (total - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_choice_does_not_depend_on_the_order_of_members(
        (members, tokens, usable) in loaded(), key in any::<u64>(), request in 0_u64..10_000,
    ) {
        let weights = weights_by_id(&members);
        let mut reversed = members.clone();
        reversed.reverse();
        let (first, second) =
            (Ring::build(RingHash::Xxh3, 16, &members).unwrap(), Ring::build(RingHash::Xxh3, 16, &reversed).unwrap());
        prop_assert_eq!(&first, &second);
        let loads = Loads { tokens: &tokens, weights: &weights };
        let choices =
            [&first, &second].map(|ring| choose(ring, &key.to_le_bytes(), loads, 0.25, request, |member| usable[member]));
        prop_assert_eq!(choices[0], choices[1]);
    }

    #[test]
    fn a_choice_has_room_or_is_idle_or_no_member_has_room(
        (members, tokens, usable) in loaded(), key in any::<u64>(), request in 0_u64..10_000, load_factor in 0.0..1.0,
    ) {
        let weights = weights_by_id(&members);
        let ring = Ring::build(RingHash::Xxh3, 16, &members).unwrap();
        let loads = Loads { tokens: &tokens, weights: &weights };
        let explanation = explain(&ring, &key.to_le_bytes(), loads, load_factor, request, |member| usable[member]);
        prop_assert_eq!(
            explanation.choice,
            choose(&ring, &key.to_le_bytes(), loads, load_factor, request, |member| usable[member])
        );
        let on_ring = |member: usize| usable[member] && weights[member] > 0.0;
        let Some(choice) = explanation.choice else {
            prop_assert!((0..members.len()).all(|member| !on_ring(member)), "a member is chosen if one is usable");
            return Ok(());
        };
        prop_assert!(on_ring(choice.member));
        let has_room = |load: u64, bound: u64| load == 0 || load + request <= bound;
        let anybody = explanation.candidates.iter().any(|c| usable[c.member] && has_room(c.load, c.bound));
        prop_assert_eq!(has_room(choice.load, choice.bound), anybody);
        prop_assert_eq!(choice.reason == Reason::LeastLoaded, !anybody);
    }

    #[test]
    fn no_worker_passes_its_bound_while_requests_come_and_go(
        weights in proptest::collection::vec(0.1..4.0, 1..=16),
        keys in proptest::collection::vec((0_u8..8, any::<bool>()), 1..500),
    ) {
        let ids = workers(weights.len());
        let members: Vec<_> = ids.iter().zip(&weights).map(|(id, weight)| (id, *weight)).collect();
        let ring = Ring::build(RingHash::Xxh3, VIRTUAL_NODES, &members).unwrap();
        let mut tokens = vec![0_u64; members.len()];
        let mut running = std::collections::VecDeque::new();
        for (key, ends) in keys {
            if ends && let Some(member) = running.pop_front() {
                tokens[member] -= 1;
            }
            let loads = Loads { tokens: &tokens, weights: &weights };
            let choice = choose(&ring, &[key], loads, 0.25, 1, |_| true).unwrap();
            prop_assert!(choice.reason != Reason::LeastLoaded, "the bounds together are more than the load");
            tokens[choice.member] += 1;
            running.push_back(choice.member);
            let total: u64 = tokens.iter().sum();
            let share = weights[choice.member] / weights.iter().sum::<f64>();
            let bound = (1.25 * total as f64 * share + 1e-6).ceil() as u64;
            prop_assert!(tokens[choice.member] <= bound);
        }
    }
}
