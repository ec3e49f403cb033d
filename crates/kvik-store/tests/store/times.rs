//! Chunks that are kept for some time only, and chunks that leave first.

use std::time::Duration;

use kvik_store::policy::PolicyKind;
use kvik_store::{Chain, Clear, Commit, Priority, Retention, Store, Write};
use kvik_tier::TierKind;

use crate::support::*;

const HOUR: Duration = Duration::from_hours(1);

fn living(time: Duration) -> Retention {
    Retention { time_to_live: Some(time), ..Retention::default() }
}

fn store_kept(store: &Store, chain: &Chain, retention: Retention) -> usize {
    let store_one = |chunk_idx: &usize| match store.begin_write_kept(chain, *chunk_idx, 0, retention) {
        Write::Slot(mut writer) => {
            let key = chain.key(*chunk_idx, 0).unwrap();
            writer.payload_mut().copy_from_slice(&content(key, chain.payload_bytes(*chunk_idx)));
            matches!(writer.commit(), Commit::Stored | Commit::Present)
        }
        Write::Present => true,
        Write::NoRoom | Write::NoParent | Write::Collision => false,
    };
    store.note_request(chain, None);
    (0..chain.n_chunks()).take_while(store_one).count()
}

/// Waits until the time of a chain is over, by nothing but lookups.
fn until_ended(store: &Store, chain: &Chain) {
    until("the time is over", || store.lookup_local(chain).n_chunks == 0);
}

#[test]
fn a_chunk_is_served_until_its_time_is_over_and_gives_its_memory_back() {
    let store = Setup::new(16).open();
    let (timed, lasting) = (chain_of(&store, 1, 3), chain_of(&store, 2, 2));
    assert_eq!(store_kept(&store, &timed, living(Duration::from_millis(300))), 3);
    assert_eq!(store_kept(&store, &lasting, living(HOUR)), 2);
    let held = store.retrieve(&timed, 0);
    assert_eq!(verify(&held, &timed, 0), 3);
    until_ended(&store, &timed);
    assert_eq!((retrieve_all(&store, &timed), store.retrieve_layers(&timed, 0).n_chunks()), (0, 0));
    assert_eq!(store.tiers_of(&timed, 0), []);
    // What a reader holds stays as it is, and is not found by others.
    assert_eq!(verify(&held, &timed, 0), 3);
    drop(held);
    assert_eq!(retrieve_all(&store, &lasting), 2);
    assert_eq!(store.stats().n_entries, 2);
    // The same content can be stored again, for as long as is wanted then.
    assert_eq!(store_chain(&store, &timed), 3);
    assert_eq!(retrieve_all(&store, &timed), 3);
}

#[test]
fn a_time_of_nothing_is_over_at_once_and_the_longest_never() {
    let store = Setup::new(16).open();
    let (over, ever) = (chain_of(&store, 1, 1), chain_of(&store, 2, 1));
    store_kept(&store, &over, living(Duration::ZERO));
    assert_eq!(store_kept(&store, &ever, living(Duration::MAX)), 1);
    assert_eq!((retrieve_all(&store, &over), retrieve_all(&store, &ever)), (0, 1));
}

#[test]
fn the_longest_time_of_all_writers_counts() {
    let store = Setup::new(16).open();
    let (longer, lasting, shorter) = (chain_of(&store, 1, 2), chain_of(&store, 2, 2), chain_of(&store, 3, 2));
    let short = living(Duration::from_millis(200));
    for chain in [&longer, &lasting] {
        assert_eq!(store_kept(&store, chain, short), 2);
    }
    assert_eq!(store_kept(&store, &longer, living(HOUR)), 2);
    assert_eq!(store_chain(&store, &lasting), 2);
    // What others have stored without a time is not shortened.
    assert_eq!((store_chain(&store, &shorter), store_kept(&store, &shorter, short)), (2, 2));
    let witness = chain_of(&store, 4, 1);
    store_kept(&store, &witness, short);
    until_ended(&store, &witness);
    for chain in [&longer, &lasting, &shorter] {
        assert_eq!(retrieve_all(&store, chain), 2);
    }
}

#[test]
fn what_hangs_on_a_chunk_with_a_time_ends_with_it() {
    let store = Setup::new(16).open();
    let (whole, beginning) = (chain_of(&store, 1, 4), chain_of(&store, 1, 2));
    assert_eq!(store_kept(&store, &beginning, living(Duration::from_millis(300))), 2);
    // The engine goes on behind what it has found, without a time.
    for chunk_idx in 2..4 {
        assert!(store_chunk(&store, &whole, chunk_idx));
    }
    assert_eq!(retrieve_all(&store, &whole), 4);
    until_ended(&store, &beginning);
    assert_eq!(store.stats().n_entries, 0);
    assert_eq!(store_chain(&store, &whole), 4);
    assert_eq!(retrieve_all(&store, &whole), 4);
}

