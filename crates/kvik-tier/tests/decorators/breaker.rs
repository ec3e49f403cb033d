//! A tier that fails gets a rest.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvik_tier::conformance::{ManualClock, MapTier, content_key};
use kvik_tier::{
    Breaker, BreakerOptions, FaultRates, Faulty, GetOutcome, Metered, PutOutcome, Tier, TierError, TierHealth,
};

use crate::{asked, get, get_batch, interrupted, permanent, put, transient};

type Inside = Metered<Faulty<MapTier>>;

fn options() -> BreakerOptions {
    BreakerOptions {
        n_failures_to_open: 3,
        first_pause: Duration::from_secs(1),
        max_pause: Duration::from_secs(5),
    }
}

fn tier() -> (Breaker<Inside>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new());
    let inner = Metered::new(Faulty::new(MapTier::new(), FaultRates::default(), 1));
    (Breaker::with_clock(inner, options(), clock.clone()), clock)
}

fn faulty(breaker: &Breaker<Inside>) -> &Faulty<MapTier> {
    breaker.inner().inner()
}

fn open(breaker: &Breaker<Inside>) {
    faulty(breaker).fail_next(3, transient());
    get_batch(breaker, 0..3, 10);
    assert!(!breaker.is_closed());
}

#[test]
fn failures_in_a_row_open_it_and_the_tier_is_not_asked() {
    let (breaker, _clock) = tier();
    faulty(&breaker).fail_next(3, permanent());
    for _ in 0..3 {
        assert!(breaker.is_closed());
        assert!(matches!(get(&breaker, 0, 10), GetOutcome::Failed(_)));
    }
    assert!(!breaker.is_closed());
    assert!(matches!(get(&breaker, 0, 10), GetOutcome::Skipped));
    assert!(matches!(put(&breaker, 0, 10), PutOutcome::Skipped));
    assert_eq!(asked(breaker.inner(), "get"), (3, 3));
    assert_eq!(asked(breaker.inner(), "put"), (0, 0));
}

#[test]
fn while_it_is_open_calls_fail_with_a_transient_error() {
    let (breaker, _clock) = tier();
    put(&breaker, 7, 10);
    open(&breaker);
    let errors = [
        breaker.contains(&[content_key(0)], &mut [false]).unwrap_err(),
        breaker.delete(&[content_key(0)]).unwrap_err(),
        breaker.flush().unwrap_err(),
    ];
    for error in errors {
        assert!(error.is_transient(), "{error}");
        assert_eq!(error.to_string(), "ask the ram tier: its breaker is open");
    }
    let mut n_visited = 0;
    breaker.visit_keys(&mut |_, _| n_visited += 1);
    assert_eq!(n_visited, 1);
    let stat = breaker.stat();
    assert!(matches!(stat.health, TierHealth::Down(_)));
    assert!(stat.details.contains(&("breaker_openings", 1)));
}

#[test]
fn an_answer_between_failures_starts_the_count_again() {
    let (breaker, _clock) = tier();
    for _ in 0..5 {
        faulty(&breaker).fail_next(2, transient());
        get_batch(&breaker, 0..3, 10);
    }
    assert!(breaker.is_closed());
}

#[test]
fn misses_and_corrupt_chunks_and_full_tiers_are_answers() {
    let breaker = Breaker::new(MapTier::with_capacity_bytes(10), options());
    put(&breaker, 0, 10);
    for _ in 0..10 {
        assert!(matches!(put(&breaker, 1, 10), PutOutcome::NoRoom));
        assert!(matches!(get(&breaker, 1, 10), GetOutcome::Miss));
        assert!(matches!(get(&breaker, 0, 9), GetOutcome::Corrupt(_)));
    }
    assert!(breaker.is_closed());
}

#[test]
fn an_error_of_the_caller_is_not_held_against_the_tier() {
    let (breaker, _clock) = tier();
    faulty(&breaker).fail_next(20, TierError::invalid("key", &"x", "y"));
    get_batch(&breaker, 0..10, 10);
    breaker.delete(&[content_key(0)]).unwrap_err();
    assert!(breaker.is_closed());
}

