//! What may pass is tried again.

use std::sync::Arc;
use std::time::Duration;

use kvik_tier::conformance::{ManualClock, MapTier, content_key};
use kvik_tier::{FaultRates, Faulty, GetOutcome, Metered, PutOutcome, Retry, RetryOptions, Tier};

use crate::{asked, get, get_batch, permanent, put, put_batch, transient};

type Inside = Metered<Faulty<MapTier>>;

fn tier(options: RetryOptions) -> (Retry<Inside>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new());
    let inner = Metered::new(Faulty::new(MapTier::new(), FaultRates::default(), 1));
    (Retry::with_clock(inner, options, clock.clone()), clock)
}

fn faulty(retry: &Retry<Inside>) -> &Faulty<MapTier> {
    retry.inner().inner()
}

#[test]
fn only_the_items_that_failed_are_tried_again() {
    let (retry, _clock) = tier(RetryOptions::default());
    faulty(&retry).fail_next(3, transient());
    assert!(put_batch(&retry, 0..10, 100).iter().all(|outcome| matches!(outcome, PutOutcome::Stored)));
    assert_eq!(asked(retry.inner(), "put"), (2, 13));
    faulty(&retry).fail_next(3, transient());
    assert!(get_batch(&retry, 0..10, 100).iter().all(GetOutcome::is_hit));
    assert_eq!(asked(retry.inner(), "get"), (2, 13));
    assert!(retry.stat().details.contains(&("retries", 2)));
}

#[test]
fn calls_without_items_are_tried_again() {
    let (retry, _clock) = tier(RetryOptions::default());
    put(&retry, 0, 100);
    let mut present = [false];
    faulty(&retry).fail_next(2, transient());
    retry.contains(&[content_key(0)], &mut present).unwrap();
    assert!(present[0]);
    faulty(&retry).fail_next(2, transient());
    assert_eq!(retry.delete(&[content_key(0)]).unwrap(), 1);
    faulty(&retry).fail_next(2, transient());
    retry.flush().unwrap();
    faulty(&retry).fail_next(3, transient());
    retry.flush().unwrap_err();
}

#[test]
fn what_stays_is_not_tried_again() {
    let (retry, clock) = tier(RetryOptions::default());
    faulty(&retry).fail_next(1, permanent());
    assert!(matches!(put(&retry, 0, 100), PutOutcome::Failed(_)));
    faulty(&retry).fail_next(1, permanent());
    retry.delete(&[content_key(0)]).unwrap_err();
    assert!(matches!(get(&retry, 0, 100), GetOutcome::Miss));
    assert_eq!((asked(retry.inner(), "put"), asked(retry.inner(), "get")), ((1, 1), (1, 1)));
    assert!(clock.take_pauses().is_empty());
}

#[test]
fn tries_end_at_their_number() {
    let (retry, clock) = tier(RetryOptions { max_attempts: 4, ..RetryOptions::default() });
    faulty(&retry).fail_next(100, transient());
    assert!(matches!(get(&retry, 0, 100), GetOutcome::Failed(_)));
    assert_eq!(asked(retry.inner(), "get"), (4, 4));
    assert_eq!(clock.take_pauses().len(), 3);
}

#[test]
fn pauses_grow_by_doubling_and_up_to_a_half_by_chance() {
    let ms = Duration::from_millis;
    let (retry, clock) = tier(RetryOptions {
        max_attempts: 6,
        first_pause: ms(10),
        max_pause: ms(60),
        budget: Duration::from_secs(10),
    });
    let mut are_different = false;
    let mut first_pauses = None;
    for _ in 0..20 {
        faulty(&retry).fail_next(5, transient());
        assert!(matches!(get(&retry, 0, 100), GetOutcome::Miss));
        let pauses = clock.take_pauses();
        assert_eq!(pauses.len(), 5);
        for (pause, longest) in pauses.iter().zip([ms(10), ms(20), ms(40), ms(60), ms(60)]) {
            assert!(longest / 2 <= *pause && *pause <= longest, "{pause:?} of {longest:?}");
        }
        are_different |= first_pauses.get_or_insert_with(|| pauses.clone()) != &pauses;
    }
    assert!(are_different, "nothing is left to chance");
}

#[test]
fn no_try_begins_after_the_budget() {
    let ms = Duration::from_millis;
    let budget = ms(100);
    let (retry, clock) =
        tier(RetryOptions { max_attempts: 1000, first_pause: ms(10), max_pause: ms(10), budget });
    faulty(&retry).fail_next(1000, transient());
    assert!(matches!(put(&retry, 0, 100), PutOutcome::Failed(_)));
    let pauses = clock.take_pauses();
    assert!(pauses.len() >= 9, "{} pauses", pauses.len());
    assert!(pauses.iter().sum::<Duration>() <= budget);
}

#[test]
fn a_put_that_got_there_and_failed_is_present() {
    let rates = FaultRates { fail_late: 1000, ..FaultRates::default() };
    let retry = Retry::with_clock(
        Faulty::new(MapTier::new(), rates, 1),
        RetryOptions::default(),
        Arc::new(ManualClock::new()),
    );
    assert!(matches!(put(&retry, 0, 100), PutOutcome::Failed(_)));
    retry.inner().set_rates(FaultRates::default());
    assert!(matches!(put(&retry, 0, 100), PutOutcome::Present));
    assert!(get(&retry, 0, 100).is_hit());
}
