//! Tenants share the bytes of a tier by weight.

use std::sync::Arc;
use std::time::Duration;

use kvik_tier::conformance::{ManualClock, MapTier};
use kvik_tier::{Bandwidth, Throttled, ThrottledOptions};
use proptest::prelude::*;

use crate::{get, put, put_batch};

const BYTES_PER_S: u64 = 1_000_000;

/// Steps of a millisecond in which tenants ask.
const N_STEPS: u64 = 20_000;

/// A tenant: how much it asks for, and what it got.
struct Tenant {
    tier: Throttled<Arc<MapTier>>,
    chunk_idx: u64,
    chunk_bytes: usize,
    /// It asks in each step that is a multiple of it; 0 is never.
    every: u64,
    got_bytes: u64,
}

/// Runs tenants of `(share, chunk bytes, every)` against each other; returns what each got.
fn run(tenants: &[(u32, usize, u64)]) -> Vec<u64> {
    let clock = Arc::new(ManualClock::new());
    let bandwidth = Bandwidth::with_clock(BYTES_PER_S, 50_000, clock.clone());
    let map = Arc::new(MapTier::new());
    let mut tenants: Vec<Tenant> = (0..)
        .zip(tenants)
        .map(|(chunk_idx, (share, chunk_bytes, every))| {
            assert!(put(&map, chunk_idx, *chunk_bytes).is_present());
            let share = Some(bandwidth.join(*share));
            let tier = Throttled::with_share(Arc::clone(&map), ThrottledOptions::default(), share);
            Tenant { tier, chunk_idx, chunk_bytes: *chunk_bytes, every: *every, got_bytes: 0 }
        })
        .collect();
    for step in 0..N_STEPS {
        clock.advance(Duration::from_millis(1));
        for tenant in
            tenants.iter_mut().filter(|tenant| tenant.every > 0 && step.is_multiple_of(tenant.every))
        {
            // One that always wants more asks until nothing is left; another asks for one chunk.
            while get(&tenant.tier, tenant.chunk_idx, tenant.chunk_bytes).is_hit() {
                tenant.got_bytes += tenant.chunk_bytes as u64;
                if tenant.every > 1 {
                    break;
                }
            }
        }
    }
    tenants.into_iter().map(|tenant| tenant.got_bytes).collect()
}

fn is_near(value: u64, expected: f64) -> bool {
    (value as f64 / expected - 1.0).abs() < 0.05
}

#[test]
fn busy_tenants_get_three_to_one_and_one_alone_gets_everything() {
    let total = (BYTES_PER_S * N_STEPS / 1000) as f64;
    let [large, small] = run(&[(3, 4000, 1), (1, 4000, 1)])[..] else { panic!() };
    assert!(is_near(large, 3.0 * small as f64), "{large} and {small}");
    assert!(is_near(large + small, total), "{large} and {small}");
    for alone in [run(&[(3, 4000, 0), (1, 4000, 1)])[1], run(&[(3, 4000, 1), (1, 4000, 0)])[0]] {
        assert!(is_near(alone, total), "{alone}");
    }
}

#[test]
fn what_a_tenant_does_not_use_others_get_and_it_is_not_made_to_wait() {
    let total = (BYTES_PER_S * N_STEPS / 1000) as f64;
    // The first could have nine tenths and takes one.
    let [light, busy] = run(&[(9, 1000, 10), (1, 4000, 1)])[..] else { panic!() };
    assert!(is_near(light, total / 10.0), "{light}");
    assert!(is_near(busy, total * 0.9), "{busy}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn busy_tenants_get_bytes_in_proportion_to_their_shares(
        tenants in prop::collection::vec((1_u32..=10, 100_usize..6000), 1..6)
    ) {
        let busy: Vec<(u32, usize, u64)> = tenants.iter().map(|(share, bytes)| (*share, *bytes, 1)).collect();
        let total_shares: u32 = tenants.iter().map(|(share, _)| share).sum();
        let total = (BYTES_PER_S * N_STEPS / 1000) as f64;
        for ((share, _), got) in tenants.iter().zip(run(&busy)) {
            let expected = total * f64::from(*share) / f64::from(total_shares);
            prop_assert!(is_near(got, expected), "share {share}: {got} of {expected}");
        }
    }
}

#[test]
fn the_smallest_share_does_not_starve() {
    let [_, small] = run(&[(1000, 1000, 1), (1, 4000, 1)])[..] else { panic!() };
    assert!(small >= 4000 * 4, "{small}");
}

#[test]
fn a_member_that_leaves_takes_nothing_any_more() {
    let clock = Arc::new(ManualClock::new());
    let bandwidth = Bandwidth::with_clock(1000, 1000, clock.clone());
    let options = ThrottledOptions::default();
    let tier = Throttled::with_share(MapTier::new(), options, Some(bandwidth.join(1)));
    let other = bandwidth.join(9);
    let n_passed = |first: u64| {
        put_batch(&tier, first..first + 20, 100).iter().filter(|outcome| outcome.is_present()).count()
    };
    assert_eq!(n_passed(0), 1, "a tenth of the burst");
    clock.advance(Duration::from_secs(1));
    drop(other);
    clock.advance(Duration::from_secs(1));
    assert_eq!(n_passed(20), 10, "the whole burst");
}

#[test]
fn bytes_at_a_time_are_bounded_and_one_chunk_always_passes() {
    let options = ThrottledOptions { max_bytes_in_flight: 250, ..ThrottledOptions::default() };
    let throttled = Throttled::new(MapTier::new(), options);
    let n_passed =
        |outcomes: &[kvik_tier::PutOutcome]| outcomes.iter().filter(|outcome| outcome.is_present()).count();
    assert_eq!(n_passed(&put_batch(&throttled, 0..5, 100)), 2);
    assert_eq!(n_passed(&put_batch(&throttled, 5..10, 100)), 2, "what has moved does not count");
    assert!(put(&throttled, 10, 1000).is_present());
}