#[test]
fn chunks_with_a_time_are_given_to_no_other_tier_and_no_other_node() {
    let (nvme, redis) = (TestTier::new(TierKind::Nvme), TestTier::new(TierKind::Redis));
    let store = Setup::new(32).local(&nvme).remote(&redis).open();
    let timed = chain_of(&store, 1, 3);
    assert_eq!(store_kept(&store, &timed, living(HOUR)), 3);
    // Used again, moved, and asked for by another node.
    assert_eq!((retrieve_all(&store, &timed), retrieve_all(&store, &timed)), (3, 3));
    assert_eq!(store.relocate(&timed, TierKind::Ram, TierKind::Nvme, true), 0);
    let key = timed.key(0, 0).unwrap();
    assert!(!store.has_local(&key) && store.lease_by_key(&key).is_none());
    flush(&store);
    assert_eq!((nvme.stat_chunks(), redis.stat_chunks()), (0, 0));
    // A writer without a time makes it a chunk as any: its next use writes it down.
    assert_eq!(store_chain(&store, &timed), 3);
    assert!(store.has_local(&key));
    assert_eq!(retrieve_all(&store, &timed), 3);
    flush(&store);
    assert_eq!((nvme.stat_chunks(), redis.stat_chunks()), (3, 3));
}

#[test]
fn a_time_goes_on_in_the_next_store_and_neither_pin_nor_room_makes_it_longer() {
    for policy in PolicyKind::ALL {
        let first = Setup::new(16).with(|options| options.policy = policy).open();
        let (timed, lasting) = (chain_of(&first, 1, 2), chain_of(&first, 2, 2));
        assert_eq!(store_kept(&first, &timed, living(Duration::from_millis(300))), 2);
        assert_eq!(store_kept(&first, &lasting, living(HOUR)), 2);
        assert_eq!(first.pin(&timed), 8);
        let options = first.options().clone();
        let memory = first.take_apart().unwrap();
        assert_eq!(memory.times.len(), 4, "{policy}");
        let second = Store::builder_on(options, memory).open().unwrap();
        let (timed, lasting) = (chain_of(&second, 1, 2), chain_of(&second, 2, 2));
        until_ended(&second, &timed);
        assert_eq!(retrieve_all(&second, &lasting), 2, "{policy}");
        assert!(second.unpin(&timed));
        // All memory but that of the lasting chain can be used.
        assert_eq!(second.pin(&lasting), 8);
        assert_eq!(store_chain(&second, &chain_of(&second, 9, 14)), 14, "{policy}");
        assert_eq!(retrieve_all(&second, &lasting), 2, "{policy}");
    }
}

#[test]
fn a_clear_ends_a_time_too() {
    let store = Setup::new(16).open();
    let chain = chain_of(&store, 1, 2);
    assert_eq!(store_kept(&store, &chain, living(Duration::from_millis(200))), 2);
    store.clear(&Clear::default());
    assert_eq!(store_chain(&store, &chain), 2);
    let witness = chain_of(&store, 2, 1);
    store_kept(&store, &witness, living(Duration::from_millis(200)));
    until_ended(&store, &witness);
    assert_eq!(retrieve_all(&store, &chain), 2);
}

#[test]
fn chunks_of_low_priority_leave_before_older_ones() {
    for policy in [PolicyKind::Lru, PolicyKind::Fifo, PolicyKind::Kvik] {
        let store = Setup::new(8).with(|options| options.policy = policy).open();
        let low = Retention { priority: Priority::Low, ..Retention::default() };
        let (old, new, raised) = (chain_of(&store, 1, 3), chain_of(&store, 2, 3), chain_of(&store, 3, 2));
        assert_eq!(store_chain(&store, &old), 3);
        assert_eq!((store_kept(&store, &new, low), store_kept(&store, &raised, low)), (3, 2));
        // A writer of normal priority raises it.
        assert_eq!(store_chain(&store, &raised), 2);
        assert_eq!(store_chain(&store, &chain_of(&store, 4, 3)), 3);
        let found = [&old, &new, &raised].map(|chain| store.lookup_local(chain).n_chunks);
        assert_eq!(found, [3, 0, 2], "{policy}");
    }
}
