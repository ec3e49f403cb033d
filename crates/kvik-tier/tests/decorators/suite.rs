//! The suite of all tiers on each decorator, and on tiers that it must not accept.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use kvik_tier::conformance::{self, ManualClock, MapTier, Traits};
use kvik_tier::{
    Breaker, BreakerOptions, Checksummed, Coded, CodedSpaces, FaultRates, Faulty, Metered, Retry,
    RetryOptions, Throttled, ThrottledOptions, Tier,
};

use crate::encrypted::encrypted;

const CAPACITY_BYTES: u64 = 8 << 20;

/// Runs the whole suite on a tier around a map, unbounded and bounded.
fn run(wrap: fn(MapTier) -> Box<dyn Tier>) {
    conformance::run(&|| wrap(MapTier::new()), &Traits::default());
    let traits = Traits { capacity_bytes: Some(CAPACITY_BYTES), ..Traits::default() };
    conformance::run(&|| wrap(MapTier::with_capacity_bytes(CAPACITY_BYTES)), &traits);
}

/// Everything at once, on a tier that fails as `rates` say.
fn stacked(map: MapTier, rates: FaultRates, seed: u64) -> Box<dyn Tier> {
    let clock = Arc::new(ManualClock::new());
    let faulty: Box<dyn Tier> = Box::new(Faulty::with_clock(map, rates, seed, clock.clone()));
    let throttled =
        Throttled::with_clock(Checksummed::new(faulty), ThrottledOptions::default(), clock.clone());
    let retry = Retry::with_clock(throttled, RetryOptions::default(), clock.clone());
    // Without a pause every call after an opening is a probe: the tier is asked on.
    let options = BreakerOptions { first_pause: Duration::ZERO, ..BreakerOptions::default() };
    let breaker = Breaker::with_clock(Arc::new(retry), options, clock.clone());
    Box::new(Metered::with_clock(breaker, clock))
}

fn all_faults(per_thousand: u32) -> FaultRates {
    FaultRates {
        fail: per_thousand,
        fail_late: per_thousand,
        delay: per_thousand,
        lose: per_thousand,
        tear: per_thousand,
        shorten: per_thousand,
        duplicate: per_thousand,
        flip: per_thousand,
        mix: per_thousand,
        max_delay: Duration::from_millis(10),
    }
}

/// The message of the panic that `check` ends with.
fn panic_of(check: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(check)).expect_err("it goes well");
    panic.downcast_ref::<String>().cloned().unwrap()
}

#[test]
fn a_map_is_a_tier() {
    run(|map| Box::new(map));
}

#[test]
fn a_checksummed_tier_is_a_tier() {
    run(|map| Box::new(Checksummed::new(map)));
}

#[test]
fn a_coded_tier_is_a_tier() {
    for codec in ["lossless", "none"] {
        let wrap = |map: MapTier| -> Box<dyn Tier> {
            Box::new(
                Coded::try_new(Checksummed::new(map), codec, &[], Arc::new(CodedSpaces::default())).unwrap(),
            )
        };
        let traits = Traits { knows_lengths: false, ..Traits::default() };
        conformance::run(&|| wrap(MapTier::new()), &traits);
        let traits = Traits { capacity_bytes: Some(CAPACITY_BYTES), ..traits };
        conformance::run(&|| wrap(MapTier::with_capacity_bytes(CAPACITY_BYTES)), &traits);
    }
}

#[test]
fn a_hit_of_a_coded_tier_is_right_whatever_fails() {
    let make = |seed: u64| -> Box<dyn Tier> {
        let inner = stacked(MapTier::new(), all_faults(30), seed);
        Box::new(Coded::try_new(inner, "lossless", &[], Arc::new(CodedSpaces::default())).unwrap())
    };
    let n_hits = conformance::run_under_faults(&make, 0..10);
    assert!(n_hits > 0);
}

#[test]
fn an_encrypted_tier_is_a_tier() {
    run(|map| Box::new(encrypted(map)));
}

#[test]
fn checksums_and_encryption_stack_in_any_order() {
    run(|map| Box::new(encrypted(Checksummed::new(map))));
    run(|map| Box::new(Checksummed::new(encrypted(map))));
}

#[test]
fn a_hit_of_an_encrypted_tier_is_right_whatever_fails() {
    for per_thousand in [5, 30, 150] {
        let make = |seed| {
            let clock = Arc::new(ManualClock::new());
            let faulty = Faulty::with_clock(MapTier::new(), all_faults(per_thousand), seed, clock);
            Box::new(encrypted(faulty)) as Box<dyn Tier>
        };
        let n_hits = conformance::run_under_faults(&make, 0..20);
        assert!(n_hits > 100, "{n_hits} hits prove nothing");
    }
}

