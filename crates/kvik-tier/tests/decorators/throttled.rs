//! What is over a bound is skipped at once, or waits.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvik_tier::conformance::{ManualClock, MapTier, content_key};
use kvik_tier::{Clock, Faulty, GetOutcome, PutOutcome, Throttled, ThrottledOptions, Tier};

use crate::{get, get_batch, interrupted, put, put_batch};

fn tier(bytes_per_s: u64, burst_bytes: u64) -> (Throttled<MapTier>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new());
    let options =
        ThrottledOptions { bytes_per_s: Some(bytes_per_s), burst_bytes, ..ThrottledOptions::default() };
    (Throttled::with_clock(MapTier::new(), options, clock.clone()), clock)
}

fn n_stored(outcomes: &[PutOutcome]) -> usize {
    let (passed, skipped) = outcomes.split_at(outcomes.iter().filter(|outcome| outcome.is_present()).count());
    assert!(passed.iter().all(PutOutcome::is_present), "items pass in their order");
    assert!(skipped.iter().all(|outcome| matches!(outcome, PutOutcome::Skipped)));
    passed.len()
}

#[test]
fn bytes_over_the_rate_are_skipped_until_time_has_passed() {
    let (throttled, clock) = tier(1000, 1000);
    assert_eq!(n_stored(&put_batch(&throttled, 0..20, 100)), 10);
    assert!(matches!(get(&throttled, 0, 100), GetOutcome::Skipped));
    clock.advance(Duration::from_millis(300));
    assert_eq!(n_stored(&put_batch(&throttled, 20..40, 100)), 3);
    clock.advance(Duration::from_millis(200));
    let outcomes = get_batch(&throttled, 0..5, 100);
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_hit()).count(), 2);
    assert!(throttled.stat().details.contains(&("throttled_items", 10 + 1 + 17 + 3)));
}

#[test]
fn bytes_over_the_rate_wait_where_that_is_wanted_and_misses_do_not() {
    let clock = Arc::new(ManualClock::new());
    let options = ThrottledOptions {
        bytes_per_s: Some(1000),
        burst_bytes: 10,
        waits: true,
        ..ThrottledOptions::default()
    };
    let throttled = Throttled::with_clock(MapTier::new(), options, clock.clone());
    let begin = clock.now();
    assert_eq!(n_stored(&put_batch(&throttled, 0..20, 100)), 20);
    assert_eq!((clock.now() - begin).as_millis(), 1990);
    assert!(get_batch(&throttled, 0..5, 100).iter().all(GetOutcome::is_hit));
    assert_eq!((clock.now() - begin).as_millis(), 2490);
    assert!(matches!(get(&throttled, 99, 100), GetOutcome::Miss));
    assert_eq!((clock.now() - begin).as_millis(), 2490);
}

#[test]
fn a_rest_saves_no_more_than_a_burst() {
    let (throttled, clock) = tier(1000, 500);
    clock.advance(Duration::from_hours(1));
    assert_eq!(n_stored(&put_batch(&throttled, 0..20, 100)), 5);
}

#[test]
fn a_chunk_larger_than_a_burst_passes_and_is_paid_for_by_those_after_it() {
    let (throttled, clock) = tier(1000, 100);
    assert!(put(&throttled, 0, 2100).is_present());
    clock.advance(Duration::from_millis(1999));
    assert!(matches!(put(&throttled, 1, 10), PutOutcome::Skipped));
    clock.advance(Duration::from_millis(2));
    assert!(put(&throttled, 1, 10).is_present());
}

#[test]
fn what_did_not_move_costs_nothing() {
    let clock = Arc::new(ManualClock::new());
    let options = ThrottledOptions { bytes_per_s: Some(1), burst_bytes: 1000, ..ThrottledOptions::default() };
    let throttled = Throttled::with_clock(MapTier::with_capacity_bytes(500), options, clock);
    for _ in 0..50 {
        assert!(matches!(get(&throttled, 7, 900), GetOutcome::Miss));
        assert!(matches!(put(&throttled, 0, 900), PutOutcome::NoRoom));
    }
}

#[test]
fn calls_over_the_bound_are_skipped_and_deletes_are_not() {
    let throttled: Arc<OnceLock<Throttled<Faulty<MapTier>>>> = Arc::default();
    let hook = {
        let throttled = throttled.clone();
        move || {
            let throttled = throttled.get().unwrap();
            assert!(matches!(put(throttled, 1, 10), PutOutcome::Skipped));
            assert!(matches!(get(throttled, 1, 10), GetOutcome::Skipped));
            let error = throttled.contains(&[content_key(0)], &mut [false]).unwrap_err();
            assert_eq!(error.to_string(), "ask the ram tier: too many calls at a time");
        }
    };
    let options = ThrottledOptions { max_calls: 1, ..ThrottledOptions::default() };
    let throttled =
        throttled.get_or_init(|| Throttled::new(interrupted(MapTier::new(), hook), options.clone()));
    assert!(matches!(put(throttled, 0, 10), PutOutcome::Stored));
    assert!(get(throttled, 0, 10).is_hit());
    assert!(throttled.stat().details.contains(&("throttled_items", 6)));

    let none = Throttled::new(MapTier::new(), ThrottledOptions { max_calls: 0, ..options });
    assert!(matches!(put(&none, 0, 10), PutOutcome::Skipped));
    assert_eq!(none.delete(&[content_key(0)]).unwrap(), 0);
    none.flush().unwrap();
}