#[test]
fn failures_of_calls_count_like_those_of_items() {
    let (breaker, _clock) = tier();
    faulty(&breaker).fail_next(3, transient());
    breaker.contains(&[content_key(0)], &mut [false]).unwrap_err();
    breaker.delete(&[content_key(0)]).unwrap_err();
    assert!(breaker.is_closed());
    breaker.flush().unwrap_err();
    assert!(!breaker.is_closed());
}

#[test]
fn after_the_pause_a_probe_that_succeeds_closes_it() {
    let (breaker, clock) = tier();
    open(&breaker);
    clock.advance(Duration::from_millis(999));
    assert!(matches!(get(&breaker, 0, 10), GetOutcome::Skipped));
    clock.advance(Duration::from_millis(1));
    assert!(matches!(get(&breaker, 0, 10), GetOutcome::Miss));
    assert!(breaker.is_closed());
}

#[test]
fn pauses_double_up_to_a_limit_and_begin_anew_after_a_success() {
    let (breaker, clock) = tier();
    open(&breaker);
    for pause_s in [1, 2, 4, 5, 5] {
        clock.advance(Duration::from_millis(1000 * pause_s - 1));
        assert!(matches!(get(&breaker, 0, 10), GetOutcome::Skipped), "{pause_s} s");
        clock.advance(Duration::from_millis(1));
        faulty(&breaker).fail_next(1, transient());
        assert!(matches!(get(&breaker, 0, 10), GetOutcome::Failed(_)), "{pause_s} s");
    }
    clock.advance(Duration::from_secs(5));
    assert!(matches!(get(&breaker, 0, 10), GetOutcome::Miss));
    open(&breaker);
    clock.advance(Duration::from_secs(1));
    assert!(matches!(get(&breaker, 0, 10), GetOutcome::Miss));
}

#[test]
fn empty_batches_are_no_probes() {
    let (breaker, clock) = tier();
    open(&breaker);
    clock.advance(Duration::from_secs(1));
    breaker.get(&mut []);
    breaker.put(&mut []);
    assert_eq!(breaker.delete(&[]).unwrap(), 0);
    assert!(!breaker.is_closed());
    assert!(matches!(get(&breaker, 0, 10), GetOutcome::Miss));
}

#[test]
fn only_one_call_is_a_probe() {
    let clock = Arc::new(ManualClock::new());
    let breaker: Arc<OnceLock<Breaker<Faulty<Faulty<MapTier>>>>> = Arc::default();
    let hook = {
        let breaker = breaker.clone();
        move || {
            // While the first probe is under way, no other call gets through.
            let breaker = breaker.get().unwrap();
            if !breaker.is_closed() {
                assert!(matches!(get(breaker, 1, 10), GetOutcome::Skipped));
            }
        }
    };
    let inner = interrupted(Faulty::new(MapTier::new(), FaultRates::default(), 1), hook);
    let breaker = breaker.get_or_init(|| Breaker::with_clock(inner, options(), clock.clone()));
    breaker.inner().inner().fail_next(3, transient());
    get_batch(breaker, 0..3, 10);
    clock.advance(Duration::from_secs(1));
    assert!(matches!(get(breaker, 0, 10), GetOutcome::Miss));
    assert!(breaker.is_closed());
}

#[test]
fn a_probe_that_panics_opens_it_again() {
    let clock = Arc::new(ManualClock::new());
    let is_armed = Arc::new(AtomicBool::new(false));
    let hook = {
        let is_armed = is_armed.clone();
        move || assert!(!is_armed.load(Ordering::Relaxed), "told to panic")
    };
    let inner = interrupted(Faulty::new(MapTier::new(), FaultRates::default(), 1), hook);
    let breaker = Breaker::with_clock(inner, options(), clock.clone());
    breaker.inner().inner().fail_next(3, transient());
    get_batch(&breaker, 0..3, 10);
    clock.advance(Duration::from_secs(1));
    is_armed.store(true, Ordering::Relaxed);
    catch_unwind(AssertUnwindSafe(|| get(&breaker, 0, 10))).unwrap_err();
    is_armed.store(false, Ordering::Relaxed);
    assert!(matches!(get(&breaker, 0, 10), GetOutcome::Skipped));
    clock.advance(Duration::from_secs(2));
    assert!(matches!(get(&breaker, 0, 10), GetOutcome::Miss));
}