#[test]
fn checksums_of_checksums_are_a_tier() {
    run(|map| Box::new(Checksummed::new(Box::new(Checksummed::new(map)) as Box<dyn Tier>)));
}

#[test]
fn a_tier_behind_a_breaker_is_a_tier() {
    run(|map| Box::new(Breaker::new(map, BreakerOptions::default())));
}

#[test]
fn a_tier_that_is_tried_again_is_a_tier() {
    run(|map| Box::new(Retry::new(map, RetryOptions::default())));
}

#[test]
fn a_throttled_tier_is_a_tier_while_it_is_within_its_bounds() {
    run(|map| {
        let options =
            ThrottledOptions { bytes_per_s: Some(1 << 50), max_calls: 100, ..ThrottledOptions::default() };
        Box::new(Throttled::new(map, options))
    });
}

#[test]
fn a_metered_tier_is_a_tier() {
    run(|map| Box::new(Metered::new(map)));
}

#[test]
fn a_faulty_tier_without_faults_is_a_tier() {
    run(|map| Box::new(Faulty::new(map, FaultRates::default(), 1)));
}

#[test]
fn duplicated_calls_change_nothing() {
    run(|map| Box::new(Faulty::new(map, FaultRates { duplicate: 500, ..FaultRates::default() }, 1)));
}

#[test]
fn a_stack_of_all_decorators_is_a_tier() {
    run(|map| stacked(map, FaultRates::default(), 1));
}

#[test]
fn a_stack_hides_rare_transient_failures() {
    conformance::run(
        &|| {
            let rates = FaultRates { fail: 2, ..FaultRates::default() };
            let options =
                RetryOptions { max_attempts: 10, budget: Duration::from_mins(1), ..RetryOptions::default() };
            let clock = Arc::new(ManualClock::new());
            Box::new(Retry::with_clock(
                Checksummed::new(Faulty::new(MapTier::new(), rates, 7)),
                options,
                clock,
            ))
        },
        &Traits::default(),
    );
}

#[test]
fn a_hit_is_right_whatever_fails() {
    for per_thousand in [5, 30, 150] {
        let make = |seed| {
            let faulty = Faulty::with_clock(
                MapTier::new(),
                all_faults(per_thousand),
                seed,
                Arc::new(ManualClock::new()),
            );
            Box::new(Checksummed::new(faulty)) as Box<dyn Tier>
        };
        let n_hits = conformance::run_under_faults(&make, 0..20);
        assert!(n_hits > 100, "{n_hits} hits prove nothing");
    }
}

#[test]
fn a_hit_of_a_stack_is_right_whatever_fails() {
    let n_hits = conformance::run_under_faults(&|seed| stacked(MapTier::new(), all_faults(10), seed), 0..20);
    assert!(n_hits > 100, "{n_hits} hits prove nothing");
}

#[test]
fn the_suite_finds_each_fault_that_nothing_proves() {
    type Choice = fn(&mut FaultRates) -> &mut u32;
    let choices: [Choice; 6] = [
        |rates| &mut rates.lose,
        |rates| &mut rates.tear,
        |rates| &mut rates.shorten,
        |rates| &mut rates.flip,
        |rates| &mut rates.mix,
        |rates| &mut rates.fail,
    ];
    for (choice, choice_idx) in choices.iter().zip(0..) {
        let make = || {
            let mut rates = FaultRates::default();
            *choice(&mut rates) = 1000;
            Box::new(Faulty::new(MapTier::new(), rates, 1)) as Box<dyn Tier>
        };
        let message = panic_of(|| conformance::run(&make, &Traits::default()));
        assert!(message.contains("a_chunk_comes_back_at_every_size"), "fault {choice_idx}: {message}");
    }
}

#[test]
fn the_suite_names_what_a_tier_has_not() {
    let traits = Traits { capacity_bytes: Some(1 << 20), ..Traits::default() };
    let message = panic_of(|| conformance::run(&|| Box::new(MapTier::new()), &traits));
    let name = "a_full_tier_says_so_and_has_room_again_after_deleting";
    assert_eq!(message, format!("behaviors of a tier that this one has not: {name}"));
}

#[test]
fn hits_of_unproven_bytes_are_found_under_faults() {
    for rates in
        [FaultRates { flip: 50, ..FaultRates::default() }, FaultRates { mix: 50, ..FaultRates::default() }]
    {
        let make = |seed| Box::new(Faulty::new(MapTier::new(), rates.clone(), seed)) as Box<dyn Tier>;
        let message = panic_of(|| {
            conformance::run_under_faults(&make, 0..3);
        });
        assert!(message.contains("with other bytes"), "{message}");
    }
}
