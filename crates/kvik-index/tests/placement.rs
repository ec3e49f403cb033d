//! Properties of the choice that knows the holders.

#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

use kvik_index::placement::{Request, choose};
use kvik_index::ring::{self, Choice, Loads, Reason, Ring, RingHash, explain};
use proptest::prelude::*;

/// What a choice is made from.
#[derive(Debug, Clone)]
struct Case {
    ring: Ring,
    weights: Vec<f64>,
    loads: Vec<u64>,
    usable: Vec<bool>,
    matched: Vec<f64>,
    key: u64,
    tokens: u64,
    load_factor: f64,
}

impl Case {
    fn choose(&self) -> Option<Choice> {
        let key = self.key.to_le_bytes();
        let request = Request { key: &key, tokens: self.tokens, matched_tokens: &self.matched };
        choose(&self.ring, request, self.loads(), self.load_factor, |member| self.usable[member])
    }

    fn choose_on_ring(&self) -> Option<Choice> {
        let key = self.key.to_le_bytes();
        let usable = |member: usize| self.usable[member];
        ring::choose(&self.ring, &key, self.loads(), self.load_factor, self.tokens, usable)
    }

    fn loads(&self) -> Loads<'_> {
        Loads { tokens: &self.loads, weights: &self.weights }
    }

    fn matched(&self, member: usize) -> u64 {
        (self.matched[member].max(0.0) as u64).min(self.tokens)
    }

    /// Whether each member stays within the bound that the ring gives it.
    fn has_room(&self) -> Vec<bool> {
        let usable = |member: usize| self.usable[member];
        let key = self.key.to_le_bytes();
        let explanation = explain(&self.ring, &key, self.loads(), self.load_factor, self.tokens, usable);
        let mut has_room = vec![false; self.weights.len()];
        for candidate in explanation.candidates.iter().filter(|candidate| self.usable[candidate.member]) {
            let left_tokens = self.tokens - self.matched(candidate.member);
            has_room[candidate.member] =
                candidate.load == 0 || candidate.load + left_tokens <= candidate.bound;
        }
        has_room
    }

    fn usable_members(&self) -> impl Iterator<Item = usize> {
        (0..self.weights.len()).filter(|&member| self.usable[member] && self.weights[member] > 0.0)
    }
}

fn ring_of(weights: &[f64]) -> Ring {
    let members: Vec<_> =
        weights.iter().enumerate().map(|(place, weight)| (format!("m{place:03}"), *weight)).collect();
    Ring::build(RingHash::Xxh3, 4, &members).unwrap()
}

fn even_case(loads: Vec<u64>, matched: Vec<f64>, tokens: u64) -> Case {
    let weights = vec![1.0; loads.len()];
    let (ring, usable) = (ring_of(&weights), vec![true; loads.len()]);
    Case { ring, weights, loads, usable, matched, key: 7, tokens, load_factor: 0.25 }
}

fn cases() -> impl Strategy<Value = Case> {
    prop_oneof![1_usize..=12, 60_usize..=70].prop_flat_map(|n| {
        let weights = proptest::collection::vec(prop_oneof![Just(0.0), Just(1.0), Just(1.0), 0.05..8.0], n);
        let loads = proptest::collection::vec(prop_oneof![Just(0), 1_u64..100, 1_u64..100_000], n);
        let usable = proptest::collection::vec(proptest::bool::weighted(0.8), n);
        let some = prop_oneof![Just(0.0), 0.0..10_000.0, Just(f64::NAN), Just(-1.0), Just(1e18)];
        let matched = proptest::collection::vec(some, n);
        (weights, loads, usable, matched, any::<u64>(), 0_u64..10_000, 0.0..2.0).prop_map(
            |(weights, loads, usable, matched, key, tokens, load_factor)| {
                let ring = ring_of(&weights);
                Case { ring, weights, loads, usable, matched, key, tokens, load_factor }
            },
        )
    })
}

#[test]
fn the_one_that_has_the_prompt_takes_it() {
    let choice = even_case(vec![500; 4], vec![0.0, 0.0, 900.0, 100.0], 1_000).choose().unwrap();
    assert_eq!((choice.member, choice.reason), (2, Reason::Holder));
}

#[test]
fn a_full_holder_passes_the_request_to_the_next_best_one() {
    // The bound is 1.25 * (6000 + 1000) / 4, rounded up.
    let choice =
        even_case(vec![3_000, 0, 1_500, 1_500], vec![900.0, 0.0, 0.0, 800.0], 1_000).choose().unwrap();
    assert_eq!((choice.member, choice.reason, choice.bound), (3, Reason::Spread, 2_188));
}

