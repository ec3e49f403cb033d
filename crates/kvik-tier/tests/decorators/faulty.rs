//! Each fault does what its name says.

use std::sync::Arc;
use std::time::Duration;

use kvik_tier::conformance::{ManualClock, MapTier, content, content_key, get_each_once};
use kvik_tier::{Checksummed, FaultRates, Faulty, GetItem, GetOutcome, PutOutcome, Tier, TierExt};

use crate::{get, get_batch, permanent, put, put_batch};

const CHUNK_BYTES: usize = 1000;

fn tier(choose: impl Fn(&mut FaultRates)) -> Faulty<MapTier> {
    let mut rates = FaultRates::default();
    choose(&mut rates);
    Faulty::new(MapTier::new(), rates, 42)
}

#[test]
fn a_failure_is_not_done_and_a_late_one_is() {
    for (is_late, choose) in
        [(false, (|rates| rates.fail = 1000) as fn(&mut FaultRates)), (true, |rates| rates.fail_late = 1000)]
    {
        let faulty = tier(choose);
        assert!(matches!(put(&faulty, 0, CHUNK_BYTES), PutOutcome::Failed(_)));
        assert_eq!(faulty.inner().bytes_of(content_key(0)).is_some(), is_late);
        assert!(matches!(get(&faulty, 0, CHUNK_BYTES), GetOutcome::Failed(_)));
        faulty.contains(&[content_key(0)], &mut [false]).unwrap_err();
        faulty.flush().unwrap_err();
        assert!(faulty.delete(&[content_key(0)]).unwrap_err().is_transient());
        assert!(faulty.inner().bytes_of(content_key(0)).is_none());
    }
}

#[test]
fn a_lost_chunk_is_said_to_be_stored() {
    let faulty = tier(|rates| rates.lose = 1000);
    assert!(matches!(put(&faulty, 0, CHUNK_BYTES), PutOutcome::Stored));
    assert!(matches!(get(&faulty, 0, CHUNK_BYTES), GetOutcome::Miss));
}

#[test]
fn a_torn_chunk_ends_in_zeros_and_a_short_one_ends() {
    let chunk = content(content_key(0), CHUNK_BYTES);
    let faulty = tier(|rates| rates.tear = 1000);
    assert!(put(&faulty, 0, CHUNK_BYTES).is_present());
    let torn = faulty.inner().bytes_of(content_key(0)).unwrap();
    let n_kept = torn.iter().zip(&chunk).take_while(|(torn, whole)| torn == whole).count();
    assert!(n_kept < CHUNK_BYTES);
    assert!(torn.len() == CHUNK_BYTES && torn[n_kept..].iter().all(|byte| *byte == 0));

    let faulty = tier(|rates| rates.shorten = 1000);
    assert!(put(&faulty, 0, CHUNK_BYTES).is_present());
    let short = faulty.inner().bytes_of(content_key(0)).unwrap();
    assert!(short.len() < CHUNK_BYTES && short[..] == chunk[..short.len()]);
}

#[test]
fn a_flipped_read_has_one_other_bit() {
    let faulty = tier(|rates| rates.flip = 1000);
    put(&faulty, 0, CHUNK_BYTES);
    let mut buffer = vec![0; CHUNK_BYTES];
    assert!(faulty.get_one(content_key(0), &mut buffer).is_hit());
    let chunk = content(content_key(0), CHUNK_BYTES);
    let n_flipped: u32 = buffer.iter().zip(&chunk).map(|(read, stored)| (read ^ stored).count_ones()).sum();
    assert_eq!(n_flipped, 1);
}

#[test]
fn a_mixed_read_has_bytes_of_another_chunk() {
    let faulty = tier(|rates| rates.mix = 1000);
    put_batch(&faulty, 0..8, CHUNK_BYTES);
    let chunks: Vec<Vec<u8>> = (0..8).map(|idx| content(content_key(idx), CHUNK_BYTES)).collect();
    let mut n_others = 0;
    for idx in 0..8 {
        let mut buffer = vec![0; CHUNK_BYTES];
        assert!(faulty.get_one(content_key(idx), &mut buffer).is_hit());
        let found = chunks.iter().position(|chunk| *chunk == buffer).expect("it is the bytes of some chunk");
        n_others += usize::from(found != idx as usize);
    }
    assert!(n_others > 0);
}

