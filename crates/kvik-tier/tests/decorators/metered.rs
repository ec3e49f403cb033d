//! Everything is counted and timed.

use std::sync::Arc;
use std::time::Duration;

use kvik_tier::conformance::{ManualClock, MapTier, content_key};
use kvik_tier::{FaultRates, Faulty, Metered, Tier};

use crate::{get, get_batch, put, put_batch, transient};

#[test]
fn items_are_counted_by_outcome_and_bytes_by_what_moved() {
    let metered = Metered::new(Faulty::new(MapTier::with_capacity_bytes(500), FaultRates::default(), 1));
    put_batch(&metered, 0..7, 100);
    put(&metered, 0, 100);
    metered.inner().fail_next(2, transient());
    put(&metered, 8, 100);
    get(&metered, 0, 100);
    get_batch(&metered, 0..6, 100);
    get(&metered, 0, 99);
    let metrics = metered.snapshot();
    let puts = metrics.operation("put").unwrap();
    let expected = [("stored", 5), ("present", 1), ("no_room", 2), ("skipped", 0), ("failed", 1)];
    assert_eq!(puts.outcomes, expected);
    assert_eq!((puts.n_bytes, puts.latencies.n_calls()), (500, 3));
    let gets = metrics.operation("get").unwrap();
    let expected =
        [("hit", 5), ("miss", 1), ("corrupt", 1), ("skipped", 0), ("failed", 1), ("token_mismatch", 0)];
    assert_eq!(gets.outcomes, expected);
    assert_eq!(metered.stat().operations[1].n_outcomes("hit"), 5, "the tier's own report has them");
    assert_eq!((gets.n_bytes, gets.latencies.n_calls()), (500, 3));
    assert_eq!((gets.n_outcomes("hit"), gets.n_outcomes("none")), (5, 0));
    assert!(metrics.operation("none").is_none());
}

#[test]
fn calls_without_items_are_counted_by_their_end() {
    let metered = Metered::new(Faulty::new(MapTier::new(), FaultRates::default(), 1));
    for n_failures in [0, 1, 1] {
        metered.inner().fail_next(n_failures, transient());
        let _ = metered.contains(&[content_key(0)], &mut [false]);
        metered.inner().fail_next(n_failures, transient());
        let _ = metered.delete(&[content_key(0)]);
        metered.inner().fail_next(n_failures, transient());
        let _ = metered.flush();
    }
    for operation in ["contains", "delete", "flush"] {
        let metrics = metered.snapshot();
        assert_eq!(
            metrics.operation(operation).unwrap().outcomes,
            [("done", 1), ("failed", 2)],
            "{operation}"
        );
    }
}

#[test]
fn calls_are_timed() {
    let clock = Arc::new(ManualClock::new());
    let faulty = Faulty::with_clock(MapTier::new(), FaultRates::default(), 1, clock.clone());
    let metered = Metered::with_clock(faulty, clock.clone());
    let max_delay = Duration::from_millis(10);
    for _ in 0..90 {
        get(&metered, 0, 10);
    }
    metered.inner().set_rates(FaultRates { delay: 1000, max_delay, ..FaultRates::default() });
    for _ in 0..10 {
        get(&metered, 0, 10);
    }
    let longest = clock.take_pauses().into_iter().max().unwrap();
    let metrics = metered.snapshot();
    let latencies = &metrics.operation("get").unwrap().latencies;
    assert_eq!(latencies.n_calls(), 100);
    assert_eq!(latencies.p50(), Duration::ZERO);
    assert!(latencies.p99() > Duration::ZERO);
    assert!(latencies.quantile(1.0) >= longest && latencies.quantile(1.0) <= longest.mul_f64(1.125));
}