#[test]
fn a_long_queue_costs_more_than_a_short_prompt() {
    let mut case = even_case(vec![4_000, 3_000, 4_000, 4_000], vec![100.0, 0.0, 0.0, 0.0], 1_000);
    assert_eq!(case.choose().map(|choice| (choice.member, choice.reason)), Some((1, Reason::Spread)));
    case.matched[0] = 900.0;
    assert_eq!(case.choose().map(|choice| (choice.member, choice.reason)), Some((0, Reason::Holder)));
}

#[test]
fn a_faster_member_takes_what_all_have_alike() {
    let mut case = even_case(vec![1_000; 3], vec![500.0; 3], 1_000);
    case.weights[1] = 2.0;
    case.ring = ring_of(&case.weights);
    assert_eq!(case.choose().map(|choice| choice.member), Some(1));
}

#[test]
fn equally_good_members_are_taken_in_the_order_of_the_ring() {
    let mut owners = [0; 4];
    for key in 0..1_000 {
        let case = Case { key, ..even_case(vec![0; 4], vec![512.0; 4], 1_000) };
        let choice = case.choose().unwrap();
        assert_eq!(Some(choice.member), case.ring.walk(&key.to_le_bytes()).next());
        owners[choice.member] += 1;
    }
    assert!(owners.iter().all(|&n| n > 50), "{owners:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_usable_member_is_chosen_whenever_there_is_one(case in cases()) {
        let Some(choice) = case.choose() else {
            prop_assert_eq!(case.usable_members().count(), 0);
            return Ok(());
        };
        prop_assert!(case.usable_members().any(|member| member == choice.member));
        prop_assert_eq!(choice.load, case.loads[choice.member]);
    }

    #[test]
    fn no_member_passes_its_bound_while_another_has_room(case in cases()) {
        let Some(choice) = case.choose() else { return Ok(()) };
        let has_room = case.has_room();
        prop_assert_eq!(has_room[choice.member], has_room.contains(&true));
    }

    #[test]
    fn without_a_match_the_ring_chooses(case in cases(), nothing in prop_oneof![Just(0.0), Just(f64::NAN), Just(-5.0)]) {
        let nothing = Case { matched: vec![nothing; case.weights.len()], ..case };
        prop_assert_eq!(nothing.choose(), nothing.choose_on_ring());
        let short = Case { matched: Vec::new(), ..nothing };
        prop_assert_eq!(short.choose(), short.choose_on_ring());
    }

    #[test]
    fn a_match_of_members_that_are_not_usable_does_not_count(mut case in cases()) {
        for member in 0..case.weights.len() {
            case.usable[member] &= case.matched(member) == 0;
        }
        prop_assert_eq!(case.choose(), case.choose_on_ring());
    }

    #[test]
    fn the_choice_stays_if_it_has_more(case in cases(), more in 0.0..10_000.0) {
        let Some(choice) = case.choose() else { return Ok(()) };
        prop_assume!(case.usable_members().any(|member| case.matched(member) > 0));
        let mut richer = case.clone();
        richer.matched[choice.member] = case.matched(choice.member) as f64 + more;
        prop_assert_eq!(richer.choose().map(|choice| choice.member), Some(choice.member));
    }

    #[test]
    fn another_member_is_not_chosen_with_less(case in cases(), other in any::<prop::sample::Index>(), part in 0.0..1.0) {
        let Some(choice) = case.choose() else { return Ok(()) };
        let other = other.index(case.weights.len());
        prop_assume!(other != choice.member && case.matched(choice.member) > 0);
        let mut poorer = case.clone();
        poorer.matched[other] = case.matched(other) as f64 * part;
        prop_assert_eq!(poorer.choose().map(|choice| choice.member), Some(choice.member));
    }

    #[test]
    fn the_reason_says_whether_another_has_more(case in cases()) {
        prop_assume!(case.usable_members().any(|member| case.matched(member) > 0));
        let choice = case.choose().unwrap();
        let most = case.usable_members().map(|member| case.matched(member)).max().unwrap();
        match choice.reason {
            Reason::Holder => prop_assert_eq!(case.matched(choice.member), most),
            Reason::Spread => prop_assert!(case.matched(choice.member) <= most),
            reason => prop_assert!(false, "{reason:?} although a member has a match"),
        }
    }

    #[test]
    fn equal_inputs_give_equal_choices(case in cases()) {
        prop_assert_eq!(case.choose(), case.clone().choose());
    }
}