#[test]
fn delays_are_pauses_of_its_clock() {
    let clock = Arc::new(ManualClock::new());
    let max_delay = Duration::from_secs(1);
    let rates = FaultRates { delay: 1000, max_delay, ..FaultRates::default() };
    let faulty = Faulty::with_clock(MapTier::new(), rates, 1, clock.clone());
    put_batch(&faulty, 0..10, 10);
    let pauses = clock.take_pauses();
    assert!(pauses.len() == 10 && pauses.iter().all(|pause| *pause <= max_delay), "{pauses:?}");
}

#[test]
fn what_is_told_to_fail_next_fails_and_no_more() {
    let faulty = tier(|_| {});
    faulty.fail_next(3, permanent());
    let outcomes = put_batch(&faulty, 0..5, CHUNK_BYTES);
    let n_failed = outcomes.iter().take_while(|outcome| matches!(outcome, PutOutcome::Failed(_))).count();
    assert_eq!(n_failed, 3);
    assert!(outcomes[3..].iter().all(PutOutcome::is_present));
    faulty.fail_next(1, permanent());
    assert!(!faulty.flush().unwrap_err().is_transient());
    faulty.flush().unwrap();
}

#[test]
fn faults_follow_from_the_seed() {
    let outcomes_of = |seed| {
        let faulty = Faulty::new(MapTier::new(), FaultRates { fail: 300, ..FaultRates::default() }, seed);
        put_batch(&faulty, 0..50, 10);
        get_batch(&faulty, 0..50, 10).iter().map(|outcome| format!("{outcome:?}")).collect::<Vec<_>>()
    };
    assert_eq!(outcomes_of(1), outcomes_of(1));
    assert_ne!(outcomes_of(1), outcomes_of(2));
}

#[test]
fn what_fails_arrives_once_too() {
    let all = FaultRates { fail: 200, fail_late: 200, duplicate: 200, flip: 200, ..FaultRates::default() };
    let read = |tier: &dyn Tier| {
        let (mut heads, mut buffers) = ([[0; 10]; 50], vec![[0; 500]; 50]);
        let memory = heads.iter_mut().zip(&mut buffers).zip(0..);
        let mut batch: Vec<GetItem<'_>> = memory
            .map(|((head, buffer), idx)| GetItem::with_head(content_key(idx), head, 10, buffer))
            .collect();
        get_each_once(tier, &mut batch);
        batch.iter().filter(|item| matches!(item.outcome, GetOutcome::Failed(_))).count()
    };
    let faulty = tier(|_| {});
    put_batch(&faulty, 0..50, CHUNK_BYTES);
    faulty.set_rates(all.clone());
    assert!((5..45).contains(&read(&faulty)));
    let checksummed = Checksummed::new(tier(|_| {}));
    put_batch(&checksummed, 0..50, CHUNK_BYTES);
    checksummed.inner().set_rates(all);
    assert!((5..50).contains(&read(&checksummed)));
}

#[test]
fn a_flipped_read_may_have_its_bit_in_the_head() {
    let faulty = tier(|rates| rates.flip = 1000);
    put(&faulty, 0, CHUNK_BYTES);
    let chunk = content(content_key(0), CHUNK_BYTES);
    let mut n_in_head = 0;
    for _ in 0..50 {
        let (mut head, mut buffer) = ([0; CHUNK_BYTES / 2], [0; CHUNK_BYTES / 2]);
        faulty.get(&mut [GetItem::with_head(content_key(0), &mut head, CHUNK_BYTES as u64 / 2, &mut buffer)]);
        let read = [head, buffer].concat();
        let n_flipped: u32 = read.iter().zip(&chunk).map(|(read, stored)| (read ^ stored).count_ones()).sum();
        assert_eq!(n_flipped, 1);
        n_in_head += usize::from(head != chunk[..CHUNK_BYTES / 2]);
    }
    assert!((1..50).contains(&n_in_head), "{n_in_head} of 50 in the head");
}
